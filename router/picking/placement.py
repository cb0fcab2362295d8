"""Where `auto` runs a request, by what steps cost: alone at an instance of either pool, or split over both. Pure.

Used by `auto` where the instances report what their steps cost; elsewhere disaggregation.py decides. With objectives
all instances are compared, without them one of each pool (plan.py), as if steps with prompts were `STEP_STRETCH` times
as long as without.

Each way costs its predicted time to the first token, what the request and its neighbours miss of their objectives, and
the capacity that it takes from those that come later. All in seconds; F(x, o) = max(0, x - 0.9 o) is what is missed:

    speed(n) = prompt tokens/s beside n streams: the whole budget, but at n > 0 only what is left of steps of length S
    first    = (uncomputed there + own) / speed(n)                            time to the first token
    tpot     = (base + per_stream (n + 1)) / (1 - share), at most S           share: of the time that goes to prompts
    alone(j) = 0.3 first + 10 F(first, T) + 10 E F(tpot, S) + 0.5 taken_j + delayed_j + held_j
    split(i, j) = the same, with `first` and `held` at i, all else at j, and the hand-over's time in tpot

taken: the prefill speed that its stream takes from j; delayed: what the n streams of j miss more by one more stream;
held: what the prompt itself delays streams where it is computed. The cheapest place alone wins. A split must be cheaper
by a fifth (`margin`), since the estimate is rough and each hand-over costs more than is counted, and must hold every
objective with a tenth to spare (`objective`), with a short answer too, over whose few tokens the hand-over is spread.
Where nothing holds them, the least loaded instance gets it (`overload`). Instances whose streams are too many already
(`takes_streams`) compute prompts for a split alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from engine.core.messages import StepCost
from router.picking.disaggregation import Decision, Disaggregation, Reason
from router.picking.scorers import Aims, queue_now
from router.picking.settings import SloSettings
from router.pools.instance_info import InstanceView
from router.pools.throughput import Work
from router.request.generation_request import GenerationRequest

AIM = 0.9
"""Of an objective: from there on it counts as missed in part."""
MARGIN = 0.8
"""A split costs less than this part of the best place alone."""
_FIRST_WEIGHT, _MISS_WEIGHT, _CAPACITY_WEIGHT = 0.3, 10.0, 0.5
_MAX_SHARE = 0.95
_MIN_CHUNK = 16
_NEAR = 0.2
"""Of an objective: with less slack than this, a prompt delays the streams beside it."""
STEP_STRETCH = 3.0
"""Times a step of the streams alone: how long steps with prompts are assumed to be where no ITL objective is set, and
without any objective are, unless prompts wait behind others."""
_STREAMS_PART = 0.5
"""Of the batch of a prefill instance: for streams that it serves alone. The other half is for prompts."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What one request wants."""

    ttft_s: float
    """Left until its first token is due; infinite without an objective."""
    itl_s: float
    num_expected: float
    """Output tokens, at least 1."""
    busy: float = 0.0
    """Mean share of both pools' time that goes to prompts."""
    num_short: float | None = None
    """Output tokens that nine answers of ten exceed; None: as expected. A hand-over is spread over so many."""


