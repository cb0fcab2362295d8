"""Plots show what was measured: the lines' data, the axes and their units, and every run by its name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from tandem.bench.serve import plots
from tandem.bench.serve.endpoint import RequestRecord
from tandem.bench.serve.report import Objectives, Point, Report, Results, summarise


def record(sent_s: float, ttft_s: float, gaps_s: tuple[float, ...]) -> RequestRecord:
    """One that succeeded."""
    token_s = list(itertools.accumulate((sent_s + ttft_s, *gaps_s)))
    return RequestRecord(sent_s, sent_s, 10, len(token_s), token_s, token_s[-1], "length")


def run_at(rate: float, ttft_s: float) -> list[RequestRecord]:
    """Three requests, the last of them ten times as slow as the first."""
    return [record(index / rate, ttft_s * slow, (0.01 * slow,) * 4) for index, slow in enumerate((1.0, 2.0, 10.0))]


def report_at(rate: float, ttft_s: float = 0.1) -> Report:
    return summarise(run_at(rate, ttft_s), Objectives(ttft_ms=1000 * ttft_s * 3))


def sweep(ttft_s: float) -> list[Point]:
    return [Point(rate, report_at(rate, ttft_s)) for rate in (4.0, 1.0, 2.0)]


def line(axis: Axes, label: str) -> tuple[list[float], list[float]]:
    """What is drawn under `label`."""
    found: Any
    (found,) = [one for one in axis.lines if one.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def texts(axis: Axes) -> list[str]:
    """The labels of the legend."""
    [legend] = axis.get_figure().legends  # type: ignore[union-attr]
    return [text.get_text() for text in legend.get_texts()]


def test_latency_over_rate_shows_both_percentiles_of_every_run_in_order_of_rate() -> None:
    sweeps = {"1P1D": sweep(0.1), "aggregated": sweep(0.3)}
    ttft, itl = plots.latency_over_rate(sweeps).axes
    assert (ttft.get_xlabel(), ttft.get_ylabel()) == ("Offered rate (requests/s)", "TTFT (ms)")
    assert itl.get_ylabel() == "ITL (ms)"
    assert texts(ttft) == texts(itl) == ["1P1D p50", "1P1D p99", "aggregated p50", "aggregated p99"]
    for name, ttft_s in (("1P1D", 0.1), ("aggregated", 0.3)):
        reports = [report_at(rate, ttft_s) for rate in (1.0, 2.0, 4.0)]
        assert line(ttft, f"{name} p50") == (pytest.approx([1.0, 2.0, 4.0]), [report.ttft.p50 for report in reports])
        assert line(ttft, f"{name} p99")[1] == [report.ttft.p99 for report in reports]
        assert line(itl, f"{name} p99")[1] == [report.itl.p99 for report in reports]


def test_a_run_is_placed_at_the_rate_that_it_really_offered() -> None:
    (axis,) = plots.goodput_over_rate({"run": [Point(8.0, report_at(2.0))]}).axes
    assert line(axis, "run")[0] == [pytest.approx(2.0)]


def test_a_trace_is_placed_at_its_measured_rate_and_a_burst_nowhere() -> None:
    points = [Point(None, report_at(2.0)), Point(math.inf, report_at(8.0))]
    ttft, _ = plots.latency_over_rate({"trace": points}).axes
    assert line(ttft, "trace p50")[0] == [pytest.approx(2.0)]


def test_goodput_is_shown_beside_what_was_offered() -> None:
    (axis,) = plots.goodput_over_rate({"1P1D": sweep(0.1)}).axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("Offered rate (requests/s)", "Met all objectives (requests/s)")
    met = [pytest.approx(rate * 2 / 3) for rate in (1.0, 2.0, 4.0)]
    assert line(axis, "1P1D") == (pytest.approx([1.0, 2.0, 4.0]), met)
    assert line(axis, "all requests") == (pytest.approx([0, 4.0]), pytest.approx([0, 4.0]))
    assert axis.get_ylim()[0] == 0


def test_a_run_whose_requests_all_meet_their_objectives_is_on_the_dotted_line_however_long_they_last() -> None:
    """Goodput over the whole run would be 30 requests in 56 s, half of what is offered."""
    records = [record(float(sent_s), 0.1, (0.26,) * 100) for sent_s in range(30)]
    (axis,) = plots.goodput_over_rate({"run": [Point(1.0, summarise(records, Objectives(ttft_ms=300)))]}).axes
    assert line(axis, "run") == ([1.0], [1.0])
    assert line(axis, "all requests") == ([0.0, 1.0], [0.0, 1.0])


def test_runs_without_objectives_have_no_goodput() -> None:
    (axis,) = plots.goodput_over_rate({"1P1D": [Point(1.0, summarise(run_at(1.0, 0.1)))]}).axes
    assert line(axis, "1P1D") == ([], [])


def test_itl_over_time_puts_each_gap_into_the_window_in_which_it_ends() -> None:
    records = [record(0.0, 0.5, (0.2, 0.2, 0.4)), record(2.0, 0.1, (0.3,))]  # tokens at 0.5 0.7 0.9 1.3, 2.1 2.4
    (axis,) = plots.itl_over_time({"run": records}, window_s=1.0).axes
    moments, medians = line(axis, "run p50")
    assert moments == [0.5, 1.5, 2.5]
    assert medians == pytest.approx([200, 400, 300])
    assert axis.get_xlabel() == "Time since the start of the run (s)"


def test_an_outage_is_a_gap_in_the_line() -> None:
    records = [record(0.0, 0.5, (0.2,)), record(4.0, 0.1, (0.3,))]
    (axis,) = plots.itl_over_time({"run": records}, window_s=1.0).axes
    moments, medians = line(axis, "run p50")
    assert moments == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert medians == pytest.approx([200, math.nan, math.nan, math.nan, 300], nan_ok=True)


def test_a_run_without_an_answer_or_a_gap_is_a_gap_in_the_line() -> None:
    failed = RequestRecord(0.0, 0.0, 10, 5, ended_s=9.5, error="UNAVAILABLE: gone", status="UNAVAILABLE")
    late = replace(failed, due_s=0.5, sent_s=0.5)
    one_token = [record(0.0, 0.1, ()), record(0.25, 0.1, ())]
    points = [Point(2.0, summarise([failed, late])), Point(1.0, report_at(1.0)), Point(4.0, summarise(one_token))]
    ttft, itl = plots.latency_over_rate({"run": points}).axes
    assert line(ttft, "run p50") == ([1.0, 2.0, 4.0], pytest.approx([200, math.nan, 100], nan_ok=True))
    assert line(itl, "run p99")[1][1:] == pytest.approx([math.nan, math.nan], nan_ok=True)
    sizes, _ = plots.latency_over_sizes({"run": {"1P1D": points[0].report}}).axes
    assert line(sizes, "run p50") == ([0], pytest.approx([math.nan], nan_ok=True))
    plots.png(plots.latency_over_rate({"run": points[:1]}))


def test_tokens_that_came_together_leave_the_axis_logarithmic() -> None:
    figure = plots.latency_cdfs({"run": [record(0.0, 0.5, (0.2, 0.0, 0.4))]})
    assert [axis.get_xscale() for axis in figure.axes] == ["log"] * 3
    plots.png(figure)


def test_ttft_over_time_has_a_point_for_each_answer_and_no_line_between_them() -> None:
    failed = RequestRecord(0.0, 0.5, 10, 5, error="UNAVAILABLE: gone", status="UNAVAILABLE")
    (axis,) = plots.ttft_over_time({"run": [*run_at(1.0, 0.1), failed]}).axes
    moments, ttfts = line(axis, "run")
    assert moments == [0, 1, 2]
    assert ttfts == pytest.approx([100, 200, 1000])
    assert axis.lines[0].get_linestyle() == "None"


@pytest.mark.parametrize("figure_of", [plots.ttft_over_time, plots.itl_over_time])
def test_marks_say_what_was_changed_when(figure_of: Callable[..., Figure]) -> None:
    (axis,) = figure_of({"run": run_at(1.0, 0.1)}, marks={1.5: "2P1D", 2.5: "1P2D"}).axes
    marks: list[Any] = list(axis.texts)
    lines: list[Any] = axis.lines[-2:]
    assert [(text.get_text(), text.xy[0]) for text in marks] == [("2P1D", 1.5), ("1P2D", 2.5)]
    assert [list(one.get_xdata()) for one in lines] == [[1.5, 1.5], [2.5, 2.5]]
    assert not {"2P1D", "1P2D"} & set(texts(axis))


@given(st.lists(st.lists(st.floats(0.001, 1.0), max_size=8), max_size=5), st.floats(0.1, 3.0))
def test_windows_lose_no_gap(gaps_s: list[list[float]], window_s: float) -> None:
    records = [record(index * 0.7, 0.1, tuple(gaps)) for index, gaps in enumerate(gaps_s)]
    windows = plots.gaps_by_window(records, window_s)
    assert list(windows) == sorted(windows)
    assert sum(map(len, windows.values())) == sum(map(len, gaps_s))
    assert sum(map(sum, windows.values())) == pytest.approx(sum(map(sum, gaps_s)))


def test_cdfs_rise_to_one_at_the_largest_value_and_leave_failures_out() -> None:
    failed = RequestRecord(0.0, 0.0, 10, 5, [9.0], 9.5, error="UNAVAILABLE: gone", status="UNAVAILABLE")
    figure = plots.latency_cdfs({"run": [*run_at(1.0, 0.1), failed]})
    assert [axis.get_xlabel() for axis in figure.axes] == ["TTFT (ms)", "ITL (ms)", "E2E latency (ms)"]
    ttft, itl, e2e = (line(axis, "run") for axis in figure.axes)
    assert ttft[0] == pytest.approx([100, 200, 1000])
    assert ttft[1] == pytest.approx([1 / 3, 2 / 3, 1])
    assert itl[0] == pytest.approx([10] * 4 + [20] * 4 + [100] * 4)
    assert e2e[0] == pytest.approx([140, 280, 1400])
    assert itl[1][-1] == e2e[1][-1] == 1


def test_sizes_stand_in_the_order_given_and_a_run_may_lack_some() -> None:
    reports = {size: report_at(1.0, ttft_s) for size, ttft_s in (("1P1D", 0.4), ("2P1D", 0.2), ("1P2D", 0.3))}
    runs = {"engines": reports, "stubs": {"1P2D": report_at(1.0, 0.7)}}
    ttft, itl = plots.latency_over_sizes(runs).axes
    assert [label.get_text() for label in itl.get_xticklabels()] == ["1P1D", "2P1D", "1P2D"]
    assert line(ttft, "engines p50") == ([0, 1, 2], pytest.approx([800, 400, 600]))
    assert line(ttft, "stubs p50") == ([2], [pytest.approx(1400)])
    assert {one.get_linestyle() for one in ttft.lines} == {"None"}, "nothing lies between two sizes"


def everything(runs: int) -> list[Figure]:
    names = [f"run {index}" for index in range(runs)]
    records = {name: run_at(1.0, 0.1) for name in names}
    sweeps = {name: sweep(0.1) for name in names}
    return [
        plots.latency_over_rate(sweeps),
        plots.goodput_over_rate(sweeps),
        plots.itl_over_time(records),
        plots.ttft_over_time(records),
        plots.latency_cdfs(records),
        plots.latency_over_sizes({name: {"1P1D": report_at(1.0)} for name in names}),
    ]


def test_runs_are_distinguishable_in_grey() -> None:
    weights = np.array([0.299, 0.587, 0.114])  # luma of ITU-R BT.601
    for figure in everything(4):
        for axis in figure.axes:
            seen = {(one.get_marker(), one.get_linestyle(), one.get_markerfacecolor()) for one in axis.lines}
            assert len(seen) == len(axis.lines), "no two lines differ in colour alone"
            assert all(weights @ to_rgb(one.get_color()) < 0.75 for one in axis.lines), "none fades into the paper"


def test_the_legend_lies_beside_the_panels_and_every_figure_has_a_title() -> None:
    for figure in everything(4):
        assert figure.get_suptitle()
        figure.draw_without_rendering()
        [legend] = figure.legends
        boxes = [axis.get_tightbbox() for axis in figure.axes]
        assert all(box is not None and not box.overlaps(legend.get_window_extent()) for box in boxes)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the runs in a plot that `write_plots` draws."""
    runs: list[str] = []

    def latency_cdfs(records: plots.Records) -> Figure:
        runs.extend(records)
        return Figure()

    monkeypatch.setattr(plots, "latency_cdfs", latency_cdfs)
    return runs


