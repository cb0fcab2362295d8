"""How fast an instance prefills, and how fast KV reaches it, as measured by this router in tokens per second.

    PREFILL_STARTED ──tokens waiting there and its own──▶ FIRST_TOKEN ──tokens it lacked──▶ KV_LOADED
                     a prefill instance's prefill speed             a decode instance's hand-over speed

A speed is measured by the equation in which it is used (docs/disaggregation.md), so that it includes what the equation
leaves out: batching, the step that is under way, the network. Load reports of an instance that always had work waiting
add to its prefill speed, whichever router sent the work.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_SHORTEST_S = 1e-6
"""For intervals that the clock does not resolve."""
_RECENT_S = 5.0
_HAND_OVER_KNOWN_S = 300.0
"""After the last hand-over: a slow one, as the first that makes connections, must not prevent all others for good."""
_MIN_BUSY_S = 0.2
"""Over a shorter interval, jitter in the arrival of reports dominates."""


@dataclass(frozen=True, slots=True)
class ThroughputEstimate:
    """An instance's speeds at one moment, tokens per second; None: not measured."""

    prefill_per_s: float | None = None
    hand_over_per_s: float | None = None
    """KV loaded by a decode instance: the tokens it lacked, over the time from the first token until they are there.
    None too where the last hand-over was long ago."""
    since_prefill_s: float = math.inf
    """Seconds since this router last assigned it a prompt to prefill."""
    recent_prefill_per_s: float = 0.0
    """Prompt tokens per second of the last seconds: assigned by this router or, if that is more, computed."""
    num_recent_computed: int = 0
    """Prompt tokens of the last seconds that its load reports show as computed."""


UNMEASURED = ThroughputEstimate()


@dataclass(slots=True)
class SmoothedRate:
    """Tokens per second, smoothed: the quotient of two decayed sums, so that a long prompt counts for more."""

    smoothing: float
    _tokens: float = 0.0
    _seconds: float = 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        self._tokens += self.smoothing * (num_tokens - self._tokens)
        self._seconds += self.smoothing * (max(seconds, _SHORTEST_S) - self._seconds)

    @property
    def per_s(self) -> float | None:
        """None before anything was observed."""
        return self._tokens / self._seconds if self._tokens > 0 else None


class ThroughputEstimator:
    """The speeds of one process. Owned by its upstream instance; fed by attempts and load reports.

    `smoothing` is the weight of the newest measurement, 0 to 1; with 0 nothing is measured. Prompts of at most
    `min_tokens` measure the calls more than the computation, and are ignored.
    """

    def __init__(self, smoothing: float = 0.2, min_tokens: int = 64) -> None:
        self._smoothing = smoothing
        self._min_tokens = min_tokens
        self.clear()

    def clear(self) -> None:
        """Another process answers, of which nothing is measured."""
        self._prefill = SmoothedRate(self._smoothing)
        self._hand_over = SmoothedRate(self._smoothing)
        self._assigned_s = -math.inf
        self._hand_over_s = math.inf  # the last one that was assigned; none is old yet
        self._is_hand_over_old = False
        self._busy_since: tuple[int, float] | None = None
        self._recent_assigned: deque[tuple[float, int]] = deque()
        self._num_recent_tokens = 0  # of these: views are made too often to add them up each time
        self._recent_computed: deque[tuple[float, int]] = deque()  # the counter at that time

    def estimate(self, now_s: float) -> ThroughputEstimate:
        self._forget(now_s)
        since_s, computed = now_s - self._assigned_s, self._recent_computed
        num_computed = computed[-1][1] - computed[0][1] if computed else 0
        recent_per_s = max(self._num_recent_tokens, num_computed) / _RECENT_S
        hand_over_per_s = self._hand_over.per_s if now_s - self._hand_over_s <= _HAND_OVER_KNOWN_S else None
        return ThroughputEstimate(self._prefill.per_s, hand_over_per_s, since_s, recent_per_s, num_computed)

    def prefill_assigned(self, now_s: float, num_tokens: int = 0) -> None:
        """The instance gets a prompt with `num_tokens` to prefill, which will be measured."""
        self._assigned_s = now_s
        self._recent_assigned.append((now_s, num_tokens))
        self._num_recent_tokens += num_tokens

    def prefilled(self, num_tokens: int, num_tokens_ahead: int, seconds: float) -> None:
        """A prompt, of which `num_tokens` were not cached, got its first token `seconds` after it had joined a queue
        of `num_tokens_ahead`."""
        if num_tokens > self._min_tokens:
            self._prefill.observe(num_tokens + num_tokens_ahead, seconds)

    def hand_over_assigned(self, now_s: float) -> None:
        """KV will be handed over to the instance: one at a time tries whether an old speed still holds."""
        self._is_hand_over_old |= now_s - self._hand_over_s > _HAND_OVER_KNOWN_S
        self._hand_over_s = now_s

    def handed_over(self, num_tokens: int, seconds: float) -> None:
        """KV of `num_tokens` was complete here `seconds` after the first token."""
        if num_tokens > self._min_tokens:
            if self._is_hand_over_old:
                self._hand_over, self._is_hand_over_old = SmoothedRate(self._smoothing), False
            self._hand_over.observe(num_tokens, seconds)

    def report_received(self, num_prefilled_tokens: int, num_waiting_tokens: int, now_s: float) -> None:
        """A load report: the tokens prefilled since the instance's start, and those waiting now."""
        self._forget(now_s)  # not only when it is asked for: a process with two addresses is asked at one of them
        self._recent_computed.append((now_s, num_prefilled_tokens))
        if num_waiting_tokens <= 0:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = (num_prefilled_tokens, now_s)
        elif now_s - self._busy_since[1] >= _MIN_BUSY_S:
            num_tokens = num_prefilled_tokens - self._busy_since[0]
            if num_tokens > self._min_tokens:
                self._prefill.observe(num_tokens, now_s - self._busy_since[1])
            self._busy_since = (num_prefilled_tokens, now_s)

    def _forget(self, now_s: float) -> None:
        """What is older than the last seconds."""
        assigned, computed = self._recent_assigned, self._recent_computed
        while assigned and assigned[0][0] < now_s - _RECENT_S:
            self._num_recent_tokens -= assigned.popleft()[1]
        while computed and computed[0][0] < now_s - _RECENT_S:
            computed.popleft()


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one attempt, as planned, in tokens."""

    num_to_prefill: int
    num_ahead: int
    """Waiting before it at the instance that prefills it."""
    num_to_move: int = 0
