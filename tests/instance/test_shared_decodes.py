"""The responses of many Decode calls in one stream: one message per step of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from decode_service.service import ROLE
from engine.core.messages import AbortRequests, TokensEvent
from protos.tandem.v1 import decode_pb2
from protos.tandem.v1.decode_pb2_grpc import DecodeServiceStub
from tests.grpc_calls import next_message
from tests.instance.rig import Rig, instance_request, model_folder, read_all, refusal, running
from tests.waiting import until

HANG_S = 20.0


def numbered(message: decode_pb2.StreamTokensResponse) -> list[tuple[int, int]]:
    """(call number, token index) of each answer."""
    return [(one.call_number, one.response.tokens.token_index) for one in message.responses]


class Stream:
    """A StreamTokens call and the Decode calls on it."""

    def __init__(self, rig: Rig, stream_id: str = "s", stub: DecodeServiceStub | None = None) -> None:
        self._rig, self._id = rig, stream_id
        self._stub = stub or rig.decode
        self.call = self._stub.StreamTokens(decode_pb2.StreamTokensRequest(stream_id=stream_id))

    async def open(self) -> Stream:
        assert not (await next_message(self.call)).responses
        return self

    async def decode(self, call_number: int) -> Any:
        """A Decode call that the core has."""
        request_id = f"r{call_number}"
        start = decode_pb2.DecodeStart(
            request=instance_request(request_id),
            token_stream=decode_pb2.TokenStream(stream_id=self._id, call_number=call_number),
        )

        async def said() -> AsyncIterator[decode_pb2.DecodeRequest]:
            yield decode_pb2.DecodeRequest(start=start)

        num_before = len(self._rig.core.commands)
        call = self._stub.Decode(said())
        await until(lambda: len(self._rig.core.commands) > num_before, HANG_S)
        return call


async def test_an_engine_s_step_is_one_message(decode: Rig) -> None:
    stream = await Stream(decode).open()
    calls = [await stream.decode(number) for number in (1, 2, 3)]
    decode.core.emit(*(TokensEvent(f"r{number}", [72]) for number in (1, 2, 3)))
    assert numbered(await next_message(stream.call)) == [(1, 0), (2, 0), (3, 0)]
    decode.core.emit(*(TokensEvent(f"r{number}", [73], finish_reason="length") for number in (1, 2, 3)))
    last = await next_message(stream.call)
    assert numbered(last) == [(1, 1), (2, 1), (3, 1)]
    assert all(one.response.tokens.HasField("finish") for one in last.responses)
    for call in calls:
        assert await read_all(call) == []
        assert await call.code() is grpc.StatusCode.OK


async def test_a_router_that_goes_takes_its_calls_along(decode: Rig) -> None:
    mine, theirs = await Stream(decode).open(), await Stream(decode, "t").open()
    call, other = await mine.decode(1), await theirs.decode(2)
    mine.call.cancel()
    assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert await decode.core.wait_for(AbortRequests) == AbortRequests(["r1"])
    assert (decode.server.metrics.num_failed, decode.server.metrics.num_cancelled) == (0, 1)
    decode.core.emit(TokensEvent("r2", [72], finish_reason="length"))
    assert numbered(await next_message(theirs.call)) == [(2, 0)]
    assert await read_all(other) == []


async def test_a_router_that_does_not_read_is_cut_off_with_its_calls(tmp_path: Path) -> None:
    windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    folder = model_folder(tmp_path / "model")
    async with (
        running(folder, ROLE, server={"write_timeout_s": 0.3}) as rig,
        grpc.aio.insecure_channel(rig.server.address, options=windows) as channel,
    ):
        stream = await Stream(rig, stub=type(rig.decode)(channel)).open()
        call = await stream.decode(1)
        ending = asyncio.create_task(refusal(call))
        async with asyncio.timeout(HANG_S):
            while not ending.done():
                rig.core.emit(*(TokensEvent("r1", [72] * 20) for _ in range(100)))
                await asyncio.sleep(0.02)
        assert (await ending).code() is grpc.StatusCode.UNAVAILABLE
        error = await refusal(stream.call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "client too slow" in str(error.details())
        metrics = rig.server.metrics
        assert (metrics.num_failed, metrics.num_cancelled) == (1, 0)


async def test_a_stream_takes_no_place_of_a_request(tmp_path: Path) -> None:
    caps = {"max_calls_per_peer": 1, "max_calls": 1}
    async with running(model_folder(tmp_path / "model"), ROLE, server=caps) as rig:
        stream = await Stream(rig).open()
        await stream.decode(1)
        assert rig.server.grpc_server.calls.num_open == 1


async def test_a_drain_waits_for_the_last_tokens_and_not_for_the_stream(decode: Rig) -> None:
    stream = await Stream(decode).open()
    call = await stream.decode(1)
    draining = asyncio.create_task(decode.server.drain())
    await until(lambda: decode.server.grpc_server.calls.draining)
    late = await Stream(decode, "late").open()
    reading = asyncio.create_task(next_message(stream.call))  # a client reads all along
    decode.core.emit(TokensEvent("r1", [72], finish_reason="length"))
    assert await asyncio.wait_for(draining, HANG_S)
    assert numbered(await reading) == [(1, 0)]
    assert await read_all(call) == []
    for ended in (stream, late):
        assert (await refusal(ended.call)).code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("stream_id", ["", "x" * 129])
async def test_a_stream_has_an_id(decode: Rig, stream_id: str) -> None:
    assert (await refusal(Stream(decode, stream_id).call)).code() is grpc.StatusCode.INVALID_ARGUMENT
