"""The cost of a step is found from few steps, and stalls do not change it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.messages import StepCost
from engine.scheduling.step_cost import RecentRate, StepCostEstimator, StepTimes

COST = StepCost(0.0035, 0.0006, 1 / 4500)


def observe(estimator: StepCostEstimator, cost: StepCost, rng: random.Random, num_steps: int = 300) -> None:
    """Steps with few and with many streams, every fourth with a chunk, each within 10 % of its cost."""
    for index in range(num_steps):
        num_streams = rng.randrange(1, 40)
        num_tokens = 0 if index % 4 else rng.choice([16, 100, 400, 1000])
        estimator.record(cost.seconds(num_streams, num_tokens) * rng.uniform(0.9, 1.1), num_streams, num_tokens)


def fitted(estimator: StepCostEstimator) -> StepCost:
    assert estimator.cost is not None
    return estimator.cost


def assert_close(cost: StepCost, expected: StepCost, relative: float = 0.15) -> None:
    for num_streams, num_tokens in ((1, 0), (16, 0), (40, 0), (4, 100), (8, 500), (30, 1000)):
        assert cost.seconds(num_streams, num_tokens) == pytest.approx(
            expected.seconds(num_streams, num_tokens), rel=relative
        )


@settings(max_examples=30)
@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-2), st.sampled_from([0, 0.1]))
def test_any_cost_is_found_though_every_tenth_step_stalls(
    base_s: float, per_stream_s: float, per_token_s: float, stalls: float
) -> None:
    """With one sequence of noise: in one of hundreds a bucket's median is near the edge of the noise, 16 % off."""
    cost, rng, estimator = StepCost(base_s, per_stream_s, per_token_s), random.Random(0), StepCostEstimator()
    for _ in range(10):
        observe(estimator, cost, rng, 30)
        if stalls:
            for num_streams, num_tokens in ((8, 0), (8, 400), (30, 0)):
                estimator.record(5.0, num_streams, num_tokens)
    assert_close(fitted(estimator), cost)


def test_a_stall_among_a_few_similar_steps_does_not_count() -> None:
    estimator = StepCostEstimator()
    for num_streams, seconds in ((4, 0.01), (5, 0.01), (6, 5.0), (7, 0.01), (7, 0.01)):
        estimator.record(seconds, num_streams, 0)
    assert fitted(estimator).seconds(6) == pytest.approx(0.01, rel=0.2)


def test_slow_first_steps_are_forgotten() -> None:
    estimator, rng = StepCostEstimator(), random.Random(1)
    observe(estimator, StepCost(0.5, 0.0, 0.01), rng, 60)
    observe(estimator, COST, rng, 300)
    assert_close(fitted(estimator), COST)


def test_it_follows_an_engine_that_becomes_slower() -> None:
    estimator, rng = StepCostEstimator(), random.Random(2)
    observe(estimator, COST, rng)
    slower = StepCost(COST.base_s * 2, COST.per_stream_s * 3, COST.per_token_s * 2)
    observe(estimator, slower, rng, 600)
    assert_close(fitted(estimator), slower)


def test_nothing_is_claimed_from_two_steps_and_no_part_is_negative() -> None:
    estimator = StepCostEstimator()
    for _ in range(3):
        estimator.record(0.0, 4, 0)  # shorter than the clock's resolution
    for _ in range(2):
        estimator.record(0.01, 4, 0)
    assert estimator.cost is None
    estimator.record(0.01, 4, 0)
    cost = fitted(estimator)
    assert cost.seconds(4) == pytest.approx(0.01, rel=0.01)
    assert cost.per_token_s == 0, "no chunk was observed"
    for num_streams, seconds in ((1, 0.02), (64, 0.005)) * 5:
        estimator.record(seconds, num_streams, 0)
    assert min(fitted(estimator).base_s, fitted(estimator).per_stream_s, fitted(estimator).per_token_s) >= 0


def test_a_second_stream_is_not_expensive_because_prompts_hide_what_a_step_costs() -> None:
    """Only steps of prompts alone, and of one stream: as long as a stream seems expensive, there are no others."""
    estimator, rng = StepCostEstimator(), random.Random(3)
    for index in range(300):
        num_tokens = (512, 512, 64, 0, 0, 27)[index % 6]
        is_stream = index % 6 > 2
        seconds = 0.0055 * is_stream + num_tokens * (0.00036 + 0.00007 * num_tokens / 512)
        estimator.record(seconds * rng.uniform(0.9, 1.1), is_stream, num_tokens)
    cost = fitted(estimator)
    assert cost.seconds(1) == pytest.approx(0.0055, rel=0.1)
    assert cost.seconds(2) < 1.1 * cost.seconds(1)


