"""Plots of one or several runs: latency over rate, over time and over pool sizes, CDFs, goodput.

Every function takes runs by name and returns a matplotlib figure, which `png` converts to bytes; there is no global
state and no display. Runs differ in colour and marker, in CDFs in their dashes; a 99th percentile is dashed and hollow,
so that a greyscale print is readable. Needs the extra `plots` (matplotlib).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tandem.bench.serve.endpoint import RequestRecord
from tandem.bench.serve.report import Distribution, Point, Report, Results, format_rate

Records = Mapping[str, Sequence[RequestRecord]]
"""The records of each run, by name."""
Sweeps = Mapping[str, Sequence[Point]]
"""The points of each run, by name; records are not needed."""

_Dash = str | tuple[int, tuple[int, ...]]
# From dark to light, distinguishable for the colour-blind (after Okabe and Ito).
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[_Dash, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
_PANEL = (4.8, 3.6)
_DPI = 120
_WIDE = 1000
"""From this span on, a logarithmic axis is labelled at powers of ten only."""
_TTFT = "TTFT (ms)"
_ITL = "ITL (ms)"
_E2E = "E2E latency (ms)"
_RATE = "Offered rate (requests/s)"
_TIME = "Time since the start of the run (s)"


def latency_over_rate(sweeps: Sweeps) -> Figure:
    """TTFT and ITL, median and 99th percentile, over the offered rate."""
    return _latency_over("offered rate", _RATE, {name: _placed(points) for name, points in sweeps.items()})


def goodput_over_rate(sweeps: Sweeps) -> Figure:
    """Requests of each second that met every objective, by the offered rate; the dotted line is all requests.

    It is the share that met them times the offered rate. The report's goodput is over the whole run, and lower: while
    the last answers end, nothing is offered.
    """
    figure, (axis,) = _panels(1)
    highest = 0.0
    for index, (name, points) in enumerate(sweeps.items()):
        placed = [(rate, rate * report.attainment) for rate, report in _placed(points) if report.attainment is not None]
        highest = max([highest, *(rate for rate, _ in placed)])
        _line(axis, index, name, placed, "-")
    axis.plot([0, highest], [0, highest], color="0.6", linestyle=":", label="all requests")
    axis.set_ylim(bottom=0)
    _finish(axis, _RATE, "Met all objectives (requests/s)")
    return _titled(figure, "Goodput by offered rate")


def ttft_over_time(runs: Records, *, marks: Mapping[float, str] | None = None) -> Figure:
    """TTFT of each succeeded request, at its time of sending; `marks`: see `itl_over_time`."""
    figure, (axis,) = _panels(1, width=2.0)
    for index, (name, records) in enumerate(runs.items()):
        _line(axis, index, name, [(one.sent_s, one.ttft_s * 1e3) for one in records if one.succeeded], "")
    _mark(axis, marks or {})
    _finish(axis, _TIME, _TTFT, log="y")
    return _titled(figure, "TTFT of each request by time of sending")


def itl_over_time(runs: Records, *, window_s: float = 1.0, marks: Mapping[float, str] | None = None) -> Figure:
    """ITL, median and 99th percentile, of the gaps that end within each window of the run. Where none does, no line is
    drawn.

    `marks` are labels by time, seconds after the start.
    """
    figure, (axis,) = _panels(1, width=2.0)
    for index, (name, records) in enumerate(runs.items()):
        windows = gaps_by_window(records, window_s)
        between = range(min(windows, default=0), max(windows, default=-1) + 1)
        placed = [((number + 0.5) * window_s, Distribution.of(windows.get(number, [math.nan]))) for number in between]
        _both_percentiles(axis, index, name, placed)
    _mark(axis, marks or {})
    _finish(axis, _TIME, _ITL, log="y")
    return _titled(figure, f"ITL in windows of {window_s:g} s")


def latency_cdfs(runs: Records) -> Figure:
    """Cumulative fraction of requests by TTFT and by E2E latency, and of gaps by ITL."""
    figure, axes = _panels(3)
    good = {name: [record for record in records if record.succeeded] for name, records in runs.items()}
    parts: tuple[tuple[str, Callable[[RequestRecord], Iterable[float]]], ...] = (
        (_TTFT, lambda record: [record.ttft_s]),
        (_ITL, lambda record: record.gaps_s),
        (_E2E, lambda record: [record.e2e_s]),
    )
    for axis, (label, values_of) in zip(axes, parts, strict=True):
        for index, (name, records) in enumerate(good.items()):
            values_ms = sorted(value_s * 1e3 for record in records for value_s in values_of(record))
            shares = [(rank + 1) / len(values_ms) for rank in range(len(values_ms))]
            colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
            axis.step(values_ms, shares, where="post", label=name, color=colour, linestyle=dash)
        axis.set_ylim(0, 1.02)
        _finish(axis, label, "Cumulative fraction", log="x")
    return _titled(figure, "Latency distributions")


def latency_over_sizes(runs: Mapping[str, Mapping[str, Report]]) -> Figure:
    """TTFT and ITL, median and 99th percentile, over the sizes of the pools: by run, a report by size ("2P1D")."""
    sizes = list(dict.fromkeys(size for reports in runs.values() for size in reports))
    placed = {
        name: [(float(sizes.index(size)), report) for size, report in reports.items()] for name, reports in runs.items()
    }
    figure = _latency_over("sizes of the pools", "Pool sizes", placed, is_joined=False)
    for axis in figure.axes:
        axis.set_xticks(range(len(sizes)), sizes)
    return figure


def png(figure: Figure) -> bytes:
    """`figure` as a PNG file; deterministic for one version of matplotlib."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def gaps_by_window(records: Iterable[RequestRecord], window_s: float) -> dict[int, list[float]]:
    """The gaps between tokens, seconds, by the number of the window in which they end.

    A window without gaps is omitted. Requests that failed later count until then.
    """
    windows: dict[int, list[float]] = {}
    for record in records:
        for earlier_s, later_s in pairwise(record.token_s):
            windows.setdefault(math.floor(later_s / window_s), []).append(later_s - earlier_s)
    return dict(sorted(windows.items()))


