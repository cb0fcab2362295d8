"""Several processes on one address: one router to its clients, with its limits, whichever process dies."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from protos.tandem.v1 import generation_pb2_grpc, pools_pb2, pools_pb2_grpc
from router.settings import RouterSettings
from router.workers import Worker, Workers, _scraped, reserve, worker_settings
from serving.lifecycle import EXIT_STOPPED, ParentBond
from serving.settings import SettingsError
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.process_logs import LOGS
from tests.router.rig import Answer, request_of
from tests.waiting import until

NUM_WORKERS = 2


def settings(**sections: Any) -> RouterSettings:
    return RouterSettings(**{"router": {"model": "m", "workers": NUM_WORKERS}} | sections)


def test_fixed_limits_are_divided_and_the_first_worker_alone_leads() -> None:
    ports = ExitStack()
    router = {"model": "m", "workers": 2, "admin_listen": "127.0.0.1:0", "ready_file": "r"}
    whole = settings(router=router, http={"listen": "127.0.0.1:0"}, admission={"max_requests": 9})
    first, second = worker_settings(whole, ports)
    ports.close()
    assert first.admission.max_requests == second.admission.max_requests == 5
    assert first.router.listen == second.router.listen
    assert first.http.listen == second.http.listen != "127.0.0.1:0"
    assert first.router.admin_listen
    assert second.router.admin_listen is None
    assert first.signals.routers == f"{first.signals.listen},{second.signals.listen}"


@pytest.mark.parametrize(
    ("num_workers", "max_calls", "max_per_peer", "expected"),
    [
        (2, 4096, 128, 128),
        (32, 4096, 128, 64),  # not all of its 128
        (2, 4096, 4096, 2048),  # a gateway, which may have all calls
        (2, 100, 4096, 50),
        (2, 4096, 3072, 1536),
        (64, 1, 1, 1),
    ],
)
def test_one_client_has_no_larger_part_of_a_worker_than_half_or_its_part_of_the_router(
    num_workers: int, max_calls: int, max_per_peer: int, expected: int
) -> None:
    ports = ExitStack()
    server = {"max_calls": max_calls, "max_calls_per_peer": max_per_peer}
    each = worker_settings(settings(router={"model": "m", "workers": num_workers}, server=server), ports)
    ports.close()
    assert {one.server.max_calls_per_peer for one in each} == {expected}


def test_what_is_for_several_routers_is_refused_with_workers() -> None:
    with pytest.raises(SettingsError, match=r"router\.workers = 2: admission\.num_routers is for several routers"):
        worker_settings(settings(admission={"num_routers": 2}), ExitStack())


def test_a_port_that_another_router_shares_among_its_workers_is_taken() -> None:
    ports, others = ExitStack(), ExitStack()
    address = reserve("127.0.0.1:0", ports)
    with pytest.raises(OSError, match="cannot listen on"):
        reserve(address, others)
    ports.close()
    reserve(address, others)
    others.close()


@pytest.fixture
def metrics_address() -> Iterator[str]:
    """Where metrics are served: at /metrics."""
    registry = CollectorRegistry()
    Gauge("things", "", registry=registry).inc()
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_metrics_of_workers_are_read_without_a_proxy(metrics_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as closed:  # bound, and nothing listens
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert [family.name for family in _scraped(metrics_address)] == ["things"]


@pytest.mark.parametrize("body", [b"things 1", b"{"])
def test_a_worker_that_dies_while_it_answers_has_no_metrics(body: bytes) -> None:
    """The head promises more than comes, or what comes is half a line."""
    num_promised = 100 if body != b"{" else len(body)

    def answer(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (num_promised, body))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=answer, args=(listening,), daemon=True)
        answering.start()
        assert _scraped(f"127.0.0.1:{listening.getsockname()[1]}") == ()
        answering.join(60)


class ProcessStub:
    """A worker's process, which writes `line` and lives until it is signalled."""

    def __init__(self, line: bytes) -> None:
        self._line = line
        self.stdin = self.stdout = self
        self.returncode: int | None = None
        self.ended = asyncio.Event()
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None: ...

    async def readline(self) -> bytes:
        return self._line

    async def wait(self) -> int:
        await self.ended.wait()
        self.returncode = 0
        return 0

    def send_signal(self, number: int) -> None:
        self.ended.set()


READY = b'{"address": "a", "metrics": null}\n'


async def test_workers_get_every_setting_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[ProcessStub] = []
    sent: list[RouterSettings] = []

    async def start(*arguments: str, **options: Any) -> ProcessStub:
        processes.append(ProcessStub(READY))
        return processes[-1]

    def recorded_settings(whole: RouterSettings, ports: ExitStack) -> list[RouterSettings]:
        sent.extend(worker_settings(whole, ports))
        return sent

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr("router.workers.worker_settings", recorded_settings)
    sections: dict[str, Any] = {
        "router": {"model": "m", "workers": NUM_WORKERS, "listen": "127.0.0.1:0"},
        "server": {"max_deadline_s": 1e9, "drain_grace_s": 0.1 + 0.2},
        "admission": {"queue_timeout_s": 1e300, "max_requests": 9},
    }
    with closing(Workers(settings(**sections))) as workers:
        await workers.start()
        assert await workers.stop()
    assert len(processes) == NUM_WORKERS
    assert [RouterSettings(**json.loads(process.written)) for process in processes] == sent


async def test_a_worker_that_cannot_be_started_once_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is no process, once no thread that waits for it, and once it dies while it writes that it is ready."""
    processes: list[ProcessStub] = []
    failures = [RuntimeError("can't start new thread"), OSError(errno.EAGAIN, "no process")]

    async def start(*arguments: str, **options: Any) -> ProcessStub:
        if len(processes) == NUM_WORKERS and failures:
            raise failures.pop()
        is_cut = len(processes) == NUM_WORKERS
        processes.append(ProcessStub(READY[:9] if is_cut else READY))
        if is_cut:
            processes[-1].ended.set()
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with closing(Workers(settings(router={"model": "m", "workers": NUM_WORKERS, "listen": "127.0.0.1:0"}))) as workers:
        await workers.start()
        processes[0].ended.set()
        await until(lambda: not failures)
        await until(lambda: len(processes) == NUM_WORKERS + 2)
        assert await workers.stop()


CHATTY = """
print("loaded")

def score(request, view):
    print("scored", flush=True)
    return 0.0
"""


async def test_what_a_scorer_prints_goes_to_standard_error(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chatty_scorer.py").write_text(CHATTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    async with FakeInstance("decode") as decode:
        whole = settings(
            router={"model": str(model_folder), "model_name": "fake", "workers": 2, "listen": "127.0.0.1:0"},
            pools={"decode": decode.address, "beat_timeout_s": 20.0},
            picking={"decode_scorers": "chatty_scorer:score"},
            admission={"instance_wait_s": 60.0},
        )
        with ExitStack() as ports, closing(ParentBond()) as bond:
            worker = Worker(0, worker_settings(whole, ports)[0], bond)
            running = asyncio.create_task(worker.run())
            ready = asyncio.create_task(worker.ready.wait())
            await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            assert ready.done()
            async with grpc.aio.insecure_channel(worker.listens["address"]) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                answer = Answer([one async for one in stub.Generate(request_of(), timeout=60)])
            worker.end()
            assert await running == EXIT_STOPPED
    assert answer.is_exactly(12)
    printed = capfd.readouterr().err
    assert "loaded" in printed
    assert "scored" in printed


class Router:
    """A supervisor with its workers, and channels to all of them."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, metrics: str, admin: str) -> None:
        self.process, self.address, self._metrics, self.admin = process, address, metrics, admin
        self.channels: list[grpc.aio.Channel] = []

    def pids(self) -> set[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return {int(pid) for pid in children.split()}

    async def received(self) -> dict[str, int]:
        """Requests by worker, of one scrape."""

        def scrape() -> str:
            with urllib.request.urlopen(f"http://{self._metrics}/metrics") as answer:
                return str(answer.read().decode())

        pattern = r'tandem_router_requests_received_total\{worker="(\d)"\} (\d+)'
        return {worker: int(number) for worker, number in re.findall(pattern, await asyncio.to_thread(scrape))}

    def channel(self) -> grpc.aio.Channel:
        """A connection of its own, which the kernel gives to any worker."""
        self.channels.append(grpc.aio.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)]))
        return self.channels[-1]

    async def generate(self, channel: grpc.aio.Channel, num_tokens: int = 12) -> Answer:
        answer, stub = Answer(), generation_pb2_grpc.GenerationServiceStub(channel)
        async for response in stub.Generate(request_of(max_tokens=num_tokens), wait_for_ready=True, timeout=60):
            answer.responses.append(response)
        return answer


