"""One pool's next size, from the looks at it: pure.

    latest look ──problem──▶ hold (fail static)
         │
         ├─ outside of min_size..max_size ──────────────▶ the nearest bound
         ├─ window: the least wanted of the last seconds > size ──▶ out, at most double
         └─ window: the most needed of the last minutes < size ──▶ in, at most half
                        └─ cool-down, instances that are still starting, a second change of direction ─▶ hold

Nothing here waits or applies: a `ScaleDecision` says what should be, why, and what stands against it. What stands in
the way for both pools together (budget, ratio) is balance.py's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from router.autoscaler.history import Direction, History
from router.autoscaler.observation import PoolObservation
from router.autoscaler.policy import PoolPolicy
from router.autoscaler.signals import Demand, demand_of
from router.pools.instances import Role

Hold = Literal[
    "steady",
    "at_bound",
    "missing",
    "stale",
    "nonsense",
    "no_actuator",
    "no_answer",
    "window",
    "cool_down",
    "pending",
    "direction",
    "budget",
    "ratio",
    "not_leading",
]
"""Why a size stays as it is: nobody wants another one (steady), it may not be another one (at_bound), or what is wanted
must wait or cannot be."""


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """What should become of one pool's size, and why."""

    role: Role
    at_s: float
    size: int
    """What it was last told to have; 0 when nobody says."""
    desired: int
    """What it would have now if it might change at once."""
    new_size: int
    hold: Hold | None
    """None: it changes."""
    reason: str
    """In words: the signal, its value and target, and what stands in the way."""

    @property
    def direction(self) -> Direction | None:
        """Where it goes; None: nowhere."""
        return None if self.new_size == self.size else "out" if self.new_size > self.size else "in"

    def held(self, hold: Hold, why: str) -> ScaleDecision:
        """The same, without the change: `why` stands in the way."""
        return replace(self, new_size=self.size, hold=hold, reason=f"{self.reason}; {why}")


def decide(looks: Sequence[PoolObservation], policy: PoolPolicy, history: History, stale_s: float) -> ScaleDecision:
    """The next size of the pool that `looks` are of, oldest first; the last one is now. Needs at least one.

    `stale_s` is the longest hole that a window may have. Never falls when a load rises in every look; never outside of
    the bounds, except where it was outside and goes there by steps.
    """
    latest = looks[-1]
    size = latest.size
    if size is None:
        return ScaleDecision(latest.role, latest.at_s, 0, 0, 0, "no_actuator", "nobody says how many there should be")
    bounded = min(max(size, policy.min_size), policy.max_size)
    if bounded != size:
        bounds = f"{size} instances are outside of {policy.min_size}..{policy.max_size}"
        decision = ScaleDecision(latest.role, latest.at_s, size, bounded, _step(size, bounded), None, bounds)
        return _cooled_down(decision, policy, history)
    if latest.problem is not None:
        return ScaleDecision(
            latest.role, latest.at_s, size, size, size, latest.problem.kind, f"no decision: {latest.problem.words}"
        )
    return _by_demand(looks, size, policy, history, stale_s)


def _by_demand(
    looks: Sequence[PoolObservation], size: int, policy: PoolPolicy, history: History, stale_s: float
) -> ScaleDecision:
    latest = looks[-1]
    now = demand_of(latest, policy)
    out = _demands(looks, policy, history, policy.scale_out_window_s, stale_s)
    down = _demands(looks, policy, history, policy.scale_in_window_s, stale_s)
    wanted = min((demand.num_wanted for demand in out), default=0)
    enough = _most_needed(down)
    desired = min(max(_desired(now, size), policy.min_size), policy.max_size)
    decision = ScaleDecision(latest.role, latest.at_s, size, desired, size, "steady", now.wanted_by.among(desired))
    if now.num_wanted > size:
        if size == policy.max_size:
            return decision.held("at_bound", f"{now.num_wanted} are wanted and {size} the most allowed")
        if wanted <= size:
            return decision.held("window", f"not yet for {policy.scale_out_window_s:g} s since the last change")
        new_size = min(_step(size, wanted), policy.max_size)
        decision = replace(decision, new_size=new_size, hold=None)
        return _may_grow(decision, looks, out, policy, history)
    if now.num_enough is None or now.num_enough >= size:
        return replace(decision, reason=f"{decision.reason}; as few as possible: {now.enough_for}")
    decision = replace(decision, reason=f"fewer are enough: {now.enough_for}")
    if size == policy.min_size:
        return decision.held("at_bound", f"{size} are the least allowed")
    if enough is None or enough >= size:
        return decision.held("window", f"not yet for {policy.scale_in_window_s:g} s since the last change")
    new_size = max(_step(size, enough), policy.min_size)
    return _cooled_down(replace(decision, new_size=new_size, hold=None), policy, history)


def _desired(demand: Demand, size: int) -> int:
    """What one look alone would have."""
    if demand.num_wanted > size:
        return demand.num_wanted
    return size if demand.num_enough is None else min(demand.num_enough, size)


def _demands(
    looks: Sequence[PoolObservation], policy: PoolPolicy, history: History, window_s: float, stale_s: float
) -> list[Demand]:
    """Of the good looks of the last `window_s`, and the one before, which held until then; none while they do not cover
    the window without a hole, all of it after the last change."""
    end_s = looks[-1].at_s
    good: list[PoolObservation] = []
    for look in reversed(looks):
        if look.at_s < history.since_s or (good and good[-1].at_s - look.at_s > stale_s):
            break
        if look.problem is None:
            good.append(look)
            if look.at_s <= end_s - window_s:
                return [demand_of(each, policy) for each in good]
    return []


def _most_needed(demands: Sequence[Demand]) -> int | None:
    """None where one of them does not know, or there is none."""
    needed = [demand.num_enough for demand in demands]
    known = [number for number in needed if number is not None]
    return max(known) if known and len(known) == len(needed) else None


def _step(size: int, wanted: int) -> int:
    """At most double, at least half."""
    return max(min(wanted, max(2 * size, 1)), math.ceil(size / 2))


def _may_grow(
    decision: ScaleDecision,
    looks: Sequence[PoolObservation],
    demands: Sequence[Demand],
    policy: PoolPolicy,
    history: History,
) -> ScaleDecision:
    latest = looks[-1]
    waits_s = policy.start_timeout_s - (latest.at_s - history.since_s)
    if latest.num_pending and waits_s > 0:
        return decision.held(
            "pending",
            f"{latest.num_pending} of {latest.size} are still starting, and are waited for {waits_s:.0f} s more",
        )
    is_urgent = min(demand.ratio for demand in demands) >= policy.urgent
    if history.direction == "in" and history.reversed_s is not None and not is_urgent:
        left_s = policy.scale_in_window_s - (latest.at_s - history.reversed_s)
        if left_s > 0:
            return decision.held("direction", f"the direction has just changed; not again for {left_s:.0f} s")
    return _cooled_down(decision, policy, history)


def _cooled_down(decision: ScaleDecision, policy: PoolPolicy, history: History) -> ScaleDecision:
    left_s = policy.cool_down_s - (decision.at_s - (-math.inf if history.changed_s is None else history.changed_s))
    return decision if left_s <= 0 else decision.held("cool_down", f"the size may change again in {left_s:.0f} s")
