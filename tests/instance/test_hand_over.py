"""What a router sees of a decode, and which commands both cores get, over real gRPC between two instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from engine import failpoints
from engine.core.messages import (
    AbortRequests,
    KVProgress,
    LeaseCommand,
    LoadedEvent,
    RemoteKV,
    ReservedEvent,
    Seed,
    TokensEvent,
    TransferEvent,
)
from protos.tandem.v1 import common_pb2
from tests.instance.rig import Decoding, Rig, refusal
from tests.tokenizer_builders import byte_level
from tests.waiting import Stopwatch, until

LENGTH = common_pb2.FINISH_REASON_LENGTH


Failpoint = Callable[[str], None]


@pytest.fixture
def failpoint() -> Iterator[Failpoint]:
    """Sets this process's failpoints for one test."""
    yield failpoints.configure
    failpoints.configure(None)


async def test_without_a_transfer_it_generates_from_its_own_prefill(decode: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start()
    asked = await decode.core.request()
    assert (asked.remote_kv, asked.hold_kv) == (None, None)
    decode.core.emit(TokensEvent("r1", [72, 73]), TokensEvent("r1", [74], finish_reason="length"))
    chunks = [response.tokens for response in await decoding.rest()]
    assert [(chunk.token_index, list(chunk.token_ids)) for chunk in chunks] == [(0, [72, 73]), (2, [74])]
    assert chunks[-1].finish.reason == LENGTH
    assert not decode.core.of(AbortRequests)


async def test_the_first_chunk_has_the_counts_of_a_prompt_that_is_computed_here(decode: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start()
    await decode.core.request()
    counts: dict[str, Any] = {"num_cached_tokens": 6, "num_external_tokens": 2}
    decode.core.emit(*(TokensEvent("r1", [token_id], **counts) for token_id in (72, 73)))
    decode.core.emit(TokensEvent("r1", [74], finish_reason="length", **counts))
    first, *others = [response.tokens for response in await decoding.rest()]
    assert first.usage == common_pb2.Usage(prompt_tokens=10, completion_tokens=1, cached_tokens=8, stored_tokens=2)
    assert not any(chunk.HasField("usage") for chunk in others)
    assert others[-1].finish.usage.cached_tokens == 8


async def test_a_whole_hand_over(decode: Rig, prefill: Rig) -> None:
    # STEP the reservation
    decoding = Decoding(decode)
    await decoding.start(prefill, stream_epoch=2, emitted_token_ids=[70])
    asked = await decode.core.request()
    assert asked.remote_kv == RemoteKV(transfer_id="t1", reservation_s=5.0)
    assert asked.output_token_ids == [70]
    decode.core.emit(ReservedEvent("r1", num_cached_tokens=4, num_local_blocks=1))
    reserved = (await decoding.next()).reserved
    assert (reserved.num_cached_tokens, reserved.instance_epoch) == (4, decode.server.instance_epoch)

    # STEP the transfer: the prefill instance's progress reaches this core, and its lease is attached
    prefill.core.emit(TransferEvent("t1", 1))
    prefill.core.emit(TransferEvent("t1", 2, num_tokens=11))
    assert (await prefill.core.wait_for(LeaseCommand)).action == "attach"
    await until(lambda: any(progress.num_tokens == 11 for progress in decode.core.of(KVProgress)))
    assert all(progress.request_id == "r1" for progress in decode.core.of(KVProgress))

    # STEP the seed and the end of the load; the lease goes back before the first token comes
    await decoding.seed(71)
    assert await decode.core.wait_for(Seed) == Seed("r1", [71])
    decode.core.emit(LoadedEvent("r1", num_external_tokens=7, num_recomputed_blocks=0))
    assert (await decoding.next()).loaded.num_external_tokens == 7
    await until(lambda: LeaseCommand("t1", "release") in prefill.core.commands)
    await until(lambda: decode.server.transfers.num_open == 0)

    # STEP the tokens go on after what was emitted and seeded
    decode.core.emit(TokensEvent("r1", [72]), TokensEvent("r1", [73], finish_reason="length", num_external_tokens=7))
    chunks = [response.tokens for response in await decoding.rest()]
    assert [(chunk.stream_epoch, chunk.token_index, list(chunk.token_ids)) for chunk in chunks] == [
        (2, 2, [72]),
        (2, 3, [73]),
    ]
    assert chunks[0].text_offset == len(byte_level().decode([70, 71]))
    usage = chunks[-1].finish.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.external_tokens) == (10, 4, 7)
    metrics = decode.server.metrics
    assert (metrics.num_seeded, metrics.num_loaded, metrics.num_external_tokens) == (1, 1, 7)
    assert dict(metrics.finished) == {"length": 1}


async def test_a_seed_may_come_before_the_reservation(decode: Rig, prefill: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decoding.seed(71)
    assert await decode.core.wait_for(Seed) == Seed("r1", [71])
    decode.core.emit(
        ReservedEvent("r1", 8, 2), LoadedEvent("r1", 0, 0), TokensEvent("r1", [72], finish_reason="length")
    )
    reserved, loaded, tokens = await decoding.rest()
    assert (reserved.reserved.num_cached_tokens, loaded.WhichOneof("event")) == (8, "loaded")
    assert tokens.tokens.token_index == 1


async def test_a_seed_may_come_long_after_the_load(decode: Rig, prefill: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decode.core.request()
    decode.core.emit(ReservedEvent("r1", 0, 0), LoadedEvent("r1", 0, 3, reason="late"))
    await decoding.next()
    loaded = (await decoding.next()).loaded
    assert (loaded.num_recomputed_blocks, loaded.reason) == (3, "late")
    await asyncio.sleep(0.1)
    await decoding.seed(71)
    await decode.core.wait_for(Seed)
    decode.core.emit(TokensEvent("r1", [72], finish_reason="length"))
    assert [response.tokens.token_index for response in await decoding.rest()] == [1]


async def test_without_a_seed_the_reservation_s_end_is_answered(decode: Rig, prefill: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decode.core.request()
    decode.core.emit(ReservedEvent("r1", 0, 0))
    await decoding.next()
    decode.core.emit(TokensEvent("r1", [], finish_reason="error", error="no seed", error_kind="timeout"))
    assert (await refusal(decoding.call)).code() is grpc.StatusCode.ABORTED
    # The release is sent although nothing was offered: a late prefill must not hold KV without a reader.
    assert await prefill.core.wait_for(LeaseCommand) == LeaseCommand("t1", "release")


async def test_no_room_is_answered_before_anything_is_read(decode: Rig, prefill: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decode.core.request()
    decode.core.emit(TokensEvent("r1", [], finish_reason="error", error="no blocks", error_kind="no_room"))
    assert (await refusal(decoding.call)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await prefill.core.wait_for(LeaseCommand) == LeaseCommand("t1", "release")


@pytest.mark.parametrize("stage", ["waiting", "reserved", "attached", "running"])
async def test_cancelling_frees_here_and_at_the_prefill_instance(decode: Rig, prefill: Rig, stage: str) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decode.core.request()
    if stage != "waiting":
        decode.core.emit(ReservedEvent("r1", 0, 0))
        await decoding.next()
    if stage == "attached":
        prefill.core.emit(TransferEvent("t1", 1))
        await decode.core.wait_for(KVProgress)
    if stage == "running":
        await decoding.seed(71)
        await decode.core.wait_for(Seed)
        decode.core.emit(LoadedEvent("r1", 0, 3), TokensEvent("r1", [72]))
        await decoding.next()
        await decoding.next()
    decoding.call.cancel()
    assert await decode.core.wait_for(AbortRequests) == AbortRequests(["r1"])
    await until(lambda: LeaseCommand("t1", "release") in prefill.core.commands)
    await until(lambda: decode.server.transfers.num_open == 0)
    assert decode.server.metrics.num_cancelled == 1


async def test_a_dead_prefill_instance_does_not_delay_a_cancelled_request(decode: Rig, prefill: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill, address="127.0.0.1:1")
    await decode.core.request()
    decode.core.emit(ReservedEvent("r1", 0, 0))
    await decoding.next()
    failed = await decode.core.wait_for(KVProgress)
    assert isinstance(failed, KVProgress)
    assert "UNAVAILABLE" in (failed.failed or "")
    watch = Stopwatch()
    decoding.call.cancel()
    await decode.core.wait_for(AbortRequests)
    assert watch.s < 0.5


async def test_a_prefill_instance_with_another_model_is_not_read_from(decode: Rig, prefill: Rig) -> None:
    prefill.server.transfer_server._identity = type(prefill.server.identity)(
        **{name: getattr(prefill.server.identity, name) for name in prefill.server.identity.__struct_fields__}
        | {"dtype": "bfloat16"}
    )
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decode.core.request()
    decode.core.emit(ReservedEvent("r1", 0, 0))
    failed = await decode.core.wait_for(KVProgress)
    assert isinstance(failed, KVProgress)
    assert "'bfloat16' here, 'float32' at the reader" in (failed.failed or "")


async def test_a_stop_string_across_the_hand_over_ends_here_and_is_aborted_in_the_core(
    decode: Rig, prefill: Rig
) -> None:
    ids = byte_level().encode("aSTQPb")
    decoding = Decoding(decode)
    await decoding.start(prefill, emitted_token_ids=ids[:1], sampling={"stop": ["STQP"]})
    await decoding.seed(*ids[1:3])
    await decode.core.wait_for(Seed)
    decode.core.emit(ReservedEvent("r1", 0, 0), LoadedEvent("r1", 0, 0), TokensEvent("r1", ids[3:]))
    chunk = (await decoding.rest())[-1].tokens
    whole = byte_level().decode(ids[:3])
    assert chunk.token_index == 3
    assert (chunk.text_offset, chunk.text) == (whole.index("S"), "")
    assert (chunk.finish.reason, chunk.finish.stop_string) == (common_pb2.FINISH_REASON_STOP, "STQP")
    assert decode.core.of(AbortRequests) == [AbortRequests(["r1"])]


@pytest.mark.parametrize("name", ["decode.reserved", "decode.loaded", "decode.after_token"])
async def test_a_fault_at_a_failpoint_frees_everything(
    decode: Rig, prefill: Rig, name: str, failpoint: Failpoint
) -> None:
    failpoint(f"{name}=fail")
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decoding.seed(71)
    await decode.core.wait_for(Seed)
    prefill.core.emit(TransferEvent("t1", 0))
    decode.core.emit(ReservedEvent("r1", 0, 0), LoadedEvent("r1", 0, 3), TokensEvent("r1", [72]))
    assert (await refusal(decoding.call)).code() is grpc.StatusCode.INTERNAL
    assert await decode.core.wait_for(AbortRequests) == AbortRequests(["r1"])
    await until(lambda: LeaseCommand("t1", "release") in prefill.core.commands)
