"""Stops asking a store that does not work, so that a dead store costs one timeout now and then and not one per page.

closed ──max_failures in a row──▶ open ──retry_s──▶ one try ──good──▶ closed
                                   ▲──────────bad─────┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Thread-safe. Ask `allows` before an operation, and tell `record` how it went."""

    def __init__(
        self, *, max_failures: int = 3, retry_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        """The store is left alone."""
        return self._num_failures >= self._max_failures

    def allows(self) -> bool:
        """Whether to try. While open, one caller per `retry_s` is let through."""
        with self._lock:
            if not self.is_open:
                return True
            now = self._clock()
            if now < self._retry_at:
                return False
            self._retry_at = now + self._retry_s
            return True

    def record(self, *, good: bool) -> None:
        """The outcome of one operation."""
        with self._lock:
            if good:
                self._num_failures = 0
                return
            self._num_failures += 1
            if self.is_open:
                self._retry_at = self._clock() + self._retry_s
