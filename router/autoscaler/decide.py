"""Decides the next size of each pool from its observations, then limits both pools together. Pure.

One pool, by the sizes that the signals demand (signals.py: load, KV use, waiting tokens, queue delay, TTFT, ITL):

    latest observation ──problem──▶ hold (fail static)
         │
         ├─ 0: an operator has stopped the pool ─────────────────────▶ hold
         ├─ outside of min_size..max_size ──────────────────────────▶ the nearest bound
         ├─ the least demand of the last scale_out_window_s > size ──▶ out, at most double
         └─ the most demand of the last scale_in_window_s < size ───▶ in, at most half
                  └─ cool-down, instances that are still starting, a second change of direction ─▶ hold

Both pools: of all pairs of sizes between the present and the decided ones, the one within max_instances and the ratio
that leaves the least unmet demand; staying is always allowed. What one pool gives up is not available to the other
before its processes have ended, so a rebalance takes two steps and never exceeds max_instances between them. The pair
is applied one after the other (`in_order`); a decision that proves impossible is held and the pair balanced again.

Nothing here waits or applies: a `ScaleDecision` says what should happen, why, and what prevents it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

from router.autoscaler.observation import PoolObservation
from router.autoscaler.settings import AutoscalerSettings, PoolPolicy
from router.autoscaler.signals import Demand, demand_of
from router.pools.instance_info import Role

Direction = Literal["out", "in"]
"""More instances, or fewer."""


@dataclass(frozen=True, slots=True)
class History:
    """The changes of a pool's size that the next decision must respect. Times are those of observations, in seconds."""

    since_s: float
    """Observations from then on count: the start, or the last change."""
    changed_s: float | None = None
    direction: Direction | None = None
    """Of the last change; None: there was none, or not by this autoscaler, and either direction may follow."""
    reversed_s: float | None = None
    """When the direction last changed."""

    def after(self, at_s: float, direction: Direction) -> History:
        """The autoscaler has changed the size."""
        is_reversal = self.direction is not None and self.direction != direction
        return History(at_s, at_s, direction, at_s if is_reversal else self.reversed_s)

    def after_external_change(self, at_s: float) -> History:
        """An operator or another router has changed the size."""
        return History(at_s, at_s)


class Observed(NamedTuple):
    """An observation, and what it alone demands: computed once, for a window may hold thousands of them."""

    observation: PoolObservation
    demand: Demand | None
    """None: it has a problem."""


def observed(observation: PoolObservation, policy: PoolPolicy) -> Observed:
    return Observed(observation, demand_of(observation, policy) if observation.problem is None else None)


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
    "no_room",
    "paused",
]
"""Why a size stays: no other size is demanded or possible (steady), a larger one is not allowed (at_bound), or the
demanded one must wait or is impossible."""


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """The next size of one pool, and why."""

    role: Role
    at_s: float
    size: int
    """The desired size until now; 0 when unknown."""
    desired: int
    """The size it would get if it could change at once."""
    new_size: int
    hold: Hold | None
    """None: the size changes."""
    reason: str
    """The signal, its value and target, and what prevents the change."""
    limit: Hold | None = None
    """The limit of both pools that `reason` names already: where a pair is balanced again it is not named twice."""
    num_unowned: int = 0
    """Processes of a pool whose size is unknown. The limits of both pools count them."""

    @property
    def num_before(self) -> int:
        """What the limits of both pools count until now."""
        return self.size + self.num_unowned

    @property
    def num_after(self) -> int:
        """What they count with the new size."""
        return self.new_size + self.num_unowned

    @property
    def direction(self) -> Direction | None:
        """None: the size stays."""
        return None if self.new_size == self.size else "out" if self.new_size > self.size else "in"

    def held(self, hold: Hold, why: str) -> ScaleDecision:
        """The same without the change, which `why` prevents."""
        return replace(self, new_size=self.size, hold=hold, reason=f"{self.reason}; {why}")


# One pool


