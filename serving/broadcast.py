"""Wakes every task that waits for a change; each task then checks whether it is the change that it waits for."""

from __future__ import annotations

import asyncio


class Broadcast:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes the tasks that wait now, in the order in which they began to wait."""
        changed, self._changed = self._changed, asyncio.Event()  # waiting tasks hold the old one
        changed.set()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next `notify`, or after `timeout_s`."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass
