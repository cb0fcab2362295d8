"""The loop of the autoscaler: observes both pools, decides, and resizes if this router leads.

    observe ─▶ decide for each pool ─▶ balance both ──leads──▶ resize ─▶ history begins anew
     ▲                                    └──another router leads, the owner is unavailable or has no room──▶ hold
     └───────── interval_s, or longer each time while the owner is unavailable ◀──────┘

Every router observes and decides, so that one that takes over the lead has full windows; one resizes. The lead is taken
before each step and holds for lead_ttl_s from the request: a router that was held up longer than that does not apply an
old decision, and a resize that hangs is given up then. A step ends before the next begins, so resizes never overlap.
No failure of the owner of the instances ends the loop, nor does an unexpected exception. Where one pool is held, the
pair is balanced again: the other one changes as far as the limits of both allow beside it.

Operators and Prometheus read its `statuses` and the lead; docs/metrics.md lists the metrics.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import Metric

from protos.tandem.v1 import pools_pb2
from router.autoscaler.decide import (
    Direction,
    History,
    Hold,
    Observed,
    ScaleDecision,
    balance,
    decide,
    in_order,
    observed,
)
from router.autoscaler.observation import PoolObservation
from router.autoscaler.resizer import ActuatorError, Change, Resizer
from router.autoscaler.settings import AutoscalerSettings, PoolPolicy
from router.pools.instance_info import Role
from serving.metrics import counter, gauge

_log = logging.getLogger(__name__)
_MAX_INTERVALS = 12
"""Between two attempts while the owner of the instances is unavailable."""
_MAX_RECENT = 32
_UNCHANGED = History(-math.inf)

ObservePools = Callable[[Mapping[Role, int]], Mapping[Role, PoolObservation]]
"""Both pools now, given their desired sizes."""


@dataclass(slots=True)
class PoolStatus:
    """One pool's, and what its next decision depends on. Written by the loop alone, on the event loop."""

    policy: PoolPolicy
    decision: ScaleDecision | None = None
    """The last one; None before the first observation."""
    failure: str | None = None
    """Why there was none since."""
    leads: bool = False
    """Whether this router was the one that resizes, at the last decision."""
    holds: Counter[Hold] = field(default_factory=Counter)
    """Decisions that left the size as it is, by reason."""
    recent: deque[ScaleDecision] = field(default_factory=lambda: deque(maxlen=_MAX_RECENT))
    """The last decisions that differ from the one before in their size or in what holds them."""
    changes: Counter[Direction] = field(default_factory=Counter)
    """Resizes that this autoscaler has begun."""
    history: History = _UNCHANGED
    observations: deque[Observed] = field(default_factory=deque)
    """Those that may decide, the newest last."""
    _size: int | None = None
    _last_change: Change | None = None

    @property
    def reason(self) -> str:
        """Why its size is what it is."""
        return self.failure or (self.decision.reason if self.decision is not None else "no observation yet")

    def add(self, observation: PoolObservation, last_change: Change | None, keep_s: float) -> None:
        """The newest observation, and the last resize by this router. A size that changed otherwise, by an operator or
        another router, is a change that begins the history anew."""
        is_new = last_change is not self._last_change
        by_operator = is_new and last_change is not None and last_change.cause == "operator"
        by_another_router = None not in (self._size, observation.size) and observation.size != self._size
        if by_operator or by_another_router:
            self.history = self.history.after_external_change(observation.at_s)
        self._size, self._last_change = observation.size, last_change
        self.observations.append(observed(observation, self.policy))
        while self.observations[0].observation.at_s < observation.at_s - keep_s:
            self.observations.popleft()

    def resized(self, decision: ScaleDecision, at_s: float) -> None:
        assert decision.direction is not None, "a decision that holds is not applied"
        self.history = self.history.after(at_s, decision.direction)
        self._size = decision.new_size

    def decided(self, decision: ScaleDecision, *, leads: bool) -> None:
        """A decision was made, and applied unless it holds."""
        before, self.decision, self.leads, self.failure = self.decision, decision, leads, None
        if before is None or (before.hold, before.new_size) != (decision.hold, decision.new_size):
            self.recent.append(decision)
        if decision.hold is not None:
            self.holds[decision.hold] += 1
        elif decision.direction is not None:
            self.changes[decision.direction] += 1

    def failed(self, why: str) -> None:
        """The owner of the instances is unavailable or has refused, so that no decision was made."""
        self.failure, self.leads = why, False
        self.holds["no_answer"] += 1