def decide(observations: Sequence[Observed], policy: PoolPolicy, history: History, stale_s: float) -> ScaleDecision:
    """The next size of the observed pool; `observations` are ordered, the last one is now. Needs at least one.

    `stale_s` is the longest gap that a window may have. The size never falls when a load rises in every observation,
    and is never outside of the bounds, except that a size outside returns to them by steps.
    """
    latest, now = observations[-1]
    size = latest.size
    if size is None:
        why = "the pool has no owner that resizes it"
        return ScaleDecision(latest.role, latest.at_s, 0, 0, 0, "no_actuator", why, num_unowned=latest.num_present)
    if size == 0:
        stopped = "an operator has set the pool to 0, which stays until it is resized"
        return ScaleDecision(latest.role, latest.at_s, 0, 0, 0, "paused", stopped)
    bounded = min(max(size, policy.min_size), policy.max_size)
    if bounded != size:
        bounds = f"{size} instances are outside of {policy.min_size}..{policy.max_size}"
        decision = ScaleDecision(latest.role, latest.at_s, size, bounded, _step(size, bounded), None, bounds)
        return _cooled_down(decision, policy, history)
    if latest.problem is not None:
        reason = f"no decision: {latest.problem.message}"
        return ScaleDecision(latest.role, latest.at_s, size, size, size, latest.problem.kind, reason)
    assert now is not None, "without a problem an observation has a demand"
    return _decide_by_demand(observations, size, now, policy, history, stale_s)


def _decide_by_demand(
    observations: Sequence[Observed], size: int, now: Demand, policy: PoolPolicy, history: History, stale_s: float
) -> ScaleDecision:
    latest = observations[-1].observation
    desired = min(max(_desired(now, size), policy.min_size), policy.max_size)
    decision = ScaleDecision(latest.role, latest.at_s, size, desired, size, "steady", now.wanted_by.describe(desired))
    if now.num_wanted > size:
        out = _demands(observations, history, policy.scale_out_window_s, stale_s)
        return _grow(decision, now, latest, out, policy, history)
    if now.num_enough is None or now.num_enough >= size:
        return replace(decision, reason=f"{decision.reason}; as few as possible: {now.enough_for}")
    down = _demands(observations, history, policy.scale_in_window_s, stale_s)
    return _shrink(replace(decision, reason=f"fewer are enough: {now.enough_for}"), down, policy, history)


def _grow(
    decision: ScaleDecision,
    now: Demand,
    latest: PoolObservation,
    demands: Sequence[Demand],
    policy: PoolPolicy,
    history: History,
) -> ScaleDecision:
    size = decision.size
    wanted = min((demand.num_wanted for demand in demands), default=0)
    if size == policy.max_size:
        return decision.held("at_bound", f"{now.num_wanted} are wanted and {size} the most allowed")
    if wanted <= size:
        return decision.held("window", f"not yet for {policy.scale_out_window_s:g} s since the last change")
    decision = replace(decision, new_size=min(_step(size, wanted), policy.max_size), hold=None)
    wait_s = policy.start_timeout_s - (latest.at_s - history.since_s)
    if latest.num_pending and wait_s > 0:
        pending = f"{latest.num_pending} of {latest.size} are not warm yet"
        return decision.held("pending", f"{pending}, and are waited for {wait_s:.0f} s more")
    is_urgent = min(demand.wanted_by.ratio for demand in demands) >= policy.urgent
    if history.direction == "in" and history.reversed_s is not None and not is_urgent:
        left_s = policy.scale_in_window_s - (latest.at_s - history.reversed_s)
        if left_s > 0:
            return decision.held("direction", f"the direction has just changed; not again for {left_s:.0f} s")
    return _cooled_down(decision, policy, history)


def _shrink(decision: ScaleDecision, demands: Sequence[Demand], policy: PoolPolicy, history: History) -> ScaleDecision:
    size, enough = decision.size, _most_needed(demands)
    if size == policy.min_size:
        return decision.held("steady", f"{size} are the least allowed")
    if enough is None or enough >= size:
        return decision.held("window", f"not yet for {policy.scale_in_window_s:g} s since the last change")
    new_size = max(_step(size, enough), policy.min_size)
    return _cooled_down(replace(decision, new_size=new_size, hold=None), policy, history)


def _desired(demand: Demand, size: int) -> int:
    """The size that one observation alone demands."""
    if demand.num_wanted > size:
        return demand.num_wanted
    return size if demand.num_enough is None else min(demand.num_enough, size)


