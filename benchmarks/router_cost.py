"""The cost of the router: CPU for each token, and the delay of a token.

    python -m benchmarks.router_cost [--rate 4000] [--streams 64] [--pattern steps] [--rounds 5] [--window 4]

A stub decode instance emits a token for each stream, either for all at once, as after an engine's step, or for each at
its own times (`spread`, which costs more: no messages are handled together). Clients read the streams through the
router (`python -m router`) and, in alternating windows of the same run, through a bare grpc.aio relay that checks
nothing, or from the stub itself. Each is a separate process. CPU is what the kernel reports for the relay's process,
user and system, all threads, at full and at half `--rate`; the delay is measured at half of it. A stream that still
writes as the stub's next step comes misses that step. A message has one token, but where the client or the router is
behind.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

import click
import grpc.aio
import psutil
from tqdm import tqdm

from benchmarks import token_load, token_source
from protos.tandem.v1 import generation_pb2, generation_pb2_grpc
from tandem.client.channel import ROUTER_SERVICE
from tandem.client.health import wait_serving
from tests.fakes.model_folder import write_model_folder

Way = Literal["direct", "bare", "router"]
"""How the clients get the stub's tokens."""

_START_TIMEOUT_S = 60.0
_WARM_UP_S = 1.5
_MEET_S = 1.5
"""Until the router has the load of all its instances."""
_context = multiprocessing.get_context("spawn")
_MAX_CPU_US = 50.0
_MAX_RATIO = 1.7
_MAX_ADDED_P50_MS = 0.5
_MAX_ADDED_P99_MS = 3.0
_FULL: tuple[Way, ...] = ("bare", "router")
_HALF: tuple[Way, ...] = ("direct", "router", "bare")


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


_Program = Callable[..., Coroutine[Any, Any, None]]
"""Of a process; its first argument is a pipe."""

Round = dict[Way, Sample]
"""One window of each way, one after the other."""


@click.command(help=__doc__)
@click.option("--rate", default=4000.0, show_default=True, help="Tokens a second in all, at full load.")
@click.option("--streams", default=64, show_default=True, help="Streams that are read at once.")
@click.option("--pattern", type=click.Choice(["steps", "spread", "both"]), default="both", show_default=True)
@click.option("--clients", default=1, show_default=True, help="Client processes.")
@click.option("--connections", default=1, show_default=True, help="Connections of each client process.")
@click.option("--workers", default=1, show_default=True, help="Processes of the router.")
@click.option("--rounds", default=5, show_default=True, help="Windows of each kind.")
@click.option("--window", "window_s", default=4.0, show_default=True, help="Seconds of one window.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes every window there.")
def main(
    rate: float,
    streams: int,
    pattern: str,
    rounds: int,
    window_s: float,
    json_file: Path | None,
    **processes: int,
) -> None:
    every: list[Sample] = []
    with running(**processes) as windows:
        for in_steps in [name == "steps" for name in ("steps", "spread") if pattern in (name, "both")]:
            full, half = (Load(part * rate, streams, in_steps) for part in (1.0, 0.5))
            name = "steps" if in_steps else "spread"
            at_full = measured(windows, _FULL, full, rounds, window_s, f"{name}, full load")
            at_half = measured(windows, _HALF, half, rounds, window_s, f"{name}, half load")
            click.echo(f"\n{name}, {streams} streams, medians of {rounds} windows of {window_s:g} s")
            show(at_full)
            show(at_half)
            judge(at_full, at_half)
            every += [sample for one in (*at_full, *at_half) for sample in one.values()]
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(sample) for sample in every], indent=1))


def measured(
    windows: Windows, ways: tuple[Way, ...], load: Load, rounds: int, window_s: float, title: str
) -> list[Round]:
    """`rounds` times one window of each way, in turn."""
    return [
        {way: windows.measure(way, load, window_s) for way in ways}
        for _ in tqdm(range(rounds), desc=title, leave=False, disable=None)
    ]


def show(rounds: list[Round]) -> None:
    for way in rounds[0]:
        samples = [one[way] for one in rounds]
        click.echo(
            f"  {way:7} {statistics.median(one.tokens_per_s for one in samples):6.0f} tokens/s"
            f"  {statistics.median(one.tokens_per_message for one in samples):5.2f} a message"
            f"  CPU {statistics.median(one.cpu_us for one in samples):6.1f} µs"
            f"  age p50 {statistics.median(one.p50_ms for one in samples):6.3f}"
            f"  p99 {statistics.median(one.p99_ms for one in samples):7.3f} ms"
        )


