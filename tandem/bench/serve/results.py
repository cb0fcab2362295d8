"""The results of a bench: a page for one run, a table with a line for each run of a sweep, and a JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from engine.machine import available_bytes, cpu_quota, usable_cores
from tandem.bench.serve.endpoint import RequestRecord
from tandem.bench.serve.report import LATE_MS, Distribution, Objectives, Report

SCHEMA_VERSION = 2
_PACKAGES = ("tandem-llm", "grpcio", "protobuf", "httpx", "numpy")
_GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Point:
    rate: float | None
    """Requested rate per second; inf: all at once; None: as in the trace."""
    report: Report
    records: Sequence[RequestRecord] = ()


@dataclass(slots=True)
class Results:
    """All results of one `tandem bench serve`, complete or interrupted."""

    endpoint: str
    model: str
    settings: Mapping[str, Any]
    """The options by name, with the seed that was used."""
    points: list[Point] = field(default_factory=list)
    counting: str = ""
    """How output tokens were counted; see Endpoint."""
    stopped_by: str = ""
    """Why it ended early; empty if it did not."""
    started_at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    @property
    def has_figures(self) -> bool:
        """Whether a measured request was sent."""
        return any(point.report.num_requests for point in self.points)


def write_json(path: Path, results: Results, *, with_records: bool) -> None:
    """Writes `results` to `path`, which may be a pipe. Raises OSError."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "started_at": results.started_at,
        "partial": bool(results.stopped_by),
        "stopped_by": results.stopped_by,
        "endpoint": results.endpoint,
        "model": results.model,
        "counting": results.counting,
        "settings": dict(results.settings),
        "versions": versions(),
        "machine": machine(),
        "points": [_as_dict(point, with_records=with_records) for point in results.points],
    }
    path.write_text(json.dumps(content, indent=2, allow_nan=False, default=str) + "\n")


def _as_dict(point: Point, *, with_records: bool) -> dict[str, Any]:
    rate = "inf" if point.rate == math.inf else point.rate  # JSON has no infinity
    named = {"rate": rate, "kept_schedule": point.report.kept_schedule, **asdict(point.report)}
    return {**named, "requests": [asdict(record) for record in point.records]} if with_records else named


def versions() -> dict[str, str]:
    """Of Python, of the packages involved, and of the git checkout if there is one."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if (described := _git_describe()) is not None:
        found["git"] = described
    return found


def machine() -> dict[str, Any]:
    """The machine of the load generator, and of the endpoint if that is local."""
    return {
        "cores": len(usable_cores()),
        "cpu_quota": cpu_quota(),
        "cpu": _cpu_name(),
        "memory_bytes": psutil.virtual_memory().total,
        "available_bytes": available_bytes(),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git_describe() -> str | None:
    """None outside a checkout or without git."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--tags"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def format_rate(rate: float | None) -> str:
    """A rate of a sweep: `2/s`, `all at once`, `as in the trace`."""
    if rate is None:
        return "as in the trace"
    return "all at once" if rate == math.inf else f"{rate:g}/s"


def page(report: Report, objectives: Objectives) -> list[str]:
    unfinished = f", {report.num_unfinished} unfinished" if report.num_unfinished else ""
    offered = f"{report.offered_per_s:.2f} requests/s" if report.offered_per_s else "all at once"
    if report.num_requests < 2:
        offered = "-"
    lines = [
        f"  requests    {report.num_succeeded} ok, {report.num_failed} failed, {report.num_refused} refused"
        f"{unfinished} in {report.duration_s:.1f} s; "
        f"{report.mean_in_flight:.1f} in flight on average, at most {report.max_in_flight}",
        f"  throughput  {report.requests_per_s:.2f} requests/s   {report.output_tokens_per_s:.1f} output tokens/s   "
        f"{report.total_tokens_per_s:.1f} tokens/s with prompts   (offered: {offered})",
    ]
    if report.num_cached_tokens is not None:
        stored = f", {report.num_stored_tokens} of them from a store" if report.num_stored_tokens else ""
        lines.append(
            f"  prompts     {report.num_prompt_tokens} tokens: {_percent(report.cached_share)} cached "
            f"({report.num_cached_tokens}{stored})"
        )
    if report.goodput_per_s is not None:
        shares = ", ".join(f"{name} {_percent(share)}" for name, share in report.attainments.items())
        lines.append(
            f"  goodput     {report.goodput_per_s:.2f} requests/s: {_percent(report.attainment)} met {objectives}"
            + (f" ({shares})" if len(report.attainments) > 1 else "")
        )
    lines += ["", "  ms  " + "".join(f"{name:>10}" for name in _COLUMNS) + f"{'of':>10}"]
    for name, distribution in (
        ("TTFT", report.ttft), ("ITL", report.itl), ("TPOT", report.tpot), ("E2E", report.e2e)
    ):  # fmt: skip
        lines.append(f"  {name:4}" + _cells(distribution))
    return [*lines, "", *(f"  {note}" for note in notes(report))]


