"""Where a request with objectives runs, over views of both pools: what placement.py needs, and the decision in words.

Used by `auto` where the router has objectives and the instances report what their steps cost; elsewhere
disaggregation.py decides.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from engine.core.messages import StepCost
from router.picking.disaggregation import Decision, Disaggregation, Reason
from router.picking.placement import Goal, Placement, Site, place
from router.picking.scorers import Aims, queue_now
from router.picking.settings import SloSettings
from router.pools.instance_info import InstanceView
from router.pools.throughput import Work
from router.request.generation_request import GenerationRequest

_WITHOUT_ITL = 3.0
"""Times the base of a step: the pace to keep where only a TTFT objective is set."""
_MAX_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class AimSource:
    """The aims of requests. One per router."""

    slo: SloSettings
    expected_tokens: Callable[[int], int] = lambda max_tokens: max_tokens
    """Output tokens to expect of a request with this `max_tokens`."""
    short_tokens: Callable[[int], int | None] = lambda max_tokens: None
    """Output tokens that nine of ten such requests exceed; None: not known."""

    def of(self, request: GenerationRequest, waited_s: float = 0.0) -> Aims:
        expected, short = self.expected_tokens(request.max_tokens), self.short_tokens(request.max_tokens)
        return Aims(self.slo.objectives(waited_s), expected, short)


class Placed(NamedTuple):
    """Decided: where the request is decoded, where it is prefilled if it is split, and how its work is measured."""

    decode: InstanceView
    prefill: InstanceView | None
    disaggregation: Disaggregation
    work: Work


def place_by_objectives(
    views: Sequence[InstanceView], aims: Aims, num_missing: Callable[[InstanceView], int], rng: random.Random
) -> Placed | None:
    """The place of a request among `views` of both pools, which all may serve it; None: their costs are not known."""
    costs = [_measured(view) for view in views]
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    itl_s = aims.objectives.itl_s or _WITHOUT_ITL * max(cost.base_s for cost in known)
    filled = [cost or known[0] for cost in costs]  # an instance that has just started is like another one
    shares = [_share(view, cost) for view, cost in zip(views, filled, strict=True)]
    ttft_s = aims.objectives.ttft_s or math.inf
    goal = Goal(ttft_s, itl_s, max(aims.num_expected, 1), fmean(shares), aims.num_short)
    per_s = [view.throughput.hand_over_per_s for view in views if view.throughput.hand_over_per_s]
    mean_per_s = fmean(per_s) if per_s else None
    sites = [
        _site(view, goal, cost, share, num_missing(view), mean_per_s)
        for view, cost, share in zip(views, filled, shares, strict=True)
    ]
    placement = place(sites, _pairs(views), rng)
    return _placed(views, sites, placement)


def _measured(view: InstanceView) -> StepCost | None:
    cost = view.load.step_cost
    return cost if cost is not None and min(cost.base_s, cost.per_token_s) > 0 else None


def _share(view: InstanceView, cost: StepCost) -> float:
    return min(view.throughput.recent_prefill_per_s * cost.per_token_s, _MAX_SHARE)


def _site(
    view: InstanceView, goal: Goal, cost: StepCost, share: float, num_missing: int, mean_per_s: float | None
) -> Site:
    per_s, load = view.throughput.hand_over_per_s or mean_per_s, view.load
    # What waits at a decode instance becomes a stream there; what waits at a prefill instance mostly leaves.
    is_prefill = view.info.role == "prefill"
    return Site(
        goal=goal,
        cost=cost,
        max_tokens=max(view.info.max_num_batched_tokens, 1),
        num_uncomputed=max(load.num_uncomputed_tokens + view.num_unreported_tokens, 0),
        num_streams=max(load.num_running - load.num_prefilling, 0) if is_prefill else sum(queue_now(view)),
        share=share,
        num_missing=num_missing,
        hand_over_s=num_missing / per_s if per_s else 0.0,
    )


def _pairs(views: Sequence[InstanceView]) -> list[tuple[list[int], list[int]]]:
    """The prefill and the decode instances of each kind that can hand KV over."""
    kinds: dict[object, tuple[list[int], list[int]]] = {}
    for index, view in enumerate(views):
        prefill, decode = kinds.setdefault(view.info.pairing, ([], []))
        (prefill if view.info.role == "prefill" else decode).append(index)
    return list(kinds.values())


def _placed(views: Sequence[InstanceView], sites: Sequence[Site], placement: Placement) -> Placed:
    site, explanation = sites[placement.site], _explain(views, sites, placement)
    reason = Reason(placement.reason)
    if placement.prefill is None:
        local = Disaggregation(Decision.LOCAL, reason, explanation)
        return Placed(views[placement.site], None, local, Work(site.num_missing, site.num_uncomputed))
    prefill = sites[placement.prefill]
    work = Work(prefill.num_missing, prefill.num_uncomputed, site.num_missing)
    split = Disaggregation(Decision.DISAGGREGATE, reason, explanation)
    return Placed(views[placement.site], views[placement.prefill], split, work)


def _explain(views: Sequence[InstanceView], sites: Sequence[Site], placement: Placement) -> str:
    goal = sites[placement.site].goal
    aims = f"of {goal.itl_s * 1e3:.3g} ms"
    if goal.ttft_s < math.inf:
        aims = f"of {goal.ttft_s:.3g} s and {goal.itl_s * 1e3:.3g} ms"

    def alone(index: int) -> str:
        return f"alone at {views[index].instance_id} {_times(sites[index].first_s, sites[index].tpot_s)}"

    def split(prefill: int, decode: int) -> str:
        names = f"split over {views[prefill].instance_id} and {views[decode].instance_id}"
        return f"{names} {_times(sites[prefill].first_s, sites[decode].split_tpot_s)}"

    if placement.prefill is not None:
        return f"{split(placement.prefill, placement.site)}, {aims}; {alone(placement.alone)}"
    text = f"{alone(placement.site)}, {aims}"
    if placement.reason == "overload":
        return f"{text}; no instance holds the objectives: the least loaded"
    if placement.split is None or placement.reason == "estimate":
        return text
    why = "not better by a fifth" if placement.reason == "margin" else "does not hold the objectives with a tenth left"
    return f"{text}; {split(*placement.split)}: {why}"


def _times(first_s: float, tpot_s: float) -> str:
    return f"{first_s:.2f} s to the first token, {tpot_s * 1e3:.1f} ms a token"
