"""Whether throughput decays and memory grows: streams for minutes on 1P1D.

    python -m benchmarks.steady_load [--streams 64] [--minutes 10] [--shape 33m] [--connector nixl]

Each client starts a new request, with a prompt of its own, when its last one has ended. Prints for each minute the
tokens a second and the resident memory of the router and of each instance, its engine's process included. KV memory
becomes resident as it is first used: an instance grows until all of its blocks have been, which is in its first
minutes. Needs nothing else running.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import psutil
from tqdm import tqdm

from benchmarks import page
from benchmarks.shapes import SHAPES, write_config
from tandem import AsyncClient, TandemError
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack

_PROMPT_LEN = 64
_OUTPUT_LEN = 512
_KV_BYTES = 320 << 20
"""Of an instance: 64 streams to their ends, and little more, so that all of it is used soon."""
_FIRST_ID = 3
"""Below it are the shapes' special tokens."""


@dataclass(slots=True)
class Load:
    """What the clients have received so far."""

    num_tokens: int = 0
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Minute:
    """The figures at its end."""

    tokens_per_s: float
    num_answers: int
    rss_bytes: dict[str, int]
    """By process name of the stack."""


@click.command(help=__doc__)
@click.option("--streams", default=64, show_default=True, help="Clients, each with one request at a time.")
@click.option("--minutes", type=click.IntRange(min=1), default=10, show_default=True)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="33m", show_default=True)
@click.option("--connector", default="shared_storage", show_default=True)
def main(streams: int, minutes: int, shape: str, connector: str) -> None:
    measured_on = page.origin()
    with tempfile.TemporaryDirectory() as folder:
        settings = StackSettings(
            model=write_config(Path(folder), shape),
            model_name="random",
            dtype="bfloat16",
            connector=connector,
            disaggregation="always",
            kv_cache_bytes=_KV_BYTES,
            max_model_len=1024,
            threads=1,
            instance_args=("--load-format", "dummy"),
        )
        with LocalStack(settings) as stack:
            found, load = asyncio.run(_measure(stack, streams, minutes, SHAPES[shape]["vocab_size"]))
    names = list(found[0].rss_bytes)
    rows = [
        [str(number), f"{minute.tokens_per_s:,.0f}", str(minute.num_answers),
         *(f"{minute.rss_bytes[name] / 2**20:.0f}" for name in names)]
        for number, minute in enumerate(found, start=1)
    ]  # fmt: skip
    click.echo(
        f"{measured_on}. {shape} shape, bf16, 1P1D {connector}, a thread each, {streams} streams of {_PROMPT_LEN} "
        f"tokens in, {_OUTPUT_LEN} out; memory in MiB.\n"
    )
    click.echo(page.table(("minute", "tokens/s", "answers", *names), rows))
    for failure in load.failures[:5]:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if load.failures else 0)


async def _measure(stack: LocalStack, streams: int, minutes: int, vocab_size: int) -> tuple[list[Minute], Load]:
    load, found = Load(), []
    async with AsyncClient(stack.address) as client, asyncio.TaskGroup() as group:
        clients = [group.create_task(_client(client, load, number, vocab_size)) for number in range(streams)]
        started_s = time.monotonic()
        for minute in tqdm(range(1, minutes + 1), unit="min", disable=None):
            before = load.num_tokens, load.num_answers, time.monotonic()
            await asyncio.sleep(started_s + 60 * minute - before[2])
            tokens_per_s = (load.num_tokens - before[0]) / (time.monotonic() - before[2])
            found.append(Minute(tokens_per_s, load.num_answers - before[1], _rss(stack)))
        for task in clients:
            task.cancel()
    return found, load


async def _client(client: AsyncClient, load: Load, number: int, vocab_size: int) -> None:
    draw = random.Random(number)
    while True:
        prompt = [draw.randrange(_FIRST_ID, vocab_size) for _ in range(_PROMPT_LEN)]
        try:
            async for piece in client.stream(prompt, max_tokens=_OUTPUT_LEN, ignore_eos=True, temperature=0.0):
                load.num_tokens += len(piece.token_ids)
        except TandemError as error:
            load.failures.append(str(error))
            await asyncio.sleep(1)
        load.num_answers += 1


def _rss(stack: LocalStack) -> dict[str, int]:
    found = {}
    for name, member in stack.processes.items():
        process = psutil.Process(member.pid)
        found[name] = sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    return found


if __name__ == "__main__":
    main()
