"""One instance of a pool: who it is, how loaded, whether it may be picked.

connecting ──info, first report──▶ ready ⇄ draining | wedged ──stream broken or silent──▶ lost ──▶ connecting
    any of them ──its address has left the pool──▶ leaving ──its last call is over──▶ let go by the pool

`watch` moves it through these states for ever, one task per member. A member that is lost or wedged ends the calls
that run on it, so that their requests go on elsewhere without waiting for a connection to notice: a frozen process
keeps its connections open. Another epoch after a reconnect is another instance.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any, Literal

import grpc
import grpc.aio

from protos.tandem.v1 import instance_pb2, instance_pb2_grpc
from router.config import PoolSettings
from router.picking.speeds import Speeds
from router.pools.expectation import Expectation
from router.pools.inflight import Inflight
from router.pools.instances import InstanceInfo, InstanceKey, InstanceView, LoadReport
from router.pools.open_legs import Losable, OpenLegs
from router.pools.token_stream import TokenStreams
from router.pools.watchdog import Watchdog

_log = logging.getLogger(__name__)

State = Literal["connecting", "ready", "draining", "leaving", "wedged", "lost", "foreign"]
"""What a member is, in one word; foreign: something answers at its address that is not what the pool is for."""


class _NotOurs(Exception):
    """What answers at this address is not what the pool is for."""


class Member:
    """Watches one address. The pool owns it; legs register with it while they run."""

    def __init__(
        self,
        address: str,
        expected: Expectation,
        channel: grpc.aio.Channel,
        settings: PoolSettings,
        on_change: Callable[[Member], None],
        speeds: Speeds | None = None,
    ) -> None:
        self.address = address
        self.channel = channel
        self.speeds = speeds or Speeds()
        self.token_streams: TokenStreams | None = None
        self._expected = expected
        self._settings = settings
        self._on_change = on_change
        self._info: InstanceInfo | None = None
        self._load: LoadReport | None = None
        self._met_s = math.inf
        self._lost: str | None = "connecting"
        self._lost_state: State = "connecting"
        self._leaving = False
        self._watchdog = Watchdog(
            settings.beat_timeout_s,
            settings.core_silence_timeout_s,
            on_silent=self._fell_silent,
            on_wedged=self._fell_wedged,
        )
        self._reports: Any = None  # the call of WatchLoad: grpc.aio's type of it has no name to import
        self._legs = OpenLegs()
        self._inflight = Inflight()

    @property
    def info(self) -> InstanceInfo | None:
        """Who answered last at this address."""
        return self._info

    @property
    def key(self) -> InstanceKey | None:
        """Which process answered last."""
        return InstanceKey(self.address, self._info.epoch) if self._info else None

    def view(self) -> InstanceView | None:
        """This instance now; None before it has told who it is and how loaded."""
        if self._info is None or self._load is None:
            return None
        return InstanceView(
            key=InstanceKey(self.address, self._info.epoch),
            info=self._info,
            load=self._load,
            out=self._out(),
            num_unreported=self._inflight.num_unreported,
            num_ended=self._inflight.num_ended,
            num_unreported_tokens=self._inflight.num_unreported_tokens,
            pace=self.speeds.pace(time.monotonic()),
            up_s=time.monotonic() - self._met_s,
        )

    @property
    def state(self) -> State:
        """What it is now."""
        return self._status()[0]

    @property
    def out(self) -> str | None:
        """Why it may not be picked; None when it may."""
        return self._out()

    @property
    def num_requests(self) -> int:
        """Requests of this router that are there or on their way."""
        return self._inflight.num_requests

    @property
    def beat_age_s(self) -> float:
        """Seconds since its last report; infinite before the first."""
        return self._watchdog.age_s

    def begin(self, leg: Losable, num_tokens: int = 0) -> None:
        """A leg of `num_tokens` tokens starts here: it counts as load, and is told when the instance is lost."""
        self._legs.begin(leg)
        self._inflight.sent(id(leg), time.monotonic(), num_tokens)

    def acknowledged(self, leg: Losable) -> None:
        """The instance has answered the leg."""
        self._inflight.acknowledged(id(leg))

    def relieve(self, leg: Losable) -> None:
        """The instance has done its part of the leg: it counts as load no more, but its call may still be open."""
        self._legs.relieve(leg)
        self._inflight.ended(id(leg), time.monotonic())

    def end(self, leg: Losable) -> None:
        """The leg is over."""
        self._legs.end(leg)
        self._inflight.ended(id(leg), time.monotonic())

    def leave(self) -> None:
        """Its address is no longer the pool's: it gets nothing new, and what runs there runs on."""
        if not self._leaving:
            self._leaving = True
            self._tell(self._out())

    def stay(self) -> None:
        """Its address is the pool's again."""
        if self._leaving:
            self._leaving = False
            self._tell(self._out())

    @property
    def is_idle(self) -> bool:
        """Whether no call of ours is open there."""
        return self._legs.is_none_open

    async def until_idle(self) -> None:
        """Returns when no call of ours is open there."""
        await self._legs.until_none_is_open()

    async def watch(self) -> None:
        """Follows the instance for ever; cancel it to stop."""
        delay_s = self._settings.min_backoff_s
        while True:
            started_s = time.monotonic()
            state: State = "lost"
            try:
                reason = await self._follow()
            except grpc.aio.AioRpcError as error:
                reason = f"its load stream failed: {error.code().name}"
            except TimeoutError:
                reason = self._silence
            except _NotOurs as error:
                reason, state = str(error), "foreign"
            self._lose(reason, state)
            self._legs.fade(reason)
            if time.monotonic() - started_s > 2 * self._settings.max_backoff_s:
                delay_s = self._settings.min_backoff_s
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self._settings.max_backoff_s)

    async def _follow(self) -> str:
        """Asks who is there, then takes its reports; returns why they ended."""
        stub = instance_pb2_grpc.InstanceServiceStub(self.channel)
        answer = await stub.GetInstanceInfo(
            instance_pb2.GetInstanceInfoRequest(), timeout=self._settings.beat_timeout_s
        )
        self._meet(InstanceInfo.from_wire(answer))
        self._reports = stub.WatchLoad(instance_pb2.WatchLoadRequest())
        self._watchdog.begin()
        self.token_streams = TokenStreams(self._expected.role, self.channel, self._settings)
        try:
            while isinstance(message := await self._next_report(), instance_pb2.WatchLoadResponse):
                if not self._observe(LoadReport.from_wire(message)):
                    return "another process answers at its address"
            return "its load stream ended"
        finally:
            self._watchdog.stop()
            self._reports.cancel()
            self._reports = None
            self.token_streams.retire()

    async def _next_report(self) -> Any:
        """The next message; not one when the stream has ended. Raises TimeoutError when the watchdog has ended it."""
        try:
            return await self._reports.read()
        except asyncio.CancelledError:
            if self._lost != self._silence or ((task := asyncio.current_task()) is not None and task.cancelling()):
                raise
            raise TimeoutError from None

    def _meet(self, info: InstanceInfo) -> None:
        if mismatch := self._expected.mismatch(info):
            raise _NotOurs(mismatch)
        if self._info is None or info.epoch != self._info.epoch:
            self._met_s = time.monotonic()
            self._inflight.clear()
            self.speeds.clear()
            _log.info(
                "%s instance %s",
                self._expected.role,
                info.instance_id,
                extra={"fields": {"address": self.address, "epoch": info.epoch}},
            )
        self._info = info
        self._load = None  # ready with its first report

    def _observe(self, report: LoadReport) -> bool:
        """Takes one report; False when it is not from the process that `_meet` saw."""
        if self._info is None or report.epoch != self._info.epoch:
            return False
        before = self._out() if self._load is not None else "connecting"
        self._load, self._lost = report, None
        self._watchdog.beat(report.core_silence_s, report.step_s)
        now_s = time.monotonic()
        self._inflight.reported(now_s, report.core_silence_s)
        self.speeds.reported(report.num_prefilled_tokens, report.num_waiting_tokens, now_s)
        after = self._out()
        if self._watchdog.is_wedged:
            self._legs.lose(after or "wedged")
        if report.moving_out:
            self._legs.move_on()
        if before != after:
            self._tell(after)
        return True

    def _status(self) -> tuple[State, str | None]:
        """What it is, and why it may not be picked."""
        if self._lost is not None:
            return self._lost_state, self._lost
        if self._leaving:
            return "leaving", "its address has left the pool"
        if self._load is None:
            return "connecting", "connecting"
        if self._watchdog.is_wedged:
            return "wedged", "its engine core is silent"
        if self._load.draining:
            return "draining", "draining"
        return "ready", None

    def _out(self) -> str | None:
        return self._status()[1]

    @property
    def _silence(self) -> str:
        return f"no sign of life for {self._settings.beat_timeout_s:g} s"

    def _fell_silent(self) -> None:
        self._lose(self._silence, "lost")
        self._legs.lose(self._silence)
        if self._reports is not None:
            self._reports.cancel()

    def _fell_wedged(self) -> None:
        self._legs.lose("its engine core is silent")
        self._tell(self._out())

    def _lose(self, reason: str, state: State) -> None:
        was_up = self._lost is None
        first = reason != self._lost
        self._lost, self._lost_state = reason, state
        if was_up or first:
            self._tell(reason)

    def _tell(self, out: str | None) -> None:
        fields = {"address": self.address, "epoch": self._info.epoch if self._info else None}
        state = "is ready" if out is None else f"is out: {out}"
        _log.log(
            logging.INFO if self.state in ("ready", "draining", "leaving") else logging.WARNING,
            "%s %s",
            self._expected.role,
            state,
            extra={"fields": fields},
        )
        self._on_change(self)
