"""Floods by name: one client repeats one kind of call as fast as it can, until it is stopped.

Each is a coroutine function of an address and an event, and returns the number of repetitions. They come from their
own address, so that a server can distinguish them from other clients; those made with gRPC's client come from its
address.

    python -m tests.floods.floods NAME HOST:PORT

floods until its standard input is closed, and writes the number.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import grpc.aio

from protos.tandem.v1 import common_pb2, generation_pb2
from tests.floods import http2
from tests.floods.http2 import Connection, frame, message
from tests.grpc_calls import of_bytes

SOURCE = "127.0.0.2"
GENERATE = "/tandem.v1.GenerationService/Generate"
WATCH = "/grpc.health.v1.Health/Watch"
Flood = Callable[[str, asyncio.Event], Awaitable[int]]
_BURST = 50
_PATIENCE_S = 0.25
_NUM_DEAF = 64
_NUM_BAD = 8


@asynccontextmanager
async def _connected(address: str, *settings: tuple[int, int]) -> AsyncIterator[Connection]:
    """A connection that the server may end, which is no error here."""
    with suppress(ConnectionError):
        async with Connection(address, settings, source=SOURCE) as connection:
            yield connection


async def _over_and_over(address: str, stop: asyncio.Event, burst: Callable[[Connection], int]) -> int:
    """`burst` on one connection after the other, as the server ends them or takes nothing more."""
    done = 0
    while not stop.is_set():
        async with _connected(address) as connection:
            while not stop.is_set():
                done += burst(connection)
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        await connection.sent()
                except TimeoutError:
                    break
        await asyncio.sleep(0)
    return done


async def resets(address: str, stop: asyncio.Event) -> int:
    """Calls that are begun and reset in the same breath (CVE-2023-44487)."""

    def burst(connection: Connection) -> int:
        for _ in range(_BURST):
            stream_id = connection.open_call(GENERATE)
            connection.send(frame(http2.RST_STREAM, 0, stream_id, http2.CANCEL.to_bytes(4, "big")))
        return _BURST

    return await _over_and_over(address, stop, burst)


async def pings(address: str, stop: asyncio.Event) -> int:
    """Pings that are all to be answered."""

    def burst(connection: Connection) -> int:
        connection.send(frame(http2.PING, 0, 0, bytes(8)) * _BURST)
        return _BURST

    return await _over_and_over(address, stop, burst)


async def settings(address: str, stop: asyncio.Event) -> int:
    """Settings that are all to be acknowledged."""
    changed = http2.INITIAL_WINDOW_SIZE.to_bytes(2, "big") + (65535).to_bytes(4, "big")

    def burst(connection: Connection) -> int:
        connection.send(frame(http2.SETTINGS, 0, 0, changed) * _BURST)
        return _BURST

    return await _over_and_over(address, stop, burst)


async def endless_headers(address: str, stop: asyncio.Event) -> int:
    """A head that goes on and on (CVE-2024-27316 and its kin)."""
    more = http2.header_block([(b"x-filler", b"y" * 8000)])

    def burst(connection: Connection) -> int:
        stream_id = connection.open_call(GENERATE, flags=0)
        connection.send(frame(http2.CONTINUATION, 0, stream_id, more) * _BURST)
        return _BURST

    return await _over_and_over(address, stop, burst)


async def half_open_calls(address: str, stop: asyncio.Event) -> int:
    """Calls whose message never comes, as many as each of eight connections may have."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(Connection(address, source=SOURCE)) for _ in range(8)]
        for connection in connections:
            for _ in range(1000):
                connection.open_call(GENERATE)
            await connection.sent()
        await stop.wait()
        return 1000 * len(connections)


async def watches(address: str, stop: asyncio.Event) -> int:
    """Watches of the health, which may last as long as they like."""
    async with AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(Connection(address, source=SOURCE)) for _ in range(5)]
        for connection in connections:
            for _ in range(1000):
                stream_id = connection.open_call(WATCH)
                connection.send(frame(http2.DATA, http2.END_STREAM, stream_id, message(b"")))
            await connection.sent()
        await stop.wait()
        return 1000 * len(connections)


async def idle_connections(address: str, stop: asyncio.Event) -> int:
    """Connections on which nothing is said, not even a preface."""
    host, _, port = address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    try:
        while not stop.is_set():
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port), local_addr=(SOURCE, 0))
                writers.append(writer)
            if len(writers) >= 3000:
                await stop.wait()
    finally:
        for writer in writers:
            writer.transport.abort()
    return len(writers)