@dataclass(frozen=True)
class Site:
    """One instance, as one request sees it."""

    goal: Goal
    cost: StepCost
    max_tokens: int
    """Token budget of its steps."""
    num_uncomputed: int
    """Prompt tokens that it has yet to compute."""
    num_streams: int
    share: float
    """Of its time in the last seconds that went to prompts, 0 … 1."""
    num_missing: int
    """Tokens of the request that it has not cached."""
    hand_over_s: float = 0.0
    """Until the request's KV is here, after its first token."""
    takes_streams: bool = True
    """Whether the request may be decoded here."""

    def __post_init__(self) -> None:
        assert min(self.cost.base_s, self.cost.per_token_s) > 0, "not measured"
        assert self.goal.itl_s > 0
        assert self.goal.num_expected >= 1

    @cached_property
    def first_s(self) -> float:
        return (self.num_uncomputed + self.num_missing) / self._speed

    @cached_property
    def base_s(self) -> float:
        """A step with one more stream and without prompts."""
        return self.cost.seconds(self.num_streams + 1)

    @cached_property
    def tpot_s(self) -> float:
        alone_s = self.base_s / (1 - min(self.share, _MAX_SHARE))
        return max(self.base_s, min(alone_s, self.goal.itl_s))

    @cached_property
    def split_tpot_s(self) -> float:
        """With the hand-over, of a request that is decoded here."""
        return self.tpot_s + self.hand_over_s / (self.goal.num_short or self.goal.num_expected)

    @cached_property
    def holds_alone(self) -> bool:
        return self.first_s <= self.goal.ttft_s and self.tpot_s <= self.goal.itl_s

    @cached_property
    def prefill_cost(self) -> float:
        """Of computing the prompt here."""
        slack = max(0.0, 1 - self.cost.seconds(self.num_streams) / (AIM * self.goal.itl_s) - self.share)
        held_s = self.num_streams * self.num_missing * self.cost.per_token_s * max(0.0, 1 - slack / _NEAR)
        return _FIRST_WEIGHT * self.first_s + _MISS_WEIGHT * _missed(self.first_s, self.goal.ttft_s) + held_s

    def decode_cost(self, tpot_s: float) -> float:
        """Of decoding here, at `tpot_s`."""
        goal, speed, less = self.goal, self._speed, self._speed_beside(self.num_streams + 1)
        taken_s = goal.busy * goal.num_expected * self.tpot_s * (speed - less) / self._speed_beside(0)
        taken_s += self.num_uncomputed / less - self.num_uncomputed / speed
        more = _missed(self.base_s, goal.itl_s) - _missed(self.cost.seconds(self.num_streams), goal.itl_s)
        missed = _missed(tpot_s, goal.itl_s) + self.num_streams * more
        return _CAPACITY_WEIGHT * taken_s + _MISS_WEIGHT * goal.num_expected * missed

    @cached_property
    def alone_cost(self) -> float:
        return self.prefill_cost + self.decode_cost(self.tpot_s)

    @cached_property
    def _speed(self) -> float:
        return self._speed_beside(self.num_streams)

    def _speed_beside(self, num_streams: int) -> float:
        """Prompt tokens per second."""
        whole = self.max_tokens / self.cost.seconds(num_streams, self.max_tokens)
        if num_streams == 0:
            return whole
        left = (1 - self.cost.seconds(num_streams) / self.goal.itl_s) / self.cost.per_token_s
        return min(whole, max(left, _MIN_CHUNK / self.cost.seconds(num_streams, _MIN_CHUNK)))


class Placement(NamedTuple):
    """The index of the site that decodes, that of the prefill site if the request is split, and why."""

    site: int
    prefill: int | None
    reason: Reason
    alone: int
    """The best site alone."""
    split: tuple[int, int] | None
    """The best pair (prefill, decode), if there is one."""


def split_cost(prefill: Site, decode: Site) -> float:
    return prefill.prefill_cost + decode.decode_cost(decode.split_tpot_s)


def place(sites: Sequence[Site], pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rng: random.Random) -> Placement:
    """The place of a request among `sites`, at least one of which takes streams. Each of `pairs` has indices of prefill
    and of decode sites that can hand KV over to each other. Ties are broken by `rng`."""
    decoding = [index for index, site in enumerate(sites) if site.takes_streams]
    alone = _cheapest(sites, decoding, lambda site: site.alone_cost, rng)
    split = _best_pair(sites, pairs, rng)
    reason = Reason.ESTIMATE
    if split is not None:
        prefill, decode = sites[split[0]], sites[split[1]]
        cost = split_cost(prefill, decode)
        if cost < MARGIN * sites[alone].alone_cost and _holds_split(prefill, decode):
            return Placement(split[1], split[0], Reason.ESTIMATE, alone, split)
        if cost < sites[alone].alone_cost:
            reason = Reason.MARGIN if cost >= MARGIN * sites[alone].alone_cost else Reason.OBJECTIVE
    if not any(sites[n].holds_alone for n in decoding):
        least = min((sites[n].num_uncomputed, sites[n].num_streams) for n in decoding)
        tied = [n for n in decoding if (sites[n].num_uncomputed, sites[n].num_streams) == least]
        return Placement(rng.choice(tied), None, Reason.OVERLOAD, alone, split)
    return Placement(alone, None, reason, alone, split)


