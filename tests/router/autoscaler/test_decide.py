"""The next size of one pool: its figures, each protection, and what holds for every load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.autoscaler import decide as decide_module
from router.autoscaler.decide import History, ScaleDecision, observed
from router.autoscaler.observation import PoolObservation
from router.autoscaler.router_signals import QueueSample
from router.autoscaler.settings import PoolPolicy
from tests.router.autoscaler.builders import (
    INTERVAL_S,
    LONG_AGO,
    NOW_S,
    STALE_S,
    for_minutes,
    instance,
    policy_of,
    pool,
    pool_of,
    starting,
)


def decide(
    observations: Sequence[PoolObservation], policy: PoolPolicy, history: History, stale_s: float
) -> ScaleDecision:
    return decide_module.decide([observed(one, policy) for one in observations], policy, history, stale_s)


def decided(
    observation: Callable[[float], PoolObservation], history: History = LONG_AGO, minutes: float = 6.0, **policy: Any
) -> ScaleDecision:
    """What is decided after minutes of the same."""
    observations = for_minutes(observation, minutes)
    return decide(observations, policy_of(observations[0].role, **policy), history, STALE_S)


def steady(size: int, **fields: Any) -> Callable[[float], PoolObservation]:
    return lambda at_s: pool_of(size, at_s=at_s, **fields)


# The formula


@pytest.mark.parametrize(
    ("running", "size", "grown"),
    [
        (7, 2, 2),  # 0.7 of what they can run, 0.75 is the target
        (8, 2, 3),  # ceil(2 * 0.8 / 0.75)
        (10, 3, 4),  # ceil(3 * 1 / 0.75)
    ],
)
def test_the_pool_grows_to_what_brings_its_load_to_target(running: int, size: int, grown: int) -> None:
    decision = decided(steady(size, num_running=running))
    assert (decision.new_size, decision.desired) == (grown, grown)


def test_a_step_at_most_doubles_and_at_least_halves() -> None:
    up = decided(steady(2, num_running=10, num_waiting=90), max_size=64)
    assert (up.new_size, up.desired) == (4, 64)
    down = decided(steady(8))
    assert (down.new_size, down.desired) == (4, 1)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_running": 10}, "load"),
        ({"used_blocks": 900}, "KV use"),
        ({"num_waiting_tokens": 2000}, "waiting tokens"),
    ],
)
def test_the_reason_names_the_signal_its_value_its_target_and_what_it_would_be_after(
    fields: dict[str, int], name: str
) -> None:
    decision = decided(steady(2, **fields))
    assert decision.direction == "out"
    assert decision.reason.startswith(f"{name} ")
    assert "(target " in decision.reason
    assert f"with {decision.desired})" in decision.reason


def test_a_queue_at_the_door_lets_the_pool_grow() -> None:
    decision = decided(lambda at_s: replace(pool_of(2, at_s=at_s), queue=QueueSample(7, 1.0)))
    assert decision.new_size == 4
    assert decision.reason == "queue delay 1 s (target 0.5 s, would be 0.5 with 4)"


@pytest.mark.parametrize(("role", "objective"), [("prefill", "ttft_objective_s"), ("decode", "itl_objective_s")])
def test_a_latency_above_its_objective_lets_the_pool_grow_while_something_waits(role: Any, objective: str) -> None:
    policy: dict[str, Any] = {objective: 1.0}

    def late(at_s: float, **fields: Any) -> PoolObservation:
        return replace(pool_of(2, role=role, at_s=at_s, **fields), latency_s=1.5)

    assert decided(lambda at_s: late(at_s, num_waiting=1), **policy).new_size == 3
    assert decided(lambda at_s: late(at_s, num_waiting=1)).new_size <= 2
    assert decided(late, **policy).direction == "in"  # nothing waits: more would not help, fewer do no harm


# The protections


def test_an_overload_that_does_not_last_changes_nothing() -> None:
    observations = for_minutes(steady(2, num_running=7))
    observations[-1] = pool_of(2, num_running=10)
    decision = decide(observations, policy_of(), LONG_AGO, STALE_S)
    assert (decision.new_size, decision.desired, decision.hold) == (2, 3, "window")


def test_a_lull_that_does_not_last_changes_nothing() -> None:
    observations = for_minutes(steady(2))
    observations[10] = pool_of(2, at_s=observations[10].at_s, num_running=7)
    assert decide(observations, policy_of(), LONG_AGO, STALE_S).hold is None  # it was more than five minutes ago
    for needed in (5, 7):  # needs two, and three
        observations[20] = pool_of(2, at_s=observations[20].at_s, num_running=needed)
        assert decide(observations, policy_of(), LONG_AGO, STALE_S).hold == "window"


def test_the_survivor_cannot_carry_it_so_the_pool_does_not_oscillate_between_two_and_one() -> None:
    """Each of two is at 0.4, below its target of 0.75; one alone would be at 0.8 and grow again at once."""
    decision = decided(steady(2, num_running=4))
    assert (decision.new_size, decision.hold) == (2, "steady")
    assert "as few as possible: load 0.4 (target 0.75, would be 0.4 with 2)" in decision.reason
    assert decided(steady(4, num_running=5)).desired == 4  # three would hold the target, and not with room left
    assert decided(steady(1, num_running=8)).new_size == 2
    fewer = decided(steady(2, num_running=3))
    assert fewer.new_size == 1  # 0.6 = 0.8 of the target: it carries that
    assert fewer.reason == "fewer are enough: load 0.3 (target 0.75, would be 0.6 with 1)"


@given(
    size=st.integers(2, 16),
    running=st.integers(0, 10),
    waiting=st.integers(0, 5),
    used_blocks=st.integers(0, 1000),
    tokens=st.integers(0, 5000),
)
def test_a_pool_that_shrinks_would_not_grow_again_at_once(
    size: int, running: int, waiting: int, used_blocks: int, tokens: int
) -> None:
    """N/(N-1) of every signal, averaged over the remaining instances, is below target with the margin."""
    policy = policy_of(max_size=64)
    fields = {"num_running": running, "num_waiting": waiting, "used_blocks": used_blocks, "num_waiting_tokens": tokens}
    decision = decided(steady(size, **fields), max_size=64)
    if decision.direction != "in":
        return
    times = size / decision.new_size
    for value, target in (
        ((4 * waiting + running) / 10, policy.target_score),
        (used_blocks / 1000, policy.target_kv_use),
        (tokens / 1000.0, policy.target_waiting_s),
    ):
        assert times * value <= policy.scale_in_margin * target + 1e-9


def test_samples_of_an_instance_that_is_still_warming_up_do_not_let_the_pool_grow() -> None:
    def observation(at_s: float) -> PoolObservation:
        return pool(instance("a", num_running=5), instance("b", up_s=3.0, num_waiting=40), at_s=at_s, size=2)

    assert decided(observation).new_size == 2


def test_an_instance_that_is_starting_is_waited_for_before_another_is_asked_for() -> None:
    def observation(at_s: float) -> PoolObservation:
        return pool(instance("a", num_running=10, num_waiting=5), starting("b"), at_s=at_s, size=2)

    since_the_last = History(NOW_S - 60, NOW_S - 60, "out")
    decision = decided(observation, since_the_last)
    assert (decision.new_size, decision.hold) == (2, "pending")
    assert "1 of 2 are not warm yet, and are waited for 240 s more" in decision.reason
    assert decided(observation, History(NOW_S - 301, NOW_S - 301, "out")).new_size == 4


def test_a_starting_instance_counts_once() -> None:
    """Two are what the load of the one that is there asks for, and two there will be."""
    decision = decided(lambda at_s: pool(instance("a", num_running=10), starting("b"), at_s=at_s, size=2))
    assert (decision.new_size, decision.hold) == (2, "steady")


def test_a_pending_instance_does_not_block_scaling_in() -> None:
    decision = decided(lambda at_s: pool(instance("a", num_running=1), starting("b"), starting("c"), at_s=at_s, size=3))
    assert decision.new_size == 2


def test_a_silent_instance_blocks_scaling_in_while_its_load_is_not_known() -> None:
    def observation(at_s: float, silent_s: float = 10.0) -> PoolObservation:
        lost = instance("b", state="lost", report_age_s=silent_s)
        return pool(instance("a", num_running=1), lost, at_s=at_s, size=2)

    assert decided(observation).new_size == 2
    assert "1 instances are silent" in decided(observation).reason
    assert decided(lambda at_s: observation(at_s, 1000.0)).new_size == 1
    observations = for_minutes(lambda at_s: observation(at_s, 1000.0))
    observations[-20] = observation(observations[-20].at_s)
    assert decide(observations, policy_of(), LONG_AGO, STALE_S).hold == "window", "it was silent a while ago"


def test_held_kv_is_not_taken_for_prefill_load() -> None:
    """Decode is the bottleneck: prefill has computed, and its KV is not fetched."""
    held = {"num_waiting": 20, "num_waiting_tokens": 20_000, "used_blocks": 950, "held_blocks": 950}

    def observation(at_s: float, **fields: Any) -> PoolObservation:
        late = pool_of(2, role="prefill", at_s=at_s, **{**held, **fields})
        return replace(late, latency_s=30.0)

    assert decided(observation, ttft_objective_s=1.0).direction != "out"
    assert decided(lambda at_s: observation(at_s, num_running=1, held_blocks=0)).direction == "out"


@pytest.mark.parametrize(
    ("observation", "hold"),
    [
        (lambda at_s: pool(size=2, at_s=at_s), "missing"),
        (lambda at_s: pool_of(2, at_s=at_s, report_age_s=60.0), "stale"),
        (lambda at_s: pool_of(2, at_s=at_s, num_running=-1), "nonsense"),
        (lambda at_s: pool_of(2, at_s=at_s, step_s=float("nan")), "nonsense"),
        (lambda at_s: replace(pool_of(2, at_s=at_s, num_running=10), size=None), "no_actuator"),
    ],
    ids=["missing", "stale snapshots", "negative", "NaN", "no size"],
)
def test_what_is_not_known_decides_nothing(observation: Callable[[float], PoolObservation], hold: str) -> None:
    decision = decided(observation)
    assert (decision.direction, decision.hold) == (None, hold)
    observations = [*for_minutes(steady(2, num_running=10), end_s=NOW_S - INTERVAL_S), observation(NOW_S)]
    assert decide(observations, policy_of(), LONG_AGO, STALE_S).direction is None


def test_a_window_with_a_hole_begins_anew() -> None:
    bad = pool(size=2, at_s=0.0)
    observations = for_minutes(steady(2))
    one_bad = [
        replace(bad, at_s=observation.at_s) if index == 40 else observation
        for index, observation in enumerate(observations)
    ]
    assert decide(one_bad, policy_of(), LONG_AGO, STALE_S).new_size == 1
    hole = [
        replace(bad, at_s=observation.at_s) if 40 <= index < 42 else observation
        for index, observation in enumerate(observations)
    ]
    assert decide(hole, policy_of(), LONG_AGO, STALE_S).hold == "window"


def test_after_a_change_the_pool_cools_down_and_its_windows_begin_anew() -> None:
    overloaded = steady(2, num_running=10)
    just = History(NOW_S - 20, NOW_S - 20, "out")
    assert decided(overloaded, just).hold == "cool_down"
    assert decided(overloaded, just, cool_down_s=20.0).new_size == 3
    assert decided(overloaded, History(NOW_S, NOW_S, "out"), cool_down_s=0.0).hold == "window"
    assert decided(steady(2), History(NOW_S - 299, NOW_S - 299, "out")).hold == "window"
    assert decided(steady(2), History(NOW_S - 300, NOW_S - 300, "out")).new_size == 1


def test_a_second_change_of_direction_waits_unless_it_is_urgent() -> None:
    just_shrunk = History(NOW_S - 60, NOW_S - 60, "in", reversed_s=NOW_S - 60)
    assert decided(steady(2, num_running=8), just_shrunk).hold == "direction"
    assert decided(steady(2, num_running=10, num_waiting=1), just_shrunk).new_size == 4
    for other in ({"reversed_s": NOW_S - 300}, {"reversed_s": None}, {"direction": "out"}):
        assert decided(steady(2, num_running=8), replace(just_shrunk, **other)).new_size == 3
    observations = for_minutes(steady(2, num_running=8))
    observations[-1] = pool_of(2, num_running=10, num_waiting=1)
    assert decide(observations, policy_of(), just_shrunk, STALE_S).hold == "direction", "urgent for too short a time"


def test_a_size_outside_of_the_bounds_comes_back_by_steps() -> None:
    assert decided(steady(1), min_size=4).new_size == 2
    assert decided(steady(6, num_running=9), max_size=2).new_size == 3
    assert decided(steady(1), History(NOW_S - 5, NOW_S - 5), min_size=4).hold == "cool_down"


def test_at_its_bounds_it_says_so() -> None:
    assert decided(steady(2, num_running=10), max_size=2).hold == "at_bound"
    assert decided(steady(2), min_size=2).hold == "steady"
    assert decided(steady(8), min_size=6).new_size == 6


def test_a_pool_that_an_operator_has_set_to_0_stays_there() -> None:
    found = decided(lambda at_s: pool(size=0, at_s=at_s), min_size=2)
    assert (found.new_size, found.hold) == (0, "paused")
    assert "an operator has set the pool to 0" in found.reason


# For every load

LOADS = st.fixed_dictionaries(
    {
        "num_waiting": st.integers(0, 30),
        "num_running": st.integers(0, 10),
        "num_waiting_tokens": st.integers(0, 20_000),
        "used_blocks": st.integers(0, 1000),
    }
)
LOOKS = st.lists(LOADS, min_size=1, max_size=80)
POLICIES = st.builds(
    lambda low, more, down_s, margin: policy_of(
        min_size=low, max_size=low + more, scale_in_window_s=down_s, scale_in_margin=margin
    ),
    st.integers(1, 5),
    st.integers(0, 20),
    st.floats(4.0, 400.0),
    st.floats(0.1, 0.95),
)
HISTORIES = st.builds(
    lambda ago_s, changed, direction, reversed_ago_s: History(
        NOW_S - ago_s, NOW_S - ago_s if changed else None, direction, reversed_ago_s and NOW_S - reversed_ago_s
    ),
    st.floats(0.0, 900.0),
    st.booleans(),
    st.sampled_from([None, "out", "in"]),
    st.none() | st.floats(0.0, 900.0),
)


def looks_of(size: int, loads: list[dict[str, Any]]) -> list[PoolObservation]:
    start_s = NOW_S - INTERVAL_S * (len(loads) - 1)
    return [pool_of(size, at_s=start_s + INTERVAL_S * index, **load) for index, load in enumerate(loads)]


@given(size=st.integers(0, 30), loads=LOOKS, policy=POLICIES, history=HISTORIES)
def test_never_outside_of_the_bounds_nor_further_out_and_never_more_than_double(
    size: int, loads: list[dict[str, Any]], policy: PoolPolicy, history: History
) -> None:
    decision = decide(looks_of(size, loads), policy, history, STALE_S)
    low, high = min(policy.min_size, size), max(policy.max_size, size)
    assert low <= decision.new_size <= high
    if policy.min_size <= size <= policy.max_size:
        assert policy.min_size <= decision.new_size <= policy.max_size
    assert decision.new_size <= max(2 * size, 1)
    assert 2 * decision.new_size >= size
    assert (decision.hold is None) == (decision.new_size != size)
    assert decision.reason


@given(size=st.integers(1, 12), pairs=st.lists(st.tuples(LOADS, LOADS), min_size=1, max_size=80), history=HISTORIES)
def test_more_load_never_makes_a_pool_smaller(
    size: int, pairs: list[tuple[dict[str, int], dict[str, int]]], history: History
) -> None:
    policy = policy_of(max_size=16, scale_in_window_s=100.0)
    less = [{name: min(one[name], other[name]) for name in one} for one, other in pairs]
    more = [{name: max(one[name], other[name]) for name in one} for one, other in pairs]
    small, large = (decide(looks_of(size, loads), policy, history, STALE_S) for loads in (less, more))
    assert small.new_size <= large.new_size
    assert small.desired <= large.desired


# History


def test_the_first_change_is_no_reversal() -> None:
    assert History(0.0).after(5.0, "out") == History(5.0, 5.0, "out", None)


def test_a_change_the_other_way_is_one_and_is_remembered() -> None:
    turned = History(0.0).after(5.0, "out").after(7.0, "in")
    assert turned == History(7.0, 7.0, "in", 7.0)
    assert turned.after(9.0, "in") == History(9.0, 9.0, "in", 7.0)


def test_after_an_external_change_the_direction_is_open() -> None:
    theirs = History(0.0).after(5.0, "out").after(7.0, "in").after_external_change(8.0)
    assert theirs == History(8.0, 8.0, None, None)
    assert theirs.after(9.0, "out").reversed_s is None
