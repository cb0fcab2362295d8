"""When a channel to a name is replaced by one that resolves the name again.

    may be replaced ──no peer is reached──▶ replaced ──the wait, each time twice as long, is over──▶ may be replaced
                                                └── a peer is reached, or the longest wait passes twice without another
                                                    replacement: the wait is the first one again

In an outage each replacement connects to every address, and the calls on it may wait for that. Its end may be missed:
calls alone look at the channel, and there may be none, or one long stream.
"""

from __future__ import annotations

import math

MAX_REDIAL_S = 30.0


class Redial:
    """Paces the replacements of one channel, by any monotonic clock."""

    def __init__(self, min_s: float) -> None:
        """`min_s` is the shortest time between two of them."""
        self._min_s = self._wait_s = min_s
        self._max_s = max(min_s, MAX_REDIAL_S)
        self._last_s = -math.inf

    def is_due(self, now_s: float, *, is_ready: bool, is_failed: bool) -> bool:
        """Whether the channel, which reaches a peer or has failed to, is replaced now; then the caller replaces it."""
        is_new = now_s > self._last_s + 2 * self._max_s  # the first outage, or another one
        if is_ready or is_new:
            self._wait_s = self._min_s
        if not is_failed or now_s < self._last_s + self._wait_s:
            return False
        if not is_new:
            self._wait_s = min(2 * self._wait_s, self._max_s)
        self._last_s = now_s
        return True