def test_times_are_those_observed_lately_or_of_smaller_steps() -> None:
    times = StepTimes()
    assert times.seconds(2, 3, 0.5) == [], "without such a step nothing is known"
    for seconds in (1.0, 1.2, 50.0):
        times.record(2, seconds)
    assert times.seconds(2, 2, 0.5) == [1.2, 1.95, 2.7], "a stall does not count"
    times.record(2, 1.2)
    times.record(4, 7.0)
    assert times.seconds(2, 3, 0.5) == [1.2, 1.95, 7.0, 7.75]
    for _ in range(1024):
        times.record(2, 1.0)
    assert times.seconds(2, 2, 0.5) == [1.0, 1.75, 2.5], "it is tried again"
    times.record(4, 1.5)
    assert times.seconds(2, 2, 0.5) == [1.0, 1.75, 1.5], "what it took long ago does not count"
    assert times.seconds(1, 1, 0.5) == []
    for _ in range(5):
        times.record(2, 3.0)
    assert times.seconds(2, 0, 0.5) == [3.0], "the last few count, and no more are kept"


def test_trials_that_take_longer_than_expected_are_made_up_for_before_the_next() -> None:
    times = StepTimes()
    times.record(2, 1.0)
    assert times.seconds(2, 3, 0.2) == pytest.approx([1.0, 1.3, 1.6, 1.9])
    times.record(5, 1.9)  # as expected
    assert times.seconds(2, 3, 0.2) == pytest.approx([1.0, 1.3, 1.6, 1.9])
    times.record(4, 3.6)  # two steps longer
    assert times.seconds(2, 3, 0.2) == pytest.approx([1.0, math.inf, 3.6, 1.9])
    for _ in range(20):
        times.record(4, 3.6)  # no trial any more
        assert times.seconds(2, 1, 0.2)[1] == (math.inf if times._total_s < 50 else pytest.approx(1.3))
    assert times._total_s > 50


def test_a_step_that_the_last_plan_did_not_try_is_no_trial() -> None:
    times = StepTimes()
    times.record(2, 1.0)
    assert times.seconds(2, 1, 0.2) == pytest.approx([1.0, 1.3])
    assert times.seconds(1, 1, 0.2) == [], "the last plan, of an unknown step"
    times.record(3, 100.0)
    assert times.seconds(2, 2, 0.2) == pytest.approx([1.0, 100.0, 100.3])


def test_steps_that_are_not_recorded_try_nothing() -> None:
    times = StepTimes()
    times.record(2, 1.0)
    times.record(4, 1.5)
    assert times.seconds(2, 3, 0.2, may_try=False) == [1.0, math.inf, 1.5, math.inf]
    times.record(3, 100.0)  # one more stream, no trial
    assert times.seconds(2, 3, 0.2) == pytest.approx([1.0, 100.0, 1.5, 1.8])


@pytest.mark.parametrize("step_s", [1.0, 0.01])
def test_a_stall_in_a_trial_does_not_end_trials_for_long(step_s: float) -> None:
    times = StepTimes()
    times.record(2, step_s)
    times.seconds(2, 1, 0.2 * step_s)
    times.record(3, 10_000.0 * step_s)
    times.record(3, 1.3 * step_s)
    for _ in range(300):
        times.record(2, step_s)
    assert times.seconds(2, 2, 0.2 * step_s) == pytest.approx([step_s, 1.3 * step_s, 1.6 * step_s])


def test_trials_that_take_less_than_expected_pay_for_no_others() -> None:
    times = StepTimes()
    times.record(2, 1.0)
    times.seconds(2, 1, 10.0)
    times.record(3, 1.0)  # 15 less than expected
    assert times.seconds(2, 2, 0.2) == pytest.approx([1.0, 1.0, 1.3])
    times.record(4, 4.3)  # 3 more
    assert times.seconds(2, 3, 0.2) == pytest.approx([1.0, 1.0, 4.3, math.inf])


def test_a_recent_rate_is_that_of_a_steady_load_and_decays_without_one() -> None:
    rate = RecentRate()
    assert rate.per_s(100.0) == 0
    for tenth in range(400):
        rate.add(50, 100 + tenth / 10)
    assert rate.per_s(139.9) == pytest.approx(500, rel=0.02)
    assert rate.per_s(144.9) == pytest.approx(500 / math.e, rel=0.02)
    assert rate.per_s(300.0) < 1e-6
    assert rate.per_s(0.0) == rate.per_s(139.9), "a clock that goes back counts as one that stands still"
