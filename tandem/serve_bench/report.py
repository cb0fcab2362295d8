"""From what a load saw to its figures. Pure functions; times in are seconds, times out milliseconds.

TTFT      from sending to the first token, per request
ITL       each gap between two tokens that follow each other in one request, those of all requests pooled
TPOT      (E2E - TTFT) / (output tokens - 1), per request that has at least two tokens
E2E       from sending to the last token, per request
goodput   requests a second that meet every objective
SLO       the share of the requests that meet every objective; one that failed or was refused does not

TTFT, ITL, TPOT, E2E and token rates are of requests that succeeded. Requests that the load itself cut off (Ctrl-C) are
counted as unfinished and stand in no other figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from tandem.serve_bench.records import INTERRUPTED, RequestRecord

LATE_MS = 10.0
"""A load whose lag has a 99th percentile above this did not keep its schedule."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Of values in ascending order, by the linear rule: the value at the rank (n - 1) * percent / 100, counted from 0,
    a straight line between the two ranks around it. That is numpy's default ("linear", Hyndman and Fan's type 7).

    Raises ValueError without values or outside 0..100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values: allowed are 0 to 100, of at least one value")
    rank = (len(values) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (rank - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of `count` values, in milliseconds; all 0 where there are none."""

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
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return cls(len(ordered), fmean(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a good answer takes at the most, in milliseconds; None: any time."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __bool__(self) -> bool:
        return any(limit_ms is not None for limit_ms in (self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in self.limits().items())

    def limits(self) -> dict[str, float]:
        """Those that are set, by the words ttft, tpot and e2e."""
        named = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2e": self.e2e_ms}
        return {name: limit for name, limit in named.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run; the module says what each word means."""

    num_requests: int
    """Sent, unfinished ones too."""
    num_succeeded: int
    num_failed: int
    """Neither refusals nor unfinished requests."""
    num_refused: int
    num_unfinished: int
    failures: dict[str, int]
    """Failures and refusals by reason, the most frequent first."""
    duration_s: float
    """From the first sending to the last end."""
    offered_per_s: float
    """Requests that became due a second: (requests - 1) / (last due - first due); 0 if all were due at once."""
    requests_per_s: float
    """Succeeded ones, over the duration; so are the rates below."""
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
    """Of each objective by itself."""
    lag: Distribution = field(default_factory=Distribution)
    """How late requests were sent, by the load's own fault."""
    loop_lag: Distribution = field(default_factory=Distribution)
    """How late the load's event loop woke up, which is how late it read; samples of `LoopWatch`."""
    held: Distribution = field(default_factory=Distribution)
    """How long the limit on concurrency held requests back, of those it did."""
    num_shared_moments: int = 0
    """Gaps of 0 in ITL: both tokens came in one message."""
    num_told: int = 0
    """Requests whose messages did not say how many tokens each carried: their ITL is between messages."""
    num_short: int = 0
    """Requests that succeeded with another number of tokens than was asked for."""

    @property
    def kept_schedule(self) -> bool:
        """Whether the figures are about the endpoint, and not about how slow this process is."""
        return max(self.lag.p99, self.loop_lag.p99) <= LATE_MS


def summarise(
    records: Sequence[RequestRecord], objectives: Objectives | None = None, loop_lags_s: Sequence[float] = ()
) -> Report:
    """The figures of one run; of no records, all of them are 0."""
    finished = [record for record in records if record.status != INTERRUPTED]
    good = [record for record in finished if record.succeeded]
    refused = [record for record in finished if record.refused]
    reasons = Counter(record.status or record.error for record in finished if not record.succeeded)
    duration_s = max((one.ended_s for one in records), default=0.0) - min((one.sent_s for one in records), default=0.0)
    num_prompt, num_output = (sum(one.num_prompt_tokens for one in good), sum(one.num_output_tokens for one in good))
    gaps_s = [later - earlier for one in good for earlier, later in pairwise(one.token_s)]
    met = None if not objectives else sum(all(_meets(one, objectives).values()) for one in good)
    return Report(
        num_requests=len(records),
        num_succeeded=len(good),
        num_failed=len(finished) - len(good) - len(refused),
        num_refused=len(refused),
        num_unfinished=len(records) - len(finished),
        failures=dict(reasons.most_common()),
        duration_s=duration_s,
        offered_per_s=_offered_per_s(records),
        requests_per_s=_rate(len(good), duration_s),
        output_tokens_per_s=_rate(num_output, duration_s),
        total_tokens_per_s=_rate(num_prompt + num_output, duration_s),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        max_in_flight=_max_in_flight(records),
        mean_in_flight=_rate(sum(one.ended_s - one.sent_s for one in records), duration_s),
        ttft=Distribution.of(_ttft_s(one) for one in good),
        itl=Distribution.of(gaps_s),
        tpot=Distribution.of(tpot_s for one in good if (tpot_s := _tpot_s(one)) is not None),
        e2e=Distribution.of(_e2e_s(one) for one in good),
        goodput_per_s=None if met is None else _rate(met, duration_s),
        attainment=None if met is None else _share(met, finished),
        attainments=_attainments(good, finished, objectives or Objectives()),
        lag=Distribution.of(one.lag_s for one in records),
        loop_lag=Distribution.of(loop_lags_s),
        held=Distribution.of(one.held_s for one in records if one.held_s),
        num_shared_moments=sum(gap_s == 0 for gap_s in gaps_s),
        num_told=sum(one.num_output_tokens != len(one.token_s) for one in good),
        num_short=sum(one.num_output_tokens != one.max_tokens for one in good),
    )


def _ttft_s(record: RequestRecord) -> float:
    return record.token_s[0] - record.sent_s


def _e2e_s(record: RequestRecord) -> float:
    return record.token_s[-1] - record.sent_s


def _tpot_s(record: RequestRecord) -> float | None:
    if record.num_output_tokens < 2:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (record.num_output_tokens - 1)


def _meets(record: RequestRecord, objectives: Objectives) -> dict[str, bool]:
    """By objective. One token has no TPOT, so it meets any."""
    took_s = {"ttft": _ttft_s(record), "tpot": _tpot_s(record) or 0.0, "e2e": _e2e_s(record)}
    return {name: took_s[name] * 1e3 <= limit_ms for name, limit_ms in objectives.limits().items()}


def _attainments(
    good: Sequence[RequestRecord], finished: Sequence[RequestRecord], objectives: Objectives
) -> dict[str, float]:
    met = Counter(name for one in good for name, is_met in _meets(one, objectives).items() if is_met)
    return {name: _share(met[name], finished) for name in objectives.limits()}


def _offered_per_s(records: Sequence[RequestRecord]) -> float:
    due_s = [record.due_s for record in records]
    return _rate(len(due_s) - 1, max(due_s) - min(due_s)) if due_s else 0.0


def _max_in_flight(records: Sequence[RequestRecord]) -> int:
    """One that ends in the moment in which another begins does not overlap with it."""
    changes = sorted([(one.ended_s, -1) for one in records] + [(one.sent_s, 1) for one in records])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _rate(amount: float, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _share(count: int, of: Sequence[object]) -> float:
    return count / len(of) if of else 0.0