def _best_pair(
    sites: Sequence[Site], pairs: Sequence[tuple[Sequence[int], Sequence[int]]], rng: random.Random
) -> tuple[int, int] | None:
    """The cheapest pair. The two parts of its cost do not depend on each other."""
    best = [
        (
            _cheapest(sites, prefill, lambda site: site.prefill_cost, rng),
            _cheapest(sites, decode, lambda site: site.decode_cost(site.split_tpot_s), rng),
        )
        for prefill, decode in pairs
        if prefill and decode
    ]
    return min(best, key=lambda pair: split_cost(sites[pair[0]], sites[pair[1]]), default=None)


def _holds_split(prefill: Site, decode: Site) -> bool:
    goal = decode.goal
    is_on_time = prefill.first_s <= AIM * goal.ttft_s
    return is_on_time and max(decode.base_s, decode.split_tpot_s) <= AIM * goal.itl_s


def _missed(seconds: float, objective_s: float) -> float:
    return 0.0 if objective_s == math.inf else max(0.0, seconds - AIM * objective_s)


def _cheapest(sites: Sequence[Site], indices: Sequence[int], cost: Callable[[Site], float], rng: random.Random) -> int:
    costs = [cost(sites[index]) for index in indices]
    least = min(costs)
    return rng.choice([index for index, one in zip(indices, costs, strict=True) if one == least])


# Over views of the instances


