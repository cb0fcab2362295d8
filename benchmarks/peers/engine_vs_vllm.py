"""The built-in engine against vLLM's offline `LLM`, the same random-weight shapes, in turns in one run.

    python -m benchmarks.peers.engine_vs_vllm [--vllm-python .venv-vllm/bin/python] [--shape 33m] [--work 1x1024->1]
                                              [--adapters 4]

`make test-vllm` makes that environment. Each side is a process that loads the shape once and computes what it is asked
for; the other one waits meanwhile. Greedy, forced length, eager, prefix caches off, new prompts in each run. Decoding
is measured alone too, with cached prompts: the time of all tokens less that of the first. The median of the repeats
counts, and what is compared is the ratio: above 1 the built-in engine is faster. With adapters, the requests of a work
have so many LoRA adapters of rank 16 in all linear layers by turns, and decoding is not measured alone.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.adapters import write_adapter
from benchmarks.engine_vs_transformers import Work, measure_bandwidth
from benchmarks.peers import shapes_option, vllm_python_option
from benchmarks.peers.offline_peer import RANK
from benchmarks.shapes import write_config

WORKS = {
    "33m": [
        Work(1, 32, 64), Work(8, 32, 64), Work(32, 32, 64), Work(16, 256, 128), Work(1, 1024, 1), Work(8, 512, 1),
        Work(1, 4095, 1), Work(16, 1024, 64), Work(16, 4032, 64),
    ],
    "0.6b": [
        Work(1, 32, 64), Work(8, 32, 64), Work(32, 32, 64), Work(1, 1024, 1), Work(8, 512, 1), Work(1, 4095, 1),
    ],
    "moe": [Work(1, 32, 64), Work(8, 32, 64), Work(32, 32, 64), Work(1, 1024, 1), Work(8, 512, 1)],
}  # fmt: skip
DECODING = {"33m": [Work(16, 4032, 64)], "0.6b": [Work(1, 32, 64)], "moe": []}
WITH_ADAPTERS = {"33m": [Work(8, 32, 64), Work(32, 32, 64), Work(1, 1024, 1)], "0.6b": [Work(8, 32, 64)], "moe": []}
"""Adapters are of dense layers."""
NUM_ADAPTERS = 4
_LONGEST = 4096
_PEER = Path(__file__).with_name("offline_peer.py")
_NAMES = dict.fromkeys(str(work) for works in WORKS.values() for work in works)


class Run(NamedTuple):
    """One work of one side."""

    seconds: float
    bandwidth: float
    """How fast memory was read just before and after it, in bytes per second: the mean."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of both sides, in turns."""

    work: Work
    ours: Sequence[Run]
    theirs: Sequence[Run]

    @property
    def ours_s(self) -> list[float]:
        return [run.seconds for run in self.ours]

    @property
    def theirs_s(self) -> list[float]:
        return [run.seconds for run in self.theirs]

    @property
    def ratio(self) -> float:
        """Of the medians; above 1: the built-in engine is faster."""
        return statistics.median(self.theirs_s) / statistics.median(self.ours_s)

    @property
    def ratios(self) -> tuple[float, float]:
        """The least and the largest of one turn."""
        each = [theirs / ours for ours, theirs in zip(self.ours_s, self.theirs_s, strict=True)]
        return min(each), max(each)


@dataclass(frozen=True, slots=True)
class Side:
    """One engine in its process: a JSON object a line, in and out."""

    process: subprocess.Popen[str]
    start_s: float
    """From the start of the process until it takes work."""

    def seconds(self, work: Work, seed: int) -> float:
        assert self.process.stdin is not None
        shape = {"num_requests": work.num_requests, "input_len": work.input_len, "output_len": work.output_len}
        self.process.stdin.write(json.dumps({**shape, "seed": seed}) + "\n")
        self.process.stdin.flush()
        return float(_line(self.process, "seconds ").split()[1])


