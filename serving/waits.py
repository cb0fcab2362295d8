"""Waits on an event loop: for a change, for an event, and until a channel to a name is dialled again.

Imports nothing but the standard library, since the Python client uses it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

MAX_REDIAL_S = 30.0


async def wait_at_most(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Returns when `event` is set, or after `timeout_s`; whether it is set then."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


@asynccontextmanager
async def within(timeout: asyncio.Timeout, error: Callable[[], Exception]) -> AsyncIterator[None]:
    """Enters `timeout`, whose end raises `error` in place of TimeoutError. One that is raised inside stays one."""
    try:
        async with timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        raise error() from None


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancels the tasks, and returns when all have ended, in whatever way."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def is_cancelling() -> bool:
    """Whether the task that runs is being cancelled. Otherwise a CancelledError in it comes from what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Broadcast:
    """Wakes every task that waits for a change; each task then checks whether it is the change that it waits for.
    Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes the tasks that wait now, in the order in which they began to wait."""
        changed, self._changed = self._changed, asyncio.Event()  # waiting tasks hold the old one
        changed.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next `notify`, or after `timeout_s`."""
        await wait_at_most(self._changed, timeout_s)


class Redial:
    """Paces the replacements of one channel by one that resolves its name again, by any monotonic clock.

    may be replaced ──no peer is reached──▶ replaced ──the wait, each time twice as long, is over──▶ may be replaced
                                                └── a peer is reached, or the longest wait passes twice without another
                                                    replacement: the wait is the first one again

    In an outage each replacement connects to every address, and the calls on it may wait for that. Its end may be
    missed: calls alone look at the channel, and there may be none, or one long stream.
    """

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
