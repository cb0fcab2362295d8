"""Decode calls that violate the protocol are rejected before they reach the core. Responses of many calls in one
stream are batched, in order, written before their calls end, and ended with their stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from decode_service.service import ROLE
from engine.core.messages import AbortRequests, Seed, TokensEvent
from instance.decoding import TokenStreams
from protos.tandem.v1 import common_pb2, decode_pb2
from protos.tandem.v1.decode_pb2_grpc import DecodeServiceStub
from serving.errors import AlreadyExists, Overloaded, Unavailable
from tests.grpc_calls import next_message
from tests.instance.rig import Decoding, Rig, instance_request, model_folder, read_all, refusal, running
from tests.waiting import until

HANG_S = 20.0
Numbered = list[tuple[int, int]]
"""(call number, token index) of each answer."""


@pytest.mark.parametrize(
    "first",
    [
        decode_pb2.DecodeRequest(),
        decode_pb2.DecodeRequest(seed=decode_pb2.DecodeSeed(token_ids=[1])),
        decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart()),
        decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=instance_request(prompt_token_ids=[2**40]))),
        decode_pb2.DecodeRequest(
            start=decode_pb2.DecodeStart(
                request=instance_request(),
                transfer=decode_pb2.TransferSource(transfer_id="t1", address="unix:/run/secret", reservation_s=1),
            )
        ),
    ],
)
async def test_a_malformed_start_is_an_invalid_argument(decode: Rig, first: decode_pb2.DecodeRequest) -> None:
    async def requests() -> AsyncIterator[decode_pb2.DecodeRequest]:
        yield first

    error = await refusal(decode.decode.Decode(requests()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not decode.core.commands


async def test_a_stream_that_ends_without_its_seed_is_an_invalid_argument(decode: Rig, prefill: Rig) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decoding.call.done_writing()
    assert (await refusal(decoding.call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await decode.core.wait_for(AbortRequests) == AbortRequests(["r1"])


@pytest.mark.parametrize("ids", [[], [480], [1] * 32])
async def test_a_wrong_seed_is_an_invalid_argument(decode: Rig, prefill: Rig, ids: list[int]) -> None:
    decoding = Decoding(decode)
    await decoding.start(prefill)
    await decoding.seed(*ids)
    assert (await refusal(decoding.call)).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not decode.core.of(Seed)
    assert await decode.core.wait_for(AbortRequests) == AbortRequests(["r1"])


# Token streams


def answer_of(index: int, text: str = "") -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(tokens=common_pb2.TokenChunk(token_index=index, text=text))


def numbered(message: decode_pb2.StreamTokensResponse) -> Numbered:
    return [(one.call_number, one.response.tokens.token_index) for one in message.responses]


def start_on(stream_id: str, call_number: int) -> decode_pb2.DecodeStart:
    return decode_pb2.DecodeStart(token_stream=decode_pb2.TokenStream(stream_id=stream_id, call_number=call_number))


class Wire:
    """Where a stream writes: takes one message at a time, when it is let."""

    def __init__(self) -> None:
        self.messages: list[Numbered] = []
        self._may_take = asyncio.Semaphore(0)

    async def write(self, message: decode_pb2.StreamTokensResponse) -> None:
        await self._may_take.acquire()
        self.messages.append(numbered(message))

    async def take(self, num_messages: int = 1) -> None:
        """Lets that many go, and waits until they have."""
        wanted = len(self.messages) + num_messages
        for _ in range(num_messages):
            self._may_take.release()
        await until(lambda: len(self.messages) >= wanted, HANG_S)


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[TokenStreams, Wire, asyncio.Task[None]]]:
    """A stream "s" whose first message has been taken."""
    streams, wire = TokenStreams(), Wire()
    running = asyncio.create_task(streams.serve_stream("s", wire.write))
    await wire.take()
    try:
        yield streams, wire, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def own(response: decode_pb2.DecodeResponse) -> None:
    raise AssertionError("was answered in its own call")


async def says(streams: TokenStreams, call_number: int, num_answers: int, end: Exception | None = None) -> None:
    async with streams.response_writer(start_on("s", call_number), own) as answer:
        for index in range(num_answers):
            await answer(answer_of(index))
        if end is not None:
            raise end


async def test_the_first_message_is_empty() -> None:
    async with opened() as (_, wire, _):
        assert wire.messages == [[]]


async def test_responses_ready_when_the_writer_is_scheduled_are_one_message() -> None:
    async with opened() as (streams, wire, _):
        calls = [asyncio.create_task(says(streams, number, 2)) for number in (1, 2, 3)]
        await wire.take()
        await asyncio.gather(*calls)
        assert wire.messages[1:] == [[(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]]


async def test_responses_during_a_write_are_batched_for_the_next() -> None:
    async with opened() as (streams, wire, _), streams.response_writer(start_on("s", 1), own) as answer:
        await answer(answer_of(0))
        await asyncio.sleep(0.01)
        for index in (1, 2, 3):
            await answer(answer_of(index))
        await wire.take(2)
        assert wire.messages[1:] == [[(1, 0)], [(1, 1), (1, 2), (1, 3)]]


@pytest.mark.parametrize("end", [None, Unavailable("a failure of its own")])
async def test_a_call_ends_when_its_last_response_is_written(end: Exception | None) -> None:
    async with opened() as (streams, wire, _):
        call = asyncio.create_task(says(streams, 1, 1, end))
        await asyncio.sleep(0.01)
        assert not call.done()  # being written
        others = asyncio.create_task(says(streams, 2, 1))
        await asyncio.sleep(0.01)
        await wire.take()
        await asyncio.wait({call}, timeout=HANG_S)
        assert call.exception() is end
        assert not others.done()  # gathering
        await wire.take()
        await others


async def test_a_full_batch_blocks_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instance.decoding._MAX_BATCH_BYTES", 1000)
    async with opened() as (streams, wire, _), streams.response_writer(start_on("s", 1), own) as answer:
        num_answered = 0

        async def flood() -> None:
            nonlocal num_answered
            for index in range(30):
                await answer(answer_of(index, "x" * 100))
                num_answered += 1

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0.05)
        assert num_answered < 20
        while not flooding.done():
            await wire.take()
        written = [one for message in wire.messages for one in message]
        assert written == [(1, index) for index in range(len(written))]
        assert max(len(message) for message in wire.messages) <= 10
        await wire.take()


@pytest.mark.parametrize("end", ["cancelled", "unwritable"])
async def test_the_calls_of_a_stream_end_with_it(end: str) -> None:
    async with opened() as (streams, wire, stream):

        async def waits() -> None:
            async with streams.response_writer(start_on("s", 1), own):
                await asyncio.Event().wait()

        waiting = asyncio.create_task(waits())
        flushing = asyncio.create_task(says(streams, 2, 1))
        await asyncio.sleep(0.01)
        if end == "cancelled":
            stream.cancel()
        else:
            wire.messages = None  # type: ignore[assignment]
            wire._may_take.release()
        for call in (waiting, flushing):
            with pytest.raises(Unavailable, match="token stream has ended"):
                await asyncio.wait_for(call, HANG_S)
        assert streams.num_open == 0


async def test_without_an_open_stream_a_call_responds_by_itself() -> None:
    async with opened() as (streams, wire, _):
        for start in (decode_pb2.DecodeStart(), start_on("another", 1), start_on("", 1)):
            answers = []

            async def itself(response: decode_pb2.DecodeResponse, answers: list[Any] = answers) -> None:
                answers.append(response)

            async with streams.response_writer(start, itself) as answer:
                await answer(answer_of(7))
            assert answers == [answer_of(7)]
        assert wire.messages == [[]]


async def test_call_numbers_and_stream_ids_are_unique_while_open() -> None:
    async with opened() as (streams, _, _):
        with pytest.raises(AlreadyExists):
            await asyncio.wait_for(streams.serve_stream("s", Wire().write), HANG_S)
        async with streams.response_writer(start_on("s", 1), own):
            with pytest.raises(AlreadyExists, match="call number 1"):
                await says(streams, 1, 0)
        await asyncio.wait_for(says(streams, 1, 0), HANG_S)


async def test_open_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instance.decoding._MAX_STREAMS", 1)
    async with opened() as (streams, _, _):
        with pytest.raises(Overloaded):
            await asyncio.wait_for(streams.serve_stream("t", Wire().write), HANG_S)


# Decode calls on token streams


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
