"""What a router sees of a prefill, and which commands the core gets, over real gRPC with a scripted core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from engine import failpoints
from engine.core.messages import AbortRequests, AddRequest, HoldKV, LeaseCommand, TokensEvent
from prefill_service.service import ROLE
from protos.tandem.v1 import common_pb2, decode_pb2, prefill_pb2
from tests.grpc_calls import next_message
from tests.instance.rig import Rig, instance_request, model_folder, read_all, refusal, running
from tests.tokenizer_builders import byte_level
from tests.waiting import until

HAND_OVER = prefill_pb2.HandOver(transfer_id="t1", lease_s=2.0)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(model_folder(tmp_path / "model"), ROLE) as rig:
        yield rig


Failpoint = Callable[[str], None]


@pytest.fixture
def failpoint() -> Iterator[Failpoint]:
    """Sets this process's failpoints for one test."""
    yield failpoints.configure
    failpoints.configure(None)


def request(request_id: str = "r1", *, hand_over: bool = True, **fields: Any) -> prefill_pb2.PrefillRequest:
    message = prefill_pb2.PrefillRequest(request=instance_request(request_id, **fields))
    if hand_over:
        message.hand_over.CopyFrom(HAND_OVER)
    return message


async def test_a_prefill_is_accepted_then_its_first_token_is_handed_over(rig: Rig) -> None:
    call = rig.prefill.Prefill(request(stream_epoch=3))
    asked = await rig.core.request()
    assert asked.hold_kv == HoldKV(transfer_id="t1", lease_s=2.0)
    assert asked.remote_kv is None
    rig.core.emit(TokensEvent("r1", [72], finish_reason="hand_over", num_cached_tokens=4))
    accepted, first = await read_all(call)
    assert accepted.accepted.instance_epoch == rig.server.instance_epoch
    chunk = first.tokens
    assert (chunk.stream_epoch, chunk.token_index, list(chunk.token_ids)) == (3, 0, [72])
    assert chunk.text == byte_level().decode([72])
    assert chunk.finish.reason == common_pb2.FINISH_REASON_HAND_OVER
    assert chunk.finish.usage.cached_tokens == 4
    # The KV stays for its reader: nothing was given up.
    assert not rig.core.of(LeaseCommand)
    assert not rig.core.of(AbortRequests)


async def test_a_first_token_that_ends_the_choice_gives_the_lease_up(rig: Rig) -> None:
    call = rig.prefill.Prefill(request())
    await rig.core.request()
    rig.core.emit(TokensEvent("r1", [479], finish_reason="stop"))
    assert (await read_all(call))[-1].tokens.finish.reason == common_pb2.FINISH_REASON_STOP
    assert rig.core.of(LeaseCommand) == [LeaseCommand("t1", "release")]


async def test_a_stop_string_in_the_first_token_stops_it_here(rig: Rig) -> None:
    """The core saw a hand-over; the stop string ended the choice, so that no reader will fetch the KV."""
    emitted = byte_level().encode("ST")
    last = byte_level().encode("P")
    call = rig.prefill.Prefill(request(emitted_token_ids=emitted, sampling={"stop": ["STP"]}))
    await rig.core.request()
    rig.core.emit(TokensEvent("r1", last, finish_reason="hand_over"))
    chunk = (await read_all(call))[-1].tokens
    assert (chunk.token_index, chunk.text_offset, chunk.text) == (len(emitted), 0, "")
    assert (chunk.finish.reason, chunk.finish.stop_string) == (common_pb2.FINISH_REASON_STOP, "STP")
    assert rig.core.of(LeaseCommand) == [LeaseCommand("t1", "release")]


