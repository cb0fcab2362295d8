"""The drain of an instance: it leaves without losing a request.

    serving ─drain─▶ accepting ─accept_s─▶ refusing ─grace_s − move_s─▶ moving out ─grace_s─▶ cut off
                                              └────────────┴─ no call runs, no KV is pending ─▶ drained

accepting    Not ready, and load reports say so. New requests are served: a router may not have the report yet.
refusing     UNAVAILABLE "draining". The router tries another instance; clients do not notice.
moving out   Load reports ask the routers to resume running requests elsewhere. What no other instance can take runs on.

A signal during a drain that a call has begun limits the rest to the instance's own times.

In every phase held KV can be fetched until its readers release it or their leases expire.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from engine.core.async_engine import AsyncEngine
from serving.limits import OpenCalls
from serving.server import Health

_log = logging.getLogger(__name__)
_POLL_S = 0.25


class DrainController:
    """Drains one instance, at most once."""

    def __init__(self, health: Health, calls: OpenCalls, engine: AsyncEngine) -> None:
        self._health = health
        self._calls = calls
        self._engine = engine
        self.draining = False
        self.moving_out = False
        """Running requests should be resumed at other instances."""
        self._end_s = math.inf  # of the grace, on the monotonic clock

    @property
    def num_pending(self) -> int:
        """Running calls, and transfers whose KV may still be fetched; a dead core has no transfers."""
        return self._calls.num_awaited + self._num_transfers

    def limit(self, seconds: float) -> None:
        """The grace ends in `seconds`, or before that. Before and during a drain."""
        self._end_s = min(self._end_s, time.monotonic() + seconds)

    async def drain(self, publish: Callable[[], None], *, accept_s: float, grace_s: float, move_s: float) -> bool:
        """Returns True as soon as nothing is pending, False when the grace ends before that.

        `publish` is called at each change of phase, so that routers get a load report at once. `move_s` is the last
        part of `grace_s`, at most all of it.
        """
        self._health.begin_draining()
        self.draining = True
        _announce(publish, f"not ready, accepting for {accept_s:g} s more")
        await self._accept_for(accept_s)
        self.limit(grace_s)
        self._calls.begin_draining()
        _announce(publish, f"refusing, {self._pending()} to finish")
        if await self._finished(move_s):
            return True
        self.moving_out = True
        _announce(publish, f"{self._pending()} to resume elsewhere")
        if await self._finished(0.0):
            return True
        _log.warning("the grace is over: %s are cut off", self._pending())
        return False

    async def _accept_for(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _finished(self, before_end_s: float) -> bool:
        """Returns True as soon as nothing is pending, False `before_end_s` before the end of the grace."""
        while self.num_pending > 0:
            left_s = self._end_s - before_end_s - time.monotonic()
            if left_s <= 0:
                return False
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _POLL_S)):
                    await self._calls.wait_idle()
                    if self._num_transfers > 0:
                        await self._engine.wait_load(_POLL_S)
        _log.info("drained")
        return True

    @property
    def _num_transfers(self) -> int:
        return 0 if self._engine.death is not None else self._engine.load.num_transfers

    def _pending(self) -> str:
        return f"{self._calls.num_awaited} calls and {self._num_transfers} transfers"


def _announce(publish: Callable[[], None], phase: str) -> None:
    publish()
    _log.info("draining: %s", phase)
