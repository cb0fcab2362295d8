"""The effect of pool sizes on TTFT and ITL: the same load on stacks that differ only in size.

    python -m benchmarks.pool_sizes [--quick] [--part engines | --part stubs] [--write-docs] [--json FILE]

`engines`: real processes on this machine. `tandem pools resize` resizes one stack under load, 1P1D, 2P1D, 1P2D; each
instance has one thread and is not pinned, because three do not share two cores evenly. A third instance can only use
the time in which the load leaves cores idle.

    phase 1 ─resize─▶ new instances start, removed ones drain ─complete─▶ phase 2 ─resize─▶ … ─▶ last phase ─▶ load ends

A request belongs to the phase in which it was sent; those sent while a resize was under way belong to none.

`stubs`: 1 to 8 instances in each pool that sleep instead of computing (stub_engines.py), as if each had
hardware of its own, behind a real router. The load is about 80 % of what one prefill instance can do.

Long prompts arrive among running streams. Exit status 1: requests failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import click
from matplotlib.figure import Figure

from benchmarks import page, stub_engines
from benchmarks.first_token import touch_free_memory
from benchmarks.mixed_load import PATIENT, Mix, ProgressBar, failed_cell, failures, measure, of_kind
from benchmarks.router_cost import start_process, start_router
from benchmarks.shapes import SHAPES, write_config
from tandem.bench.serve import plots
from tandem.bench.serve.endpoint import PlannedRequest, RequestRecord
from tandem.bench.serve.report import Objectives, Point, machine, summarise, versions
from tandem.demo import MODEL_DIR
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack

Size = tuple[int, int]
"""Prefill and decode instances."""
_SHAPE = "33m"
_ENGINE_SIZES: tuple[Size, ...] = ((1, 1), (2, 1), (1, 2))
_STUB_SIZES: tuple[Size, ...] = tuple((p, d) for d in (1, 2, 8) for p in (1, 2, 4, 8))
_QUICK_SIZES: tuple[Size, ...] = ((1, 1), (2, 1), (1, 2))
_SPEEDS = stub_engines.Speeds()
_STUB_VOCAB_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds after the start of the load."""

    size: Size
    begin_s: float
    end_s: float

    @property
    def name(self) -> str:
        return named(self.size)


@dataclass(slots=True)
class Live:
    """The result of a run."""

    records: Sequence[RequestRecord]
    phases: list[Phase] = field(default_factory=list)
    resized_at_s: dict[float, str] = field(default_factory=dict)
    """The time and target of each resize."""

    def points(self, rate: float) -> dict[str, Point]:
        """The figures of each phase, by its size."""
        return {phase.name: self._point(phase, rate) for phase in self.phases}

    def _point(self, phase: Phase, rate: float) -> Point:
        records = [one for one in self.records if phase.begin_s <= one.sent_s < phase.end_s]
        return Point(rate, summarise(records), records)


def named(size: Size) -> str:
    """1P2D."""
    return f"{size[0]}P{size[1]}D"


@dataclass(slots=True)
class Part:
    """One load, and the sizes of the pools that it is put on."""

    name: str
    mix: Mix
    rate: float
    sizes: tuple[Size, ...]
    points: dict[str, Point] = field(default_factory=dict)
    """By size; of a stack that was resized, of its phases."""
    live: Live | None = None
    """The stack that was resized."""

    def failures(self) -> list[str]:
        """Between phases too."""
        if self.live is not None:
            return failures({self.name: [Point(self.rate, summarise(self.live.records))]})
        return failures({f"{self.name} {size}": [point] for size, point in self.points.items()})


def _parts(only: str | None, quick: bool) -> list[Part]:
    engines = Mix(
        stream_input_len=64,
        stream_output_len=96,
        long_input_len=1536,
        long_output_len=8,
        long_share=0.5,
        duration_s=25.0 if quick else 40.0,
    )
    stubs = replace(
        engines,
        long_input_len=2048,
        stream_output_len=64,
        long_output_len=64,
        duration_s=3.0 if quick else 12.0,
        long_share=0.8,
    )
    parts = [
        Part("engines", engines, 3.0, _ENGINE_SIZES),
        Part("stubs", stubs, 12.0, _QUICK_SIZES if quick else _STUB_SIZES),
    ]
    return [part for part in parts if only in (None, part.name)]


@click.command(help=__doc__)
@click.option("--part", "only", type=click.Choice(["engines", "stubs"]), help="Only this one.")
@click.option("--quick", is_flag=True, help="Short and few: whether it works, not how fast it is.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes every figure there.")
@click.option("--plots", "folder", type=click.Path(path_type=Path), help="Writes the plots into this folder.")
@click.option("--write-docs", is_flag=True, help="Fills docs/tuning.md, docs/plots and benchmarks/LOG.md.")
def main(only: str | None, quick: bool, json_file: Path | None, folder: Path | None, write_docs: bool) -> None:
    measured_on = page.origin()
    parts = _parts(only, quick)
    if not quick and only != "stubs":
        click.echo(f"fresh memory: {touch_free_memory():.1f} GB/s")
    for part in parts:
        if part.name == "engines":
            _run_engines(part)
        else:
            _run_stubs(part)
        click.echo(f"{part.name}\n\n{report_text(part)}\n")
    if json_file is not None:
        json_file.write_text(json.dumps(_as_dict(parts, measured_on), indent=1) + "\n")
    if write_docs:
        for part in parts:
            draw(part, page.PLOTS)
            page.fill(
                page.TUNING, f"pool_sizes {part.name}", f"{measured_on}.\n\n{report_text(part)}\n\n{_pictures(part)}"
            )
        text = "\n\n".join(report_text(part) for part in parts)
        page.log(measured_on, "The sizes of the pools (`python -m benchmarks.pool_sizes`)", text)
    elif folder is not None:
        for part in parts:
            draw(part, folder)
    bad = [line for part in parts for line in part.failures()]
    for line in bad:
        click.echo(line, err=True)
    sys.exit(1 if bad else 0)


def _run_engines(part: Part) -> None:
    with tempfile.TemporaryDirectory() as name:
        settings = StackSettings(
            model=write_config(Path(name), _SHAPE),
            model_name="random",
            disaggregation="always",
            dtype="bfloat16",
            kv_cache_bytes=512 << 20,
            max_model_len=4096,
            threads=1,
            pin=False,
            router_args=PATIENT,
            instance_args=("--load-format", "dummy"),
        )
        part.live = _run_resized(settings, part.mix, part.rate, part.sizes, SHAPES[_SHAPE]["vocab_size"])
    part.points = part.live.points(part.rate)


def _run_resized(settings: StackSettings, mix: Mix, rate: float, sizes: Sequence[Size], vocab_size: int) -> Live:
    """Puts `mix`, whose duration is that of a phase, on a stack that has each of `sizes` in turn.

    Raises ClickException if a resize does not end within its phase.
    """
    num_prefill, num_decode = sizes[0]
    settings = replace(
        settings,
        num_prefill=num_prefill,
        num_decode=num_decode,
        max_prefill=max(size[0] for size in sizes),
        max_decode=max(size[1] for size in sizes),
    )
    whole = replace(mix, duration_s=mix.duration_s * len(sizes))
    stop = threading.Event()
    with LocalStack(settings) as stack:
        looking_after = threading.Thread(target=stack.serve, args=(stop, lambda event: None))
        looking_after.start()
        try:
            view = _Resizing(stack.admin_address, sizes, mix.duration_s)
            (point,) = measure(stack.address, whole, [rate], view, vocab_size=vocab_size, objectives=Objectives())
            return view.live(point)
        finally:
            stop.set()
            looking_after.join()


class _Resizing(ProgressBar):
    """Resizes when the measured load has begun, on a thread of its own."""

    def __init__(self, admin_address: str, sizes: Sequence[Size], phase_s: float) -> None:
        super().__init__("live resize")
        self._admin_address = admin_address
        self._sizes = sizes
        self._phase_s = phase_s
        self._live = Live(())
        self._problem = ""
        self._resizer = threading.Thread(target=self._resize_all)

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        super().begin(rate, requests)
        self._started_s = time.perf_counter()
        self._resizer.start()

    def live(self, point: Point) -> Live:
        """Everything, once the load has ended."""
        self._resizer.join()
        if self._problem:
            raise click.ClickException(self._problem)
        self._live.records = point.records
        return self._live

    def _resize_all(self) -> None:
        for index, size in enumerate(self._sizes):
            if index and not self._resize(size):
                return
            begin_s, end_s = self._now_s(), (index + 1) * self._phase_s
            self._live.phases.append(Phase(size, begin_s, end_s))
            time.sleep(max(0.0, end_s - begin_s))

    def _resize(self, size: Size) -> bool:
        self._live.resized_at_s[self._now_s()] = named(size)
        command = [sys.executable, "-m", "tandem.cli", "pools", "resize", "--admin", self._admin_address]
        command += [f"prefill={size[0]}", f"decode={size[1]}", "--timeout", str(self._phase_s)]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            self._problem = f"resizing to {named(size)} failed or took longer than {self._phase_s:g} s:\n{done.stdout}"
        return not self._problem

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s


