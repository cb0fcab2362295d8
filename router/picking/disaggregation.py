"""Whether a request is split between a prefill and a decode instance: a pure decision with its reason.

`auto` compares what the prompt costs both ways, in seconds that somebody waits. With n tokens that the decode instance
lacks, and so many more (or fewer) that the prefill instance would have to compute:

    local = (ahead_decode + n) / v_decode  +  weight * streams * n / v_decode
    split = (ahead_prefill + n + more) / v_prefill  +  n / v_hand_over

The first term of each is the time to the first token, the second the interruption: of the streams that run at the
decode instance, or of this one between its first two tokens. Both grow with n by a constant per token, so splitting
pays from some length on, or never. docs/disaggregation.md tells where every figure comes from.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

Mode = Literal["always", "auto", "never"]


class Decision(enum.Enum):
    """What becomes of a request."""

    DISAGGREGATE = "disaggregate"
    LOCAL = "local"  # the decode instance prefills too
    REFUSE = "refuse"  # neither is allowed


class Reason(enum.StrEnum):
    """Why, in one word that may be a metric's label."""

    OFF = "off"
    """The mode is never."""
    ON = "on"
    """The mode is always."""
    NO_PREFILL = "no_prefill"
    """No prefill instance may be picked."""
    ALONE = "alone"
    """The mode is always, but the stream has begun: it is better ended by a decode instance alone than not at all."""
    SHORT = "short"
    """At most `min_tokens` tokens in all."""
    CACHED = "cached"
    """At most `min_tokens` that the decode instance does not have already."""
    UNMEASURED = "unmeasured"
    """More than `min_tokens`, and nothing is known of the speeds."""
    ESTIMATE = "estimate"
    """The comparison."""
    QUEUE = "queue"
    """The comparison would have it split, but for the queue at the prefill instance."""
    PROBE = "probe"
    """Split against the comparison, to measure again what has not been measured for long."""


class Disaggregation(NamedTuple):
    """The decision, why, and the same in ASCII words that may stand in a trailer."""

    decision: Decision
    reason: Reason
    words: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of one request and of the two instances it would go to. Speeds are tokens per second, None where
    nothing was measured."""

    num_tokens: int
    """Whose KV it needs: the prompt and, after a failover, what was emitted."""
    num_cached_at_decode: int = 0
    num_cached_at_prefill: int = 0
    num_ahead_at_decode: int = 0
    """Tokens that wait to be prefilled there."""
    num_ahead_at_prefill: int = 0
    num_streams: int = 0
    """Requests at the decode instance that a prefill there would hold up."""
    decode_per_s: float | None = None
    prefill_per_s: float | None = None
    hand_over_per_s: float | None = None
    untried_s: float = 0.0
    """Seconds since this router last gave the prefill instance something to do."""

    def __post_init__(self) -> None:
        assert 0 <= self.num_cached_at_decode <= self.num_tokens
        assert 0 <= self.num_cached_at_prefill <= self.num_tokens

    @property
    def num_uncached(self) -> int:
        """Tokens to prefill at the decode instance, or to hand over to it."""
        return self.num_tokens - self.num_cached_at_decode


@dataclass(frozen=True, slots=True)
class Limits:
    """The constants of `auto`."""

    min_tokens: int
    """Never split for so few uncached tokens; the only threshold while nothing is measured."""
    interruption_weight: float = 1.0
    """Seconds of time to first token that one second by which one running stream is held up counts as."""
    expected_streams: float = 1.0
    """Streams taken to begin at a decode instance while it prefills, besides those that run."""
    probe_s: float = 30.0
    """Seconds without a split request after which one is split to measure, if nobody waits at the prefill instance."""


def decide(
    mode: Mode, situation: Situation, limits: Limits, *, prefill_available: bool, has_begun: bool = False
) -> Disaggregation:
    """What becomes of a request in this situation. `has_begun`: some of its tokens are with the client already."""
    if mode == "never":
        return Disaggregation(Decision.LOCAL, Reason.OFF, "disaggregation is off")
    if mode == "always":
        if prefill_available:
            return Disaggregation(Decision.DISAGGREGATE, Reason.ON, "disaggregation is on")
        if has_begun:
            words = "disaggregation is on, but no prefill instance is available: the decode instance goes on alone"
            return Disaggregation(Decision.LOCAL, Reason.ALONE, words)
    if not prefill_available:
        decision = Decision.REFUSE if mode == "always" else Decision.LOCAL
        return Disaggregation(decision, Reason.NO_PREFILL, "no prefill instance is available")
    return _by_cost(situation, limits)


def _by_cost(situation: Situation, limits: Limits) -> Disaggregation:
    num_uncached, min_tokens = situation.num_uncached, limits.min_tokens
    if situation.num_tokens <= min_tokens:
        words = f"{situation.num_tokens} tokens to prefill, at most {min_tokens} stay local"
        return Disaggregation(Decision.LOCAL, Reason.SHORT, words)
    if num_uncached <= min_tokens:
        words = f"{num_uncached} of {situation.num_tokens} tokens not cached, at most {min_tokens} stay local"
        return Disaggregation(Decision.LOCAL, Reason.CACHED, words)
    if situation.prefill_per_s is None:
        words = f"{num_uncached} tokens to prefill, more than {min_tokens}; no speed is measured"
        return Disaggregation(Decision.DISAGGREGATE, Reason.UNMEASURED, words)
    from_tokens = break_even(situation, limits)
    words = _in_words(situation, from_tokens)
    if num_uncached > from_tokens:
        return Disaggregation(Decision.DISAGGREGATE, Reason.ESTIMATE, words)
    if num_uncached > break_even(situation, limits, num_ahead_at_prefill=0):
        return Disaggregation(Decision.LOCAL, Reason.QUEUE, words)
    if situation.untried_s >= limits.probe_s and situation.num_ahead_at_prefill == 0:
        return Disaggregation(Decision.DISAGGREGATE, Reason.PROBE, f"split to measure again; {words}")
    return Disaggregation(Decision.LOCAL, Reason.ESTIMATE, words)


def break_even(situation: Situation, limits: Limits, *, num_ahead_at_prefill: int | None = None) -> float:
    """Uncached tokens above which splitting costs less; infinite when a token costs as much split as local, or more.

    Needs a measured prefill speed. A decode instance that was not seen prefilling is taken to be as fast as the prefill
    instance, and a hand-over that was not measured to be free, so that it is tried where it may pay.
    """
    prefill_per_s = situation.prefill_per_s
    assert prefill_per_s is not None, "without a speed there is nothing to compare"
    decode_per_s = situation.decode_per_s or prefill_per_s
    hand_over_s = 1 / situation.hand_over_per_s if situation.hand_over_per_s else 0.0
    streams = situation.num_streams + limits.expected_streams
    saved_per_token_s = (1 + limits.interruption_weight * streams) / decode_per_s - 1 / prefill_per_s - hand_over_s
    if saved_per_token_s <= 0:
        return math.inf
    ahead = situation.num_ahead_at_prefill if num_ahead_at_prefill is None else num_ahead_at_prefill
    more = situation.num_cached_at_decode - situation.num_cached_at_prefill
    longer_wait_s = (ahead + more) / prefill_per_s - situation.num_ahead_at_decode / decode_per_s
    return max(0.0, longer_wait_s / saved_per_token_s)


def _in_words(situation: Situation, from_tokens: float) -> str:
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