async def new_connections(address: str, stop: asyncio.Event) -> int:
    """Connections that are made and dropped."""
    done = 0
    while not stop.is_set():
        async with _connected(address) as connection:
            await connection.sent()
        done += 1
    return done


async def deaf_readers(address: str, stop: asyncio.Event) -> int:
    """Calls on connections that take nothing of the answers."""
    sampling = common_pb2.SamplingParams(max_tokens=32, ignore_eos=True)
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=range(20, 30)), sampling=sampling)
    data = message(request.SerializeToString())
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(Connection(address, [(http2.INITIAL_WINDOW_SIZE, 0)], source=SOURCE))
            for _ in range(_NUM_DEAF)
        ]
        for connection in connections:
            connection.send(frame(http2.DATA, http2.END_STREAM, connection.open_call(GENERATE), data))
        await stop.wait()
    return len(connections)


async def cancelled_requests(address: str, stop: asyncio.Event) -> int:
    """Requests that are whole, and reset in the same breath."""
    sampling = common_pb2.SamplingParams(max_tokens=32, ignore_eos=True)
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=range(20, 30)), sampling=sampling)
    data = message(request.SerializeToString())

    def burst(connection: Connection) -> int:
        for _ in range(_BURST):
            stream_id = connection.open_call(GENERATE)
            connection.send(frame(http2.DATA, http2.END_STREAM, stream_id, data))
            connection.send(frame(http2.RST_STREAM, 0, stream_id, http2.CANCEL.to_bytes(4, "big")))
        return _BURST

    return await _over_and_over(address, stop, burst)


async def bad_requests(address: str, stop: asyncio.Event) -> int:
    """Requests with ids out of range, invalid UTF-8 and too many stops, in turn."""
    many = common_pb2.SamplingParams(stop=["x"] * 10_000, logprobs=10**6, n=10**9)
    ids = common_pb2.TokenIds(ids=[2**40])
    return await _refused(
        address,
        stop,
        [
            generation_pb2.GenerateRequest(token_ids=ids).SerializeToString(),
            b"\x0a\x02\xff\xfe",
            generation_pb2.GenerateRequest(text="x", sampling=many).SerializeToString(),
        ],
    )


async def giant_prompts(address: str, stop: asyncio.Event) -> int:
    """Prompts as long as a message may be: four million ids, then as much text."""
    ids = common_pb2.TokenIds(ids=[20] * 4_194_000)
    return await _refused(
        address,
        stop,
        [
            generation_pb2.GenerateRequest(token_ids=ids).SerializeToString(),
            generation_pb2.GenerateRequest(text="a" * 4_194_000).SerializeToString(),
        ],
    )


async def metadata(address: str, stop: asyncio.Event) -> int:
    """Calls with more metadata than is taken."""
    data = generation_pb2.GenerateRequest(text="x").SerializeToString()
    return await _refused(address, stop, [data], (("x-filler", "y" * 12_000),))


async def _refused(
    address: str, stop: asyncio.Event, requests: list[bytes], metadata: tuple[tuple[str, str], ...] = ()
) -> int:
    """Asks for what must be refused, some at a time, and how often that was."""
    done = 0

    async def one(channel: grpc.aio.Channel) -> None:
        nonlocal done
        while not stop.is_set():
            try:
                await of_bytes(channel, GENERATE)(requests[done % len(requests)], metadata=metadata).read()
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
                    raise
                done += 1

    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        await asyncio.gather(*(one(channel) for _ in range(_NUM_BAD)))
    return done


ANY_PORT: dict[str, Flood] = {
    flood.__name__: flood
    for flood in (
        resets,
        pings,
        settings,
        endless_headers,
        half_open_calls,
        watches,
        idle_connections,
        new_connections,
    )
}
"""What can be done to every gRPC port."""
CLIENTS_PORT: dict[str, Flood] = {
    flood.__name__: flood for flood in (deaf_readers, cancelled_requests, bad_requests, giant_prompts, metadata)
}
"""What needs the router's own service."""


async def main(name: str, address: str) -> None:
    """Floods until standard input ends; writes how often."""
    stop = asyncio.Event()
    flooding = asyncio.ensure_future(({**ANY_PORT, **CLIENTS_PORT})[name](address, stop))
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    print(await flooding)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
