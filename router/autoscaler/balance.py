"""Both pools together: what each decides for itself, as far as budget and ratio allow. Pure.

Of all pairs of sizes between those that are and those that are wanted, the allowed one that leaves least unmet is
taken; to stay as it is is always allowed. What a pool gives up is not there for the other before its processes have
ended, so a rebalance takes two steps, and never exceeds the budget between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from router.autoscaler.decide import ScaleDecision
from router.autoscaler.policy import AutoscalerSettings


@dataclass(frozen=True, slots=True)
class Both:
    """The two decisions of one moment, with the processes of each pool beyond its size that have not ended yet."""

    prefill: ScaleDecision
    decode: ScaleDecision
    num_ending: int = 0


def balance(both: Both, policy: AutoscalerSettings) -> Both:
    """The decisions that may be carried out together; the others hold, or go less far, and say why."""
    prefill, decode = both.prefill, both.decode
    wanted = (prefill.new_size, decode.new_size)
    if _is_allowed(both, policy, *wanted):
        return both
    allowed = [pair for pair in _pairs(both) if _is_allowed(both, policy, *pair)]
    best = min(allowed, key=lambda pair: _unmet(both, *pair), default=(prefill.size, decode.size))
    return Both(_cut(prefill, best[0], both, policy), _cut(decode, best[1], both, policy), both.num_ending)


def _pairs(both: Both) -> Iterator[tuple[int, int]]:
    for num_prefill in _between(both.prefill):
        for num_decode in _between(both.decode):
            yield num_prefill, num_decode


def _between(decision: ScaleDecision) -> range:
    return range(min(decision.size, decision.new_size), max(decision.size, decision.new_size) + 1)


def _is_allowed(both: Both, policy: AutoscalerSettings, num_prefill: int, num_decode: int) -> bool:
    return _is_within_budget(both, policy, num_prefill, num_decode) and _is_in_ratio(
        both, policy, num_prefill, num_decode
    )


def _is_within_budget(both: Both, policy: AutoscalerSettings, num_prefill: int, num_decode: int) -> bool:
    """Whether those that grow find room beside all that is there; who does not grow needs none."""
    before = (both.prefill.size, both.decode.size)
    if policy.max_instances is None or (num_prefill <= before[0] and num_decode <= before[1]):
        return True
    return max(num_prefill, before[0]) + max(num_decode, before[1]) + both.num_ending <= policy.max_instances


def _is_in_ratio(both: Both, policy: AutoscalerSettings, num_prefill: int, num_decode: int) -> bool:
    """Whether the ratio is within its bounds, or no further from them than it is."""
    before = _off_ratio(policy, both.prefill.size, both.decode.size)
    return _off_ratio(policy, num_prefill, num_decode) <= before


def _off_ratio(policy: AutoscalerSettings, num_prefill: int, num_decode: int) -> float:
    lowest, highest = policy.ratios
    if num_decode == 0:
        return 0.0
    ratio = num_prefill / num_decode
    return max(lowest - ratio, ratio - highest, 0.0)


def _unmet(both: Both, num_prefill: int, num_decode: int) -> tuple[float, float, float, int]:
    """How far from what is wanted: first the shortage of the pool that is worst off, then of both, then what could be
    spared; the last part makes it unique."""
    shortages, surpluses = [1.0], [1.0]
    for decision, got in ((both.prefill, num_prefill), (both.decode, num_decode)):
        of = shortages if decision.direction == "out" else surpluses
        of.append(max(decision.new_size, 1) / max(got, 1) if of is shortages else got / max(decision.new_size, 1))
    return max(shortages), sum(shortages), sum(surpluses), -num_decode


def _cut(decision: ScaleDecision, size: int, both: Both, policy: AutoscalerSettings) -> ScaleDecision:
    if size == decision.new_size:
        return decision
    if not _is_within_budget(both, policy, both.prefill.new_size, both.decode.new_size):
        held = decision.held("budget", f"{policy.max_instances} instances are allowed in both pools together")
    else:
        lowest, highest = policy.ratios
        held = decision.held("ratio", f"the ratio of prefill to decode must stay within {lowest:g}..{highest:g}")
    return held if size == decision.size else _less_far(held, size)


def _less_far(held: ScaleDecision, size: int) -> ScaleDecision:
    return ScaleDecision(held.role, held.at_s, held.size, held.desired, size, None, held.reason)
