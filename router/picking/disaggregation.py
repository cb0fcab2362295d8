"""Whether a request is split between a prefill and a decode instance: a pure decision with its reason.

Where instances report what their steps cost, placement.py decides for `auto`. Elsewhere it compares the cost of both
ways in seconds of waiting. With n tokens that the decode instance lacks, and `more` additional ones (or fewer, if
negative) that the prefill instance would have to compute:

    local = (ahead_decode + n) / v_decode  +  weight * streams * n / v_decode
    split = (ahead_prefill + n + more) / v_prefill  +  n / v_hand_over

The first term of each is the time to the first token, the second the interruption: of the streams that run at the
decode instance, or of this one between its first two tokens. Both grow with n by a constant per token, so splitting
pays from some length on, or never. docs/disaggregation.md explains every term.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from router.picking.settings import DisaggregationSettings


class Decision(enum.Enum):
    """How a request is served."""

    DISAGGREGATE = "disaggregate"
    LOCAL = "local"  # one instance prefills and decodes
    REFUSE = "refuse"  # neither is allowed


class Reason(enum.StrEnum):
    """Why, as a metric's label."""

    OFF = "off"
    """The mode is never."""
    ON = "on"
    """The mode is always."""
    NO_PREFILL = "no_prefill"
    """No prefill instance may be picked."""
    ALONE = "alone"
    """The mode is always and no prefill instance is available, but the stream has begun and must not break."""
    LAST_TOKEN = "last_token"
    """It would be split, but one token is left, which the prefill instance computes. It serves the request alone."""
    SHORT = "short"
    """At most `min_tokens` tokens in all."""
    CACHED = "cached"
    """At most `min_tokens` that the decode instance does not have already."""
    UNMEASURED = "unmeasured"
    """More than `min_tokens`, and the speeds are unknown."""
    ESTIMATE = "estimate"
    """By the comparison of costs."""
    QUEUE = "queue"
    """The comparison would split it without the queue at the prefill instance."""
    PROBE = "probe"
    """Split against the comparison, to renew an old measurement."""
    MARGIN = "margin"
    """By step costs: a split would cost less, but not by a fifth."""
    OBJECTIVE = "objective"
    """By step costs: a split would cost less, but not hold them with a tenth to spare."""
    OVERLOAD = "overload"
    """No instance holds the objectives: the least loaded one gets it."""


class Disaggregation(NamedTuple):
    """The decision, its reason, and an explanation in ASCII for a trailer."""

    decision: Decision
    reason: Reason
    explanation: str


