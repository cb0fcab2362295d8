"""The calls of this router that are open at one instance.

begun ──relieved (the instance has done its part, but its call may go on)──▶ ended
  └── lost with its instance, fading after it, or asked to move on ──▶ ended
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Losable(Protocol):
    """A call that runs on an instance."""

    def lose(self, reason: str) -> None:
        """The instance is gone: end now, as failed."""

    def fade(self, reason: str) -> None:
        """The instance has ended: read what has arrived of it, then end, as failed."""

    def move_on(self) -> None:
        """The instance is about to end: end now if another one can take over, else run on."""


class OpenLegs:
    """Owned by the pool member, to which legs report."""

    def __init__(self) -> None:
        self._running: dict[int, Losable] = {}
        self._relieved: set[int] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    def begin(self, leg: Losable) -> None:
        """It runs, and is told when the instance is lost."""
        self._running[id(leg)] = leg
        self._none_open.clear()

    def relieve(self, leg: Losable) -> None:
        """Losing the instance no longer fails it; its call is still open."""
        if self._running.pop(id(leg), None) is not None:
            self._relieved.add(id(leg))

    def end(self, leg: Losable) -> None:
        """Its call is over. Idempotent."""
        self._running.pop(id(leg), None)
        self._relieved.discard(id(leg))
        if not (self._running or self._relieved):
            self._none_open.set()

    def lose(self, reason: str) -> None:
        """The instance is gone."""
        for leg in list(self._running.values()):
            leg.lose(reason)

    def fade(self, reason: str) -> None:
        """The instance has ended, but what it said last may still lie here unread."""
        for leg in list(self._running.values()):
            leg.fade(reason)

    def move_on(self) -> None:
        """The instance is about to end."""
        for leg in list(self._running.values()):
            leg.move_on()

    @property
    def is_none_open(self) -> bool:
        return self._none_open.is_set()

    async def until_none_is_open(self) -> None:
        """Returns when every call is over."""
        await self._none_open.wait()
