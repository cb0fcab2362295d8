"""The same two cores as two aggregated instances and as one prefill and one decode instance, under the same load.

    python -m benchmarks.pd_isolation [--quick] [--rate 2 --rate 3 …] [--chunk 64 …] [--seeds 3] [--write-docs]

Long prompts arrive among running streams. Every instance has one core and one thread. The aggregated instances stand
behind the same router (`--disaggregation never`, no prefill instance); their chunk budget (`max_num_batched_tokens`),
which trades TTFT against ITL, is swept, and once the engine chooses it by the router's objectives; at each rate the
one with the best goodput is what the split stack is compared with: a choice that no operator has. The split stack runs
with its default budget, with `always`, with `auto`, and with `auto` and objectives. With each seed every stack runs,
one after the other, with the same requests; the runs of a stack count together. Exit status 1: requests failed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks import page
from benchmarks.first_token import touch_free_memory
from benchmarks.mixed_load import PATIENT, Mix, ProgressBar, failed_cell, failures, joined, measure, num_bad, of_kind
from benchmarks.shapes import SHAPES, write_config
from tandem.bench.serve import plots
from tandem.bench.serve.report import Objectives, Point, Report, machine, versions
from tandem.local_stack.settings import Disaggregation, StackSettings
from tandem.local_stack.stack import LocalStack

_DEFAULT_CHUNK = 512
_CHUNKS = (64, 128, 256, 512)
_RATES = (1.5, 3.0, 4.5)
_MIX = Mix(
    stream_input_len=64,
    stream_output_len=256,
    long_input_len=2048,
    long_output_len=16,
    long_share=0.5,
    duration_s=15.0,
)
_HEAD = (
    "requests/s", "stack", "TTFT of long prompts p50 · p99", "TTFT of streams p50 · p99", "ITL p50 · p95 · p99 · max",
    "TPOT p50 · p99", "goodput", "met", "failed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Subject:
    """One way to use the two cores."""

    name: str
    mode: Disaggregation
    chunk: int
    objectives: Objectives | None = None
    """The router's, in terms of the ITL what `tpot_ms` says."""

    @property
    def is_aggregated(self) -> bool:
        return self.mode == "never"

    def settings(self, model: Path) -> StackSettings:
        """Two instances, a core each."""
        return StackSettings(
            model=model,
            model_name="random",
            num_prefill=0 if self.is_aggregated else 1,
            num_decode=2 if self.is_aggregated else 1,
            disaggregation=self.mode,
            dtype="bfloat16",
            kv_cache_bytes=512 << 20,
            max_model_len=4096,
            threads=1,
            router_args=(*PATIENT, *self._objectives_args()),
            instance_args=("--load-format", "dummy", "--max-num-batched-tokens", str(self.chunk)),
        )

    def _objectives_args(self) -> tuple[str, ...]:
        if self.objectives is None:
            return ()
        return "--slo-ttft-ms", str(self.objectives.ttft_ms), "--slo-itl-ms", str(self.objectives.tpot_ms)


@dataclass(frozen=True, slots=True)
class Experiment:
    """What was measured, by subject."""

    shape: str
    mix: Mix
    objectives: Objectives
    points: dict[Subject, list[Point]]

    def best(self) -> list[tuple[Subject, Point]]:
        """At each rate the aggregated stack with the best goodput; of equals that with fewer failures, then ITL p99."""
        aggregated = {subject: points for subject, points in self.points.items() if subject.is_aggregated}
        return [
            max(at_rate, key=lambda pair: _merit(pair[1]))
            for at_rate in zip(*([(one, point) for point in points] for one, points in aggregated.items()), strict=True)
        ]

    def split(self) -> dict[Subject, list[Point]]:
        """The stacks with a prefill instance."""
        return {subject: points for subject, points in self.points.items() if not subject.is_aggregated}


def _merit(point: Point) -> tuple[float, ...]:
    return point.report.goodput_per_s or 0.0, -num_bad(point), -point.report.itl.p99


