"""Clients that read many token streams at once and measure number and age of the tokens in a window of time."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from benchmarks.token_source import age_ms
from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc

_PROMPT = tuple(range(20, 36))


@dataclass(frozen=True, slots=True)
class Window:
    """Streams of `num_tokens` each, restarted when they end, until `end_s`, by time.monotonic."""

    address: str
    num_streams: int
    num_tokens: int
    begin_s: float
    end_s: float
    num_connections: int = 1
    """Over which the streams are spread."""


@dataclass(slots=True)
class Seen:
    """What arrived between a window's begin and end."""

    num_messages: int = 0
    ages_ms: list[float] = field(default_factory=list)
    """Of each token, of which a message may have several: from its creation at the source to its arrival here."""


def run(orders: Connection) -> None:
    """The process: for each `Window` from `orders` it returns a `Seen`, or the text of an error; None ends it."""
    asyncio.run(_serve(orders))


async def _serve(orders: Connection) -> None:
    while (window := await asyncio.to_thread(orders.recv)) is not None:
        try:
            orders.send(await _read(window))
        except grpc.aio.AioRpcError as error:
            orders.send(f"{error.code().name}: {error.details()}")


async def _read(window: Window) -> Seen:
    seen = Seen()
    async with AsyncExitStack() as stack:
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(window.address, options=own) for _ in range(window.num_connections)]
        stubs = [
            generation_pb2_grpc.GenerationServiceStub(await stack.enter_async_context(channel)) for channel in channels
        ]
        spread_s = max(window.begin_s - time.monotonic(), 0) / 2 / window.num_streams
        readers = [
            asyncio.create_task(_keep_reading(stubs[index % len(stubs)], window, seen, index * spread_s))
            for index in range(window.num_streams)
        ]
        done, _ = await asyncio.wait(readers, timeout=window.end_s - time.monotonic())
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        for reader in done:
            reader.result()
    return seen


async def _keep_reading(stub: Any, window: Window, seen: Seen, delay_s: float) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=window.num_tokens, seed=7)
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=_PROMPT), sampling=sampling)
    await asyncio.sleep(delay_s)
    while True:
        async for response in stub.Generate(request):
            if window.begin_s <= time.monotonic() < window.end_s:
                seen.num_messages += 1
                seen.ages_ms += map(age_ms, response.tokens.text.split())
