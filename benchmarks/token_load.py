"""Clients that read many token streams at once and measure number and age of the tokens in a window of time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks.lean_client import LeanConnection, StreamEnded
from benchmarks.token_source import age_ms
from protos.tandem.v1 import common_pb2, generation_pb2

_PATH = "/tandem.v1.GenerationService/Generate"
_PROMPT = tuple(range(20, 36))
_NUM_TOKENS = 100_000
"""More than a stream gets in a window."""


@dataclass(frozen=True, slots=True)
class Window:
    """Streams that are read until `end_s`, by time.monotonic."""

    address: str
    num_streams: int
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
        except (StreamEnded, OSError) as error:
            orders.send(str(error))


async def _read(window: Window) -> Seen:
    seen = Seen()
    connections = [await LeanConnection.connect(window.address) for _ in range(window.num_connections)]
    spread_s = max(window.begin_s - time.monotonic(), 0) / 2 / window.num_streams
    readers = [
        asyncio.create_task(_keep_reading(connections[index % len(connections)], window, seen, index * spread_s))
        for index in range(window.num_streams)
    ]
    done, _ = await asyncio.wait(readers, timeout=window.end_s - time.monotonic())
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    for connection in connections:
        connection.close()
    for reader in done:
        reader.result()
    return seen


async def _keep_reading(connection: LeanConnection, window: Window, seen: Seen, delay_s: float) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=_NUM_TOKENS, seed=7)
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=_PROMPT), sampling=sampling)
    await asyncio.sleep(delay_s)

    def on_message(data: bytes) -> None:
        if window.begin_s <= time.monotonic() < window.end_s:
            seen.num_messages += 1
            seen.ages_ms += map(age_ms, generation_pb2.GenerateResponse.FromString(data).tokens.text.split())

    await connection.read_stream(_PATH, request.SerializeToString(), on_message)