@click.command(help=__doc__)
@click.option("--shape", type=click.Choice(list(SHAPES)), default="33m", show_default=True)
@click.option("--rate", "rates", multiple=True, type=float, default=_RATES, show_default=True, help="Requests/s.")
@click.option("--chunk", "chunks", multiple=True, type=int, default=_CHUNKS, show_default=True, help="Budgets swept.")
@click.option("--seconds", default=_MIX.duration_s, show_default=True, help="Of load at each rate.")
@click.option("--long-share", default=_MIX.long_share, show_default=True, help="Long prompts among the requests.")
@click.option("--seeds", default=1, show_default=True, help="Runs of each stack at each rate, with other requests.")
@click.option("--ttft-ms", default=1000.0, show_default=True, help="Objective for goodput.")
@click.option("--tpot-ms", default=12.0, show_default=True, help="Objective for goodput.")
@click.option("--quick", is_flag=True, help="Everything once and short: whether it works, not how fast it is.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Writes every figure there.")
@click.option("--plots", "folder", type=click.Path(path_type=Path), help="Writes the plots into this folder.")
@click.option("--write-docs", is_flag=True, help="Fills docs/tuning.md, docs/plots and benchmarks/LOG.md.")
def main(
    *, json_file: Path | None, folder: Path | None, write_docs: bool, ttft_ms: float, tpot_ms: float, **options: Any
) -> None:
    measured_on = page.origin()
    done = run(objectives=Objectives(ttft_ms=ttft_ms, tpot_ms=tpot_ms), **options)
    text = report_text(done)
    click.echo(f"\n{text}")
    if json_file is not None:
        json_file.write_text(json.dumps(_as_dict(done, measured_on), indent=1) + "\n")
    if write_docs:
        draw(done, page.PLOTS)
        page.fill(page.TUNING, "pd_isolation", f"{measured_on}.\n\n{text}\n\n{_PICTURES}")
        page.log(measured_on, "Two cores split and aggregated (`python -m benchmarks.pd_isolation`)", text)
    elif folder is not None:
        draw(done, folder)
    bad = failures({subject.name: points for subject, points in done.points.items()})
    for line in bad:
        click.echo(line, err=True)
    sys.exit(1 if bad else 0)


def run(
    *,
    shape: str,
    rates: Sequence[float],
    chunks: Sequence[int],
    seconds: float,
    long_share: float,
    seeds: int,
    objectives: Objectives,
    quick: bool,
) -> Experiment:
    mix = replace(_MIX, duration_s=seconds, long_share=long_share)
    if quick:
        rates, chunks, mix = (4.0,), (128, _DEFAULT_CHUNK), replace(mix, duration_s=4.0)
    else:
        click.echo(f"fresh memory: {touch_free_memory():.1f} GB/s")
    runs: dict[Subject, list[list[Point]]] = {subject: [] for subject in _subjects(chunks, objectives)}
    with tempfile.TemporaryDirectory() as name:
        model = write_config(Path(name), shape)
        for seed in range(seeds):
            for subject, points in runs.items():
                with LocalStack(subject.settings(model)) as stack:
                    points.append(_measure(subject, stack.address, mix, sorted(rates), objectives, shape, seed))
                click.echo(f"{subject.name}: {', '.join(map(_short, points[-1]))}")
    by_rate = {subject: zip(*points, strict=True) for subject, points in runs.items()}
    means = {subject: [joined(same, objectives) for same in rows] for subject, rows in by_rate.items()}
    return Experiment(shape, mix, objectives, means)


def _measure(
    subject: Subject, address: str, mix: Mix, rates: Sequence[float], objectives: Objectives, shape: str, seed: int
) -> list[Point]:
    view, vocab_size = ProgressBar(subject.name), SHAPES[shape]["vocab_size"]
    return measure(address, mix, rates, view, vocab_size=vocab_size, objectives=objectives, seed=100 * seed)


def _subjects(chunks: Sequence[int], objectives: Objectives) -> Iterator[Subject]:
    for chunk in chunks:
        yield Subject(f"2 aggregated, chunks of {chunk}", "never", chunk)
    yield Subject("2 aggregated, objectives", "never", _DEFAULT_CHUNK, objectives)
    yield Subject("1P1D always", "always", _DEFAULT_CHUNK)
    yield Subject("1P1D auto", "auto", _DEFAULT_CHUNK)
    yield Subject("1P1D auto, objectives", "auto", _DEFAULT_CHUNK, objectives)


