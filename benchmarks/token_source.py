"""A decode instance without an engine: each stream gets one TokenChunk at a time, at the pace that the benchmark sets.

It serves the same chunks by `Decode`, in token streams as an instance does, and by `Generate`, so that a client can
take them without a router in between. The text of a chunk is the time at which it was due, in nanoseconds of this
machine's monotonic clock and in hexadecimal: about as long as a long word, and its reader can compute the delay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import grpc.aio

from instance.decoding import TokenStreams
from protos.tandem.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
)
from tests.fakes.tokens import VOCAB_SIZE

_EPOCH = "token-source"
_BEAT_S = 0.25
_FIRST_ID = 10
_MAX_MODEL_LEN = 1 << 20


def stamp(made_s: float) -> str:
    """Text with its time of creation, by time.monotonic."""
    return f"{int(made_s * 1e9):x} "


def age_ms(text: str) -> float:
    """How long ago `text` was made by `stamp`, on this machine."""
    return (time.monotonic_ns() - int(text, 16)) / 1e6


@dataclass(frozen=True, slots=True)
class Pace:
    """When the next tokens are due. Shared with the benchmark's process, which sets it before each window."""

    interval_s: Synchronized[float]
    """Between two tokens of a stream; 0: as fast as they are taken."""
    in_steps: Synchronized[int]
    """1: the tokens of all streams are due at once, as after an engine's step; 0: each stream has its own moments."""

    async def ticks(self) -> AsyncIterator[float]:
        """One for each token of one stream at its own moments: when it is due."""
        due_s = time.monotonic()
        while True:
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
            yield due_s
            due_s += self.interval_s.value


class _Steps:
    """The steps of the stub's engine: one timer for all streams, since one for each costs more than its token. A step
    that is late delays those behind it. Belongs to one event loop."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._ended_s = 0.0
        """When the last step ended."""
        self._next_ends = asyncio.Event()

    async def run(self) -> None:
        while True:
            interval_s = self._pace.interval_s.value if self._pace.in_steps.value else _BEAT_S
            due_s = max(self._ended_s + interval_s, time.monotonic())
            await asyncio.sleep(due_s - time.monotonic())
            self._ended_s = due_s
            self._next_ends.set()
            self._next_ends = asyncio.Event()

    async def ticks(self) -> AsyncIterator[float]:
        """One for each token of one stream: when its step has ended. It misses those that end while it writes."""
        while True:
            await self._next_ends.wait()
            yield self._ended_s


class TokenSource(
    instance_pb2_grpc.InstanceServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    generation_pb2_grpc.GenerationServiceServicer,
):
    """The servicer. One per process."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._steps = _Steps(pace)
        self._token_streams = TokenStreams()

    async def run_steps(self) -> None:
        """Until it is cancelled."""
        await self._steps.run()

    async def GetInstanceInfo(self, request: Any, context: Any) -> instance_pb2.GetInstanceInfoResponse:
        return instance_pb2.GetInstanceInfoResponse(
            instance_id="source",
            instance_epoch=_EPOCH,
            role=instance_pb2.ROLE_DECODE,
            model="benchmark",
            max_model_len=_MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            block_size=16,
        )

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        while True:
            yield instance_pb2.WatchLoadResponse(instance_epoch=_EPOCH)
            await asyncio.sleep(_BEAT_S)

    # For the stubs an answer of several messages is a generator; grpc takes a coroutine function that writes, too.
    async def Decode(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        start = (await anext(requests)).start
        request_spec = start.request
        async with self._token_streams.response_writer(start, context.write) as answer:
            async for chunk in self._chunks(request_spec.sampling.max_tokens, request_spec.stream_epoch):
                await answer(decode_pb2.DecodeResponse(tokens=chunk))

    async def StreamTokens(self, request: decode_pb2.StreamTokensRequest, context: Any) -> None:  # type: ignore[override]
        await self._token_streams.serve_stream(request.stream_id, context.write)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for chunk in self._chunks(request.sampling.max_tokens, 1):
            yield generation_pb2.GenerateResponse(request_id="benchmark", tokens=chunk)

    async def _chunks(self, num_tokens: int, stream_epoch: int) -> AsyncIterator[common_pb2.TokenChunk]:
        text_offset = index = 0
        ticks = self._steps.ticks() if self._pace.in_steps.value else self._pace.ticks()
        async for due_s in ticks:
            chunk = common_pb2.TokenChunk(
                stream_epoch=stream_epoch,
                token_index=index,
                token_ids=(_FIRST_ID + index % (VOCAB_SIZE - _FIRST_ID),),
                text_offset=text_offset,
                text=stamp(due_s),
            )
            index += 1
            text_offset += len(chunk.text)
            if index == num_tokens:
                chunk.finish.reason = common_pb2.FINISH_REASON_LENGTH
            yield chunk
            if index == num_tokens:
                return


async def serve(ready: Connection, pace: Pace) -> None:
    """Sends its address through `ready` and serves until its process is killed."""
    server = grpc.aio.server(options=[("grpc.http2.min_ping_interval_without_data_ms", 250)])
    servicer = TokenSource(pace)
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(servicer, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready.send(f"127.0.0.1:{port}")
    await servicer.run_steps()
