"""`--workers N`: N router processes on one address, and the process that starts them, watches them and ends them.

    supervisor ──starts, with its settings on stdin──▶ worker ──"ready" on stdout──▶ serving ──SIGTERM──▶ drained
        │                                                ▲  └──dies──▶ another one, on the same ports
        └──holds the ports, merges the metrics           └──later each time that it lives only briefly

Each worker is a whole router, on one core. The kernel gives each new connection to one of them (SO_REUSEPORT). They
know each other as routers of the same pools do (`signals`), so that together they keep the limits of one: of amounts
that the pools report each is guaranteed a part and takes what the others leave, of fixed ones each has its part. The
first worker alone scales the pools and answers operators. The live page of each can resize the pools.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from engine.imports import child_environment
from router.settings import RouterSettings
from serving.lifecycle import EXIT_FAILED, EXIT_STOPPED, ParentBond
from serving.metrics import MetricsServer
from serving.server import ServerSettings
from serving.settings import Section, SettingsError, format_address, parse_address
from serving.waits import wait_at_most

_log = logging.getLogger(__name__)
_WORK = "from router.__main__ import work; work()"
_LOCAL = "127.0.0.1:0"
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 10.0
_LONG_LIFE_S = 30.0
_SCRAPE_S = 2.0
_LOCALLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever proxy the environment names."""
S = TypeVar("S", bound=Section)


class WorkersFailed(Exception):
    """A worker has ended before it was ready. `status` is its exit status; its log says why."""

    def __init__(self, index: int, status: int) -> None:
        super().__init__(f"worker {index} ended with status {status} before it was ready")
        self.status = status


def reserve(address: str, ports: ExitStack) -> str:
    """Binds a port until `ports` are closed, for the workers, which bind it too, as do those that replace them; returns
    `address` with it, if it was 0. Raises OSError if another process has it."""
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as alone:  # fails where others listen, be it with SO_REUSEPORT
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind((host, port))
        held = ports.enter_context(socket.socket(family))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        raise OSError(f"cannot listen on {format_address(host, port)}: {error.strerror}") from error
    return format_address(host, held.getsockname()[1])


def worker_settings(settings: RouterSettings, ports: ExitStack) -> list[RouterSettings]:
    """The settings of each worker, for which `ports` are held. Raises SettingsError for what workers cannot do, OSError
    for a taken port."""
    num_workers = settings.router.workers
    for name, is_set in (
        ("signals.listen and signals.routers", settings.signals.listen or settings.signals.routers),
        ("endpoint_picker.listen", settings.endpoint_picker.listen),
        ("admission.num_routers", settings.admission.num_routers > 1),
    ):
        if is_set:
            raise SettingsError(
                f"router.workers = {num_workers}: {name} is for several routers of one worker: leave one of both out"
            )
    server = settings.effective_server
    listen = reserve(format_address(server.host, server.port), ports)
    http, probes, admin = (
        address and reserve(address, ports)
        for address in (settings.http.listen, settings.health.listen, settings.router.admin_listen)
    )
    signals = [reserve(_LOCAL, ports) for _ in range(num_workers)]
    shared = {
        "server": _server_part(server, num_workers),
        "http": _parts(settings.http, num_workers, "max_connections").model_copy(update={"listen": http}),
        "health": settings.health.model_copy(update={"listen": probes}),
        "metrics": settings.metrics.model_copy(update={"listen": settings.metrics.listen and _LOCAL}),
        "admission": _parts(
            settings.admission, num_workers, "max_requests", "max_tokens", "max_queued", "max_queued_tokens"
        ),
    }
    return [
        settings.model_copy(
            update={
                **shared,
                "router": settings.router.model_copy(
                    update={"listen": listen, "ready_file": None, "admin_listen": None if index else admin}
                ),
                "signals": settings.signals.model_copy(update={"listen": own, "routers": ",".join(signals)}),
                "autoscaler": settings.autoscaler.model_copy(
                    update={"enabled": settings.autoscaler.enabled and not index}
                ),
            }
        )
        for index, own in enumerate(signals)
    ]


