"""Wakes everybody who waits for a change; each then looks for himself whether it was the one he waits for."""

from __future__ import annotations

import asyncio


class News:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        told, self._told = self._told, asyncio.Event()  # whoever waits holds the old one
        told.set()

    async def wait(self, timeout_s: float) -> None:
        """Returns at the next `tell`, or after `timeout_s`. Who waited first is woken first."""
        told = self._told
        try:
            async with asyncio.timeout(timeout_s):
                await told.wait()
        except TimeoutError:
            pass