@asynccontextmanager
async def running(model_folder: Path, decode: FakeInstance) -> AsyncIterator[Router]:
    ports = ExitStack()
    metrics, admin = reserve("127.0.0.1:0", ports), reserve("127.0.0.1:0", ports)
    ports.close()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--workers", str(NUM_WORKERS), "--listen", "127.0.0.1:0"),
        *("--model", str(model_folder), "--model-name", "fake", "--decode", decode.address),
        *("--metrics-listen", metrics, "--admin-listen", admin, "--server-drain-accept-s", "0"),
        *("--pools-beat-timeout-s", "20"),  # a stall delays reports
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with AsyncExitStack() as stack:
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
            assert line.startswith("ready address=127.0.0.1:")
            router = Router(process, line.removeprefix("ready address=").strip(), metrics, admin)
            yield router
        finally:
            for channel in router.channels:
                await stack.enter_async_context(channel)
            if process.returncode is None:
                process.kill()
            _, errors = await process.communicate()
            LOGS.search("router", errors.decode())


async def until_all_serve(router: Router) -> dict[str, grpc.aio.Channel]:
    """A channel to each worker, which has answered a request."""
    found: dict[str, grpc.aio.Channel] = {}
    async with asyncio.timeout(60):
        while len(found) < NUM_WORKERS:
            before, channel = await router.received(), router.channel()
            await router.generate(channel)
            after = await router.received()
            (worker,) = [one for one in after if after[one] > before.get(one, 0)]
            found.setdefault(worker, channel)
    return found


async def test_workers_share_an_address_a_death_ends_only_its_own_streams_and_a_drain_all(model_folder: Path) -> None:
    async with (
        FakeInstance("decode", behaviour=Behaviour(token_s=0.02)) as decode,
        running(model_folder, decode) as router,
    ):
        channels = await until_all_serve(router)
        async with grpc.aio.insecure_channel(router.admin) as operator:
            pools = await pools_pb2_grpc.PoolsServiceStub(operator).ListPools(pools_pb2.ListPoolsRequest())
        assert [pool.num_ready for pool in pools.pools] == [0, 1]

        # A worker dies.
        victim = max(router.pids())
        num_begun = len(decode.recorded("decode"))
        streams = [asyncio.create_task(router.generate(channel, 100)) for channel in channels.values()]
        await decode.until("decode", num_begun + NUM_WORKERS, timeout_s=20)
        os.kill(victim, signal.SIGKILL)
        done = await asyncio.gather(*streams, return_exceptions=True)
        (whole,) = [one for one in done if isinstance(one, Answer)]
        assert whole.is_exactly(100)

        # Another one takes its place.
        await until(lambda: len(router.pids() - {victim}) == NUM_WORKERS)
        channels = await until_all_serve(router)

        # All drain.
        num_begun = len(decode.recorded("decode"))
        streams = [asyncio.create_task(router.generate(channel, 60)) for channel in channels.values()]
        await decode.until("decode", num_begun + NUM_WORKERS, timeout_s=20)
        router.process.send_signal(signal.SIGINT)
        assert all([(await stream).is_exactly(60) for stream in streams])
        assert await asyncio.wait_for(router.process.wait(), 30) == 0
