"""HTTP/2 frames by hand (RFC 9113), for what no gRPC client can be made to do: resets, pings and headers without end.

A header block is written as literals without indexing and without Huffman codes (RFC 7541, 6.2.2), which every server
must take. What the server says is read, and kept only as far as a test asks: the frames' types and error codes.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
CANCEL = 8
INITIAL_WINDOW_SIZE = 4

Headers = Sequence[tuple[bytes, bytes]]


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame as it goes over the wire."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def header_block(headers: Headers) -> bytes:
    """HPACK, every name and value in full."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)


def _string(value: bytes) -> bytes:
    if len(value) < 127:
        return bytes([len(value)]) + value
    length, encoded = len(value) - 127, b"\x7f"
    while length >= 128:
        encoded += bytes([length % 128 + 128])
        length //= 128
    return encoded + bytes([length]) + value


def call_headers(method: str, *more: tuple[bytes, bytes]) -> Headers:
    """What a gRPC call begins with; `more` is its metadata."""
    return (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"router"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        *more,
    )


def message(data: bytes, *, length: int | None = None) -> bytes:
    """A gRPC message, or the beginning of one of `length` bytes."""
    return b"\x00" + struct.pack(">I", len(data) if length is None else length) + data


class Connection:
    """One HTTP/2 connection to host:port. A context manager; leaving it closes the socket without a word."""

    def __init__(self, address: str, settings: Iterable[tuple[int, int]] = (), *, source: str = "127.0.0.1") -> None:
        """`settings` are HTTP/2's own, by number; `source` is the address that it comes from."""
        self._source = source
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._settings = b"".join(struct.pack(">HI", key, value) for key, value in settings)
        self._next_id = 1
        self.received: Counter[int] = Counter()
        """Frames by type."""
        self.goaway: bytes | None = None
        """The server's last word: error code and debug text."""
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port, local_addr=(self._source, 0))
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0, self._settings))
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        self._writer.transport.abort()
        await asyncio.gather(self._reading, return_exceptions=True)

    @property
    def is_open(self) -> bool:
        """Whether the server has not ended it."""
        return self._reading is not None and not self._reading.done()

    async def closed(self, within_s: float = 20.0) -> None:
        """Returns when the server has ended it; raises TimeoutError if it does not."""
        assert self._reading is not None
        await asyncio.wait_for(asyncio.shield(self._reading), within_s)

    def open_call(self, method: str, *more: tuple[bytes, bytes], flags: int = END_HEADERS) -> int:
        """Begins a call; returns its stream's id."""
        stream_id = self._next_id
        self._next_id += 2
        self.send(frame(HEADERS, flags, stream_id, header_block(call_headers(method, *more))))
        return stream_id

    def send(self, data: bytes) -> None:
        """Frames as they are."""
        self._writer.write(data)

    async def sent(self) -> None:
        """Returns when the socket has taken what there was to send. Raises ConnectionError at the server's end."""
        await self._writer.drain()
        if not self.is_open:
            raise ConnectionResetError("the server has ended the connection")
        await asyncio.sleep(0)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._saw(head[3], head[4], payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _saw(self, kind: int, flags: int, payload: bytes) -> None:
        self.received[kind] += 1
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.goaway = payload[4:]
