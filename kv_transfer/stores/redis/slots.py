"""Turns at a few connections, for threads that come back for the next one at once."""

from __future__ import annotations

import math
import threading
import time

PATIENCE_S = 0.05
"""Some ten pages."""


class Slots:
    """A semaphore in which no thread is overtaken for longer than `PATIENCE_S`. Strict order would leave a connection
    idle until the next thread runs: a sixth of the throughput. Without any, a page may wait as long as others come."""

    def __init__(self, num_free: int) -> None:
        self._changed = threading.Condition()
        self._num_free = num_free
        self._waiting: dict[int, float] = {}  # since when, the longest first, by thread

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._waiting[me] = time.monotonic()
            try:
                while self._num_free == 0 or self._impatient() not in (None, me):
                    if self._num_free:
                        self._changed.notify_all()  # this one was notified before the other became impatient
                    self._changed.wait()
                self._num_free -= 1
            finally:  # also after Ctrl-C: or it would be the longest for ever
                del self._waiting[me]

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """A slot is free, or a new one is there."""
        with self._changed:
            self._num_free += 1
            self._changed.notify(1 if self._impatient() is None else len(self._waiting))

    def _impatient(self) -> int | None:
        me, since_s = next(iter(self._waiting.items()), (0, math.inf))
        return me if time.monotonic() - since_s > PATIENCE_S else None
