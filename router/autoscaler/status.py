"""What the autoscaler of one pool thinks and has done, for operators and for Prometheus."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protos.tandem.v1 import pools_pb2
from router.autoscaler.decide import Hold, ScaleDecision
from router.autoscaler.history import Direction
from router.autoscaler.policy import PoolPolicy


@dataclass(slots=True)
class Standing:
    """One pool's, since the start. Written by the loop alone, on the event loop."""

    policy: PoolPolicy
    decision: ScaleDecision | None = None
    """The last one; None before the first look."""
    trouble: str | None = None
    """Why there was none since, in words."""
    leads: bool = False
    """Whether this router is the one that resizes."""
    holds: Counter[Hold] = field(default_factory=Counter)
    """Decisions that left the size as it is, by why."""
    changes: Counter[Direction] = field(default_factory=Counter)
    """Resizes that this autoscaler has begun."""

    def took(self, decision: ScaleDecision, *, leads: bool) -> None:
        """A decision has been made, and carried out unless it holds."""
        self.decision, self.leads, self.trouble = decision, leads, None
        if decision.hold is not None:
            self.holds[decision.hold] += 1
        elif decision.direction is not None:
            self.changes[decision.direction] += 1

    def failed(self, why: str) -> None:
        """The owner of the instances does not answer or has refused: nothing could be decided, or carried out."""
        self.trouble, self.leads = why, False
        self.holds["no_answer"] += 1

    def to_wire(self, now_s: float) -> pools_pb2.AutoscalerStatus:
        """As operators are told; `now_s` on the autoscaler's clock."""
        decision = self.decision
        reason = decision.reason if decision is not None else "it has not looked yet"
        return pools_pb2.AutoscalerStatus(
            min_size=self.policy.min_size,
            max_size=self.policy.max_size,
            leads=self.leads,
            reason=self.trouble or reason,
            desired_size=decision.desired if decision is not None else 0,
            age_s=now_s - decision.at_s if decision is not None else 0.0,
        )
