"""Large messages of one client take turns, with a rest after each, so that others' tokens do not wait for them.

    comes ──nobody's turn──▶ parsed ──▶ the client rests ──▶ the next one's turn
      ├────somebody's turn──▶ waits ────────────────────────────▲
      └────too many wait──▶ refused

Parsing holds the event loop, and the interpreter: some 10 ms for a MiB of token ids, and as long again to look at them
and let them go. A client that sends one large message after the other has a small part of the time, and clients do not
wait for each other. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from serving.errors import Overloaded

LARGE_BYTES = 256 << 10
"""More than prompts of 80,000 token ids have, whose computation takes longer than any rest."""
_MAX_WAITING = 8
_REST = 40.0
"""Times as long as parsing took."""
_RETRY_AFTER_S = 1.0
T = TypeVar("T")


class LargeMessages:
    """The turns of all clients."""

    def __init__(self) -> None:
        self._turns: dict[str, asyncio.Lock] = {}
        self._num_waiting: dict[str, int] = {}

    async def parsed(self, peer: str, data: bytes, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of `data`, when it is the turn of a message of `peer`. Raises Overloaded, and what `parse`
        raises."""
        if len(data) < LARGE_BYTES:
            return parse(data)
        await self._turn(peer)
        began_s = time.monotonic()
        try:
            return parse(data)
        finally:
            rest_s = (time.monotonic() - began_s) * _REST
            asyncio.get_running_loop().call_later(rest_s, self._rested, peer)

    async def _turn(self, peer: str) -> None:
        if self._num_waiting.get(peer, 0) >= _MAX_WAITING:
            raise Overloaded(f"{_MAX_WAITING} large messages of this client wait already", _RETRY_AFTER_S)
        self._num_waiting[peer] = self._num_waiting.get(peer, 0) + 1
        try:
            await self._turns.setdefault(peer, asyncio.Lock()).acquire()
        finally:
            self._num_waiting[peer] -= 1

    def _rested(self, peer: str) -> None:
        self._turns[peer].release()
        if not self._num_waiting[peer]:
            del self._turns[peer], self._num_waiting[peer]