@dataclass(frozen=True, slots=True)
class Situation:
    """One request and the two instances it would go to. Speeds are tokens per second; None: not measured."""

    num_tokens: int
    """Whose KV it needs: the prompt and, after a failover, the emitted tokens."""
    num_cached_at_decode: int = 0
    num_cached_at_prefill: int = 0
    num_ahead_at_decode: int = 0
    """Tokens waiting to be prefilled there."""
    num_ahead_at_prefill: int = 0
    num_streams: int = 0
    """Requests at the decode instance that a prefill there would delay."""
    decode_per_s: float | None = None
    prefill_per_s: float | None = None
    hand_over_per_s: float | None = None
    since_prefill_s: float = 0.0
    """Seconds since this router last assigned a prompt to the prefill instance."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_cached_at_decode <= self.num_tokens
        assert 0 <= self.num_cached_at_prefill <= self.num_tokens

    @property
    def num_uncached(self) -> int:
        """Tokens to prefill at the decode instance, or to hand over to it."""
        return self.num_tokens - self.num_cached_at_decode


def decide(
    situation: Situation, settings: DisaggregationSettings, *, prefill_available: bool, has_begun: bool = False
) -> Disaggregation:
    """How the request is served. `has_begun`: some of its tokens were sent to the client already."""
    if settings.mode == "never":
        return Disaggregation(Decision.LOCAL, Reason.OFF, "disaggregation is off")
    if settings.mode == "always":
        if prefill_available:
            return Disaggregation(Decision.DISAGGREGATE, Reason.ON, "disaggregation is on")
        if has_begun:
            explanation = (
                "disaggregation is on, but no prefill instance is available: the decode instance continues alone"
            )
            return Disaggregation(Decision.LOCAL, Reason.ALONE, explanation)
    if not prefill_available:
        decision = Decision.REFUSE if settings.mode == "always" else Decision.LOCAL
        return Disaggregation(decision, Reason.NO_PREFILL, "no prefill instance is available")
    return _by_cost(situation, settings)


def _by_cost(situation: Situation, settings: DisaggregationSettings) -> Disaggregation:
    num_uncached, min_tokens = situation.num_uncached, settings.min_tokens
    if situation.num_tokens <= min_tokens:
        tokens = "1 token" if situation.num_tokens == 1 else f"{situation.num_tokens} tokens"
        explanation = f"{tokens} to prefill, at most {min_tokens} stay local"
        return Disaggregation(Decision.LOCAL, Reason.SHORT, explanation)
    if num_uncached <= min_tokens:
        explanation = f"{num_uncached} of {situation.num_tokens} tokens not cached, at most {min_tokens} stay local"
        return Disaggregation(Decision.LOCAL, Reason.CACHED, explanation)
    if situation.prefill_per_s is None:
        explanation = f"{num_uncached} tokens to prefill, more than {min_tokens}; no speed is measured"
        return Disaggregation(Decision.DISAGGREGATE, Reason.UNMEASURED, explanation)
    from_tokens = break_even(situation, settings)
    explanation = _describe(situation, from_tokens)
    if num_uncached > from_tokens:
        return Disaggregation(Decision.DISAGGREGATE, Reason.ESTIMATE, explanation)
    if num_uncached > break_even(replace(situation, num_ahead_at_prefill=0), settings):
        return Disaggregation(Decision.LOCAL, Reason.QUEUE, explanation)
    if situation.since_prefill_s >= settings.probe_s and situation.num_ahead_at_prefill == 0:
        return Disaggregation(Decision.DISAGGREGATE, Reason.PROBE, f"split to measure again; {explanation}")
    return Disaggregation(Decision.LOCAL, Reason.ESTIMATE, explanation)


def break_even(situation: Situation, settings: DisaggregationSettings) -> float:
    """Uncached tokens above which splitting costs less; infinite when a token costs as much split as local, or more.

    Needs a measured prefill speed. A decode instance without a measurement is assumed to prefill as fast as the prefill
    instance, and a hand-over without one to be free, so that it is tried where it may pay.
    """
    prefill_per_s = situation.prefill_per_s
    assert prefill_per_s is not None, "without a speed there is nothing to compare"
    decode_per_s = situation.decode_per_s or prefill_per_s
    hand_over_s = 1 / situation.hand_over_per_s if situation.hand_over_per_s else 0.0
    streams = situation.num_streams + settings.expected_streams
    saved_per_token_s = (1 + settings.interruption_weight * streams) / decode_per_s - 1 / prefill_per_s - hand_over_s
    if saved_per_token_s <= 0:
        return math.inf
    more = situation.num_cached_at_decode - situation.num_cached_at_prefill
    wait_s = (situation.num_ahead_at_prefill + more) / prefill_per_s
    longer_wait_s = wait_s - situation.num_ahead_at_decode / decode_per_s
    return max(0.0, longer_wait_s / saved_per_token_s)


def _describe(situation: Situation, from_tokens: float) -> str:
    return (
        f"{situation.num_uncached} tokens to prefill, "
        f"{f'worth splitting above {round(from_tokens)}' if math.isfinite(from_tokens) else 'not worth splitting'}"
        f" (decode: {_speed(situation.decode_per_s)}, {situation.num_ahead_at_decode} tokens waiting, "
        f"{situation.num_streams} streams; "
        f"prefill: {_speed(situation.prefill_per_s)}, {situation.num_ahead_at_prefill} tokens waiting; "
        f"hand-over: {_speed(situation.hand_over_per_s)})"
    )


def _speed(per_s: float | None) -> str:
    return "speed not measured" if per_s is None else f"{per_s:.0f} tokens/s"