@dataclass(frozen=True, slots=True)
class AimSource:
    """The aims of requests. One per router."""

    slo: SloSettings
    expected_tokens: Callable[[int], int] = lambda max_tokens: max_tokens
    """Output tokens to expect of a request with this `max_tokens`."""
    short_tokens: Callable[[int], int | None] = lambda max_tokens: None
    """Output tokens that nine of ten such requests exceed; None: not known."""
    late_wait_s: float = math.inf
    """How long a prompt that has missed its TTFT waits for a step."""

    def of(self, request: GenerationRequest, waited_s: float = 0.0, *, is_first: bool) -> Aims:
        """Of an attempt that begins, which may be the first one."""
        expected, short = self.expected_tokens(request.max_tokens), self.short_tokens(request.max_tokens)
        return Aims(self.slo.objectives(waited_s, self.late_wait_s, is_first=is_first), expected, short)

    def is_overdue(self, waited_s: float) -> bool:
        """Whether a request without a token has missed its TTFT by more than it may."""
        return waited_s >= self.slo.ttft_s + self.late_wait_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Decided, not begun. Without `prefill` the decode instance prefills too, and may be one of the prefill pool."""

    decode: InstanceView
    prefill: InstanceView | None
    disaggregation: Disaggregation
    work: Work
    why: str
    """These instances; for the log."""
    step_stretch: float | None = None
    """How far prompts may lengthen a step beside the stream; None: as its objectives say, or without a limit."""


def place_by_step_costs(
    views: Sequence[InstanceView],
    aims: Aims,
    num_missing: Callable[[InstanceView], int],
    rng: random.Random,
    *,
    may_split: bool,
) -> Plan | None:
    """The place of a request among `views` of both pools, which all may serve it. None: their costs are not known, or
    none takes streams."""
    costs = [_measured(view) for view in views]
    known = [cost for cost in costs if cost is not None]
    if not known:
        return None
    filled = [cost or known[0] for cost in costs]  # an instance that has just started is like another one
    itl_s = aims.objectives.itl_s or _default_itl_s(views, filled)
    shares = [_share(view, cost) for view, cost in zip(views, filled, strict=True)]
    ttft_s = aims.objectives.ttft_s or math.inf
    goal = Goal(ttft_s, itl_s, max(aims.num_expected, 1), fmean(shares), aims.num_short)
    per_s = [view.throughput.hand_over_per_s for view in views if view.throughput.hand_over_per_s]
    mean_per_s = fmean(per_s) if per_s else None
    sites = [
        _site(view, goal, cost, share, num_missing(view), mean_per_s)
        for view, cost, share in zip(views, filled, shares, strict=True)
    ]
    if not any(site.takes_streams for site in sites):
        return None
    placement = place(sites, _pairs(views) if may_split else [], rng)
    explanation, why = _explain(views, sites, placement, aims), f"by step costs, of {len(views)}"
    site, decode = sites[placement.site], views[placement.site]
    if placement.prefill is None:
        local = Disaggregation(Decision.LOCAL, placement.reason, explanation)
        return Plan(decode, None, local, Work(site.num_missing, site.num_uncomputed), why)
    prefill = sites[placement.prefill]
    work = Work(prefill.num_missing, prefill.num_uncomputed, site.num_missing)
    split = Disaggregation(Decision.DISAGGREGATE, placement.reason, explanation)
    return Plan(decode, views[placement.prefill], split, work, why)


def _default_itl_s(views: Sequence[InstanceView], costs: Sequence[StepCost]) -> float:
    """The ITL objective that is assumed where none is set: it follows the number of streams, so that they alone never
    miss it."""
    steps_s = (cost.seconds(_num_streams(view) + 1) for view, cost in zip(views, costs, strict=True))
    return STEP_STRETCH * max(steps_s)


def _measured(view: InstanceView) -> StepCost | None:
    cost = view.load.step_cost
    return cost if cost is not None and min(cost.base_s, cost.per_token_s) > 0 else None


def _share(view: InstanceView, cost: StepCost) -> float:
    return min(view.throughput.recent_prefill_per_s * cost.per_token_s, _MAX_SHARE)


def _site(
    view: InstanceView, goal: Goal, cost: StepCost, share: float, num_missing: int, mean_per_s: float | None
) -> Site:
    per_s, load = view.throughput.hand_over_per_s or mean_per_s, view.load
    return Site(
        goal=goal,
        cost=cost,
        max_tokens=max(view.info.max_num_batched_tokens, 1),
        num_uncomputed=max(load.num_uncomputed_tokens + view.num_unreported_to_prefill, 0),
        num_streams=_num_streams(view),
        share=share,
        num_missing=num_missing,
        hand_over_s=num_missing / per_s if per_s else 0.0,
        takes_streams=_takes_streams(view),
    )


def _takes_streams(view: InstanceView) -> bool:
    """Prefill instances keep half of their batch for prompts, of which a batch full of streams would leave none."""
    limit = view.info.max_num_seqs
    return view.info.role != "prefill" or not limit or sum(queue_now(view)) < _STREAMS_PART * limit


def _num_streams(view: InstanceView) -> int:
    """What waits at a decode instance becomes a stream there; what waits at a prefill instance mostly leaves."""
    if view.info.role == "prefill":
        return max(view.load.num_running - view.load.num_prefilling, 0)
    return sum(queue_now(view))


def _pairs(views: Sequence[InstanceView]) -> list[tuple[list[int], list[int]]]:
    """The prefill and the decode instances of each kind that can hand KV over."""
    kinds: dict[object, tuple[list[int], list[int]]] = {}
    for index, view in enumerate(views):
        prefill, decode = kinds.setdefault(view.info.pairing, ([], []))
        (prefill if view.info.role == "prefill" else decode).append(index)
    return list(kinds.values())


def _explain(views: Sequence[InstanceView], sites: Sequence[Site], placement: Placement, aims: Aims) -> str:
    goal, reason = sites[placement.site].goal, placement.reason
    assumed = "" if aims.objectives.itl_s else " (assumed)"
    wanted = f"of {goal.itl_s * 1e3:.3g} ms{assumed}"
    if goal.ttft_s < math.inf:
        wanted = f"of {goal.ttft_s:.3g} s and {goal.itl_s * 1e3:.3g} ms{assumed}"

    def alone(index: int) -> str:
        return f"alone at {views[index].instance_id} {_times(sites[index].first_s, sites[index].tpot_s)}"

    def split(prefill: int, decode: int) -> str:
        names = f"split over {views[prefill].instance_id} and {views[decode].instance_id}"
        return f"{names} {_times(sites[prefill].first_s, sites[decode].split_tpot_s)}"

    if placement.prefill is not None:
        return f"{split(placement.prefill, placement.site)}, {wanted}; {alone(placement.alone)}"
    text = f"{alone(placement.site)}, {wanted}"
    if reason is Reason.OVERLOAD:
        return f"{text}; no instance holds the objectives: the least loaded"
    if placement.split is None or reason is Reason.ESTIMATE:
        return text
    why = "not better by a fifth" if reason is Reason.MARGIN else "does not hold the objectives with a tenth left"
    return f"{text}; {split(*placement.split)}: {why}"


def _times(first_s: float, tpot_s: float) -> str:
    return f"{first_s:.2f} s to the first token, {tpot_s * 1e3:.1f} ms a token"
