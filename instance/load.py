"""Load reports of this instance, for the routers that watch it.

One reporter makes the reports, at least every `interval_s` and sooner when the load has changed significantly. Each
watcher gets the newest report whenever it can write, so a slow watcher skips reports and delays none. A watcher that
would give this instance up for its silence before `interval_s` says how long it waits, and gets a report in time. They
continue while the engine core is silent, with `core_silence_s` growing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineLoad
from instance.convert import common_fields
from instance.drain import DrainController
from protos.tandem.v1 import instance_pb2
from serving.waits import Broadcast

MIN_GAP_S = 0.02  # minimum time between reports: a step of a small model takes less than a report


def changed_significantly(old: EngineLoad, new: EngineLoad) -> bool:
    """Whether a router might pick differently: the number of requests changed, or a twentieth of the blocks."""
    if (old.num_waiting, old.num_running, old.num_loading) != (new.num_waiting, new.num_running, new.num_loading):
        return True
    num_blocks = sum((new.free_blocks, new.cached_blocks, new.running_blocks, new.held_blocks, new.quarantined_blocks))
    usable_before = old.free_blocks + old.cached_blocks
    usable_now = new.free_blocks + new.cached_blocks
    return abs(usable_now - usable_before) * 20 > num_blocks


class LoadReporter:
    """Owns the sequence of reports. `report_until_cancelled` is its one task; any number may `watch`."""

    def __init__(
        self,
        engine: AsyncEngine,
        *,
        instance_epoch: str,
        drain: DrainController,
        interval_s: float = 0.25,
    ) -> None:
        self._engine = engine
        self._instance_epoch = instance_epoch
        self._drain = drain
        self._interval_s = interval_s
        self._published = Broadcast()
        self._sequence = 0
        self._reported = engine.load
        self.latest = self._report()

    async def report_until_cancelled(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval_s
            while (left_s := due - loop.time()) > 0 and not self._changed():
                await self._engine.wait_load(left_s)
            self.publish()
            await asyncio.sleep(MIN_GAP_S)

    def publish(self) -> None:
        self.latest = self._report()
        self._published.notify()

    async def watch(self, max_interval_s: float = 0.0) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        """The newest report, then each newer one, as fast as the caller takes them, and one at least every
        `max_interval_s` where that is above 0."""
        within_s = max(max_interval_s, MIN_GAP_S) if 0 < max_interval_s < self._interval_s else None
        sent: instance_pb2.WatchLoadResponse | None = None
        while True:
            if sent is self.latest:
                await self._published.wait(within_s)
                if sent is self.latest:
                    self.publish()
            sent = self.latest
            yield sent

    def _changed(self) -> bool:
        return self._drain.draining != self.latest.draining or changed_significantly(self._reported, self._engine.load)

    def _report(self) -> instance_pb2.WatchLoadResponse:
        self._reported = load = self._engine.load
        self._sequence += 1
        return instance_pb2.WatchLoadResponse(
            instance_epoch=self._instance_epoch,
            sequence=self._sequence,
            blocks=instance_pb2.BlockUsage(
                free=load.free_blocks,
                cached=load.cached_blocks,
                running=load.running_blocks,
                held=load.held_blocks,
                quarantined=load.quarantined_blocks,
            ),
            core_silence_s=self._engine.core_silence_s,
            load_age_s=self._engine.load_age_s,
            draining=self._drain.draining,
            moving_out=self._drain.moving_out,
            **common_fields(load, instance_pb2.WatchLoadResponse) | {"step_cost": _step_cost(load)},
        )


def _step_cost(load: EngineLoad) -> instance_pb2.StepCost | None:
    return None if load.step_cost is None else instance_pb2.StepCost(**msgspec.structs.asdict(load.step_cost))
