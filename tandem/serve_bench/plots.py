"""Figures of one or several runs, side by side: latency over rate, over time and over pool sizes, CDFs, goodput.

Every function takes runs by name and returns a matplotlib figure, which `png` turns into bytes; nothing is kept in
between and no display is needed. Runs differ in colour and marker, in CDFs in their dashes; a 99th percentile is dashed
and hollow: a print in grey can be read. Needs the extra `plots` (matplotlib).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tandem.serve_bench.records import RequestRecord
from tandem.serve_bench.report import Distribution, Report
from tandem.serve_bench.results import Point

Records = Mapping[str, Sequence[RequestRecord]]
"""What was seen of each run, by its name."""
Sweeps = Mapping[str, Sequence[Point]]
"""The rates of each run, by its name; those without records will do."""

# From dark to light, and apart from each other for the colour-blind too (after Okabe and Ito).
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)))
_PANEL = (4.8, 3.6)
_DPI = 120
_WIDE = 1000
"""From this span on a logarithmic axis has words at powers of ten alone."""
_TTFT = "TTFT (ms)"
_ITL = "ITL (ms)"
_E2E = "E2E latency (ms)"
_RATE = "Offered rate (requests/s)"
_TIME = "Time since the start of the run (s)"


def latency_over_rate(sweeps: Sweeps) -> Figure:
    """TTFT and ITL, median and 99th percentile, over the offered rate."""
    figure, axes = _panels(2)
    for axis, of, label in zip(axes, (_ttft, _itl), (_TTFT, _ITL), strict=True):
        for index, (name, points) in enumerate(sweeps.items()):
            placed = _placed(points)
            _both_percentiles(axis, index, name, [rate for rate, _ in placed], [of(report) for _, report in placed])
        _finish(axis, _RATE, label, log="y")
    return figure


def goodput_over_rate(sweeps: Sweeps) -> Figure:
    """Requests a second that met every objective, over the offered rate; the dotted line is all of them."""
    figure, (axis,) = _panels(1)
    highest = 0.0
    for index, (name, points) in enumerate(sweeps.items()):
        placed = [(rate, report.goodput_per_s) for rate, report in _placed(points) if report.goodput_per_s is not None]
        highest = max([highest, *(rate for rate, _ in placed)])
        _line(axis, index, name, [rate for rate, _ in placed], [goodput for _, goodput in placed], _DASHES[0])
    axis.plot([0, highest], [0, highest], color="0.6", linestyle=":", label="all requests")
    axis.set_ylim(bottom=0)
    _finish(axis, _RATE, "Goodput (requests/s)")
    return figure


def ttft_over_time(runs: Records, *, marks: Mapping[float, str] | None = None) -> Figure:
    """TTFT of each request that succeeded, at the moment of its sending; `marks`: see `itl_over_time`."""
    figure, (axis,) = _panels(1, width=2.0)
    for index, (name, records) in enumerate(runs.items()):
        good = [record for record in records if record.succeeded]
        values_ms = [(record.token_s[0] - record.sent_s) * 1e3 for record in good]
        _line(axis, index, name, [record.sent_s for record in good], values_ms, "")
    _mark(axis, marks or {})
    _finish(axis, _TIME, _TTFT, log="y")
    return figure


def itl_over_time(runs: Records, *, window_s: float = 1.0, marks: Mapping[float, str] | None = None) -> Figure:
    """ITL, median and 99th percentile, of the gaps that end within each window of the run.

    `marks` are words at moments, seconds after the start: what was changed then.
    """
    figure, (axis,) = _panels(1, width=2.0)
    for index, (name, records) in enumerate(runs.items()):
        windows = gaps_by_window(records, window_s)
        middles_s = [(number + 0.5) * window_s for number in windows]
        _both_percentiles(axis, index, name, middles_s, [Distribution.of(gaps) for gaps in windows.values()])
    _mark(axis, marks or {})
    _finish(axis, _TIME, _ITL, log="y")
    return figure


def latency_cdfs(runs: Records) -> Figure:
    """The share of requests with at most so much TTFT and E2E latency, and of gaps with at most so much ITL."""
    figure, axes = _panels(3)
    good = {name: [record for record in records if record.succeeded] for name, records in runs.items()}
    parts: tuple[tuple[str, Callable[[RequestRecord], Iterable[float]]], ...] = (
        (_TTFT, lambda record: [record.token_s[0] - record.sent_s]),
        (_ITL, _gaps_s),
        (_E2E, lambda record: [record.token_s[-1] - record.sent_s]),
    )
    for axis, (label, values_of) in zip(axes, parts, strict=True):
        for index, (name, records) in enumerate(good.items()):
            values_ms = sorted(value_s * 1e3 for record in records for value_s in values_of(record))
            shares = [(rank + 1) / len(values_ms) for rank in range(len(values_ms))]
            axis.step(values_ms, shares, where="post", label=name, color=_of(_COLOURS, index), linestyle=_dash(index))
        axis.set_ylim(0, 1.02)
        _finish(axis, label, "Share at most", log="x")
    return figure


def latency_over_sizes(runs: Mapping[str, Mapping[str, Report]]) -> Figure:
    """TTFT and ITL, median and 99th percentile, over the sizes of the pools: by run, a report by size ("2P1D")."""
    figure, axes = _panels(2)
    sizes = list(dict.fromkeys(size for reports in runs.values() for size in reports))
    for axis, of, label in zip(axes, (_ttft, _itl), (_TTFT, _ITL), strict=True):
        for index, (name, reports) in enumerate(runs.items()):
            places = [float(sizes.index(size)) for size in reports]
            _both_percentiles(axis, index, name, places, [of(report) for report in reports.values()])
        axis.set_xticks(range(len(sizes)), sizes)
        _finish(axis, "Sizes of the pools", label, log="y")
    return figure


def png(figure: Figure) -> bytes:
    """`figure` as a PNG file. The same figure gives the same bytes, with one version of matplotlib."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def gaps_by_window(records: Iterable[RequestRecord], window_s: float) -> dict[int, list[float]]:
    """By the number of the window in which they end, in order, the gaps between tokens, seconds.

    A window without gaps is left out. Requests that failed later count as far as they came.
    """
    windows: dict[int, list[float]] = {}
    for record in records:
        for earlier_s, later_s in pairwise(record.token_s):
            windows.setdefault(math.floor(later_s / window_s), []).append(later_s - earlier_s)
    return dict(sorted(windows.items()))


