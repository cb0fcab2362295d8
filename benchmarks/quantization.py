"""Memory and speed of the engine with weights of 8 and 4 bits, beside those of the checkpoint, in turns in one run.

    python -m benchmarks.quantization [--shape 0.6b] [--repeat 3] [--dtype bfloat16]

Random weights of one shape, greedy, forced length. Memory is what the process grows by at the load, without KV. Ratios
above 1: faster than without quantization.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import click
import psutil
import torch

from benchmarks.engine_vs_transformers import WORKS, make_llm, timed, with_engine
from benchmarks.shapes import SHAPES, write_config
from engine import LLM
from engine.config import Quantization

METHODS: tuple[Quantization, ...] = ("none", "int8", "int4")


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="0.6b", show_default=True)
@click.option("--repeat", default=3, show_default=True, help="Runs of each; the median counts.")
@click.option("--threads", default=2, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32", "float16"]), default="bfloat16", show_default=True)
def main(shape: str, repeat: int, threads: int, dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engines = {method: loaded(write_config(Path(folder), shape), dtype, threads, method) for method in METHODS}
    click.echo(f"{shape}, {dtype}, {threads} threads\n{'work':12} " + " ".join(f"{name:>16}" for name in METHODS))
    for work in WORKS:
        prompts = torch.randint(3, 8000, (work.num_requests, work.input_len))
        seconds: dict[str, list[float]] = {method: [] for method in METHODS}
        for _ in range(repeat + 1):
            for method, llm in engines.items():
                seconds[method].append(timed(partial(with_engine, llm, prompts, work)))
        medians = [statistics.median(times[1:]) for times in seconds.values()]  # the first is a warm-up
        num_tokens = work.num_requests * (work.output_len if work.output_len > 1 else work.input_len)
        shown = [f"{num_tokens / median:8.1f} ({medians[0] / median:5.2f})" for median in medians]
        click.echo(f"{work!s:12} " + " ".join(f"{one:>16}" for one in shown) + "  tok/s")


def loaded(folder: Path, dtype: str, threads: int, method: Quantization) -> LLM:
    memory = psutil.Process().memory_info
    before, started = memory().rss, time.perf_counter()
    llm = make_llm(folder, "native", dtype, threads, method)
    gc.collect()
    click.echo(f"{method}: {(memory().rss - before) / 2**20:.0f} MiB, loaded in {time.perf_counter() - started:.1f} s")
    return llm


if __name__ == "__main__":
    main()
