"""A proxy of HTTP/2 that ends a stream as proxies do when the server behind them dies.

It passes frames on until the first data of an answer, and ends that stream when the client has read it; then it sends
the client away (GOAWAY), so that the next call comes by another connection, which it leaves alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.floods.http2 import CANCEL, DATA, END_STREAM, GOAWAY, RST_STREAM, frame
from tests.tcp import TcpServer

ENDS = {
    "reset": (RST_STREAM, 0, CANCEL.to_bytes(4)),
    "no trailers": (DATA, END_STREAM, b""),
}
"""HAProxy's two ways to end a stream whose headers it has sent: type, flags and payload of the frame."""
FREEZES = "freezes"
"""No end: the connection stays, and nothing comes any more, as from a router that is frozen."""


@asynccontextmanager
async def ending_proxy(address: str, end: str, has_read: asyncio.Event) -> AsyncIterator[TcpServer]:
    """In front of the server at `address`; `end` is one of ENDS, or FREEZES. The stream ends after `has_read`: gRPC
    drops messages that are unread then."""
    host, _, port = address.rpartition(":")
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        answers, requests = await asyncio.open_connection(host, int(port))
        sending = asyncio.create_task(_pass_bytes(reader, requests))
        try:
            if num_connections == 1:
                stream = await _pass_frames_until_data(answers, writer)
                await has_read.wait()
                if end == FREEZES:
                    await sending
                    return
                kind, flags, payload = ENDS[end]
                writer.write(frame(kind, flags, stream, payload))
                writer.write(frame(GOAWAY, 0, 0, stream.to_bytes(4) + bytes(4)))
                await sending
            else:
                await _pass_bytes(answers, writer)
        finally:
            sending.cancel()
            requests.close()
            await asyncio.gather(sending, return_exceptions=True)

    async with TcpServer(serve) as server:
        yield server


async def _pass_frames_until_data(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> int:
    """The stream of the first data, which has been passed on."""
    while True:
        header = await source.readexactly(9)
        sink.write(header + await source.readexactly(int.from_bytes(header[:3])))
        await sink.drain()
        if header[3] == DATA:
            return int.from_bytes(header[5:])


async def _pass_bytes(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65_536):
        sink.write(data)
        await sink.drain()