@dataclass(slots=True)
class _Backoff:
    """Spaces the attempts of one operation while it fails; logs the first failure and the recovery."""

    what: str
    interval_s: float
    num_intervals: int = 1
    until_s: float = -math.inf
    why: str = ""

    def failed(self, why: str, now_s: float, traceback: BaseException | None = None) -> None:
        if self.num_intervals == 1:
            _log.warning("autoscaler: %s failed: %s", self.what, why, exc_info=traceback)
        self.why = why
        self.num_intervals = min(2 * self.num_intervals, _MAX_INTERVALS)
        self.until_s = now_s + self.num_intervals * self.interval_s

    def succeeded(self) -> None:
        if self.num_intervals > 1:
            _log.info("autoscaler recovered: %s", self.what)
        self.num_intervals, self.until_s, self.why = 1, -math.inf, ""


@dataclass(eq=False)
class Autoscaler:
    """One per router, on its event loop."""

    resizer: Resizer
    observe: ObservePools
    settings: AutoscalerSettings
    holder: str
    """Identifies it among the autoscalers of several routers."""
    clock: Callable[[], float] = time.monotonic
    """That of the observations and of the resizer's changes."""

    def __post_init__(self) -> None:
        self._actuator = self.resizer.actuator
        policies, history = self.settings.policies, History(self.clock())
        self.statuses = {role: PoolStatus(policy, history=history) for role, policy in policies.items()}
        self.num_failures = 0
        """Times that the owner of the instances was unavailable or refused."""
        self._lead_until_s = -math.inf
        self._reading = _Backoff("reading the pools' sizes from their owner", self.settings.interval_s)
        self._stepping = _Backoff("a step", self.settings.interval_s)
        self._resizing = {role: _Backoff(f"resizing the {role} pool", self.settings.interval_s) for role in policies}

    @property
    def leads(self) -> bool:
        """Whether this router is the one that resizes, now."""
        return self.clock() < self._lead_until_s

    def to_wire(self, role: Role) -> pools_pb2.AutoscalerStatus:
        pool = self.statuses[role]
        decision = pool.decision
        return pools_pb2.AutoscalerStatus(
            min_size=pool.policy.min_size,
            max_size=pool.policy.max_size,
            leads=pool.leads,
            reason=pool.reason,
            desired_size=decision.desired if decision is not None else 0,
            age_s=self.clock() - decision.at_s if decision is not None else 0.0,
        )

    async def run(self) -> None:
        while True:
            try:
                await self.step()
                self._stepping.succeeded()
            except Exception as error:
                self._failed_unexpectedly(error)
            num_intervals = max(self._reading.num_intervals, self._stepping.num_intervals)
            await asyncio.sleep(self.settings.interval_s * num_intervals)

    async def step(self) -> None:
        """One observation and its consequences."""
        try:
            sizes = await self._read_sizes()
        except (ActuatorError, TimeoutError) as error:
            self._failed(self._reading, error)
            for pool in self.statuses.values():
                pool.failed(self._reading.why)
            return
        self._reading.succeeded()
        observations = self.observe(sizes)
        num_ending = sum(observation.num_ending for observation in observations.values())
        await self._apply(self._decisions(observations, num_ending), num_ending)

    async def _read_sizes(self) -> Mapping[Role, int]:
        """The sizes; takes the lead, if possible. Raises ActuatorError, or TimeoutError after lead_ttl_s."""
        ttl_s = self.settings.lead_ttl_s
        async with asyncio.timeout(ttl_s):
            asked_s, is_leader = self.clock(), False
            try:
                is_leader = await self._actuator.take_lead(self.holder, ttl_s)
            finally:
                self._lead_until_s = asked_s + ttl_s if is_leader else -math.inf
            return await self._actuator.sizes()

    def _decisions(self, observations: Mapping[Role, PoolObservation], num_ending: int) -> Sequence[ScaleDecision]:
        settings = self.settings
        keep_s = max(settings.prefill.scale_in_window_s, settings.decode.scale_in_window_s) + settings.stale_s
        for role, pool in self.statuses.items():
            pool.add(observations[role], self.resizer.last_changes.get(role), keep_s)
        prefill, decode = (
            decide(pool.observations, pool.policy, pool.history, settings.stale_s) for pool in self.statuses.values()
        )
        return balance(prefill, decode, num_ending, settings)

    async def _apply(self, decisions: Sequence[ScaleDecision], num_ending: int) -> None:
        """Resizes the pools one after the other, each within the limits beside what the other one has or will have."""
        leads, settings = self.leads, self.settings
        pair = {decision.role: await self._while_leading(decision, self._possible) for decision in decisions}
        for role in in_order(pair["prefill"], pair["decode"], num_ending, settings):
            prefill, decode = balance(pair["prefill"], pair["decode"], num_ending, settings)
            decision = await self._while_leading(prefill if role == "prefill" else decode, self._resized)
            pair[role], pool = decision, self.statuses[role]
            if decision.direction is not None:
                pool.resized(decision, self.clock())
            pool.decided(decision, leads=leads)

    async def _while_leading(
        self, decision: ScaleDecision, next_step: Callable[[ScaleDecision], Awaitable[ScaleDecision]]
    ) -> ScaleDecision:
        """What `next_step` returns for a change; held without the lead, or if the owner fails."""
        left_s = self._lead_until_s - self.clock()
        if decision.direction is None:
            return decision
        if left_s <= 0:
            return decision.held("not_leading", "another router resizes")
        try:
            async with asyncio.timeout(left_s):
                return await next_step(decision)
        except (ActuatorError, TimeoutError) as error:
            resizing = self._resizing[decision.role]
            self._failed(resizing, error)
            return decision.held("no_answer", resizing.why)

    async def _possible(self, decision: ScaleDecision) -> ScaleDecision:
        """`decision`, held where that needs no attempt to be known. Raises ActuatorError."""
        resizing = self._resizing[decision.role]
        if self.clock() < resizing.until_s:
            return decision.held("no_answer", resizing.why)
        if self._actuator.pause is not None:
            return decision.held("paused", self._actuator.pause)
        if decision.direction == "out" and (why := await self._actuator.no_room(decision.role)) is not None:
            return decision.held("no_room", why)
        return decision

    async def _resized(self, decision: ScaleDecision) -> ScaleDecision:
        """Applies it. Raises ActuatorError."""
        sizes, expected = {decision.role: decision.new_size}, {decision.role: decision.size}
        await self.resizer.resize(sizes, cause="autoscaler", reason=decision.reason, expected=expected)
        self._resizing[decision.role].succeeded()
        return decision

    def _failed(self, backoff: _Backoff, error: ActuatorError | TimeoutError) -> None:
        self.num_failures += 1
        backoff.failed(str(error) or f"no answer within {self.settings.lead_ttl_s:g} s", self.clock())

    def _failed_unexpectedly(self, error: Exception) -> None:
        self.num_failures += 1
        why = f"{type(error).__name__}: {error}"
        self._stepping.failed(why, self.clock(), traceback=error)
        for pool in self.statuses.values():
            pool.failed(why)