async def test_a_prefill_without_a_hand_over_is_rejected(rig: Rig) -> None:
    error = await refusal(rig.prefill.Prefill(request(hand_over=False)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "hand_over.transfer_id" in (error.details() or "")


async def test_what_it_serves_alone_is_a_decode_here_too(rig: Rig) -> None:
    """In the router's shared stream, as at a decode instance."""
    stream = rig.decode.StreamTokens(decode_pb2.StreamTokensRequest(stream_id="s"))
    assert not (await next_message(stream)).responses
    start = decode_pb2.DecodeStart(
        request=instance_request("r1"), token_stream=decode_pb2.TokenStream(stream_id="s", call_number=1)
    )

    async def requests() -> AsyncIterator[decode_pb2.DecodeRequest]:
        yield decode_pb2.DecodeRequest(start=start)

    call = rig.decode.Decode(requests())
    asked = await rig.core.request()
    assert (asked.hold_kv, asked.remote_kv) == (None, None)
    rig.core.emit(TokensEvent("r1", [72]), TokensEvent("r1", [73], finish_reason="length"))
    chunks = []
    while not (chunks and chunks[-1].HasField("finish")):
        chunks += [one.response.tokens for one in (await next_message(stream)).responses]
    assert [chunk.token_index for chunk in chunks] == [0, 1]
    assert await read_all(call) == []
    assert rig.server.metrics.finished["length"] == 1


async def test_a_cancelled_prefill_is_aborted_and_its_lease_given_up(rig: Rig) -> None:
    call = rig.prefill.Prefill(request())
    assert (await next_message(call)).accepted.instance_epoch
    call.cancel()
    assert await rig.core.wait_for(LeaseCommand) == LeaseCommand("t1", "release")
    # The abort comes first: a reader gets the failure instead of an unknown transfer.
    assert [type(command) for command in rig.core.commands] == [AddRequest, AbortRequests, LeaseCommand]
    metrics = rig.server.metrics
    assert (metrics.num_received, metrics.num_cancelled, metrics.num_leases_given_up) == (1, 1, 1)


async def test_the_id_of_a_running_request_is_refused_and_its_lease_left_alone(rig: Rig) -> None:
    call = rig.prefill.Prefill(request())
    await call.read()
    error = await refusal(rig.prefill.Prefill(request()))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    assert not rig.core.of(LeaseCommand)
    call.cancel()
    await rig.core.wait_for(AbortRequests)
    await until(lambda: not rig.server.choices._request_ids)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("no_room", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("too_large", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("timeout", grpc.StatusCode.ABORTED),
        ("id_in_use", grpc.StatusCode.ALREADY_EXISTS),
        ("nothing_allowed", grpc.StatusCode.INVALID_ARGUMENT),
        ("invalid_constraint", grpc.StatusCode.INVALID_ARGUMENT),
        (None, grpc.StatusCode.INTERNAL),
    ],
)
async def test_what_the_engine_gives_up_has_its_status(rig: Rig, kind: Any, status: grpc.StatusCode) -> None:
    call = rig.prefill.Prefill(request())
    await rig.core.request()
    rig.core.emit(TokensEvent("r1", [], finish_reason="error", error="the reason", error_kind=kind))
    error = await refusal(call)
    assert error.code() is status
    assert rig.core.of(LeaseCommand) == [LeaseCommand("t1", "release")]
    assert rig.server.metrics.num_failed == 1


async def test_a_request_that_cannot_be_never_reaches_the_core(rig: Rig) -> None:
    error = await refusal(rig.prefill.Prefill(request(prompt_token_ids=[480])))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt_token_ids[0]" in (error.details() or "")
    assert (await refusal(rig.prefill.Prefill(prefill_pb2.PrefillRequest()))).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not rig.core.commands


@pytest.mark.parametrize("name", ["prefill.accepted", "prefill.first_token"])
async def test_a_fault_at_a_failpoint_frees_everything(rig: Rig, name: str, failpoint: Failpoint) -> None:
    failpoint(f"{name}=fail")
    call = rig.prefill.Prefill(request())
    await rig.core.request()
    rig.core.emit(TokensEvent("r1", [72], finish_reason="hand_over"))
    assert (await refusal(call)).code() is grpc.StatusCode.INTERNAL
    assert rig.core.of(LeaseCommand) == [LeaseCommand("t1", "release")]