def _latency_over(
    what: str, x_label: str, runs: Mapping[str, Iterable[tuple[float, Report]]], *, is_joined: bool = True
) -> Figure:
    """TTFT and ITL, median and 99th percentile: by run, reports with their places on the x axis. Categories are not
    joined."""
    figure, axes = _panels(2)
    for axis, figure_name, label in zip(axes, ("ttft", "itl"), (_TTFT, _ITL), strict=True):
        for index, (name, placed) in enumerate(runs.items()):
            distributions = [(place, getattr(report, figure_name)) for place, report in placed]
            _both_percentiles(axis, index, name, distributions, is_joined=is_joined)
        _finish(axis, x_label, label, log="y")
    return _titled(figure, f"Latency by {what}")


def _panels(count: int, width: float = 1.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_PANEL[0] * count * width, _PANEL[1]), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _placed(points: Iterable[Point]) -> list[tuple[float, Report]]:
    """By the rate at which requests really became due, ascending; without runs that have none: all at once, or one."""
    found = [(one.report.offered_per_s, one.report) for one in points if one.rate != math.inf]
    found = [(rate, report) for rate, report in found if rate > 0]
    return sorted(found, key=lambda pair: pair[0])


def _titled(figure: Figure, title: str) -> Figure:
    """With one legend for all panels, below them, where it hides no curve, in as many columns as fit, up to
    four."""
    figure.suptitle(title, fontsize="medium")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    for ncols in (4, 3, 2, 1) if handles else ():
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=ncols, fontsize="small")
        if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    return figure


def _both_percentiles(
    axis: Axes, index: int, name: str, placed: Sequence[tuple[float, Distribution]], *, is_joined: bool = True
) -> None:
    """Leaves a gap in the lines where there was nothing to measure."""
    median = [(place, one.p50 if one.count else math.nan) for place, one in placed]
    high = [(place, one.p99 if one.count else math.nan) for place, one in placed]
    _line(axis, index, f"{name} p50", median, "-" if is_joined else "")
    _line(axis, index, f"{name} p99", high, "--" if is_joined else "", hollow=True)


def _line(
    axis: Axes, index: int, label: str, points: Sequence[tuple[float, float]], dash: _Dash, *, hollow: bool = False
) -> None:
    axis.plot(
        [x for x, _ in points],
        [y for _, y in points],
        label=label,
        color=_COLOURS[index % len(_COLOURS)],
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4,
        markerfacecolor="white" if hollow else None,
        linestyle=dash,
    )


def _mark(axis: Axes, marks: Mapping[float, str]) -> None:
    for at_s, label in marks.items():
        axis.axvline(at_s, color="0.4", linewidth=0.8, linestyle=":")
        axis.annotate(label, (at_s, 1), xycoords=("data", "axes fraction"), fontsize="small", va="bottom")


def _finish(axis: Axes, x_label: str, y_label: str, *, log: str = "") -> None:
    """Labels and grid; `log` names the dimension with a logarithmic scale, x or y."""
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    ends = {"x": axis.dataLim.intervalx, "y": axis.dataLim.intervaly}
    # without zeros, as those of tokens that came together
    least = {"x": axis.dataLim.minposx, "y": axis.dataLim.minposy}
    if log and 0 < least[log] <= ends[log].max() < math.inf:  # matplotlib cannot take the logarithm of an empty axis
        axis.set(**{f"{log}scale": "log"})
        scaled: Axis = getattr(axis, f"{log}axis")
        scaled.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[log].max() < _WIDE * least[log] else (1,)))
        scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scaled.set_minor_formatter(NullFormatter())
    axis.grid(True, which="both", linewidth=0.3, color="0.85")


def _late(point: Point) -> str:
    """What the legend adds to a run whose figures are not the endpoint's alone."""
    return "" if point.report.kept_schedule else ", the load was late"


def write_plots(results: Results, folder: Path) -> list[Path]:
    """Writes the plots of `results` into `folder`, which is created; returns the files. Raises OSError.

    Latency and goodput over rate need several rates; the others show each rate as a run.
    """
    records: dict[str, Sequence[RequestRecord]] = {}
    for point in results.points:
        name = format_rate(point.rate) + _late(point)
        num_same = sum(one == name or one.startswith(f"{name} #") for one in records)
        records[f"{name} #{num_same + 1}" if num_same else name] = point.records
    figures = {"latency_cdfs": latency_cdfs(records), "itl_over_time": itl_over_time(records)}
    sweeps = {results.model + max(map(_late, results.points), default=""): results.points}
    if len(results.points) > 1:
        figures["latency_over_rate"] = latency_over_rate(sweeps)
        if any(point.report.goodput_per_s is not None for point in results.points):
            figures["goodput_over_rate"] = goodput_over_rate(sweeps)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        written.append(folder / f"{name}.png")
        written[-1].write_bytes(png(figure))
    return written
