"""How many attempts may be under way again at one time, so that a dying pool is not buried under its own retries.

    failed before its first token ──wait for a turn──▶ under way ──first token, or failed again──▶ over
    failed after it (a resumption) ──────at once─────▶ under way ──────────────────────────────▶ over

A retry first waits for a turn and is refused only when none comes: one death fails many requests together, and each of
them can be served elsewhere, a few at a time. A resumption never waits here: its client has read tokens, the work of
all of them is lost if it ends, and the client would begin again with more. It counts, though, so that retries wait
while streams resume; its own bounds are `failover.max_resumptions` and the trials (trials.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from router.config import FailoverSettings
from router.news import News


class Turn:
    """One attempt that is under way again. `end` it at its first token or its end, whichever is first."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget: RetryBudget | None = budget

    def end(self) -> None:
        """Idempotent."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._ended()


class RetryBudget:
    """Counts what is active and what is under way again. One per router, on one event loop."""

    def __init__(self, settings: FailoverSettings) -> None:
        self._settings = settings
        self._num_active = 0
        self._num_under_way = 0
        self._news = News()

    @property
    def num_under_way(self) -> int:
        """Retries and resumptions that have brought no token yet."""
        return self._num_under_way

    @property
    def limit(self) -> int:
        """How many may be under way now."""
        return max(self._settings.min_retries_under_way, int(self._settings.retry_share * self._num_active))

    @contextmanager
    def active(self) -> Iterator[None]:
        """While inside, one more choice of a request is active."""
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1

    def resume(self) -> Turn:
        """A turn for a stream that has begun."""
        self._num_under_way += 1
        return Turn(self)

    async def retry(self) -> Turn | None:
        """A turn for a request that has no token yet; None when none has come free in `failover.retry_wait_s`."""
        until_s = time.monotonic() + self._settings.retry_wait_s
        while self._num_under_way >= self.limit:
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                return None
            await self._news.wait(remaining_s)
        return self.resume()

    def _ended(self) -> None:
        self._num_under_way -= 1
        self._news.tell()
