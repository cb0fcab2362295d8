"""When a member of a local stack that has ended by itself is started again: later every time, and not for ever."""

from __future__ import annotations

from collections import deque

FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 8.0
MAX_ENDS = 5
WITHIN_S = 60.0


class Restarts:
    """Keeps count of every member's ends. Owned by LocalStack; all times are of the monotonic clock."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[float]] = {}
        self._restart_at_s: dict[str, float] = {}

    def ended(self, name: str, now_s: float) -> float | None:
        """Seconds until it is to be started again; None when it has ended more than 5 times within a minute."""
        ends = self._ends.setdefault(name, deque(maxlen=MAX_ENDS + 1))
        ends.append(now_s)
        num_recent = sum(now_s - end_s < WITHIN_S for end_s in ends)
        if num_recent > MAX_ENDS:
            return None
        backoff_s = min(FIRST_BACKOFF_S * 2.0 ** (num_recent - 1), _MAX_BACKOFF_S)
        self._restart_at_s[name] = now_s + backoff_s
        return backoff_s

    def awaits(self, name: str) -> bool:
        """Whether its end is known and its next start still to come."""
        return name in self._restart_at_s

    def is_due(self, name: str, now_s: float) -> bool:
        """Whether it is time to start it; says so once."""
        if now_s < self._restart_at_s[name]:
            return False
        del self._restart_at_s[name]
        return True

    def forget(self, name: str) -> None:
        """It is not to be started again, and another one may come that has its name."""
        self._ends.pop(name, None)
        self._restart_at_s.pop(name, None)
