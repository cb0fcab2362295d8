"""Figures for people: a page for one run, a line of a wide table for each run of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.serve_bench.report import LATE_MS, Distribution, Objectives, Report
from tandem.serve_bench.results import Point

_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def rate_words(rate: float | None) -> str:
    """A rate of a sweep: `2/s`, `all at once`, `as in the trace`."""
    if rate is None:
        return "as in the trace"
    return "all at once" if rate == math.inf else f"{rate:g}/s"


def page(report: Report, objectives: Objectives) -> list[str]:
    """Everything of one run."""
    lines = [
        f"  requests    {_counts(report)} in {report.duration_s:.1f} s; "
        f"{report.mean_in_flight:.1f} in flight on average, {report.max_in_flight} at the most",
        f"  throughput  {report.requests_per_s:.2f} requests/s   {report.output_tokens_per_s:.1f} output tokens/s   "
        f"{report.total_tokens_per_s:.1f} tokens/s with prompts   (offered: {_offered(report)})",
    ]
    if report.goodput_per_s is not None:
        lines.append(
            f"  goodput     {report.goodput_per_s:.2f} requests/s: {_percent(report.attainment)} met {objectives}"
            + _apart(report)
        )
    lines += ["", "  ms  " + "".join(f"{name:>10}" for name in _COLUMNS) + f"{'of':>10}"]
    for name, distribution in (
        ("TTFT", report.ttft), ("ITL", report.itl), ("TPOT", report.tpot), ("E2E", report.e2e)
    ):  # fmt: skip
        lines.append(f"  {name:4}" + _cells(distribution))
    return [*lines, "", *(f"  {note}" for note in notes(report))]


def sweep(points: Sequence[Point]) -> list[str]:
    """A line for each rate."""
    with_goodput = any(point.report.goodput_per_s is not None for point in points)
    head = (
        f"{'RATE':>15} {'OK':>6} {'FAILED':>6} {'REFUSED':>7} {'REQ/S':>7} {'OUT TOK/S':>9}"
        f" {'TTFT p50':>9} {'p99':>8} {'ITL p50':>8} {'p99':>8} {'TPOT p50':>9} {'p99':>8} {'E2E p50':>9} {'p99':>9}"
    ) + (f" {'GOODPUT':>7} {'SLO':>6}" if with_goodput else "")
    return [head, *(_sweep_line(point, with_goodput) for point in points)]


def _sweep_line(point: Point, with_goodput: bool) -> str:
    one = point.report
    late = "" if one.kept_schedule else "  (late: see above)"
    line = (
        f"{rate_words(point.rate):>15} {one.num_succeeded:6} {one.num_failed:6} {one.num_refused:7}"
        f" {one.requests_per_s:7.2f} {one.output_tokens_per_s:9.1f}"
        f" {one.ttft.p50:9.1f} {one.ttft.p99:8.1f} {one.itl.p50:8.2f} {one.itl.p99:8.2f}"
        f" {one.tpot.p50:9.2f} {one.tpot.p99:8.2f} {one.e2e.p50:9.1f} {one.e2e.p99:9.1f}"
    )
    if with_goodput:
        line += f" {one.goodput_per_s or 0:7.2f} {_percent(one.attainment):>6}"
    return line + late


def notes(report: Report) -> list[str]:
    """What a reader of the figures must know about them."""
    lines = []
    if not report.kept_schedule:
        lines.append(
            f"WARNING: the load did not keep its schedule: requests were sent {report.lag.p99:.1f} ms late, and the "
            f"event loop woke up {report.loop_lag.p99:.1f} ms late (p99; allowed are {LATE_MS:g}). The figures have "
            "that delay in them: lower the rate, free this machine's cores, or run the load elsewhere."
        )
    elif report.lag.count:
        lines.append(f"the load kept its schedule: lag p99 {report.lag.p99:.2f} ms, max {report.lag.max:.2f} ms")
    if report.held.count:
        lines.append(
            f"held back by the limit on concurrency: {report.held.count} of {report.num_requests}, "
            f"{report.held.p50:.0f} ms at the median, {report.held.max:.0f} ms at the most; TTFT and E2E count from "
            "their sending"
        )
    if report.num_shared_moments:
        share = report.num_shared_moments / report.itl.count
        lines.append(f"{share:.1%} of the gaps in ITL are 0: both tokens came in one message")
    if report.num_told:
        lines.append(
            f"answers whose messages do not say how many tokens they carry: {report.num_told} of "
            f"{report.num_succeeded}; there ITL is between messages"
        )
    if report.num_short:
        lines.append(f"answers of another length than was asked for: {report.num_short} of {report.num_succeeded}")
    lines += [f"{count} x {reason}" for reason, count in report.failures.items()]
    return lines


def _counts(report: Report) -> str:
    counts = [f"{report.num_succeeded} ok, {report.num_failed} failed, {report.num_refused} refused"]
    return ", ".join(counts + ([f"{report.num_unfinished} unfinished"] if report.num_unfinished else []))


def _offered(report: Report) -> str:
    return f"{report.offered_per_s:.2f} requests/s" if report.offered_per_s else "all at once"


def _apart(report: Report) -> str:
    if len(report.attainments) < 2:
        return ""
    return " (" + ", ".join(f"{name} {_percent(share)}" for name, share in report.attainments.items()) + ")"


def _cells(distribution: Distribution) -> str:
    if not distribution.count:
        return f"{'-':>10}" * len(_COLUMNS) + f"{0:10}"
    return "".join(f"{getattr(distribution, name):10.2f}" for name in _COLUMNS) + f"{distribution.count:10}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
