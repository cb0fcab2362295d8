"""A client of several routers: routing, retries, and the answers to invalid addresses."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tandem import AsyncClient, Client, TandemError
from tandem.bench.serve import grpc_endpoint
from tandem.client import channel
from tandem.client.channel import ROUTER_SERVICE, ClientChannel, router_target
from tandem.client.credentials import PLAINTEXT
from tandem.client.errors import ConnectionLost
from tests.waiting import wait_until


class Router(generation_pb2_grpc.GenerationServiceServicer):
    """Answers two tokens and its name as the model, or refuses, or breaks off after the first token."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refuses = False
        self.breaks = False
        self.num_requests = 0
        self.may_end: threading.Event | None = None
        """The second token waits for it."""
        # Without threads, a watch that begins can hold the lock that one that ends waits for, on the thread that sends.
        self.health = health.HealthServicer(experimental_non_blocking=False)
        self.address = ""

    def Generate(self, request: Any, context: Any) -> Iterator[generation_pb2.GenerateResponse]:  # type: ignore[override]
        self.num_requests += 1
        if self.refuses:
            context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        for index, text in enumerate(["a", "b"]):
            if index == 1 and self.may_end is not None:
                assert self.may_end.wait(60)
            if self.breaks and index == 1:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the stream broke")
            chunk = common_pb2.TokenChunk(token_index=index, token_ids=[index], text=text, text_offset=index)
            if index == 1:
                chunk.finish.reason = common_pb2.FINISH_REASON_LENGTH
            yield generation_pb2.GenerateResponse(tokens=chunk, model=self.name)

    def begin_to_refuse(self) -> None:
        """`num_requests` counts from now on."""
        self.refuses, self.num_requests = True, 0

    @contextmanager
    def serving(self, at: str = "127.0.0.1:0") -> Iterator[Router]:
        server: Any = grpc.server(ThreadPoolExecutor(32))  # the stubs are typed for asyncio alone
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.is_ready(True)
        self.address = f"{at.rpartition(':')[0]}:{server.add_insecure_port(at)}"
        server.start()
        try:
            yield self
        finally:
            server.stop(None).wait()

    def is_ready(self, is_ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self.health.set(ROUTER_SERVICE, status.SERVING if is_ready else status.NOT_SERVING)


@pytest.fixture
def two() -> Iterator[list[Router]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Router(name).serving()) for name in ("left", "right")]


def addresses(several: list[Router]) -> list[str]:
    return [router.address for router in several]


def wait_connected(client: Client) -> None:
    """Returns when both routers have answered: one that is not ready yet for this client gets nothing."""
    models = {client.generate("go").model}
    wait_until(lambda: len(models | {client.generate("go").model}) == 2, f"only {models} answers")


def test_several_routers_share_the_requests(two: list[Router]) -> None:
    with Client(addresses(two)) as client:
        wait_connected(client)
        models = [client.generate("go").model for _ in range(20)]
    assert {"left", "right"} == set(models)


def use_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that does not answer, for every address."""
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")


def test_a_router_on_this_machine_is_not_looked_for_behind_the_proxy(
    two: list[Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_proxy(monkeypatch)

    async def ask() -> str:
        async with AsyncClient(two[1].address) as client:
            return (await client.generate("go")).model

    port = two[0].address.rpartition(":")[2]
    for given in (two[0].address, [two[0].address] * 2, f"dns:localhost:{port}", f"localhost:{port}"):
        with Client(given) as client:
            assert client.generate("go").model == "left"
    assert asyncio.run(ask()) == "right"


def test_a_router_at_any_address_of_this_machine_is_not_looked_for_behind_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    hosts = [one.address for one in every if one.family is socket.AF_INET]
    assert "127.0.0.1" in hosts
    use_proxy(monkeypatch)
    with Router("own").serving("0.0.0.0:0") as router:
        port = router.address.rpartition(":")[2]
        for host in hosts:
            with Client(f"{host}:{port}") as client:
                assert client.generate("go").model == "own", host


def test_a_request_rejected_by_one_router_is_answered_by_the_other(two: list[Router]) -> None:
    with Client(",".join(addresses(two))) as client:
        wait_connected(client)
        two[0].begin_to_refuse()
        answers = [client.generate("go") for _ in range(10)]
    assert [(answer.model, answer.text) for answer in answers] == [("right", "ab")] * 10
    assert two[0].num_requests, "no request was sent to it, so nothing was retried"


def test_a_long_request_is_answered_by_the_other_router_too(two: list[Router]) -> None:
    """By default gRPC keeps no request of more than 256 KiB for a retry."""
    with Client(addresses(two)) as client:
        wait_connected(client)
        two[0].begin_to_refuse()
        assert [client.generate("a" * size).model for size in (300_000, 4_000_000) * 5] == ["right"] * 10
    assert two[0].num_requests


async def test_the_asyncio_client_does_the_same(two: list[Router]) -> None:
    async with AsyncClient(addresses(two)) as client, asyncio.timeout(60):
        models = set[str]()
        while len(models) < 2:
            models.add((await client.generate("go")).model)
        two[1].begin_to_refuse()
        assert [(await client.generate("go")).model for _ in range(10)] == ["left"] * 10
    assert two[1].num_requests


def test_a_stream_that_has_begun_is_never_retried(two: list[Router]) -> None:
    """It is resumed instead (test_resumption.py)."""
    for router in two:
        router.breaks = True
    with Client(addresses(two), max_resumptions=0) as client, pytest.raises(TandemError, match="the stream broke"):
        client.generate("go")
    assert sum(router.num_requests for router in two) == 1


def test_a_router_that_is_not_ready_is_left_out(two: list[Router]) -> None:
    two[0].is_ready(False)
    with Client(addresses(two)) as client:
        assert [client.generate("go").model for _ in range(10)] == ["right"] * 10
    assert two[0].num_requests == 0


def test_a_name_stands_for_every_address_it_has(two: list[Router]) -> None:
    port = two[0].address.rpartition(":")[2]
    with Client(f"dns:localhost:{port}") as client:
        assert client.generate("go").model == "left"


@pytest.mark.parametrize(("retries", "num_requests"), [(None, 1), (0, 1), (2, 3)])
def test_a_single_router_is_retried_on_request(two: list[Router], retries: int | None, num_requests: int) -> None:
    two[0].refuses = True
    with Client(two[0].address, retries=retries) as client, pytest.raises(TandemError, match="draining"):
        client.generate("go")
    assert two[0].num_requests == num_requests


_SETTINGS, _PING, _ACK = 4, 6, 1


@contextmanager
def frozen_server(num_pings: int) -> Iterator[str]:
    """HTTP/2 that takes requests, answers `num_pings` pings, and nothing from then on; the kernel acknowledges."""

    def serve() -> None:
        with listening, listening.accept()[0] as connection, connection.makefile("rb") as frames:
            connection.sendall(bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0]))
            frames.read(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
            num_left = num_pings
            while len(header := frames.read(9)) == 9:
                kind, flags, body = header[3], header[4], frames.read(int.from_bytes(header[:3]))
                if flags & _ACK or kind not in (_SETTINGS, _PING) or not num_left:
                    continue
                num_left -= kind == _PING
                body = body if kind == _PING else b""
                connection.sendall(bytes([0, 0, len(body), kind, _ACK, 0, 0, 0, 0]) + body)

    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    thread.join()


def notice_soon(monkeypatch: pytest.MonkeyPatch, module: ModuleType, options: str) -> None:
    """Shortens the keepalive in that module's options."""
    soon = {name: 300 for name, value in channel.KEEPALIVE if value}
    monkeypatch.setattr(module, options, [(name, soon.get(name, value)) for name, value in getattr(module, options)])


@pytest.mark.parametrize("num_pings", [1, 5])
def test_a_router_that_freezes_is_noticed(monkeypatch: pytest.MonkeyPatch, num_pings: int) -> None:
    notice_soon(monkeypatch, channel, "_OPTIONS")
    with (
        frozen_server(num_pings) as address,
        Client(address, timeout_s=30.0, max_resumptions=0) as client,
        pytest.raises(ConnectionLost, match="ping timeout"),
    ):
        client.generate("go")


def test_the_bench_notices_it_as_well() -> None:
    assert set(channel.KEEPALIVE) <= set(grpc_endpoint._OPTIONS)


def test_a_call_that_the_garbage_collector_ends_may_end_at_any_moment() -> None:
    """On a thread that begins a call too: there the lock is held."""
    connections = ClientChannel("127.0.0.1:1", (), PLAINTEXT)

    def abandon() -> None:
        def call() -> Iterator[None]:
            with connections.connection():
                yield

        calls: list[Any] = [call()]
        next(calls[0])
        calls.append(calls)

    def collect() -> None:
        with connections._lock:
            gc.collect()

    abandon()
    assert connections._current.num_calls == 1
    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(30)
    assert not collecting.is_alive(), "it waits for its own lock"
    assert connections._current.num_calls == 0
    connections.close()


def test_targets() -> None:
    assert router_target("10.0.0.1:1", None).target == "10.0.0.1:1"
    assert router_target(["10.0.0.1:1", " 10.0.0.2:2"], None).target == "ipv4:10.0.0.1:1,10.0.0.2:2"
    assert router_target("[::1]:1,[::2]:2", None).target == "ipv6:[::1]:1,[::2]:2"
    assert router_target("dns:///router:1", None).target == "dns:///router:1"
    config = json.loads(str(dict(router_target("10.0.0.1:1", None).options)["grpc.service_config"]))
    assert config == {}, "no retries and no health checks for a single router"


@pytest.mark.parametrize(
    ("address", "retries", "message"),
    [
        (["router:1", "10.0.0.1:1"], None, "'router:1' is not.*dns:name:port"),
        (["10.0.0.1", "10.0.0.2"], None, "'10.0.0.1' is not"),
        (["10.0.0.1:1", "[::1]:1"], None, "do not go together"),
        ("10.0.0.1:1,", None, "is empty"),
        ([], None, "is empty"),
        ("127.0.0.1:99999", None, r"address: '127.0.0.1:99999' has no valid port; allowed: 1\.\.65535"),
        (["10.0.0.1:1", "10.0.0.2:65536"], None, "'10.0.0.2:65536' has no valid port"),
        ("dns:router:065536", None, "'dns:router:065536' has no valid port"),
        ("10.0.0.1:1", 5, r"retries: is 5; allowed: 0\.\.4"),
    ],
)
def test_invalid_addresses_are_answered_with_what_to_write(address: Any, retries: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router_target(address, retries)