def report_text(done: Experiment) -> str:
    best = done.best()
    rows = []
    for index, (subject, point) in enumerate(best):
        rows.append(_row(subject.name + " (best)", point, done.mix))
        rows += [_row(one.name, points[index], done.mix) for one, points in done.split().items()]
    ratios = [
        _ratios(one.name, points[index].report, point.report, point.rate)
        for index, (_, point) in enumerate(best)
        for one, points in done.split().items()
    ]
    swept = [
        [subject.name, *(f"{point.report.goodput_per_s:.2f} · {point.report.itl.p99:.0f} ms" for point in points)]
        for subject, points in done.points.items()
    ]
    rates = [f"{point.rate:g}/s" for point in next(iter(done.points.values()))]
    return "\n\n".join(
        (
            f"{done.shape} shape, bf16; {done.mix}. Goodput: requests a second with {done.objectives}; times in ms.",
            page.table(_HEAD, rows),
            "1P1D over the best aggregated stack (TTFT, ITL, TPOT: below 1 is better; goodput: above 1):",
            page.table(
                ("requests/s", "stack", "TTFT p50", "p99", "ITL p50", "p95", "p99", "TPOT p99", "goodput"), ratios
            ),
            "All stacks, goodput · ITL p99:",
            page.table(("stack", *rates), swept),
        )
    )


def _row(name: str, point: Point, mix: Mix) -> list[str]:
    report = point.report
    longs, streams = (of_kind(point, mix, long=long).ttft for long in (True, False))
    return [
        f"{point.rate:g}",
        name,
        f"{longs.p50:.0f} · {longs.p99:.0f}",
        f"{streams.p50:.0f} · {streams.p99:.0f}",
        f"{report.itl.p50:.1f} · {report.itl.p95:.1f} · {report.itl.p99:.1f} · {report.itl.max:.0f}",
        f"{report.tpot.p50:.1f} · {report.tpot.p99:.1f}",
        f"{report.goodput_per_s:.2f}",
        f"{report.attainment:.0%}",
        failed_cell(point),
    ]


def _ratios(name: str, ours: Report, theirs: Report, rate: float | None) -> list[str]:
    pairs = (
        (ours.ttft.p50, theirs.ttft.p50),
        (ours.ttft.p99, theirs.ttft.p99),
        (ours.itl.p50, theirs.itl.p50),
        (ours.itl.p95, theirs.itl.p95),
        (ours.itl.p99, theirs.itl.p99),
        (ours.tpot.p99, theirs.tpot.p99),
        (ours.goodput_per_s or 0.0, theirs.goodput_per_s or 0.0),
    )
    return [f"{rate:g}", name, *(f"{one / other:.2f}" if other else "-" for one, other in pairs)]


def _short(point: Point) -> str:
    report = point.report
    late = "" if report.kept_schedule else " (the load was late)"
    goodput = f"goodput {report.goodput_per_s or 0.0:.2f}"
    return f"{point.rate:g}/s {goodput}, TTFT p99 {report.ttft.p99:.0f}, ITL p99 {report.itl.p99:.0f} ms{late}"


_PICTURES = """\
![Latency over rate](plots/pd_isolation_latency.png)

![Goodput over rate](plots/pd_isolation_goodput.png)

![Distributions at the highest rate](plots/pd_isolation_cdfs.png)

![ITL over time at the highest rate](plots/pd_isolation_itl.png)"""


def draw(done: Experiment, folder: Path) -> None:
    """The plots: the best aggregated stack of each rate as one run, beside the split stacks."""
    best = done.best()
    sweeps = {"best aggregated": [point for _, point in best]}
    sweeps |= {subject.name: points for subject, points in done.split().items()}
    highest = {name: points[-1].records for name, points in sweeps.items()}
    for name, figure in (
        ("latency", plots.latency_over_rate(sweeps)),
        ("goodput", plots.goodput_over_rate(sweeps)),
        ("cdfs", plots.latency_cdfs(highest)),
        ("itl", plots.itl_over_time(highest)),
    ):
        click.echo(f"written: {page.save_plot(f'pd_isolation_{name}', plots.png(figure), folder)}")


def _as_dict(done: Experiment, measured_on: str) -> dict[str, object]:
    return {
        "measured_on": measured_on,
        "machine": machine(),
        "versions": versions(),
        "shape": done.shape,
        "mix": asdict(done.mix),
        "objectives": done.objectives.limits(),
        "best": [subject.name for subject, _ in done.best()],
        "stacks": [
            {"subject": asdict(subject), "points": [{"rate": one.rate, **asdict(one.report)} for one in points]}
            for subject, points in done.points.items()
        ],
    }


if __name__ == "__main__":
    main()
