"""What the live page costs the router: its CPU time without the page, with it, and with a client that reads it.

    python -m benchmarks.live_page [--rounds 4] [--seconds 10]

Two routers, one of them with the page, have 50 fake instances that report their load four times a second. One router at
a time gets 1 000 requests a minute of 20 tokens. Measured, in turns: the CPU time of its process, in per cent of
a core. Printed: medians of the rounds, and of their differences from the router without the page.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import grpc.aio
import httpx
import psutil

from protos.tandem.v1 import generation_pb2_grpc
from tandem.local_stack.topology import free_ports
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_model_folder
from tests.router.rig import request_of

_RAMP_S = 2.0
NUM_INSTANCES, PER_S, NUM_TOKENS, TOKEN_S = 50, 1000 / 60, 20, 0.1
WAYS = ("no page", "page, nobody reads", "page, one reads")


@dataclass(frozen=True, slots=True)
class Router:
    """One that runs."""

    process: psutil.Process
    stub: Any
    http: str

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@asynccontextmanager
async def instances() -> AsyncIterator[list[FakeInstance]]:
    """Two fifths of them prefill."""
    async with AsyncExitStack() as cleanup:
        fakes = [
            FakeInstance("prefill" if number % 5 < 2 else "decode", f"fake-{number}", beat_s=0.25)
            for number in range(NUM_INSTANCES)
        ]
        for fake in fakes:
            fake.behaviour.token_s = TOKEN_S
            await cleanup.enter_async_context(fake)
        yield fakes


@asynccontextmanager
async def router(model: Path, fakes: Sequence[FakeInstance], *, has_page: bool) -> AsyncIterator[Router]:
    pools = {role: ",".join(fake.address for fake in fakes if fake.role == role) for role in ("prefill", "decode")}
    [port] = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--model", str(model), "--model-name", "fake"),
        *("--prefill", pools["prefill"], "--decode", pools["decode"], "--http-listen", f"127.0.0.1:{port}"),
        *("--log-level", "warning", "--http-page", str(has_page).lower()),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        address = (await process.stdout.readline()).decode().partition("address=")[2].strip()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            yield Router(psutil.Process(process.pid), stub, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        await process.wait()


async def load(one: Router, seconds: float) -> None:
    """Requests at an even rate; returns when all have ended."""
    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(int(seconds * PER_S)):
            await asyncio.sleep(max(begun_s + number / PER_S - time.monotonic(), 0))
            group.create_task(_request(one, number))


async def _request(one: Router, number: int) -> None:
    request = request_of(list(range(20, 120)), max_tokens=NUM_TOKENS, seed=number)
    async for _ in one.stub.Generate(request, timeout=60):
        pass


async def read(one: Router) -> None:
    """The page's data, until this is cancelled."""
    async with httpx.AsyncClient(timeout=60) as client, client.stream("GET", f"{one.http}/live") as response:
        response.raise_for_status()
        async for _ in response.aiter_bytes():
            pass


async def used(one: Router, seconds: float, *, is_read: bool) -> float:
    """Per cent of a core that the router uses beside the load."""
    reader = asyncio.create_task(read(one)) if is_read else None
    loading = asyncio.create_task(load(one, seconds + _RAMP_S))
    await asyncio.sleep(_RAMP_S)
    before_s, begun_s = one.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    found = 100 * (one.cpu_s() - before_s) / (time.monotonic() - begun_s)
    await loading
    if reader is not None:
        assert not reader.done(), reader.result()
        reader.cancel()
    return found


async def measure(rounds: int, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder))
        async with (
            instances() as fakes,
            router(model, fakes, has_page=False) as without,
            router(model, fakes, has_page=True) as with_page,
        ):
            await asyncio.sleep(_RAMP_S)
            for _ in range(rounds):
                for way, one in zip(WAYS, (without, with_page, with_page), strict=True):
                    found[way].append(await used(one, seconds, is_read=way == WAYS[-1]))
    return found


def report(found: dict[str, list[float]]) -> Iterator[str]:
    without = found[WAYS[0]]
    for way, values in found.items():
        more = [value - other for value, other in zip(values, without, strict=True)]
        yield (
            f"{way}: {statistics.median(values):.2f} % of a core ({min(values):.2f} to {max(values):.2f}), "
            f"{statistics.median(more):+.2f} ({min(more):+.2f} to {max(more):+.2f})"
        )


@click.command(help=__doc__)
@click.option("--rounds", default=4, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="Length of a window.")
def main(rounds: int, seconds: float) -> None:
    for line in report(asyncio.run(measure(rounds, seconds))):
        click.echo(line)


if __name__ == "__main__":
    main()
