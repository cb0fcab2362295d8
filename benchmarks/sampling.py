"""What sampling a row of logits takes: the compiled kernel, and torch's operations, the tests' reference, in turn.

    python -m benchmarks.sampling [--rows 32] [--vocab 151936] [--rounds 5]

Logits are normal with a deviation of 4. CPU time of all threads, for a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch

from engine.sampling import sampler
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import SamplingRow
from tests.engine.sampling.margins import cdf_of, inverted

_SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_k, top_p": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
}


@click.command(help=__doc__)
@click.option("--rows", "num_rows", default=32, show_default=True, help="Sampled together.")
@click.option("--vocab", default=151_936, show_default=True, help="Logits of a row.")
@click.option("--rounds", default=5, show_default=True, help="Of each way.")
@click.option("--threads", default=1, show_default=True)
def main(num_rows: int, vocab: int, rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    logits = 4 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    click.echo(f"{num_rows} rows of {vocab}, {threads} thread(s), medians of {rounds}: CPU, wall of a row, ms")
    for name, params in _SETTINGS.items():
        rows = [SamplingRow(SamplingParams(**params), seed=index, position=index) for index in range(num_rows)]
        sampler.sample(logits, rows)
        ways: list[Callable[[], object]] = [partial(sampler.sample, logits, rows)]
        if params["temperature"] > 0:
            ways.append(partial(_by_torch, logits, rows))
        samples = [[_times(way) for way in ways] for _ in range(rounds)]
        figures = [
            " · ".join(f"{statistics.median(one[way][kind] for one in samples) / num_rows:.3f}" for kind in range(2))
            for way in range(len(ways))
        ]
        click.echo(f"  {name:14} kernel {figures[0]}" + (f"   torch {figures[1]}" if len(figures) > 1 else ""))


def _by_torch(logits: torch.Tensor, rows: list[SamplingRow]) -> None:
    for one, row in zip(logits, rows, strict=True):
        int(inverted(cdf_of(one, float(one.max()), row), sampler._uniform_of(row)))


def _times(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall time, milliseconds."""
    cpu_s, wall_s = time.process_time(), time.monotonic()
    work()
    return 1e3 * (time.process_time() - cpu_s), 1e3 * (time.monotonic() - wall_s)


if __name__ == "__main__":
    main()
