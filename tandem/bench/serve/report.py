"""The figures of a load, from its records. Pure functions; times in are seconds, times out milliseconds.

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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles

from tandem.bench.serve.endpoint import INTERRUPTED, RequestRecord

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
    """By status the most frequent message."""
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
    finished = [record for record in records if record.status != INTERRUPTED]
    good = [record for record in finished if record.succeeded]
    refused = [record for record in finished if record.refused]
    reasons = Counter(record.status or record.error for record in finished if not record.succeeded)
    errors = Counter((record.status, record.error) for record in finished if record.status and record.error)
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
        errors={status: error.removeprefix(f"{status}: ") for (status, error), _ in reversed(errors.most_common())},
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
