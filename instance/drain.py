"""How an instance leaves without losing anything.

    serving ─run─▶ accepting ─accept_s─▶ refusing ─grace_s − move_s─▶ moving out ─grace_s─▶ cut off
                                            └────────────┴─ no call runs, no KV is awaited ─▶ drained

accepting    Not ready, and the load reports say so. What still comes is served: a router may not have heard yet.
refusing     UNAVAILABLE "draining". The router asks another instance, and no client sees it.
moving out   The load reports ask the routers to let what runs go on elsewhere. What nobody else can take runs on here.

In every phase the KV that is held here can be fetched, until its readers have let go of it or their leases are over.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.messages import EngineLoad
from serving.health import Health
from serving.open_calls import OpenCalls

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.25


class Phase(enum.Enum):
    """How far the drain is."""

    SERVING = "serving"
    ACCEPTING = "accepting"
    REFUSING = "refusing"
    MOVING_OUT = "moving out"


@dataclass(frozen=True, slots=True)
class DrainTimes:
    """Seconds. `move_s` is the last part of `grace_s`; a longer one takes all of it."""

    accept_s: float
    grace_s: float
    move_s: float

    @property
    def alone_s(self) -> float:
        """How long what runs may take before it is asked to go elsewhere."""
        return max(self.grace_s - self.move_s, 0.0)


class Engine(Protocol):
    """What a drain looks at; `AsyncEngine` is one."""

    death: str | None

    @property
    def load(self) -> EngineLoad: ...

    async def wait_load(self, timeout_s: float) -> None:
        """Returns when the load has changed, or after `timeout_s`."""
        ...


class Drain:
    """The drain of one instance, run at most once."""

    def __init__(self, health: Health, calls: OpenCalls, engine: Engine) -> None:
        self._health = health
        self._calls = calls
        self._engine = engine
        self.phase = Phase.SERVING

    @property
    def begun(self) -> bool:
        """Whether new requests should go elsewhere."""
        return self.phase is not Phase.SERVING

    @property
    def moving_out(self) -> bool:
        """Whether what runs should go on elsewhere."""
        return self.phase is Phase.MOVING_OUT

    @property
    def num_awaited(self) -> int:
        """Calls that run, and transfers whose KV somebody may still fetch; a dead core has none."""
        return self._calls.num_awaited + self._num_transfers

    async def run(self, times: DrainTimes, announce: Callable[[], None]) -> bool:
        """Returns True as soon as nothing is awaited here, False when the grace is over before that.

        `announce` is called whenever the phase has changed: the load reports are not to wait for their next beat.
        """
        await self._health.begin_draining()
        self._enter(Phase.ACCEPTING, announce, f"not ready, accepting for {times.accept_s:g} s more")
        await asyncio.sleep(times.accept_s)
        self._calls.begin_draining()
        self._enter(Phase.REFUSING, announce, f"refusing, {self._pending()} to finish")
        if await self._finished_within(times.alone_s):
            return True
        self._enter(Phase.MOVING_OUT, announce, f"{self._pending()} to go on elsewhere")
        if await self._finished_within(times.grace_s - times.alone_s):
            return True
        _log.warning("grace is over: %s are cut off", self._pending())
        return False

    def _enter(self, phase: Phase, announce: Callable[[], None], what: str) -> None:
        self.phase = phase
        announce()
        _log.info("draining: %s", what)

    async def _finished_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_awaited > 0:
                    await self._calls.wait_idle()
                    if self._num_transfers > 0:
                        await self._engine.wait_load(_LOOK_AGAIN_S)
        except TimeoutError:
            return False
        _log.info("drained")
        return True

    @property
    def _num_transfers(self) -> int:
        return 0 if self._engine.death is not None else self._engine.load.num_transfers

    def _pending(self) -> str:
        return f"{self._calls.num_awaited} calls and {self._num_transfers} transfers"
