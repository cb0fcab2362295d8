"""Waiting for what has to come, without a guess at how long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Returns when `condition` holds. Raises TimeoutError after a time that a busy machine does not need either."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
