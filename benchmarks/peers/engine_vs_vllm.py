"""The built-in engine against vLLM's offline `LLM`, the same random-weight shapes, in turns in one run.

    python -m benchmarks.peers.engine_vs_vllm [--vllm-python .venv-vllm/bin/python] [--shape 33m] [--work 1x1024->1]

`make test-vllm` makes that environment. Each side is a process that loads the shape once and computes what it is asked
for; the other one waits meanwhile. Greedy, forced length, eager, prefix caches off, new prompts in each run. The median
of the repeats counts, and what is compared is the ratio: above 1 the built-in engine is faster.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.engine_vs_transformers import Work, measure_bandwidth
from benchmarks.shapes import SHAPES, write_config

WORKS = [
    Work(1, 32, 64), Work(8, 32, 64), Work(32, 32, 64), Work(16, 256, 128), Work(1, 1024, 1), Work(8, 512, 1),
    Work(1, 4095, 1), Work(16, 1024, 64), Work(16, 4032, 64),
]  # fmt: skip
_LONGEST = 4096
_PEER = Path(__file__).with_name("offline_peer.py")


@dataclass(frozen=True, slots=True)
class Side:
    """One engine in its process: a JSON object a line, in and out."""

    process: subprocess.Popen[str]

    def seconds(self, work: Work, seed: int) -> float:
        """One run of the work."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        shape = {"num_requests": work.num_requests, "input_len": work.input_len, "output_len": work.output_len}
        self.process.stdin.write(json.dumps({**shape, "seed": seed}) + "\n")
        self.process.stdin.flush()
        return next(float(line.split()[1]) for line in self.process.stdout if line.startswith("seconds "))


@click.command(help=__doc__)
@click.option(
    "--vllm-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=Path(".venv-vllm/bin/python"),
    show_default=True,
    help="Python of the environment that has vLLM.",
)
@click.option(
    "--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)), default=list(SHAPES), show_default=True
)
@click.option("--work", "only", multiple=True, type=click.Choice([str(work) for work in WORKS]), help="Only these.")
@click.option("--repeat", default=5, show_default=True, help="Runs of each side; the median counts.")
@click.option("--threads", default=2, show_default=True, help="Threads of both sides.")
def main(vllm_python: Path, shapes: tuple[str, ...], only: tuple[str, ...], repeat: int, threads: int) -> None:
    click.echo(f"memory read {measure_bandwidth(threads) / 1e9:.0f} GB/s, {threads} threads, bfloat16")
    click.echo(f"{'shape':6} {'work':12} {'engine s':>9} {'vLLM s':>9} {'ratio':>6}  {'least':>6} {'most':>6}")
    for shape in shapes:
        with (
            tempfile.TemporaryDirectory() as folder,
            _side(sys.executable, "tandem", write_config(Path(folder), shape), threads) as ours,
            _side(str(vllm_python), "vllm", Path(folder), threads) as theirs,
        ):
            for work in (work for work in WORKS if not only or str(work) in only):
                click.echo(f"{shape:6} {_row(work, ours, theirs, repeat)}")


def _row(work: Work, ours: Side, theirs: Side, repeat: int) -> str:
    _, *pairs = [
        (ours.seconds(work, seed), theirs.seconds(work, seed)) for seed in range(1 + repeat)
    ]  # the first warms up
    mine, peer = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    return f"{work!s:12} {mine:9.3f} {peer:9.3f} {peer / mine:6.2f}  {ratios[0]:6.2f} {ratios[-1]:6.2f}"


@contextmanager
def _side(python: str, engine: str, folder: Path, threads: int) -> Iterator[Side]:
    vllm = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    environment = {**os.environ, **vllm, "VLLM_CPU_OMP_THREADS_BIND": cores} if engine == "vllm" else None
    process = subprocess.Popen(
        [python, str(_PEER), engine, str(folder), str(_LONGEST), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Side(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


if __name__ == "__main__":
    main()
