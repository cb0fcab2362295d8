"""The processes of the router's benchmark, and one window of traffic through one of them."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import click
import psutil

from benchmarks import bare_relay, token_load, token_source
from tests.fakes.model_folder import write_model_folder

Way = Literal["direct", "bare", "router"]
"""How the clients get the stub's tokens."""

_START_TIMEOUT_S = 60.0
_MEET_S = 1.5
"""Until the router has discovered the stub."""
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Load:
    """The traffic of one window."""

    tokens_per_s: float
    """Of all streams; 0: without limit."""
    num_streams: int
    in_steps: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one window."""

    way: Way
    load: Load
    tokens_per_s: float
    tokens_per_message: float
    cpu_us: float
    """CPU of the relay's process for each token that the clients got, microseconds; 0 without a relay."""
    p50_ms: float
    """Age of a token when its client has it, milliseconds."""
    p99_ms: float


@dataclass(frozen=True, slots=True)
class _Relay:
    address: str
    process: psutil.Process | None

    def cpu_s(self) -> float:
        """User and system time of all its threads so far, and of its workers."""
        if self.process is None:
            return 0.0
        every = [process.cpu_times() for process in (self.process, *self.process.children())]
        return float(sum(times.user + times.system for times in every))


class Windows:
    """Stub, relays and clients, ready for one window after the other. Made by `running`."""

    def __init__(
        self,
        relays: dict[Way, _Relay],
        clients: list[Connection],
        pace: token_source.Pace,
        router_log: Path,
        num_connections: int,
    ) -> None:
        self._relays = relays
        self._num_connections = num_connections
        self._clients = clients
        self._pace = pace
        self._router_log = router_log

    def measure(self, way: Way, load: Load, length_s: float, warm_up_s: float = 1.5) -> Sample:
        """Sends `load` one way; raises ClickException when a stream fails."""
        relay = self._relays[way]
        self._pace.interval_s.value = load.num_streams / load.tokens_per_s if load.tokens_per_s else 0.0
        self._pace.in_steps.value = int(load.in_steps)
        begin_s = time.monotonic() + warm_up_s
        for index, client in enumerate(self._clients):
            num_streams = len(range(index, load.num_streams, len(self._clients)))
            window = token_load.Window(relay.address, num_streams, begin_s, begin_s + length_s, self._num_connections)
            client.send(window)
        time.sleep(max(begin_s - time.monotonic(), 0))
        before_s, began_s = relay.cpu_s(), time.monotonic()
        time.sleep(max(begin_s + length_s - time.monotonic(), 0))
        used_s, lasted_s = relay.cpu_s() - before_s, time.monotonic() - began_s
        seen = [self._seen(client) for client in self._clients]
        ages_ms = sorted(age_ms for one in seen for age_ms in one.ages_ms)
        if not ages_ms:
            raise click.ClickException(f"no message arrived through {way}")
        num_tokens = len(ages_ms) * lasted_s / length_s
        return Sample(
            way=way,
            load=load,
            tokens_per_s=num_tokens / lasted_s,
            tokens_per_message=len(ages_ms) / sum(one.num_messages for one in seen),
            cpu_us=used_s / num_tokens * 1e6,
            p50_ms=ages_ms[len(ages_ms) // 2],
            p99_ms=ages_ms[len(ages_ms) * 99 // 100],
        )

    def _seen(self, client: Connection) -> token_load.Seen:
        seen = client.recv()
        if isinstance(seen, str):
            raise click.ClickException(f"a stream failed: {seen}\n{self._router_log.read_text()[-4000:]}")
        assert isinstance(seen, token_load.Seen)
        return seen


@contextmanager
def running(clients: int, workers: int = 1, connections: int = 1) -> Iterator[Windows]:
    """All processes, until the end of the block. Each client has that many connections."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pace = token_source.Pace(_context.Value("d", 1.0), _context.Value("b", 0))
        _, source = _start(stack, token_source.run, pace)
        bare, bare_address = _start(stack, bare_relay.run, source)
        router, router_address = _start_router(stack, folder, source, workers)
        clients = [_start_client(stack) for _ in range(clients)]
        relays: dict[Way, _Relay] = {
            "direct": _Relay(source, None),
            "bare": _Relay(bare_address, psutil.Process(bare)),
            "router": _Relay(router_address, psutil.Process(router)),
        }
        yield Windows(relays, clients, pace, folder / "router.log", connections)


def _start(stack: ExitStack, target: Callable[..., None], *arguments: Any) -> tuple[int, str]:
    """Starts a process that sends its address when it is ready; returns its id and that address."""
    here, there = _context.Pipe()
    process = _context.Process(target=target, args=(there, *arguments), daemon=True)
    process.start()
    stack.callback(process.kill)
    if not here.poll(_START_TIMEOUT_S):
        raise click.ClickException(f"{target.__module__} did not start")
    assert process.pid is not None
    return process.pid, here.recv()


def _start_client(stack: ExitStack) -> Connection:
    here, there = _context.Pipe()
    process = _context.Process(target=token_load.run, args=(there,), daemon=True)
    process.start()
    stack.callback(process.kill)
    return here


def _start_router(stack: ExitStack, folder: Path, source: str, num_workers: int) -> tuple[int, str]:
    """`python -m router` in front of `source`, with a model's folder that has no weights."""
    model = write_model_folder(folder / "model")
    command = [sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--model", str(model), "--decode", source]
    command += ["--workers", str(num_workers)]
    log = folder / "router.log"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stack.enter_context(log.open("w")), text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    address = process.stdout.readline().strip().removeprefix("ready address=")
    if not address:
        raise click.ClickException(f"the router did not start: {log.read_text()[-4000:]}")
    time.sleep(_MEET_S)
    return process.pid, address
