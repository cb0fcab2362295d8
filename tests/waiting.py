"""Waiting for what has to come, without a guess at how long that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Returns when `condition` holds. Raises TimeoutError after a time that a busy machine does not need either."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], problem: str | Callable[[], str] = "", within_s: float = 60.0) -> None:
    """As `until`, without an event loop. Raises AssertionError with `problem`."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {within_s:g} s: {problem if isinstance(problem, str) else problem()}")
        time.sleep(0.01)