def _run_stubs(part: Part) -> None:
    for size in part.sizes:
        with _stubs(size) as address:
            view, vocab_size = ProgressBar(f"stubs {named(size)}"), _STUB_VOCAB_SIZE
            (point,) = measure(address, part.mix, [part.rate], view, vocab_size=vocab_size, objectives=Objectives())
            part.points[named(size)] = point


@contextmanager
def _stubs(size: Size) -> Iterator[str]:
    """The address of a router in front of stubs; all processes end with the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pools = stub_engines.Pools(*size, _SPEEDS, _STUB_VOCAB_SIZE)
        _, (prefill, decode) = start_process(stack, stub_engines.serve, pools)
        arguments = ["--model", str(MODEL_DIR), "--disaggregation", "always", "--no-pools-check-tokenizer"]
        arguments += ["--prefill", ",".join(prefill), "--decode", ",".join(decode)]
        _, address = start_router(stack, folder / "router.log", *arguments)
        yield address


def report_text(part: Part) -> str:
    what = _speeds_text() if part.live is None else f"{_SHAPE} shape, bf16"
    how = "" if part.live is None else " for each size; requests sent during a resize count for none"
    head = ["pools", "TTFT p50 · p99", "of long prompts p50 · p99", "ITL p50 · p95 · p99", "TPOT p50", "failed"]
    rows = [_row(name, point, part.mix) for name, point in part.points.items()]
    if part.live is None:
        head.append("TPOT by the formula")
        for row, size in zip(rows, part.sizes, strict=True):
            row.append(f"{_SPEEDS.expected_step(part.rate * part.mix.mean_output_len / size[1]) * 1e3:.1f}")
    return f"{what}. {part.rate:g} requests/s: {part.mix}{how}. Times in ms.\n\n{page.table(head, rows)}"


def _row(name: str, point: Point, mix: Mix) -> list[str]:
    report, longs = point.report, of_kind(point, mix, long=True)
    return [
        name,
        f"{report.ttft.p50:.0f} · {report.ttft.p99:.0f}",
        f"{longs.ttft.p50:.0f} · {longs.ttft.p99:.0f}",
        f"{report.itl.p50:.1f} · {report.itl.p95:.1f} · {report.itl.p99:.1f}",
        f"{report.tpot.p50:.1f}",
        failed_cell(point),
    ]


def _speeds_text() -> str:
    return (
        f"Stub engines: prefill {_SPEEDS.tokens_per_s:g} tokens/s; a decode step {_SPEEDS.step_s * 1e3:g} ms and "
        f"{_SPEEDS.per_request_s * 1e3:g} ms for each request in it; KV at {_SPEEDS.kv_tokens_per_s:g} tokens/s"
    )


def draw(part: Part, folder: Path) -> None:
    """The plots, by the names that `_pictures` shows."""
    for name, figure in _figures(part).items():
        click.echo(f"written: {page.save_plot(name, plots.png(figure), folder)}")


def _figures(part: Part) -> dict[str, Figure]:
    """Of a stack that was resized: by size, and over time. Of stubs: over the prefill pool, by decode pool."""
    if part.live is not None:
        records, marks = {"the stack": part.live.records}, part.live.resized_at_s
        return {
            "pool_sizes_engines": plots.latency_over_sizes(
                {"this machine": {name: point.report for name, point in part.points.items()}}
            ),
            "pool_sizes_engines_ttft": plots.ttft_over_time(records, marks=marks),
            "pool_sizes_engines_itl": plots.itl_over_time(records, marks=marks),
        }
    runs = {
        f"{decode} decode": {f"{p} prefill": part.points[named((p, d))].report for p, d in part.sizes if d == decode}
        for decode in sorted({size[1] for size in part.sizes})
    }
    return {"pool_sizes_stubs": plots.latency_over_sizes(runs)}


def _pictures(part: Part) -> str:
    return "\n\n".join(f"![{name.replace('_', ' ')}](plots/{name}.png)" for name in _figures(part))


def _as_dict(parts: list[Part], measured_on: str) -> dict[str, object]:
    return {
        "measured_on": measured_on,
        "machine": machine(),
        "versions": versions(),
        "parts": [
            {
                "name": part.name,
                "mix": asdict(part.mix),
                "rate": part.rate,
                "speeds": asdict(_SPEEDS) if part.name == "stubs" else None,
                "points": {name: asdict(point.report) for name, point in part.points.items()},
            }
            for part in parts
        ],
    }


if __name__ == "__main__":
    main()
