"""The effect of floods on other clients: inter-token latency of normal streams while one client floods the router.

    python -m benchmarks.floods [--seconds 5] [--only FLOOD] [--log]

One prefill and one decode instance with the demo model in float32. Four clients stream one short story after the other;
each flood of tests/floods/floods.py comes from its own process and another address, at the lowest priority, since
a real one does not use the server's cores. Before each flood the same streams are measured without it, and the two
are compared, because figures drift. The limits: the p99 of the streams' ITL is at most 1.5 times that without the
flood, none of them fails, and no process grows by more than 320 MiB. The exit status says whether they hold.
Needs a quiet machine with two cores, and two minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from benchmarks import page
from tandem import AsyncClient, TandemError
from tandem.bench.serve.report import Distribution
from tandem.demo import MODEL_DIR
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack
from tests.floods.floods import ANY_PORT, CLIENTS_PORT

NAMES = (*ANY_PORT, *CLIENTS_PORT)
NUM_STREAMS = 4
NUM_TOKENS = 96
MAX_RATIO = 1.5
MAX_GROWTH_MIB = 320
_SETTLE_S = 0.5
_NICE = 19


@dataclass(frozen=True, slots=True)
class Streams:
    """What the well-behaved clients saw in some seconds."""

    itl: Distribution
    num_failed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One flood."""

    name: str
    per_s: float
    quiet: Streams
    flooded: Streams
    growth_mib: float
    """Of the process that grew most."""

    @property
    def ratio(self) -> float:
        return self.flooded.itl.p99 / self.quiet.itl.p99

    @property
    def is_kept(self) -> bool:
        return self.ratio <= MAX_RATIO and not self.flooded.num_failed and self.growth_mib <= MAX_GROWTH_MIB

    def row(self) -> list[str]:
        quiet, flooded = (f"{streams.itl.p50:.1f} · {streams.itl.p99:.1f}" for streams in (self.quiet, self.flooded))
        verdict = "yes" if self.is_kept else "**no**"
        failed = str(self.flooded.num_failed)
        return [
            self.name.replace("_", " "),
            f"{self.per_s:,.0f}",
            quiet,
            flooded,
            f"{self.ratio:.2f}",
            f"{self.growth_mib:.0f}",
            failed,
            verdict,
        ]


HEAD = ["flood", "times/s", "ITL p50 · p99 without, ms", "with, ms", "p99 ratio", "grown by MiB", "failed", "kept"]


async def stream(address: str, seconds: float) -> Streams:
    """The well-behaved clients, for so long."""
    gaps_s: list[float] = []
    until_s, num_failed = time.monotonic() + seconds, 0

    async def one(client: AsyncClient, number: int) -> None:
        nonlocal num_failed
        while time.monotonic() < until_s:
            times_s: list[float] = []
            try:
                pieces = client.stream("Once upon a time", max_tokens=NUM_TOKENS, seed=number, ignore_eos=True)
                times_s.extend([time.monotonic() async for _ in pieces])
            except TandemError:
                num_failed += 1
            gaps_s.extend(later - earlier for earlier, later in itertools.pairwise(times_s))

    async with AsyncClient(address) as client:
        await asyncio.gather(*(one(client, number) for number in range(NUM_STREAMS)))
    return Streams(Distribution.of(gaps_s), num_failed)


async def flood(stack: LocalStack, name: str, seconds: float) -> Figures:
    """The streams without the flood, and then with it."""
    quiet = await stream(stack.address, seconds)
    processes = [psutil.Process(member.pid) for member in stack.processes.values()]
    before = [process.memory_info().rss for process in processes]
    flooder = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.floods.floods", name, stack.address),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    _set_lowest_priority(flooder.pid)
    await asyncio.sleep(2 * _SETTLE_S)
    started_s = time.monotonic()
    flooded = await stream(stack.address, seconds)
    after = [process.memory_info().rss for process in processes]
    output, _ = await flooder.communicate(b"")
    num_done = int(output) if output else 0
    growth = max(now - then for then, now in zip(before, after, strict=True))
    await asyncio.sleep(_SETTLE_S)
    return Figures(name, num_done / (time.monotonic() - started_s), quiet, flooded, growth / (1 << 20))


def _set_lowest_priority(pid: int) -> None:
    """Lowest priority. Linux's desktop scheduling divides cores between sessions first, and only then by niceness."""
    os.setpriority(os.PRIO_PROCESS, pid, _NICE)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(_NICE))


def measure(seconds: float, names: Sequence[str]) -> list[Figures]:
    """Floods on one stack, one after the other."""
    settings = StackSettings(model=MODEL_DIR, model_name="demo", dtype="float32")
    with LocalStack(settings) as stack:
        asyncio.run(stream(stack.address, 2.0))  # warms up
        figures = []
        for name in names:
            figures.append(asyncio.run(flood(stack, name, seconds)))
            click.echo(" | ".join(figures[-1].row()))
        return figures


@click.command(help=__doc__)
@click.option("--seconds", type=click.FloatRange(min=1), default=5.0, show_default=True, help="Of each measurement.")
@click.option("--only", "names", type=click.Choice(NAMES), multiple=True, help="This flood; may be repeated.")
@click.option("--log", "is_logged", is_flag=True, help="Put the table on top of benchmarks/LOG.md.")
def main(seconds: float, names: tuple[str, ...], is_logged: bool) -> None:
    measured_on = page.origin()
    figures = measure(seconds, names or NAMES)
    text = (
        f"Demo model in float32, 1P1D auto; {NUM_STREAMS} streams of {NUM_TOKENS} tokens, {seconds:g} s without each "
        f"flood and {seconds:g} s with it. Limit: p99 at most {MAX_RATIO} times, no stream fails, no process grows by "
        f"more than {MAX_GROWTH_MIB} MiB.\n\n" + page.table(HEAD, [one.row() for one in figures])
    )
    click.echo(f"\n{text}")
    if is_logged:
        page.log(measured_on, "Floods and their neighbours (`python -m benchmarks.floods`)", text)
    sys.exit(0 if all(one.is_kept for one in figures) else 1)


if __name__ == "__main__":
    main()