def _panels(count: int, width: float = 1.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_PANEL[0] * count * width, _PANEL[1]), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _placed(points: Iterable[Point]) -> list[tuple[float, Report]]:
    """By rate, ascending: the one asked for, or that of the trace. A run with all requests at once has no place."""
    found = [
        (point.report.offered_per_s if point.rate is None else point.rate, point.report)
        for point in points
        if point.rate != math.inf
    ]
    return sorted(found, key=lambda pair: pair[0])


def _both_percentiles(
    axis: Axes, index: int, name: str, places: Sequence[float], values: Sequence[Distribution]
) -> None:
    _line(axis, index, f"{name} p50", places, [value.p50 for value in values], "-")
    _line(axis, index, f"{name} p99", places, [value.p99 for value in values], "--", hollow=True)


def _line(
    axis: Axes,
    index: int,
    label: str,
    places: Sequence[float],
    values: Sequence[float],
    dash: str | tuple[int, tuple[int, ...]],
    *,
    hollow: bool = False,
) -> None:
    axis.plot(
        places,
        values,
        label=label,
        color=_of(_COLOURS, index),
        marker=_of(_MARKERS, index),
        markersize=4,
        markerfacecolor="white" if hollow else None,
        linestyle=dash,
    )


def _mark(axis: Axes, marks: Mapping[float, str]) -> None:
    for at_s, words in marks.items():
        axis.axvline(at_s, color="0.4", linewidth=0.8, linestyle=":")
        axis.annotate(words, (at_s, 1), xycoords=("data", "axes fraction"), fontsize="small", va="bottom")


def _finish(axis: Axes, x_label: str, y_label: str, *, log: str = "") -> None:
    """Words, grid and legend; `log` names the dimension that gets a logarithmic scale, x or y."""
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    ends = {"x": axis.dataLim.intervalx, "y": axis.dataLim.intervaly}
    if log and 0 < ends[log].min() < math.inf:  # matplotlib cannot take the logarithm of an empty axis
        axis.set(**{f"{log}scale": "log"})
        scaled: Axis = getattr(axis, f"{log}axis")
        scaled.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[log].max() < _WIDE * ends[log].min() else (1,)))
        scaled.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        scaled.set_minor_formatter(NullFormatter())
    axis.grid(True, which="both", linewidth=0.3, color="0.85")
    if axis.lines:
        axis.legend(fontsize="small")


def _gaps_s(record: RequestRecord) -> list[float]:
    return [later - earlier for earlier, later in pairwise(record.token_s)]


def _ttft(report: Report) -> Distribution:
    return report.ttft


def _itl(report: Report) -> Distribution:
    return report.itl


def _of(cycle: Sequence[str], index: int) -> str:
    return cycle[index % len(cycle)]


def _dash(index: int) -> str | tuple[int, tuple[int, ...]]:
    return _DASHES[index % len(_DASHES)]