def metrics_of(scaler: Autoscaler | None) -> Iterator[Metric]:
    """Every metric family; without an autoscaler they have no samples."""
    pools = scaler.statuses if scaler is not None else {}
    decided = [((role,), pool.decision) for role, pool in pools.items() if pool.decision is not None]
    owned = [(labels, decision) for labels, decision in decided if decision.hold != "no_actuator"]
    sizes = [(labels, decision.new_size) for labels, decision in owned]
    desired = [(labels, decision.desired) for labels, decision in owned]
    ages = [(labels, scaler.clock() - decision.at_s) for labels, decision in decided if scaler is not None]
    leads = [((), scaler.leads)] if scaler is not None else []
    holds = [((role, why), count) for role, pool in pools.items() for why, count in dict(pool.holds).items()]
    changes = [((role, to), count) for role, pool in pools.items() for to, count in dict(pool.changes).items()]
    failures = [((), scaler.num_failures)] if scaler is not None else []
    for kind, name, documentation, samples, labels in (
        (gauge, "size", "Desired size of the pool.", sizes, ["role"]),
        (gauge, "desired_size", "Size the pool would get if it could change at once.", desired, ["role"]),
        (gauge, "decision_age_seconds", "Since the last observation with a decision.", ages, ["role"]),
        (gauge, "leads", "1: this router resizes; 0: another one or none does.", leads, []),
        (counter, "holds", "Decisions that left a size as it is.", holds, ["role", "reason"]),
        (counter, "changes", "Resizes by this autoscaler.", changes, ["role", "direction"]),
        (counter, "failures", "Times that the owner of the instances was unavailable or refused.", failures, []),
    ):
        yield kind(f"tandem_router_autoscaler_{name}", documentation, samples, *labels)
