"""The drain of an instance: it leaves without losing a request.

    serving ─drain─▶ accepting ─accept_s─▶ refusing ─grace_s − move_s─▶ moving out ─grace_s─▶ cut off
                                              └────────────┴─ no call runs, no KV is pending ─▶ drained

accepting    Not ready, and load reports say so. New requests are served: a router may not have the report yet.
refusing     UNAVAILABLE "draining". The router tries another instance; clients do not notice.
moving out   Load reports ask the routers to resume running requests elsewhere. What no other instance can take runs on.

In every phase held KV can be fetched until its readers release it or their leases expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine.core.async_engine import AsyncEngine
from serving.health import Health
from serving.limits import OpenCalls

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

    @property
    def num_pending(self) -> int:
        """Running calls, and transfers whose KV may still be fetched; a dead core has no transfers."""
        return self._calls.num_awaited + self._num_transfers

    async def drain(self, publish: Callable[[], None], *, accept_s: float, grace_s: float, move_s: float) -> bool:
        """Returns True as soon as nothing is pending, False when the grace ends before that.

        `publish` is called at each change of phase, so that routers get a load report at once. `move_s` is the last
        part of `grace_s`, at most all of it.
        """
        before_move_s = max(grace_s - move_s, 0.0)
        self._health.begin_draining()
        self.draining = True
        _announce(publish, f"not ready, accepting for {accept_s:g} s more")
        await asyncio.sleep(accept_s)
        self._calls.begin_draining()
        _announce(publish, f"refusing, {self._pending()} to finish")
        if await self._finished_within(before_move_s):
            return True
        self.moving_out = True
        _announce(publish, f"{self._pending()} to resume elsewhere")
        if await self._finished_within(grace_s - before_move_s):
            return True
        _log.warning("the grace is over: %s are cut off", self._pending())
        return False

    async def _finished_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_pending > 0:
                    await self._calls.wait_idle()
                    if self._num_transfers > 0:
                        await self._engine.wait_load(_POLL_S)
        except TimeoutError:
            return False
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
