"""The TCP servers of tests leave no connection behind, whatever their handlers and peers do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import warnings
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from tests.tcp import TcpServer, proxy


async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await reader.readexactly(1000)


async def ignores_cancelling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.read()
    except asyncio.CancelledError:
        return


async def returns_with_more_than_the_peer_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(bytes(16 << 20))


async def connect(server: TcpServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    client = socket.create_connection((host, int(port)))
    client.sendall(b"some")
    return client


@pytest.mark.parametrize("serve", [waits, ignores_cancelling, returns_with_more_than_the_peer_reads])
def test_no_connection_is_left(serve: Callable[..., Awaitable[None]]) -> None:
    """However far the server is with it: accepted, its task not begun, served; so many turns of the event loop."""

    async def leave(num_turns: int) -> socket.socket:
        async with TcpServer(serve) as server:
            client = await connect(server)
            for _ in range(num_turns):
                await asyncio.sleep(0)
        return client

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clients = [asyncio.run(leave(num_turns)) for num_turns in range(20)]
        gc.collect()
    for client in clients:
        client.close()
    assert not [str(warning.message) for warning in caught]


async def test_what_a_handler_raises_fails_the_test() -> None:
    async def fails(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise ValueError("mistake")

    async def use() -> None:
        async with TcpServer(fails) as server:
            with await connect(server) as client:
                client.setblocking(False)
                await ended(partial(asyncio.get_running_loop().sock_recv, client, 1))

    with pytest.raises(ValueError, match="mistake"):
        await use()


async def test_a_proxy_passes_on_both_ways_until_it_is_cut() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    async with TcpServer(echo) as server, proxy(server.address, delay_s=0.01) as passing_on:
        host, _, port = passing_on.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        passing_on.cut()
        await ended(reader.read)
        writer.close()


async def ended(read: Callable[[], Awaitable[bytes]]) -> None:
    with contextlib.suppress(ConnectionError):
        assert await read() == b""
