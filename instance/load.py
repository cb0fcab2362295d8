"""How loaded this instance is, for the routers that watch it.

One reporter makes the reports of the process, at least every `interval_s` and sooner when the load has changed much.
Each watcher gets the newest one whenever it is ready to write, so a slow watcher skips reports and holds none up.
Reports go on while the engine core is silent, with `core_silence_s` growing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from engine.messages import EngineLoad
from protos.tandem.v1 import instance_pb2

MIN_GAP_S = 0.02
"""Between two reports, however much changes: a step of a small model takes less than a report."""


class LoadSource(Protocol):
    """What a report is made of; `AsyncEngine` is one."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def core_silence_s(self) -> float: ...

    async def wait_load(self, timeout_s: float) -> None:
        """Returns when the load has changed, or after `timeout_s`."""
        ...


def changed_much(old: EngineLoad, new: EngineLoad) -> bool:
    """Whether a router would pick differently: another number of requests, or a twentieth of the blocks moved."""
    if (old.num_waiting, old.num_running, old.num_loading) != (new.num_waiting, new.num_running, new.num_loading):
        return True
    num_blocks = sum((new.free_blocks, new.cached_blocks, new.running_blocks, new.held_blocks, new.quarantined_blocks))
    usable_before = old.free_blocks + old.cached_blocks
    usable_now = new.free_blocks + new.cached_blocks
    return abs(usable_now - usable_before) * 20 > num_blocks


class LoadReporter:
    """Owns the sequence of reports. `run` is its one task; `watch` may be called any number of times."""

    def __init__(
        self,
        source: LoadSource,
        *,
        instance_epoch: str,
        draining: Callable[[], bool],
        moving_out: Callable[[], bool] = lambda: False,
        interval_s: float = 0.25,
    ) -> None:
        self._source = source
        self._instance_epoch = instance_epoch
        self._draining = draining
        self._moving_out = moving_out
        self._interval_s = interval_s
        self._published = asyncio.Event()
        self._sequence = 0
        self._reported = source.load
        self._reported_draining = draining()
        self.latest = self._report()

    async def run(self) -> None:
        """Reports until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval_s
            while (left_s := due - loop.time()) > 0 and not self._changed():
                await self._source.wait_load(left_s)
            self.publish()
            await asyncio.sleep(MIN_GAP_S)

    def publish(self) -> None:
        """Reports now."""
        self.latest = self._report()
        published, self._published = self._published, asyncio.Event()
        published.set()

    async def watch(self) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        """The newest report, then each one that follows, as fast as the caller takes them."""
        while True:
            published = self._published
            yield self.latest
            await published.wait()

    def _changed(self) -> bool:
        return self._draining() != self._reported_draining or changed_much(self._reported, self._source.load)

    def _report(self) -> instance_pb2.WatchLoadResponse:
        self._reported = load = self._source.load
        self._reported_draining = self._draining()
        self._sequence += 1
        return instance_pb2.WatchLoadResponse(
            instance_epoch=self._instance_epoch,
            sequence=self._sequence,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_loading=load.num_loading,
            num_waiting_tokens=load.num_waiting_tokens,
            blocks=instance_pb2.BlockUsage(
                free=load.free_blocks,
                cached=load.cached_blocks,
                running=load.running_blocks,
                held=load.held_blocks,
                quarantined=load.quarantined_blocks,
            ),
            num_steps=load.num_steps,
            core_silence_s=self._source.core_silence_s,
            step_s=load.step_s,
            draining=self._reported_draining,
            moving_out=self._moving_out(),
            num_transfers=load.num_transfers,
            num_prefilled_tokens=load.num_prefilled_tokens,
            num_generated_tokens=load.num_generated_tokens,
            num_external_tokens=load.num_external_tokens,
            num_recomputed_blocks=load.num_recomputed_blocks,
            num_expired_leases=load.num_expired_leases,
            num_preemptions=load.num_preemptions,
        )
