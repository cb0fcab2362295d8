"""One instance of a pool: who it is, how loaded, whether it may be picked.

connecting ──info, first report──▶ ready ⇄ draining | wedged ──stream broken or silent──▶ lost ──▶ connecting

`watch` moves it through these states for ever, one task per member. A member that is lost or wedged ends the calls
that run on it, so that their requests go on elsewhere without waiting for a connection to notice: a frozen process
keeps its connections open. Another epoch after a reconnect is another instance.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import instance_pb2, instance_pb2_grpc
from router.config import PoolSettings
from router.inflight import Inflight
from router.instances import InstanceInfo, InstanceKey, InstanceView, LoadReport, Role

_log = logging.getLogger(__name__)
_STEPS_OF_SILENCE = 5  # an engine core says nothing during a step; one that takes as long as predicted is no wedge


class Losable(Protocol):
    """A call that runs on an instance."""

    def lose(self, reason: str) -> None:
        """The instance is gone: end now, as failed."""


class _NotOurs(Exception):
    """What answers at this address is not what the pool is for."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must answer at an address of a pool."""

    role: Role
    tokenizer_digest: str = ""
    """Of the tokenizer that the router encodes with; empty: not looked at. Another one would read the ids as other
    text."""

    def mismatch(self, info: InstanceInfo) -> str | None:
        """Why `info` is not what the pool is for."""
        if info.role not in (None, self.role):
            return f"its role is {info.role}, not {self.role}"
        theirs = info.identity.tokenizer_digest
        if self.tokenizer_digest and theirs and theirs != self.tokenizer_digest:
            return f"its tokenizer_digest is {theirs}, the router's {self.tokenizer_digest}"
        return None


class Member:
    """Watches one address. The pool owns it; legs register with it while they run."""

    def __init__(
        self,
        address: str,
        expected: Expectation,
        channel: grpc.aio.Channel,
        settings: PoolSettings,
        on_change: Callable[[Member], None],
    ) -> None:
        self.address = address
        self.channel = channel
        self._expected = expected
        self._settings = settings
        self._on_change = on_change
        self._info: InstanceInfo | None = None
        self._load: LoadReport | None = None
        self._last_beat_s = 0.0
        self._lost: str | None = "connecting"
        self._legs: dict[int, Losable] = {}
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
        )

    def begin(self, leg: Losable) -> None:
        """A leg starts here: it counts as load, and is told when the instance is lost."""
        self._legs[id(leg)] = leg
        self._inflight.sent(id(leg), time.monotonic())

    def acknowledged(self, leg: Losable) -> None:
        """The instance has answered the leg."""
        self._inflight.acknowledged(id(leg))

    def end(self, leg: Losable) -> None:
        """The leg is over."""
        self._legs.pop(id(leg), None)
        self._inflight.ended(id(leg))

    async def watch(self) -> None:
        """Follows the instance for ever; cancel it to stop."""
        delay_s = self._settings.min_backoff_s
        while True:
            started_s = time.monotonic()
            try:
                reason = await self._follow()
            except grpc.aio.AioRpcError as error:
                reason = f"its load stream failed: {error.code().name}"
            except TimeoutError:
                reason = f"no sign of life for {self._settings.beat_timeout_s:g} s"
            except _NotOurs as error:
                reason = str(error)
            self._lose(reason)
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
        call = stub.WatchLoad(instance_pb2.WatchLoadRequest())
        try:
            while True:
                async with asyncio.timeout(self._settings.beat_timeout_s):
                    message = await call.read()
                if not isinstance(message, instance_pb2.WatchLoadResponse):
                    return "its load stream ended"
                if not self._observe(LoadReport.from_wire(message)):
                    return "another process answers at its address"
        finally:
            call.cancel()

    def _meet(self, info: InstanceInfo) -> None:
        if mismatch := self._expected.mismatch(info):
            raise _NotOurs(mismatch)
        if self._info is None or info.epoch != self._info.epoch:
            self._inflight.clear()
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
        self._load, self._last_beat_s, self._lost = report, time.monotonic(), None
        self._inflight.reported(self._last_beat_s)
        after = self._out()
        if self._wedged():
            self._lose_legs(after or "wedged")
        if before != after:
            self._tell(after)
        return True

    def _wedged(self) -> bool:
        if self._load is None:
            return False
        limit_s = max(self._settings.core_silence_timeout_s, _STEPS_OF_SILENCE * self._load.step_s)
        return self._load.core_silence_s > limit_s

    def _out(self) -> str | None:
        if self._lost is not None:
            return self._lost
        if self._load is None:
            return "connecting"
        if self._wedged():
            return "its engine core is silent"
        if self._load.draining:
            return "draining"
        if time.monotonic() - self._last_beat_s > self._settings.beat_timeout_s:
            return "silent"
        return None

    def _lose(self, reason: str) -> None:
        was_up = self._lost is None
        first = reason != self._lost
        self._lost = reason
        self._lose_legs(reason)
        if was_up or first:
            self._tell(reason)

    def _lose_legs(self, reason: str) -> None:
        for leg in list(self._legs.values()):
            leg.lose(reason)

    def _tell(self, out: str | None) -> None:
        fields = {"address": self.address, "epoch": self._info.epoch if self._info else None}
        state = "is ready" if out is None else f"is out: {out}"
        _log.log(
            logging.INFO if out in (None, "draining") else logging.WARNING,
            "%s %s",
            self._expected.role,
            state,
            extra={"fields": fields},
        )
        self._on_change(self)