def test_the_legend_says_which_load_was_late(tmp_path: Path, shown: list[str]) -> None:
    late = summarise(run_at(2.0, 0.1), None, [1.0] * 100)
    results = Results("fake", "demo", {}, [Point(1.0, report_at(1.0)), Point(2.0, late)])
    assert plots.write_plots(results, tmp_path)
    assert shown == ["1/s", "2/s, the load was late"]


def test_runs_at_one_rate_are_all_shown(tmp_path: Path, shown: list[str]) -> None:
    assert plots.write_plots(Results("fake", "demo", {}, [Point(4.0, report_at(4.0))] * 3), tmp_path)
    assert shown == ["4/s", "4/s #2", "4/s #3"]


def test_figures_of_nothing_are_drawn_all_the_same() -> None:
    for figure in (
        plots.latency_over_rate({"none": []}),
        plots.goodput_over_rate({"none": []}),
        plots.itl_over_time({"none": []}),
        plots.ttft_over_time({"none": []}),
        plots.latency_cdfs({"none": []}),
        plots.latency_over_sizes({}),
    ):
        assert plots.png(figure)


def test_png_is_a_picture_of_the_requested_size(tmp_path: Path) -> None:
    from matplotlib.image import imread

    for figure in everything(2):
        path = tmp_path / "plot.png"
        path.write_bytes(plots.png(figure))
        width, height = figure.get_size_inches()
        assert imread(path).shape[:2] == (pytest.approx(120 * height, abs=1), pytest.approx(120 * width, abs=1))


@pytest.mark.parametrize("length", [5, 20, 45])
def test_the_legend_has_room(length: int) -> None:
    """Names of any length, beside each other or below each other."""
    sweeps = {f"{index}" * length: sweep(0.1) for index in range(5)}
    figure = plots.goodput_over_rate(sweeps)
    figure.canvas.draw()
    [legend] = figure.legends
    assert legend.get_window_extent().x0 >= 0
