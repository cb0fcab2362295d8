"""The calls of this router at one instance, and which of them the instance's last load report cannot have counted.

    added ──▶ sent ──a report that must know of it──▶ counted ──completed──▶ remembered until a report must know of that
      └────────┴─ completed (the instance has done its part, the call may still be open) ──▶ removed
    expected (its request moves here from another instance) ──▶ removed, when a call of its own is added
    added ──its instance is lost before it is sent──▶ no load, until it is removed

A report describes the moment of the engine core's last sign, `age_s` ago. It counts a request only if that was
sent `report_lag_s` before that moment, the way into the core, or if the instance has answered the request by then. The
same holds for completions on their way back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serving.waits import Broadcast

REPORT_LAG_S = 0.1
"""Generous for a network and an event loop. Too short: one report attracts a herd; too long: it repels one."""


class InFlightCall(Protocol):
    """A call to an instance, as the pool sees it."""

    def instance_lost(self, reason: str) -> None:
        """The instance is unavailable: the call ends now, as failed."""

    def instance_ended(self, reason: str) -> None:
        """The instance has ended: the call reads what has arrived, then ends as failed."""

    def instance_draining(self) -> None:
        """The instance is about to end: the call ends now if another instance can take over, else it runs on."""


@dataclass(slots=True)
class _Sent:
    at_s: float
    num_tokens: int
    num_to_prefill: int
    is_acknowledged: bool = False
    is_counted: bool = False


class InFlightCalls:
    """Owned by the upstream instance; calls register themselves. Belongs to one event loop."""

    def __init__(self, report_lag_s: float = REPORT_LAG_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._report_lag_s = report_lag_s
        self._clock = clock
        self._running: dict[InFlightCall, None] = {}
        self._completed: set[InFlightCall] = set()
        self._sent: dict[InFlightCall, _Sent] = {}
        self._ended_s: list[float] = []
        self._emptied = Broadcast()
        self.num_unreported = 0
        """Requests that the last report cannot have counted."""
        self.num_unreported_tokens = 0
        """Theirs, for which the instance needs blocks."""
        self.num_unreported_to_prefill = 0
        """Those of them that it has yet to compute."""

    @property
    def num_requests(self) -> int:
        """Requests of this router at the instance or on their way."""
        return len(self._sent)

    @property
    def num_ended(self) -> int:
        """Requests that the last report counted and that are over."""
        return len(self._ended_s)

    @property
    def is_empty(self) -> bool:
        return not (self._running or self._completed)

    async def wait_until_empty(self) -> None:
        while not self.is_empty:
            await self._emptied.wait()

    def add(self, call: InFlightCall, num_tokens: int = 0, num_to_prefill: int = 0) -> None:
        """A call begins that brings `num_tokens` tokens whose KV it needs before it can go on; the instance computes
        that of `num_to_prefill` of them, and has or loads the others'. No report counts it before it is `sent`."""
        self._running[call] = None
        self._add_sent(call, _Sent(math.inf, num_tokens, num_to_prefill))

    def expect(self, call: InFlightCall, num_tokens: int) -> None:
        """The request of a call at another instance is about to come here: until the call is removed, it counts like
        one that no report has counted, so that those that decide after it see its place as taken."""
        self._add_sent(call, _Sent(math.inf, num_tokens, num_tokens))

    def sent(self, call: InFlightCall) -> None:
        """The call's request is on its way."""
        if (sent := self._sent.get(call)) is not None:
            sent.at_s = self._clock()

    def acknowledge(self, call: InFlightCall) -> None:
        """The instance has answered, so it has the request."""
        if (sent := self._sent.get(call)) is not None:
            sent.is_acknowledged = True

    def complete(self, call: InFlightCall) -> None:
        """The instance has done its part: the call counts as load no more, and losing the instance does not fail it."""
        if call in self._running:
            del self._running[call]
            self._completed.add(call)
        self._forget_sent(call)

    def remove(self, call: InFlightCall) -> None:
        """The call is over. Idempotent."""
        self._running.pop(call, None)
        self._completed.discard(call)
        self._forget_sent(call)
        if self.is_empty:
            self._emptied.notify()

    def report_received(self, age_s: float = 0.0) -> None:
        """A load report has come that describes the instance `age_s` ago."""
        as_of_s = self._clock() - age_s
        self._ended_s = [ended_s for ended_s in self._ended_s if ended_s > as_of_s + self._report_lag_s]
        for sent in self._sent.values():
            lag_s = 0.0 if sent.is_acknowledged else self._report_lag_s
            if not sent.is_counted and sent.at_s + lag_s <= as_of_s:
                sent.is_counted = True
                self._count_reported(sent)

    def instance_restarted(self) -> None:
        """Another process answers at the address: it has nothing of what was sent before."""
        self._sent.clear()
        self._ended_s.clear()
        self.num_unreported = self.num_unreported_tokens = self.num_unreported_to_prefill = 0

    def instance_lost(self, reason: str) -> None:
        """A call that was not sent yet never will be: it is no load if the instance comes back."""
        for call in list(self._running):
            if (sent := self._sent.get(call)) is not None and sent.at_s == math.inf:
                self._forget_sent(call)
            call.instance_lost(reason)

    def instance_ended(self, reason: str) -> None:
        for call in list(self._running):
            call.instance_ended(reason)

    def instance_draining(self) -> None:
        for call in list(self._running):
            call.instance_draining()

    def _add_sent(self, call: InFlightCall, sent: _Sent) -> None:
        self._forget_sent(call)
        self._sent[call] = sent
        self.num_unreported += 1
        self.num_unreported_tokens += sent.num_tokens
        self.num_unreported_to_prefill += sent.num_to_prefill

    def _forget_sent(self, call: InFlightCall) -> None:
        if (sent := self._sent.pop(call, None)) is None:
            return
        if sent.is_counted:
            self._ended_s.append(self._clock())
        else:
            self._count_reported(sent)

    def _count_reported(self, sent: _Sent) -> None:
        self.num_unreported -= 1
        self.num_unreported_tokens -= sent.num_tokens
        self.num_unreported_to_prefill -= sent.num_to_prefill
