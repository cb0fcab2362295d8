"""Clients that read many token streams at once and measure number and age of the tokens in a window of time.

They take little CPU, so that they leave the cores to what is measured: they read server streams as gRPC writes them, in
the frames of tests/floods/http2.py, and no more. Their windows have 2 GiB and are never updated; headers are not read,
so that an error has no text; there is no TLS.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks.token_source import age_ms
from protos.tandem.v1 import common_pb2, generation_pb2
from tests.floods import http2

_PATH = "/tandem.v1.GenerationService/Generate"
_PROMPT = tuple(range(20, 36))
_NUM_TOKENS = 100_000
"""More than a stream gets in a window."""
_MAX_WINDOW, _DEFAULT_WINDOW = (1 << 31) - 1, (1 << 16) - 1
_FRAME_HEAD_BYTES = 9
_MESSAGE_HEAD = struct.Struct(">BI")
"""Before each gRPC message: whether it is compressed, and its length."""

OnMessage = Callable[[bytes], None]


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


async def serve(orders: Connection) -> None:
    """For each `Window` from `orders` it returns a `Seen`, or the text of an error; None ends it."""
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


class StreamEnded(Exception):
    """The server has ended a stream or the connection. Its reason is not read."""


class LeanConnection(asyncio.Protocol):
    """One connection. Belongs to an event loop; opened by `connect`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._next_stream = 1
        self._streams: dict[int, _Stream] = {}

    @classmethod
    async def connect(cls, address: str) -> LeanConnection:
        """To `host:port`."""
        host, _, port = address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return connection

    async def read_stream(self, path: str, request: bytes, on_message: OnMessage) -> None:
        """Calls the method `path`, "/package.Service/Method", and for each message `on_message`. Raises StreamEnded."""
        number, self._next_stream = self._next_stream, self._next_stream + 2
        stream = self._streams[number] = _Stream(on_message)
        headers = http2.frame(http2.HEADERS, http2.END_HEADERS, number, http2.header_block(http2.call_headers(path)))
        self._transport.write(headers + http2.frame(http2.DATA, http2.END_STREAM, number, http2.message(request)))
        try:
            await stream.ended
        finally:
            if self._streams.pop(number, None) is not None:
                self._transport.write(http2.frame(http2.RST_STREAM, 0, number, struct.pack(">I", http2.CANCEL)))

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, _MAX_WINDOW)
        window = struct.pack(">I", _MAX_WINDOW - _DEFAULT_WINDOW)
        frames = http2.frame(http2.SETTINGS, 0, 0, settings), http2.frame(http2.WINDOW_UPDATE, 0, 0, window)
        transport.write(http2.PREFACE + b"".join(frames))

    def connection_lost(self, exc: Exception | None) -> None:
        for number in list(self._streams):
            self._end(number, f"the connection is lost: {exc}")

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _FRAME_HEAD_BYTES:
            begin = at + _FRAME_HEAD_BYTES
            end = begin + int.from_bytes(received[at : at + 3], "big")
            if end > len(received):
                break
            number = int.from_bytes(received[at + 5 : begin], "big")
            self._take(received[at + 3], received[at + 4], number, bytes(received[begin:end]))
            at = end
        del received[:at]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == http2.DATA:
            if (stream := self._streams.get(number)) is not None:
                stream.add(payload)
        elif kind in (http2.SETTINGS, http2.PING):
            if not flags & http2.ACK:
                self._transport.write(http2.frame(kind, http2.ACK, 0, payload if kind == http2.PING else b""))
        elif kind == http2.GOAWAY:
            self._transport.close()
        elif kind == http2.RST_STREAM:
            self._end(number, "the server has reset the stream")
        if kind in (http2.DATA, http2.HEADERS) and flags & http2.END_STREAM:
            self._end(number, "the server has ended the stream")

    def _end(self, number: int, reason: str) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None and not stream.ended.done():
            stream.ended.set_exception(StreamEnded(reason))


class _Stream:
    """One call's messages, which frames may cut anywhere."""

    def __init__(self, on_message: OnMessage) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_message = on_message
        self._rest = b""

    def add(self, payload: bytes) -> None:
        data = self._rest + payload if self._rest else payload
        at = 0
        while len(data) - at >= _MESSAGE_HEAD.size:
            begin = at + _MESSAGE_HEAD.size
            end = begin + _MESSAGE_HEAD.unpack_from(data, at)[1]
            if end > len(data):
                break
            self._on_message(data[begin:end])
            at = end
        self._rest = data[at:]