def sweep_table(points: Sequence[Point]) -> list[str]:
    """A line for each rate, of at most 80 columns without objectives and 100 with them; latencies in ms."""
    head = ["RATE", "OK", "REQ/S", "TOK/S", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50", "p99"]
    if any(point.report.goodput_per_s is not None for point in points):
        head += ["GOODPUT", "SLO"]
    rows = [head, *(_sweep_row(point)[: len(head)] for point in points)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _sweep_row(point: Point) -> list[str]:
    one = point.report
    late = "" if one.kept_schedule else " late"
    return [
        f"{format_rate(point.rate)}{late}",
        f"{one.num_succeeded}/{one.num_requests}",
        f"{one.requests_per_s:.2f}",
        f"{one.output_tokens_per_s:.0f}",
        *(_latency(distribution, p) for distribution in (one.ttft, one.itl, one.e2e) for p in ("p50", "p99")),
        f"{one.goodput_per_s or 0:.2f}",
        _percent(one.attainment),
    ]


def _latency(distribution: Distribution, percentile: str) -> str:
    value_ms: float = getattr(distribution, percentile)
    if not distribution.count:
        return "-"
    return f"{value_ms:.0f}" if value_ms >= 100 else f"{value_ms:.3g}"


def late_warning(points: Sequence[Point]) -> list[str]:
    """Names the rates whose schedule the load did not keep; empty if it kept all."""
    late = [format_rate(point.rate) for point in points if not point.report.kept_schedule]
    if not late:
        return []
    return [
        f"WARNING: the load did not keep its schedule at {', '.join(late)}. TTFT and E2E leave out how late requests "
        "were sent, and include how late tokens were read: lower the rate, free this machine's cores, or run the load "
        "elsewhere."
    ]


def notes(report: Report) -> list[str]:
    lines = []
    if not report.kept_schedule:
        lines.append(
            f"late: requests were sent {report.lag.p99:.1f} ms late, the event loop woke up {report.loop_lag.p99:.1f} "
            f"ms late (p99; allowed: {LATE_MS:g})"
        )
    elif report.lag.count:
        lines.append(f"the load kept its schedule: lag p99 {report.lag.p99:.2f} ms, max {report.lag.max:.2f} ms")
    if report.held.count:
        lines.append(
            f"delayed by the concurrency limit: {report.held.count} of {report.num_requests} requests, "
            f"{report.held.p50:.0f} ms at the median, at most {report.held.max:.0f} ms; TTFT and E2E start at sending"
        )
    if report.num_shared_moments:
        share = report.num_shared_moments / report.itl.count
        lines.append(f"{share:.1%} of the gaps in ITL are 0: both tokens came in one message")
    if report.num_reported:
        lines.append(
            f"answers whose messages do not say how many tokens they carry: {report.num_reported} of "
            f"{report.num_succeeded}; their ITL is between messages"
        )
    if report.num_short:
        lines.append(f"answers of another length than requested: {report.num_short} of {report.num_succeeded}")
    for reason, count in report.failures.items():
        error = report.errors.get(reason, "")
        lines.append(f"{count} x {reason}" + (f", such as: {error[:200]}" if error else ""))
    return lines


def _cells(distribution: Distribution) -> str:
    if not distribution.count:
        return f"{'-':>10}" * len(_COLUMNS) + f"{0:10}"
    return "".join(f"{getattr(distribution, name):10.2f}" for name in _COLUMNS) + f"{distribution.count:10}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
