"""One instance of a pool: its identity, its load, and whether it may be picked.

connecting ──info, first report──▶ ready ⇄ draining | wedged ──stream broken or silent──▶ lost ──▶ connecting
    connecting ──silent, or failed otherwise than by a refused connection──▶ lost
    any of them ──its address has left the pool──▶ leaving ──its calls and its drain are over──▶ removed by the pool

`watch` moves it through these states until it is cancelled; there is one task per instance. An instance that is lost or
wedged ends the calls that run on it, so that their requests go on elsewhere without waiting for the connection to fail:
a frozen process keeps its connections open. Another epoch after a reconnect is another instance.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import grpc
import grpc.aio

from protos.tandem.v1 import instance_pb2, instance_pb2_grpc
from router.pools.in_flight import InFlightCalls
from router.pools.instance_info import InstanceInfo, InstanceKey, InstanceView, LoadReport, Role
from router.pools.settings import PoolSettings
from router.pools.throughput import ThroughputEstimator
from router.pools.token_stream import TokenStreams
from serving.waits import Broadcast, is_cancelling

_log = logging.getLogger(__name__)

State = Literal["ready", "draining", "leaving", "wedged", "lost", "foreign", "connecting"]
"""foreign: what answers at the address does not belong to the pool. connecting: no answer yet, and nothing listens."""
STATES: tuple[State, ...] = get_args(State)
"""What still works comes first."""
ENDING: frozenset[State] = frozenset({"draining", "leaving"})
LEFT = "its address has left the pool"
"""Why an instance is out that runs its calls to their end; tandem/commands/pools.py knows it."""
_MAX_SILENCE_S = 30.0
"""A process that has left and is silent for longer counts as ended, such as that of a node that is gone."""
_SILENT_STEPS = 5
"""An engine core is silent during a step; a step that takes as long as predicted is not a wedge."""
_MOVE_INTERVAL_S = 0.25
"""Between two requests to the calls to move: each looks for a place, and reports come up to 50 times a second."""
_LATE_S = 0.1
_GRACE_S = 0.25
_RESOLUTION_S = 0.001
_TIMED_OUT = ("ping timeout", "timed out")
"""What gRPC says of a connection on which nothing has answered, besides UNAVAILABLE."""
_REPORTS_PER_TIMEOUT = 4
"""At least so many load reports come within `beat_timeout_s`: a late one is no silence."""


@dataclass(frozen=True, slots=True)
class ExpectedInstance:
    """What must answer at an address of a pool."""

    role: Role
    tokenizer_digest: str = ""
    """Of the tokenizer that the router encodes with; empty: not checked. Another tokenizer gives the ids another
    meaning."""

    def mismatch(self, info: InstanceInfo) -> str | None:
        """Why `info` does not belong to the pool."""
        if info.role not in (None, self.role):
            return f"its role is {info.role}, not {self.role}"
        theirs = info.identity.tokenizer_digest
        if self.tokenizer_digest and theirs and theirs != self.tokenizer_digest:
            return f"its tokenizer_digest is {theirs}, the router's {self.tokenizer_digest}"
        return None


class _UnexpectedInstance(Exception):
    """What answers at this address does not belong to the pool."""


@dataclass(slots=True, eq=False)
class FailureDetector:
    """Decides when an instance is unavailable: by the silence of its load reports, or of the engine core they describe.

    stopped ──start──▶ watching ──no report in time──▶ silent: reported once, then stopped
                          ⇅ ──the core is silent for too long──▶ wedged: reported once, until a report says otherwise

    One timer, which a report does not touch: it reads the clock when it fires. A timer that fires late means that this
    process was held up and that reports may wait in its buffers; it then checks once more, a little later. Belongs to
    one event loop, on which it calls `on_silent` and `on_wedged`.
    """

    report_timeout_s: float
    core_silence_timeout_s: float
    on_silent: Callable[[], None]
    on_wedged: Callable[[], None]
    is_wedged: bool = False
    """Whether the engine core has been silent for too long: a report says so, or none has come since in time."""
    _last_report_s: float = -math.inf
    _core_due_s: float = math.inf
    _timer: asyncio.TimerHandle | None = None
    _timer_due_s: float = 0.0
    _is_grace_used: bool = False
    _is_wedge_reported: bool = False

    def start(self) -> None:
        """Watches from now on; the first report is due like any other."""
        self.stop()
        self._last_report_s = time.monotonic()
        self._set_timer()

    def stop(self) -> None:
        """Nothing is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._core_due_s = math.inf
        self.is_wedged = self._is_grace_used = self._is_wedge_reported = False

    def report_received(self, core_silence_s: float, step_s: float) -> None:
        """A report has come: the core has been silent for `core_silence_s` and predicts a step of `step_s`."""
        now_s = self._last_report_s = time.monotonic()
        limit_s = max(self.core_silence_timeout_s, _SILENT_STEPS * step_s)
        self._core_due_s = now_s - core_silence_s + limit_s
        self.is_wedged = now_s >= self._core_due_s
        self._is_grace_used = False
        if not self.is_wedged:
            self._is_wedge_reported = False
        if self._timer is not None and self._due_s < self._timer_due_s:
            self._set_timer()

    @property
    def report_age_s(self) -> float:
        """Seconds since the last report, or since this connection began to be watched; infinite before that."""
        return time.monotonic() - self._last_report_s

    @property
    def _due_s(self) -> float:
        silent_s = self._last_report_s + self.report_timeout_s
        return silent_s if self._is_wedge_reported else min(silent_s, self._core_due_s)

    def _set_timer(self, delay_s: float | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now_s = time.monotonic()
        self._timer_due_s = max(now_s, self._due_s) if delay_s is None else now_s + delay_s
        self._timer = asyncio.get_running_loop().call_later(self._timer_due_s - now_s, self._check)

    def _check(self) -> None:
        now_s = time.monotonic() + _RESOLUTION_S
        if now_s < self._due_s:
            self._set_timer()
        elif now_s - self._timer_due_s > _LATE_S and not self._is_grace_used:
            self._is_grace_used = True
            self._set_timer(_GRACE_S)
        elif now_s >= self._last_report_s + self.report_timeout_s:
            self.stop()
            self.on_silent()
        else:
            self.is_wedged = self._is_wedge_reported = True
            self._set_timer()
            self.on_wedged()


@dataclass(eq=False)
class UpstreamInstance:
    """Watches one address. The pool owns it; calls register in `calls` while they are open."""

    address: str
    expected: ExpectedInstance
    channel: grpc.aio.Channel
    settings: PoolSettings
    on_change: Callable[[], None]
    throughput: ThroughputEstimator

    def __post_init__(self) -> None:
        self.calls = InFlightCalls()
        self.token_streams: TokenStreams | None = None
        self.info: InstanceInfo | None = None
        """Of the process that answered last at this address."""
        self._load: LoadReport | None = None
        self.last_full_s = -math.inf
        """The last moment at which its engine core said that requests wait for room."""
        self._first_seen_s = math.inf
        self._lost: str | None = "connecting"
        self._lost_state: State = "connecting"
        self._disconnected = Broadcast()
        self._is_leaving = False
        self._move_again_s = -math.inf
        self._failure_detector = FailureDetector(
            self.settings.beat_timeout_s,
            self.settings.core_silence_timeout_s,
            on_silent=self._on_silent,
            on_wedged=self._on_wedged,
        )
        self._is_silent = False  # whether silence has ended this connection
        self._silent_since_s: float | None = None  # of one that is lost by silence; its process may run on
        self._reports: Any = None  # the call of WatchLoad: grpc.aio's type of it has no name to import

    @property
    def name(self) -> str:
        """Its own name, or its address until it has sent one."""
        return (self.info.instance_id if self.info else "") or self.address

    @property
    def key(self) -> InstanceKey | None:
        """The process that answered last."""
        return InstanceKey(self.address, self.info.epoch) if self.info else None

    def view(self) -> InstanceView | None:
        """A snapshot; None before the instance has sent its info and its first load report."""
        if self.info is None or self._load is None:
            return None
        now_s = time.monotonic()
        return InstanceView(
            key=InstanceKey(self.address, self.info.epoch),
            info=self.info,
            load=self._load,
            out=self.out,
            num_unreported=self.calls.num_unreported,
            num_ended=self.calls.num_ended,
            num_unreported_tokens=self.calls.num_unreported_tokens,
            num_unreported_to_prefill=self.calls.num_unreported_to_prefill,
            throughput=self.throughput.estimate(now_s),
            up_s=now_s - self._first_seen_s,
        )

    @property
    def state(self) -> State:
        return self._status()[0]

    @property
    def out(self) -> str | None:
        return self._status()[1]

    @property
    def is_draining(self) -> bool:
        """Whether its process is there and drains, be it for another router."""
        return self._lost is None and self._load is not None and self._load.draining

    @property
    def has_left(self) -> bool:
        """Whether its address has left the pool and its process has ended; one that is silent may go on for a while. A
        call that it has completed may be open: the one for a prompt, for as long as another instance decodes."""
        return self._is_leaving and self._lost is not None and not self._is_silent_within(_MAX_SILENCE_S)

    @property
    def report_age_s(self) -> float:
        return self._failure_detector.report_age_s

    def may_go_on(self, within_s: float) -> bool:
        """Whether it is out because of silence, its engine core's or, for less than `within_s`, its own, as on a busy
        or halted machine; its process may run."""
        if self.state != "lost":
            return self.state == "wedged"
        return self._is_silent_within(within_s)

    def _is_silent_within(self, seconds: float) -> bool:
        return self._silent_since_s is not None and time.monotonic() - self._silent_since_s < seconds

    async def wait_lost(self, timeout_s: float) -> None:
        """Returns when there is no connection to its process, or after `timeout_s`."""
        if self._lost is None:
            await self._disconnected.wait(timeout_s)

    def set_leaving(self, is_leaving: bool) -> None:
        """Whether its address has left the pool. Then it gets no new calls, and those that run there run on."""
        if is_leaving != self._is_leaving:
            self._is_leaving = is_leaving
            self._notify(self.out)

    async def watch(self) -> None:
        delay_s = self.settings.min_backoff_s
        while True:
            started_s = time.monotonic()
            state: State = "lost"
            is_silence = False
            try:
                reason = await self._connect()
            except grpc.aio.AioRpcError as error:
                reason, is_silence = _failure_text(error), _is_silence(error)
                if self.info is None and _is_refused(error):
                    state = "connecting"
            except TimeoutError:
                reason, is_silence = self._silence, True
            except _UnexpectedInstance as error:
                reason, state = str(error), "foreign"
            self._lose(reason, state, is_silence=is_silence)
            self.calls.instance_ended(reason)
            if time.monotonic() - started_s > 2 * self.settings.max_backoff_s:
                delay_s = self.settings.min_backoff_s
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
            delay_s = min(2 * delay_s, self.settings.max_backoff_s)

    async def _connect(self) -> str:
        """Gets the instance's info, then its load reports; returns why they ended."""
        stub = instance_pb2_grpc.InstanceServiceStub(self.channel)
        answer = await stub.GetInstanceInfo(instance_pb2.GetInstanceInfoRequest(), timeout=self.settings.beat_timeout_s)
        self._identify(InstanceInfo.from_wire(answer))
        max_interval_s = self.settings.beat_timeout_s / _REPORTS_PER_TIMEOUT
        self._reports = stub.WatchLoad(instance_pb2.WatchLoadRequest(max_interval_s=max_interval_s))
        self._is_silent = False
        self._failure_detector.start()
        self.token_streams = TokenStreams(self.channel, self.settings)
        try:
            while isinstance(message := await self._next_report(), instance_pb2.WatchLoadResponse):
                if not self._observe(LoadReport.from_wire(message)):
                    return "another process answers at its address"
            return "its load stream ended"
        finally:
            self._failure_detector.stop()
            self._reports.cancel()
            self._reports = None
            self.token_streams.retire()

    async def _next_report(self) -> Any:
        """The next message; another value when the stream has ended. Raises TimeoutError when silence has ended it."""
        try:
            message = await self._reports.read()
        except asyncio.CancelledError:
            if not self._is_silent or is_cancelling():
                raise
            raise TimeoutError from None
        if self._is_silent:  # it came in the same turn of the event loop, and its stream has been cancelled
            raise TimeoutError
        return message

    def _identify(self, info: InstanceInfo) -> None:
        if mismatch := self.expected.mismatch(info):
            raise _UnexpectedInstance(mismatch)
        if self.info is None or info.epoch != self.info.epoch:
            self._first_seen_s, self.last_full_s = time.monotonic(), -math.inf
            self.calls.instance_restarted()
            self.throughput.clear()
            _log.info(
                "%s instance %s",
                self.expected.role,
                info.instance_id,
                extra={"fields": {"address": self.address, "epoch": info.epoch}},
            )
        self.info = info
        self._load = None  # ready with its first report

    def _observe(self, report: LoadReport) -> bool:
        """Records one report; False when it is not from the process that `_identify` has recorded."""
        if self.info is None or report.epoch != self.info.epoch:
            return False
        before = self.out if self._load is not None else "connecting"
        self._load, self._lost, self._silent_since_s = report, None, None
        if report.num_without_room:
            self.last_full_s = time.monotonic() - report.age_s
        self._failure_detector.report_received(report.core_silence_s, report.step_s)
        self.calls.report_received(report.age_s)
        self.throughput.report_received(report.num_prefilled_tokens, report.num_waiting_tokens, time.monotonic())
        after = self.out
        if self._failure_detector.is_wedged:
            self.calls.instance_lost(after or "wedged")
        if report.moving_out and time.monotonic() >= self._move_again_s:
            self._move_again_s = time.monotonic() + _MOVE_INTERVAL_S
            self.calls.instance_draining()
        if before != after:
            self._notify(after)
        return True

    def _status(self) -> tuple[State, str | None]:
        if self._is_leaving:  # its process may have ended, as it should: its calls notice it where it should not
            return "leaving", LEFT
        if self._lost is not None:
            return self._lost_state, self._lost
        if self._load is None:
            return "connecting", "connecting"
        if self._failure_detector.is_wedged:
            return "wedged", "its engine core is silent"
        if self._load.draining:
            return "draining", "draining"
        return "ready", None

    @property
    def _silence(self) -> str:
        return f"no load report for {self.settings.beat_timeout_s:g} s"

    def _on_silent(self) -> None:
        self._is_silent = True
        self._lose(self._silence, "lost", is_silence=True)
        self.calls.instance_lost(self._silence)
        if self._reports is not None:
            self._reports.cancel()

    def _on_wedged(self) -> None:
        self.calls.instance_lost("its engine core is silent")
        self._notify(self.out)

    def _lose(self, reason: str, state: State, *, is_silence: bool) -> None:
        is_new = reason != self._lost
        if not is_silence:
            self._silent_since_s = None
        elif self._lost is None:
            self._silent_since_s = time.monotonic()
        self._lost, self._lost_state = reason, state
        self._disconnected.notify()
        if is_new:
            self._notify(reason)

    def _notify(self, out: str | None) -> None:
        _log.log(
            logging.INFO if self.state in ("ready", "draining", "leaving") else logging.WARNING,
            "%s %s",
            self.expected.role,
            "is ready" if out is None else f"is out: {out}",
            extra={"fields": {"address": self.address, "epoch": self.info.epoch if self.info else None}},
        )
        self.on_change()


def _failure_text(error: grpc.aio.AioRpcError) -> str:
    """Why a connection to an instance could not be made, or broke."""
    if _is_refused(error):
        return "starting: nothing listens at its address yet"
    if _is_silence(error):
        return "nothing answers at its address"
    return f"its load stream failed: {error.code().name}"


def _is_refused(error: grpc.aio.AioRpcError) -> bool:
    """Whether nothing listens at the address."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and "Connection refused" in (error.details() or "")


def _is_silence(error: grpc.aio.AioRpcError) -> bool:
    """Whether nothing answered, not even that nothing listens."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return any(text in (error.details() or "") for text in _TIMED_OUT)
    return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
