"""The clock by which admission measures: waits, stays and rates are of this process's doing only while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

_MOST_S = 1.0
"""That passes between two readings: what is longer was a halt, as of a container or a machine that is paused."""


class RunningClock:
    """Monotonic seconds without halts of this process. To be read several times a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._running_s = 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        self._running_s += min(now_s - self._read_s, _MOST_S)
        self._read_s = now_s
        return self._running_s
