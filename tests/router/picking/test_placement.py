"""The placement of one request: the cheapest place, no split without a margin, and more work never attracts."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine.core.messages import StepCost
from router.picking.placement import AIM, MARGIN, Goal, Placement, Site, place, split_cost

GOAL = Goal(1.0, 0.012, 100, 0.2)
COST = StepCost(0.0035, 0.0006, 1 / 4500)


def site(**fields: float | Goal) -> Site:
    values = {"num_uncomputed": 0, "num_streams": 0, "share": 0.0, "num_missing": 1000, "hand_over_s": 0.05}
    return Site(**{"goal": GOAL, "cost": COST, "max_tokens": 2048} | values | fields)  # type: ignore[arg-type]


costs = st.builds(StepCost, st.floats(1e-4, 0.05), st.floats(0, 2e-3), st.floats(1e-5, 1e-3))
goals = st.builds(
    Goal, st.floats(0.001, 5) | st.just(math.inf), st.floats(0.001, 0.2), st.integers(1, 1000), st.floats(0, 1)
)


@st.composite
def site_lists(draw: st.DrawFn) -> list[Site]:
    """Instances of one pool kind, as one request sees them: prefill instances first, then as many decode instances."""
    goal = draw(goals)
    one = st.builds(
        Site,
        st.just(goal),
        costs,
        st.integers(16, 4096),
        st.integers(0, 20_000),
        st.integers(0, 40),
        st.floats(0, 1),
        st.integers(1, 8000),
        st.floats(0, 0.5),
    )
    size = draw(st.integers(1, 3))
    return draw(st.lists(one, min_size=2 * size, max_size=2 * size))


def placed(sites: list[Site], seed: int = 0, *, split: bool = True) -> Placement:
    half = len(sites) // 2
    pairs = [(range(half), range(half, len(sites)))] if split else []
    return place(sites, pairs, random.Random(seed))


SMALL_BUDGETS = [Site(Goal(math.inf, 0.125, 1), StepCost(0.03125, 0.0, v), 16, 0, 0, 0.0, 1) for v in (2.5e-5, 4.7e-4)]
"""Where steps of the whole budget are shorter than the objective."""


def costs_by_the_formula(at: Site) -> tuple[float, float, float, float]:
    """Of the prompt and of the stream there, as documented; and the two times that they are made of."""
    goal, cost, num_streams = at.goal, at.cost, at.num_streams

    def speed(streams: int) -> float:
        bare_s = cost.base_s + streams * cost.per_stream_s
        whole = at.max_tokens / (bare_s + at.max_tokens * cost.per_token_s)
        in_objective = (goal.itl_s - bare_s) / cost.per_token_s / goal.itl_s
        return whole if streams == 0 else min(whole, max(in_objective, 16 / (bare_s + 16 * cost.per_token_s)))

    def missed(seconds: float, objective_s: float) -> float:
        return max(seconds - 0.9 * objective_s, 0.0) if objective_s < math.inf else 0.0

    step_s, longer_s = (cost.base_s + streams * cost.per_stream_s for streams in (num_streams, num_streams + 1))
    first_s = (at.num_uncomputed + at.num_missing) / speed(num_streams)
    tpot_s = max(min(longer_s / (1 - min(at.share, 0.95)), goal.itl_s), longer_s)
    slack = max(1 - step_s / (0.9 * goal.itl_s) - at.share, 0.0)
    held_s = num_streams * at.num_missing * cost.per_token_s * max(1 - slack / 0.2, 0.0)
    slower = speed(num_streams) - speed(num_streams + 1)
    taken_s = goal.busy * goal.num_expected * tpot_s * slower / speed(0)
    taken_s += at.num_uncomputed * (1 / speed(num_streams + 1) - 1 / speed(num_streams))
    missed_s = missed(tpot_s, goal.itl_s) + num_streams * (missed(longer_s, goal.itl_s) - missed(step_s, goal.itl_s))
    prefill = 0.3 * first_s + 10 * missed(first_s, goal.ttft_s) + held_s
    return prefill, 0.5 * taken_s + 10 * goal.num_expected * missed_s, first_s, tpot_s


@given(site_lists())
def test_costs_are_those_of_the_formula(sites: list[Site]) -> None:
    for one in sites:
        prefill, decode, first_s, tpot_s = costs_by_the_formula(one)
        assert math.isclose(one.prefill_cost, prefill, rel_tol=1e-6)
        assert math.isclose(one.alone_cost, prefill + decode, rel_tol=1e-6, abs_tol=1e-9)
        assert one.holds_alone == (one.first_s <= one.goal.ttft_s and one.tpot_s <= one.goal.itl_s)
        assert math.isclose(one.first_s, first_s)
        assert math.isclose(one.tpot_s, tpot_s)


@settings(max_examples=50)
@given(site_lists(), st.integers(1, 50_000))
@example(SMALL_BUDGETS, 1)
def test_more_waiting_tokens_never_make_an_instance_more_attractive(sites: list[Site], more: int) -> None:
    before = placed(sites, split=False)
    others = [index for index in range(len(sites)) if index != before.site]
    for index in others:
        loaded = [*sites]
        loaded[index] = replace(sites[index], num_uncomputed=sites[index].num_uncomputed + more)
        assert loaded[index].prefill_cost >= sites[index].prefill_cost
        assert loaded[index].alone_cost >= sites[index].alone_cost
        assume(before.reason != "overload")
        after = placed(loaded, split=False)
        if after.reason == "overload":  # it was the last one that held the objectives: now the least loaded counts
            assert loaded[after.site].num_uncomputed == min(site.num_uncomputed for site in loaded)
        else:
            assert after.site != index or loaded[index].alone_cost == sites[index].alone_cost


@settings(max_examples=50)
@given(site_lists())
def test_no_split_without_margin_or_objectives(sites: list[Site]) -> None:
    found = placed(sites)
    best = min(site.alone_cost for site in sites)
    if found.prefill is not None:
        prefill, decode = sites[found.prefill], sites[found.site]
        assert split_cost(prefill, decode) < MARGIN * best
        assert prefill.first_s <= AIM * prefill.goal.ttft_s
        assert max(decode.base_s, decode.split_tpot_s) <= AIM * decode.goal.itl_s
    elif found.reason != "overload":
        assert sites[found.site].alone_cost == best
        assert found.split is not None
        split = split_cost(sites[found.split[0]], sites[found.split[1]])
        assert found.reason == ("estimate" if split >= best else "margin" if split >= 0.8 * best else "objective")


@settings(max_examples=50)
@given(site_lists())
def test_the_best_pair_is_the_cheapest_of_all_pairs(sites: list[Site]) -> None:
    half = len(sites) // 2
    split = placed(sites).split
    assert split is not None
    cheapest = min(split_cost(prefill, decode) for prefill in sites[:half] for decode in sites[half:])
    assert math.isclose(split_cost(sites[split[0]], sites[split[1]]), cheapest)
    of_kinds = [(index, half + index) for index in range(half)]  # each can hand over to one
    split = place(sites, [([prefill], [decode]) for prefill, decode in of_kinds], random.Random(0)).split
    assert split in of_kinds
    cheapest = min(split_cost(sites[prefill], sites[decode]) for prefill, decode in of_kinds)
    assert split_cost(sites[split[0]], sites[split[1]]) == cheapest


@settings(max_examples=50)
@given(site_lists())
def test_overload_takes_the_least_loaded_and_only_where_none_holds(sites: list[Site]) -> None:
    found = placed(sites)
    if found.reason == "overload":
        assert not any(site.holds_alone for site in sites)
        least = min((site.num_uncomputed, site.num_streams) for site in sites)
        assert (sites[found.site].num_uncomputed, sites[found.site].num_streams) == least


def test_an_idle_prefill_instance_takes_a_request_alone_when_the_decode_instance_is_busy() -> None:
    found = placed([site(), site(num_streams=10, num_uncomputed=3000)])
    assert (found.site, found.prefill) == (0, None)


def test_a_split_is_chosen_where_streams_would_be_held_up_and_a_hand_over_is_cheap() -> None:
    prefill = site(num_missing=4000, share=0.7)
    decode = site(num_missing=4000, num_streams=4, hand_over_s=0.01)
    found = placed([prefill, decode])
    assert (found.prefill, found.site, found.reason) == (0, 1, "estimate")
    slow = replace(decode, hand_over_s=10.0)
    assert placed([prefill, slow]).prefill is None, "the hand-over takes longer than the objective allows"


def test_equal_places_are_drawn_at_random() -> None:
    assert {placed([site(), site()], seed, split=False).site for seed in range(20)} == {0, 1}


def test_what_is_cached_somewhere_draws_the_request_there() -> None:
    assert placed([site(), site(num_missing=10)]).site == 1


def test_a_hand_over_is_spread_over_a_short_answer() -> None:
    mean, short = replace(GOAL, num_expected=136), replace(GOAL, num_expected=136, num_short=16)
    for goal, is_split in ((mean, True), (short, False)):
        sites = [
            site(goal=goal, num_missing=4000, share=0.7),
            site(goal=goal, num_missing=4000, num_streams=4, hand_over_s=0.069),
        ]
        assert (sites[1].split_tpot_s <= AIM * goal.itl_s) == is_split
        assert (placed(sites).prefill is not None) == is_split
