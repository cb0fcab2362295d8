"""The report of a load: its figures, from the records; a page for one run, a table with a line for each run of a
sweep, and a JSON file. Times in are seconds, times out milliseconds.

TTFT      from sending to the first token, per request
ITL       each gap between two tokens that follow each other in one request, those of all requests pooled
TPOT      (E2E - TTFT) / (output tokens - 1), per request that has at least two tokens
E2E       from sending to the last token, per request
goodput   requests that meet every objective over the duration, that of the last answers included, as vLLM's
SLO       the share of requests that meet every objective; failed and refused ones do not
cached    prompt tokens whose KV the endpoint had, in a prefix cache or a store, and did not compute

TTFT, ITL, TPOT, E2E and token rates are of requests that succeeded. Requests that the load itself cancelled (Ctrl-C)
are counted as unfinished and are in no latency, goodput or token figure; duration, offered rate, requests in flight and
lag include them.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import psutil

from engine.machine import available_bytes, cpu_quota, usable_cores
from tandem.bench.serve.endpoint import INTERRUPTED, RequestRecord

SCHEMA_VERSION = 2
_PACKAGES = ("tandem-llm", "grpcio", "protobuf", "httpx", "numpy")
_GIT_TIMEOUT_S = 5.0
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
LATE_MS = 10.0
"""A load whose lag has a 99th percentile above this did not keep its schedule."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of `count` values, in milliseconds; all 0 where there are none. Percentiles are linear between two ranks, as
    numpy's default (Hyndman and Fan's type 7)."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Distribution:
        """Of values in seconds, in any order."""
        ordered = sorted(value * 1e3 for value in values_s)
        if not ordered:
            return cls()
        percentiles = quantiles(ordered, n=100, method="inclusive") if len(ordered) > 1 else ordered * 99
        p50, p90, p95, p99 = (percentiles[percent - 1] for percent in (50, 90, 95, 99))
        return cls(len(ordered), fmean(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper limits for a good answer, in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in self.limits().items())

    def limits(self) -> dict[str, float]:
        """The limits that are set, by name: ttft, tpot and e2e."""
        named = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in named.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run; the module's docstring defines them."""

    num_requests: int
    """Sent, unfinished ones too."""
    num_succeeded: int
    num_failed: int
    """Without refused and unfinished ones."""
    num_refused: int
    num_unfinished: int
    failures: dict[str, int]
    """Failed and refused requests by status, the most frequent first."""
    errors: dict[str, str]
    """By status the most frequent message, with the id of one such request."""
    duration_s: float
    """From the first sending to the last end."""
    offered_per_s: float
    """Requests that became due per second: (requests - 1) / (last due - first due); 0 if all were due at once."""
    requests_per_s: float
    """Succeeded ones over the duration, like the rates below."""
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output."""
    num_prompt_tokens: int
    num_output_tokens: int
    max_in_flight: int
    mean_in_flight: float
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution
    goodput_per_s: float | None
    """None without objectives; so is attainment."""
    attainment: float | None
    attainments: dict[str, float] = field(default_factory=dict)
    """Of each objective alone."""
    lag: Distribution = field(default_factory=Distribution)
    """Delay of sending that the load itself caused."""
    loop_lag: Distribution = field(default_factory=Distribution)
    """Delay of the load's event loop, and so of reading tokens; samples of `loop_lags`."""
    held: Distribution = field(default_factory=Distribution)
    """Delay by the concurrency limit, of the requests that it delayed."""
    num_shared_moments: int = 0
    """Gaps of 0 in ITL: both tokens came in one message."""
    num_reported: int = 0
    """Requests whose messages do not say how many tokens each carries: their ITL is between messages."""
    num_short: int = 0
    """Succeeded requests with another number of tokens than requested."""
    num_cached_tokens: int | None = None
    """Of the prompts; None: no answer reports them."""
    num_stored_tokens: int = 0
    """Of these, those from a store."""
    cached_share: float | None = None
    """Of the prompt tokens of answers that report it."""

    @property
    def kept_schedule(self) -> bool:
        """Whether this process kept up with its schedule: only then the figures are about the endpoint."""
        return max(self.lag.p99, self.loop_lag.p99) <= LATE_MS


def summarise(
    records: Sequence[RequestRecord], objectives: Objectives | None = None, loop_lags_s: Sequence[float] = ()
) -> Report:
    """The figures of one run; without records they are 0."""
    from serving.errors import without_request_id  # not at the top: benchmarks without services need no gRPC

    finished = [record for record in records if record.status != INTERRUPTED]
    good = [record for record in finished if record.succeeded]
    refused = [record for record in finished if record.refused]
    reasons = Counter(record.status or record.error for record in finished if not record.succeeded)
    with_error = [record for record in finished if record.status and record.error]
    examples = {without_request_id(record.error): record.error for record in with_error}
    errors = Counter((record.status, without_request_id(record.error)) for record in with_error)
    duration_s = max((one.ended_s for one in records), default=0.0) - min((one.sent_s for one in records), default=0.0)
    num_prompt, num_output = (sum(one.num_prompt_tokens for one in good), sum(one.num_output_tokens for one in good))
    gaps_s = [gap_s for one in good for gap_s in one.gaps_s]
    due_s = [record.due_s for record in records]
    limits = (objectives or Objectives()).limits()
    meets = [_meets(one, limits) for one in good]
    num_met = sum(all(one.values()) for one in meets)
    cached = [(one.num_cached_tokens, one.num_prompt_tokens) for one in good if one.num_cached_tokens is not None]
    num_cached = sum(num_tokens for num_tokens, _ in cached)
    return Report(
        num_requests=len(records),
        num_succeeded=len(good),
        num_failed=len(finished) - len(good) - len(refused),
        num_refused=len(refused),
        num_unfinished=len(records) - len(finished),
        failures=dict(reasons.most_common()),
        errors={
            status: examples[error].removeprefix(f"{status}: ") for (status, error), _ in reversed(errors.most_common())
        },
        duration_s=duration_s,
        offered_per_s=_ratio(len(due_s) - 1, max(due_s) - min(due_s)) if due_s else 0.0,
        requests_per_s=_ratio(len(good), duration_s),
        output_tokens_per_s=_ratio(num_output, duration_s),
        total_tokens_per_s=_ratio(num_prompt + num_output, duration_s),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        max_in_flight=_max_in_flight(records),
        mean_in_flight=_ratio(sum(one.ended_s - one.sent_s for one in records), duration_s),
        ttft=Distribution.of(one.ttft_s for one in good),
        itl=Distribution.of(gaps_s),
        tpot=Distribution.of(tpot_s for one in good if (tpot_s := _tpot_s(one)) is not None),
        e2e=Distribution.of(one.e2e_s for one in good),
        goodput_per_s=_ratio(num_met, duration_s) if limits else None,
        attainment=_ratio(num_met, len(finished)) if limits else None,
        attainments={name: _ratio(sum(one[name] for one in meets), len(finished)) for name in limits},
        lag=Distribution.of(one.lag_s for one in records),
        loop_lag=Distribution.of(loop_lags_s),
        held=Distribution.of(one.held_s for one in records if one.held_s),
        num_shared_moments=sum(gap_s == 0 for gap_s in gaps_s),
        num_reported=sum(one.num_output_tokens != len(one.token_s) for one in good),
        num_short=sum(one.num_output_tokens != one.max_tokens for one in good),
        num_cached_tokens=num_cached if cached else None,
        num_stored_tokens=sum(one.num_stored_tokens for one in good),
        cached_share=_ratio(num_cached, sum(num_tokens for _, num_tokens in cached)) if cached else None,
    )


def _tpot_s(record: RequestRecord) -> float | None:
    if record.num_output_tokens < 2:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (record.num_output_tokens - 1)


def _meets(record: RequestRecord, limits: Mapping[str, float]) -> dict[str, bool]:
    """By objective. One token has no TPOT, so it meets any."""
    took_s = {"ttft": record.ttft_s, "tpot": _tpot_s(record) or 0.0, "e2e": record.e2e_s}
    return {name: took_s[name] * 1e3 <= limit_ms for name, limit_ms in limits.items()}


def _max_in_flight(records: Sequence[RequestRecord]) -> int:
    """Requests that end exactly when another begins do not overlap with it."""
    changes = sorted([(one.ended_s, -1) for one in records] + [(one.sent_s, 1) for one in records])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0


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
    """A line for each rate, of at most 80 columns without objectives and 110 with them; latencies in ms."""
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