def _server_part(server: ServerSettings, num_workers: int) -> ServerSettings:
    """The limit of one client is not divided: its few connections may all belong to one worker. It gets at most half of
    that one, or the part that it may have of the whole router, if that is more."""
    part = _parts(server, num_workers, "max_calls", "max_connections")
    of_client = -(-min(server.max_calls_per_peer, server.max_calls) // num_workers)
    most = max(part.max_calls // 2, of_client)
    return part.model_copy(update={"max_calls_per_peer": min(server.max_calls_per_peer, most)})


def _parts(section: S, num_workers: int, *names: str) -> S:
    """With an equal part of each amount."""
    return section.model_copy(update={name: -(-getattr(section, name) // num_workers) for name in names})


class Worker:
    """One place among the workers: the process that has it, and those that follow."""

    def __init__(self, index: int, settings: RouterSettings, bond: ParentBond) -> None:
        self._index = index
        self._settings = settings.model_dump_json().encode()
        self._bond = bond
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        self.ready = asyncio.Event()
        """Set by the first process and never cleared."""
        self.listens: dict[str, Any] = {}
        """Of the last process: `address` and `metrics`."""

    async def run(self) -> int:
        """Keeps a process running until `end`; returns the last one's status. Raises WorkersFailed."""
        delay_s = _MIN_BACKOFF_S
        while True:
            began_s = time.monotonic()
            try:
                status = await self._run_one()
            except (OSError, RuntimeError) as error:  # at a limit on processes or threads: counts as one that ended
                if not self.ready.is_set():
                    raise
                _log.error("worker %d cannot be started: %s", self._index, error)
                status = EXIT_FAILED
            if self._ending.is_set():
                return status
            if not self.ready.is_set():
                raise WorkersFailed(self._index, status)
            delay_s = _MIN_BACKOFF_S if time.monotonic() - began_s > _LONG_LIFE_S else delay_s
            _log.error("worker %d ended with status %d; another one starts in %g s", self._index, status, delay_s)
            if await wait_at_most(self._ending, delay_s):
                return EXIT_STOPPED
            delay_s = min(2 * delay_s, _MAX_BACKOFF_S)

    def end(self) -> None:
        """Drains the process; the second time it stops now."""
        self._ending.set()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    async def _run_one(self) -> int:
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _WORK),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **self._bond.environment(), **child_environment()},
            pass_fds=self._bond.pass_fds,
            start_new_session=True,  # a terminal's Ctrl-C goes to the supervisor alone
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if self._ending.is_set():
            process.terminate()
        process.stdin.write(self._settings)
        process.stdin.close()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):  # it died before, or in the middle
            status = await process.wait()
            return EXIT_STOPPED if self._ending.is_set() else status
        self.listens = json.loads(line)
        self.ready.set()
        return await process.wait()


class Workers(Collector):
    """The supervisor. Made, run and ended on one event loop; metrics are read on the metrics server's threads."""

    def __init__(self, settings: RouterSettings) -> None:
        self._ports = ExitStack()
        self._bond = ParentBond()
        each = worker_settings(settings, self._ports)
        self._workers = [Worker(index, one, self._bond) for index, one in enumerate(each)]
        self._metrics = MetricsServer(settings.metrics, self, of_process=False)
        self._running: asyncio.Future[Any] | None = None

    @property
    def address(self) -> str:
        return str(self._workers[0].listens["address"])

    async def start(self) -> None:
        """Returns when all workers listen. Raises WorkersFailed."""
        self._running = asyncio.gather(*(worker.run() for worker in self._workers))
        ready = asyncio.gather(*(worker.ready.wait() for worker in self._workers))
        both: list[asyncio.Future[Any]] = [self._running, ready]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            ready.cancel()
            self._running.result()
        self._metrics.start()

    async def drain(self) -> bool:
        """Drains all workers; False if one cut a request off."""
        return await self.stop()

    async def stop(self) -> bool:
        """Ends all workers, now if they drain already; False if one cut a request off."""
        for worker in self._workers:
            worker.end()
        assert self._running is not None, "not started"
        statuses = await asyncio.shield(self._running)
        return not any(statuses)

    def close(self) -> None:
        """Ends what is left, at once."""
        self._metrics.close()
        self._bond.close()
        self._ports.close()

    def collect(self) -> Iterator[Metric]:
        """Every worker's metrics, with the label `worker`; none of one that does not answer."""
        merged: dict[str, Metric] = {}
        for index, worker in enumerate(self._workers):
            for family in _scraped(worker.listens.get("metrics")):
                same = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    same.add_sample(sample.name, {**sample.labels, "worker": str(index)}, sample.value)
        yield from merged.values()


def _scraped(address: str | None) -> Iterable[Metric]:
    if address is None:
        return ()
    try:
        with _LOCALLY.open(f"http://{address}/metrics", timeout=_SCRAPE_S) as answer:
            return [*text_string_to_metric_families(answer.read().decode())]
    except (OSError, http.client.HTTPException, ValueError) as error:  # the last two: it died while it answered
        _log.warning("no metrics of the worker at %s: %s", address, error)
        return ()
