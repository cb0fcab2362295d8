"""How fast an instance prefills, and how fast KV gets to it: what this router has seen, in tokens per second.

    PREFILL_STARTED ──tokens waiting there and its own──▶ FIRST_TOKEN ──tokens it lacked──▶ KV_LOADED
                     a prefill instance's prefill speed             a decode instance's hand-over speed

A speed is measured by the equation in which it is used (docs/disaggregation.md), so that what the equation leaves out
(batching, a step that is under way, the network) is in the figure. The reports of an instance that had work waiting all
the time add to its prefill speed, whoever sent the work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from serving.events import RequestEvent

_SHORTEST_S = 1e-6
"""A span that the clock does not resolve."""
_BUSY_S = 0.2
"""What reports say of a shorter span is mostly when they happened to come."""


@dataclass(frozen=True, slots=True)
class Pace:
    """An instance's speeds at one moment, tokens per second; None: not measured."""

    prefill_per_s: float | None = None
    hand_over_per_s: float | None = None
    """KV that a decode instance takes over: what it lacked, by the time from the first token until it is loaded."""
    untried_s: float = math.inf
    """Seconds since this router last gave it a prompt to prefill, or decided to."""


UNMEASURED = Pace()


class Speed:
    """Tokens per second, smoothed: the quotient of two decayed sums, so that a long prompt counts for more."""

    __slots__ = ("_seconds", "_smoothing", "_tokens")

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, num_tokens: float, seconds: float) -> None:
        """Takes note of `num_tokens` that took `seconds`."""
        self._tokens += self._smoothing * (num_tokens - self._tokens)
        self._seconds += self._smoothing * (max(seconds, _SHORTEST_S) - self._seconds)

    @property
    def per_s(self) -> float | None:
        """None before anything was observed."""
        return self._tokens / self._seconds if self._tokens > 0 else None


class Speeds:
    """The speeds of one process. Owned by its pool member; attempts and reports tell it what they saw.

    `smoothing` is the weight of the newest observation, 0 to 1; with 0 nothing is ever measured. Prompts of at most
    `min_tokens` say more about the calls than about the computation, and are not counted.
    """

    def __init__(self, smoothing: float = 0.2, min_tokens: int = 64) -> None:
        self._smoothing = smoothing
        self._min_tokens = min_tokens
        self.clear()

    def clear(self) -> None:
        """Another process answers: nothing is known of it."""
        self._prefill = Speed(self._smoothing)
        self._hand_over = Speed(self._smoothing)
        self._tried_s = -math.inf
        self._busy_since: tuple[int, float] | None = None

    def pace(self, now_s: float) -> Pace:
        """The speeds as they stand."""
        return Pace(self._prefill.per_s, self._hand_over.per_s, now_s - self._tried_s)

    def tried(self, now_s: float) -> None:
        """A prompt goes there, and its speed will be known."""
        self._tried_s = now_s

    def prefilled(self, num_tokens: int, num_tokens_ahead: int, seconds: float) -> None:
        """A prompt, of which `num_tokens` were not cached, got its first token `seconds` after it had joined a queue
        of `num_tokens_ahead`."""
        if num_tokens > self._min_tokens:
            self._prefill.observe(num_tokens + num_tokens_ahead, seconds)

    def handed_over(self, num_tokens: int, seconds: float) -> None:
        """KV of `num_tokens` was complete here `seconds` after the first token."""
        if num_tokens > self._min_tokens:
            self._hand_over.observe(num_tokens, seconds)

    def reported(self, num_prefilled_tokens: int, num_waiting_tokens: int, now_s: float) -> None:
        """The instance tells what it has prefilled since its start, and what waits there now."""
        if num_waiting_tokens <= 0:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = (num_prefilled_tokens, now_s)
        elif now_s - self._busy_since[1] >= _BUSY_S:
            num_tokens = num_prefilled_tokens - self._busy_since[0]
            if num_tokens > self._min_tokens:
                self._prefill.observe(num_tokens, now_s - self._busy_since[1])
            self._busy_since = (num_prefilled_tokens, now_s)


@dataclass(frozen=True, slots=True)
class Work:
    """What one attempt gives its instances to do, as planned; tokens."""

    num_to_prefill: int
    num_ahead: int
    """Waiting where it is prefilled, before it."""
    num_to_move: int = 0


class AttemptClock:
    """Times one attempt for the speeds of its instances. `mark` stands between its legs and the request's timeline."""

    def __init__(
        self,
        work: Work,
        prefill: Speeds,
        decode: Speeds | None,
        mark: Callable[[RequestEvent], float],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefill` are the speeds of whoever prefills, `decode` those of who takes the KV over, if somebody does."""
        self._work = work
        self._prefill = prefill
        self._decode = decode
        self._mark = mark
        self._now = now
        self._since_s: float | None = None

    def started(self) -> None:
        """The call of whoever prefills has been opened."""
        self._since_s = self._now()

    def first_token(self) -> None:
        """Whoever prefills has brought its first token; from here on the hand-over counts."""
        now_s = self._now()
        if self._since_s is not None:
            self._prefill.prefilled(self._work.num_to_prefill, self._work.num_ahead, now_s - self._since_s)
        self._since_s = now_s

    def mark(self, event: RequestEvent) -> float:
        """Records `event` in the timeline; returns its time."""
        if event is RequestEvent.PREFILL_STARTED:
            self.started()
        elif event is RequestEvent.DECODE_STARTED and self._decode is None:
            self.first_token()
        elif event is RequestEvent.KV_LOADED and self._decode is not None and self._since_s is not None:
            self._decode.handed_over(self._work.num_to_move, self._now() - self._since_s)
        return self._mark(event)