def _demands(observations: Sequence[Observed], history: History, window_s: float, stale_s: float) -> list[Demand]:
    """Of the observations without problem in the last `window_s`, and the one before, which was valid until then; empty
    while they do not cover the whole window without a gap since the last change."""
    end_s = last_s = observations[-1].observation.at_s
    demands: list[Demand] = []
    for observation, demand in reversed(observations):
        at_s = observation.at_s
        if at_s < history.since_s or (demands and last_s - at_s > stale_s):
            break
        if demand is not None:
            demands.append(demand)
            last_s = at_s
            if at_s <= end_s - window_s:
                return demands
    return []


def _most_needed(demands: Sequence[Demand]) -> int | None:
    """None where one of them is unknown, or there is none."""
    needed = [demand.num_enough for demand in demands]
    known = [number for number in needed if number is not None]
    return max(known) if known and len(known) == len(needed) else None


def _step(size: int, wanted: int) -> int:
    """At most double, at least half."""
    return max(min(wanted, max(2 * size, 1)), math.ceil(size / 2))


def _cooled_down(decision: ScaleDecision, policy: PoolPolicy, history: History) -> ScaleDecision:
    left_s = policy.cool_down_s - (decision.at_s - (-math.inf if history.changed_s is None else history.changed_s))
    return decision if left_s <= 0 else decision.held("cool_down", f"the size may change again in {left_s:.0f} s")


def decide_now(observation: PoolObservation, policy: PoolPolicy) -> ScaleDecision:
    """The size that this observation alone demands, for an autoscaler with windows of its own, such as an HPA.

    The observation's size is the number of ready instances. Those that are present include what starts, is young or
    silent: a scale-up has ordered them, or a rollout has added them for a time, which are not distinguishable here. So
    what the load on the young ones demands counts only beyond all that are present, but no latency: most of its samples
    are from before there were so many. Held where the observation has a problem, and where the number that is enough is
    unknown and no growth is demanded.
    """
    size, num_present = observation.size or 0, observation.num_present
    stays = (num_present,) * 3
    if (problem := observation.problem) is not None:
        return ScaleDecision(observation.role, observation.at_s, *stays, problem.kind, problem.message)
    settled = observation.of_settled
    is_mixed = bool(settled.warm) and len(settled.warm) < len(observation.warm)
    now = demand_of(replace(observation, latency_s=None) if is_mixed else observation, policy)
    if now.num_wanted <= num_present and not settled.warm:
        young = f"no warm instance has been ready for {policy.settled_s:g} s, and a rollout may have added any"
        return ScaleDecision(observation.role, observation.at_s, *stays, "missing", young)
    if is_mixed or now.num_wanted <= num_present:
        of_settled = demand_of(settled, policy)
        if now.num_wanted <= max(num_present, of_settled.num_wanted):
            now = of_settled
    demanded = _demanded(now, size, num_present)
    if demanded is None:
        return ScaleDecision(observation.role, observation.at_s, *stays, "missing", now.enough_for)
    desired, size = min(max(demanded, policy.min_size), policy.max_size), size or num_present
    return ScaleDecision(
        observation.role, observation.at_s, size, desired, desired, None, now.wanted_by.describe(desired)
    )


def _demanded(now: Demand, num_ready: int, num_present: int) -> int | None:
    """None: unknown, and the size should stay.

    Beyond the ready instances nothing counts as present unless growth is demanded. Then those that start are kept as
    far as the load may need them, and where that is unknown, an order for fewer than are present could remove some.
    """
    is_growth = now.num_wanted > num_ready
    if now.num_enough is None:
        return now.num_wanted if is_growth and now.num_wanted >= num_present else None
    if is_growth:
        return max(now.num_wanted, min(now.num_enough, num_present))
    return min(now.num_enough, num_ready)


# Both pools

Sizes = tuple[int, int]
"""Of the prefill and of the decode pool."""


