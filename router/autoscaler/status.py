"""The state of the autoscaler as operators and Prometheus see it. docs/metrics.md lists the metrics."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import Metric

from protos.tandem.v1 import pools_pb2
from router.autoscaler.decide import Direction, Hold, ScaleDecision
from router.autoscaler.settings import AutoscalerSettings, PoolPolicy
from router.pools.instance_info import Role
from serving.metrics import counter, gauge

_MAX_RECENT = 32


@dataclass(slots=True)
class PoolStatus:
    """One pool's, since the start. Written by the loop alone, on the event loop."""

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

    def to_wire(self, now_s: float) -> pools_pb2.AutoscalerStatus:
        """`now_s` is on the autoscaler's clock."""
        decision = self.decision
        reason = decision.reason if decision is not None else "no observation yet"
        return pools_pb2.AutoscalerStatus(
            min_size=self.policy.min_size,
            max_size=self.policy.max_size,
            leads=self.leads,
            reason=self.failure or reason,
            desired_size=decision.desired if decision is not None else 0,
            age_s=now_s - decision.at_s if decision is not None else 0.0,
        )


class AutoscalerStatus:
    """Both pools' and the lead. Written by the loop."""

    def __init__(self, settings: AutoscalerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.pools: dict[Role, PoolStatus] = {
            "prefill": PoolStatus(settings.prefill),
            "decode": PoolStatus(settings.decode),
        }
        self.lead_until_s = float("-inf")
        self.num_failures = 0
        """Times that the owner of the instances was unavailable or refused."""

    @property
    def leads(self) -> bool:
        """Whether this router is the one that resizes, now."""
        return self._clock() < self.lead_until_s

    def to_wire(self, role: Role) -> pools_pb2.AutoscalerStatus:
        return self.pools[role].to_wire(self._clock())

    def age_s(self, decision: ScaleDecision) -> float:
        return self._clock() - decision.at_s


def collected(status: AutoscalerStatus | None) -> Iterator[Metric]:
    """Every metric family; without an autoscaler they have no samples."""
    pools = status.pools if status is not None else {}
    decided = [((role,), pool.decision) for role, pool in pools.items() if pool.decision is not None]
    sizes = [(labels, decision.new_size) for labels, decision in decided]
    desired = [(labels, decision.desired) for labels, decision in decided]
    ages = [(labels, status.age_s(decision)) for labels, decision in decided if status is not None]
    leads = [((), status.leads)] if status is not None else []
    holds = [((role, why), count) for role, pool in pools.items() for why, count in dict(pool.holds).items()]
    changes = [((role, to), count) for role, pool in pools.items() for to, count in dict(pool.changes).items()]
    failures = [((), status.num_failures)] if status is not None else []
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