@dataclass(frozen=True, slots=True)
class Sides:
    """Both engines with one shape."""

    ours: Side
    theirs: Side
    threads: int

    def compare(self, work: Work, repeat: int) -> Comparison:
        """`repeat` turns, after one to warm up."""
        return self._in_turns(work, repeat, lambda side, turn: side.seconds(work, seed=turn))

    def compare_decoding(self, work: Work, repeat: int) -> Comparison:
        """Of all tokens but the first, where both sides have prefix caches; the first turn computes the prompts."""
        first = replace(work, output_len=1)
        return self._in_turns(work, repeat, lambda side, _: side.seconds(work, 0) - side.seconds(first, 0))

    def _in_turns(self, work: Work, repeat: int, measure: Callable[[Side, int], float]) -> Comparison:
        runs: tuple[list[Run], list[Run]] = ([], [])
        before = measure_bandwidth(self.threads)
        for turn in range(1 + repeat):
            for of_side, side in zip(runs, (self.ours, self.theirs), strict=True):
                seconds, after = measure(side, turn), measure_bandwidth(self.threads)
                of_side.append(Run(seconds, (before + after) / 2))
                before = after
        return Comparison(work, runs[0][1:], runs[1][1:])


@click.command(help=__doc__)
@vllm_python_option
@shapes_option
@click.option("--work", "only", multiple=True, type=click.Choice(list(_NAMES)), help="Only these.")
@click.option("--repeat", default=5, show_default=True, help="Runs of each side; the median counts.")
@click.option("--threads", default=2, show_default=True, help="Threads of both sides.")
@click.option("--adapters", default=0, show_default=True, help="LoRA adapters that the requests have by turns.")
def main(
    vllm_python: Path, shapes: tuple[str, ...], only: tuple[str, ...], repeat: int, threads: int, adapters: int
) -> None:
    click.echo(f"memory read {measure_bandwidth(threads) / 1e9:.0f} GB/s, {threads} threads, bfloat16")
    click.echo(f"{'shape':6} {'work':18} {'engine s':>9} {'vLLM s':>9} {'ratio':>6}  {'least':>6} {'most':>6}")
    for shape in shapes:
        with both_sides(vllm_python, shape, threads, num_adapters=adapters) as sides:
            for work in _chosen(WORKS[shape], only):
                _show(shape, str(work), sides.compare(work, repeat))
        if not adapters and (decoding := _chosen(DECODING[shape], only)):
            with both_sides(vllm_python, shape, threads, is_cached=True) as sides:
                for work in decoding:
                    _show(shape, f"{work} alone", sides.compare_decoding(work, repeat))


def _chosen(works: Sequence[Work], only: Sequence[str]) -> list[Work]:
    return [work for work in works if not only or str(work) in only]


def _show(shape: str, name: str, found: Comparison) -> None:
    ours_s, theirs_s = statistics.median(found.ours_s), statistics.median(found.theirs_s)
    least, most = found.ratios
    click.echo(f"{shape:6} {name:18} {ours_s:9.3f} {theirs_s:9.3f} {found.ratio:6.2f}  {least:6.2f} {most:6.2f}")


@contextmanager
def both_sides(
    vllm_python: Path, shape: str, threads: int, *, is_cached: bool = False, num_adapters: int = 0
) -> Iterator[Sides]:
    """Started one after the other, so that the times until they are ready can be compared; `is_cached`: with prefix
    caches."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder) / "model", shape)
        adapters = [write_adapter(Path(folder) / str(index), shape, RANK) for index in range(num_adapters)]
        options = {
            "model": str(model),
            "max_model_len": _LONGEST,
            "threads": threads,
            "cached": is_cached,
            "adapters": [str(adapter) for adapter in adapters],
        }
        with (
            _side(sys.executable, {"engine": "tandem", **options}) as ours,
            _side(str(vllm_python), {"engine": "vllm", **options}) as theirs,
        ):
            yield Sides(ours, theirs, threads)


@contextmanager
def _side(python: str, options: dict[str, Any]) -> Iterator[Side]:
    vllm = {"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: options["threads"]])
    is_vllm = options["engine"] == "vllm"
    environment = {**os.environ, **vllm, "VLLM_CPU_OMP_THREADS_BIND": cores} if is_vllm else None
    started = time.monotonic()
    process = subprocess.Popen(
        [python, str(_PEER), json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        _line(process, "ready")
        yield Side(process, time.monotonic() - started)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def _line(process: subprocess.Popen[str], beginning: str) -> str:
    """The next line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise click.ClickException(f"{process.args!s} ended with status {process.wait()}")


if __name__ == "__main__":
    main()