def balance(
    prefill: ScaleDecision,
    decode: ScaleDecision,
    num_ending: int,
    settings: AutoscalerSettings,
    num_present: Sizes | None = None,
) -> tuple[ScaleDecision, ScaleDecision]:
    """The decisions that may be applied together; those that may not hold, or change less, and say why.

    `num_present` are the processes of each pool that stay: its size by default. `num_ending` are those beyond them
    that have not ended yet.
    """
    before, decided = (prefill.num_before, decode.num_before), (prefill.num_after, decode.num_after)
    present = before if num_present is None else num_present
    if _is_allowed(before, decided, present, num_ending, settings):
        return prefill, decode
    if _is_within_max_instances(before, decided, present, num_ending, settings):
        lowest, highest = settings.ratios
        hold: Hold = "ratio"
        why = f"the ratio of prefill to decode must stay within {lowest:g}..{highest:g}"
    else:
        hold, why = "budget", f"{settings.max_instances} instances are allowed in both pools together"
    pairs = [*product(_between(prefill), _between(decode))]
    allowed = [pair for pair in pairs if _is_allowed(before, pair, present, num_ending, settings)]
    if not allowed:  # processes that start are within the ratio, and what has started is not yet
        allowed = [pair for pair in pairs if _is_allowed(before, pair, before, num_ending, settings)]
    best = min(allowed, key=lambda pair: _unmet((prefill, decode), pair), default=before)
    return _limited(prefill, best[0], hold, why), _limited(decode, best[1], hold, why)


def in_order(
    prefill: ScaleDecision, decode: ScaleDecision, num_ending: int, settings: AutoscalerSettings
) -> tuple[Role, Role]:
    """Which of two balanced decisions to apply first and second. The first is allowed while the other pool has its
    present size, if either is, so that the limits are kept between both, and if the second proves impossible."""
    before = (prefill.num_before, decode.num_before)
    prefill_alone = (prefill.num_after, decode.num_before)
    if _is_allowed(before, prefill_alone, before, num_ending, settings):
        return "prefill", "decode"
    return "decode", "prefill"


def _between(decision: ScaleDecision) -> range:
    return range(min(decision.num_before, decision.num_after), max(decision.num_before, decision.num_after) + 1)


def _is_allowed(before: Sizes, sizes: Sizes, present: Sizes, num_ending: int, settings: AutoscalerSettings) -> bool:
    """Whether the ratio is within its bounds, or not farther from them than now, and the sum within max_instances."""
    off_now = min(_off_ratio(settings, before), _off_ratio(settings, present))
    is_in_ratio = _off_ratio(settings, sizes) <= off_now
    return is_in_ratio and _is_within_max_instances(before, sizes, present, num_ending, settings)


def _is_within_max_instances(
    before: Sizes, sizes: Sizes, present: Sizes, num_ending: int, settings: AutoscalerSettings
) -> bool:
    """Whether a pool that grows finds room beside all present processes; a pool that does not grow needs none. Nor do
    those that start already, though those of a rollout are no reason to keep more than max_instances."""
    if settings.max_instances is None or (sizes[0] <= before[0] and sizes[1] <= before[1]):
        return True
    if sizes[0] <= present[0] and sizes[1] <= present[1]:
        return sum(sizes) <= settings.max_instances
    return max(sizes[0], present[0]) + max(sizes[1], present[1]) + num_ending <= settings.max_instances


def _off_ratio(settings: AutoscalerSettings, sizes: Sizes) -> float:
    num_prefill, num_decode = sizes
    if num_decode == 0:
        return 0.0
    lowest, highest = settings.ratios
    ratio = num_prefill / num_decode
    return max(lowest - ratio, ratio - highest, 0.0)


def _unmet(decisions: Sequence[ScaleDecision], sizes: Sizes) -> tuple[float, float, float, int]:
    """How far from the decisions: first the shortage of the worse pool, then of both, then what could be removed; the
    last part makes it unique."""
    shortages, surpluses = [1.0], [1.0]
    for decision, size in zip(decisions, sizes, strict=True):
        if decision.direction == "out":
            shortages.append(max(decision.new_size, 1) / max(size, 1))
        else:
            surpluses.append(size / max(decision.new_size, 1))
    return max(shortages), sum(shortages), sum(surpluses), -sizes[1]


def _limited(decision: ScaleDecision, size: int, hold: Hold, why: str) -> ScaleDecision:
    if size == decision.num_after:
        return decision
    reason = decision.reason if decision.limit == hold else f"{decision.reason}; {why}"
    return replace(decision, new_size=size, hold=hold if size == decision.size else None, reason=reason, limit=hold)
