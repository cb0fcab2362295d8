"""A gRPC client that takes little CPU, so that a load generator leaves the cores to what it measures.

It reads server streams over HTTP/2 (RFC 9113) as gRPC writes them, and no more. Its windows are of 2 GiB and never
updated; headers are sent as literals (RFC 7541) and not read, so that an error has no text; there is no TLS.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 0x1, 0x1, 0x4
_INITIAL_WINDOW_SIZE = 4
_MAX_WINDOW, _DEFAULT_WINDOW = (1 << 31) - 1, (1 << 16) - 1
_FRAME_HEAD_BYTES = 9
_MESSAGE_HEAD = struct.Struct(">BI")
"""Before each gRPC message: whether it is compressed, and its length."""

OnMessage = Callable[[bytes], None]


class StreamEnded(Exception):
    """The server has ended a stream or the connection. Its reason is not read."""


class LeanConnection(asyncio.Protocol):
    """One connection. Belongs to an event loop; opened by `connect`."""

    def __init__(self, authority: str) -> None:
        self._authority = authority
        self._transport: asyncio.Transport
        self._received = bytearray()
        self._next_stream = 1
        self._streams: dict[int, _Stream] = {}

    @classmethod
    async def connect(cls, address: str) -> LeanConnection:
        """To `host:port`."""
        host, _, port = address.rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(address), host, int(port))
        return connection

    async def read_stream(self, path: str, request: bytes, on_message: OnMessage) -> None:
        """Calls the method `path`, "/package.Service/Method", and for each message `on_message`. Raises StreamEnded."""
        number, self._next_stream = self._next_stream, self._next_stream + 2
        stream = self._streams[number] = _Stream(on_message)
        headers = _literals(
            (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", self._authority),
            ("content-type", "application/grpc"), ("te", "trailers"),
        )  # fmt: skip
        body = _MESSAGE_HEAD.pack(0, len(request)) + request
        self._transport.write(
            _frame(_HEADERS, _END_HEADERS, number, headers) + _frame(_DATA, _END_STREAM, number, body)
        )
        try:
            await stream.ended
        finally:
            if self._streams.pop(number, None) is not None:
                self._transport.write(_frame(_RST_STREAM, 0, number, struct.pack(">I", 8)))  # 8: CANCEL

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, _MAX_WINDOW)
        window = struct.pack(">I", _MAX_WINDOW - _DEFAULT_WINDOW)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, window))

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
        if kind == _DATA:
            if (stream := self._streams.get(number)) is not None:
                stream.add(payload)
        elif kind in (_SETTINGS, _PING):
            if not flags & _ACK:
                self._transport.write(_frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif kind == _GOAWAY:
            self._transport.close()
        elif kind == _RST_STREAM:
            self._end(number, "the server has reset the stream")
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
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


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + number.to_bytes(4, "big") + payload


def _literals(*headers: tuple[str, str]) -> bytes:
    """Header fields without indexing, with new names; each shorter than 127 bytes."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127
    return bytes((len(data),)) + data