def judge(at_full: list[Round], at_half: list[Round]) -> None:
    """The figures that the router is held to; ratios and differences are taken within a round."""
    found = [
        ("CPU of a token, µs", median(at_full, lambda one: one["router"].cpu_us), _MAX_CPU_US),
        ("… in bare relays", median(at_full, lambda one: one["router"].cpu_us / one["bare"].cpu_us), _MAX_RATIO),
        ("added p50, ms", median(at_half, lambda one: one["router"].p50_ms - one["direct"].p50_ms), _MAX_ADDED_P50_MS),
        ("added p99, ms", median(at_half, lambda one: one["router"].p99_ms - one["direct"].p99_ms), _MAX_ADDED_P99_MS),
    ]
    for name, value, limit in found:
        click.echo(f"  {name:28} {value:7.2f}  (aim {limit:g}{'' if value <= limit else ', MISSED'})")


def median(rounds: list[Round], value: Callable[[Round], float]) -> float:
    return statistics.median(map(value, rounds))


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

    def measure(self, way: Way, load: Load, length_s: float) -> Sample:
        """Sends `load` one way; raises ClickException when a stream fails."""
        relay = self._relays[way]
        self._pace.interval_s.value = load.num_streams / load.tokens_per_s if load.tokens_per_s else 0.0
        self._pace.in_steps.value = int(load.in_steps)
        begin_s = time.monotonic() + _WARM_UP_S
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
        _, source = start_process(stack, token_source.serve, pace)
        bare, bare_address = start_process(stack, relay, source)
        arguments = ("--model", str(write_model_folder(folder / "model")), "--decode", source)
        router, router_address = start_router(stack, folder / "router.log", *arguments, "--workers", str(workers))
        pipes = [_spawn(stack, token_load.serve)[1] for _ in range(clients)]
        relays: dict[Way, _Relay] = {
            "direct": _Relay(source, None),
            "bare": _Relay(bare_address, psutil.Process(bare)),
            "router": _Relay(router_address, psutil.Process(router)),
        }
        yield Windows(relays, pipes, pace, folder / "router.log", connections)


def start_process(stack: ExitStack, target: _Program, *arguments: Any) -> tuple[int, Any]:
    """Starts a process that sends something when it is ready, as its address; returns its id and that."""
    process, here = _spawn(stack, target, *arguments)
    if not here.poll(_START_TIMEOUT_S):
        raise click.ClickException(f"{target.__module__}.{target.__name__} did not start")
    assert process.pid is not None
    return process.pid, here.recv()


def _spawn(stack: ExitStack, target: _Program, *arguments: Any) -> tuple[SpawnProcess, Connection]:
    """A process that runs `target` until the end of the block, and our end of the pipe that it gets."""
    here, there = _context.Pipe()
    process = _context.Process(target=_run, args=(target, there, *arguments), daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.kill)
    return process, here


def _run(target: _Program, *arguments: Any) -> None:
    asyncio.run(target(*arguments))


def start_router(stack: ExitStack, log: Path, *arguments: str) -> tuple[int, str]:
    """Starts `python -m router`, which writes to `log`; returns its id and address once it knows its instances."""
    command = [sys.executable, "-m", "router", "--listen", "127.0.0.1:0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stack.enter_context(log.open("w")), text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    address = process.stdout.readline().strip().removeprefix("ready address=")
    if not address or not wait_serving(address, ROUTER_SERVICE, _START_TIMEOUT_S):
        raise click.ClickException(f"the router does not serve: {log.read_text()[-4000:]}")
    time.sleep(_MEET_S)
    return process.pid, address


class BareRelay(generation_pb2_grpc.GenerationServiceServicer):
    """The minimal relay of token streams on grpc.aio, the baseline of the router's cost: a generator over a call.

    Generated stubs, one call in and one call out, every message forwarded unchanged. Nothing is checked, counted,
    bounded, traced or retried.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in self._stub.Generate(request):
            yield response


async def relay(ready: Connection, source: str) -> None:
    """Sends its address through `ready` and relays the streams of `source` until its process is killed."""
    async with grpc.aio.insecure_channel(source) as channel:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(BareRelay(channel), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()


if __name__ == "__main__":
    main()
