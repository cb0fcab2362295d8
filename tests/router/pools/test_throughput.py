"""What attempts and reports show of an instance's throughput."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pools.throughput import SmoothedRate, ThroughputEstimator


def speeds(smoothing: float = 1.0, min_tokens: int = 0) -> ThroughputEstimator:
    return ThroughputEstimator(smoothing, min_tokens)


def test_a_speed_is_unknown_until_something_was_seen() -> None:
    assert SmoothedRate(0.5).per_s is None
    assert speeds().estimate(0.0).prefill_per_s is None
    assert speeds().estimate(0.0).since_prefill_s == math.inf


def test_a_long_observation_counts_for_more_than_a_short_one() -> None:
    speed = SmoothedRate(0.5)
    speed.observe(10, 1.0)
    speed.observe(10_000, 10.0)
    assert 900 < (speed.per_s or 0) < 1000


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e3)), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_a_speed_lies_between_the_slowest_and_the_fastest_that_was_seen(
    seen: list[tuple[int, float]], smoothing: float
) -> None:
    speed = SmoothedRate(smoothing)
    for num_tokens, seconds in seen:
        speed.observe(num_tokens, seconds)
    each = [num_tokens / seconds for num_tokens, seconds in seen]
    assert speed.per_s is not None
    assert min(each) * 0.999 <= speed.per_s <= max(each) * 1.001


def test_an_old_speed_gives_way_to_what_is_seen_now() -> None:
    speed = SmoothedRate(0.2)
    speed.observe(1000, 100.0)  # the first prompt, which compiled everything
    for _ in range(40):
        speed.observe(1000, 1.0)
    assert speed.per_s == pytest.approx(1000, rel=0.05)


def test_without_smoothing_nothing_is_measured() -> None:
    blind = speeds(smoothing=0.0)
    blind.prefilled(1000, 0, 1.0)
    blind.handed_over(1000, 1.0)
    assert blind.estimate(0.0).prefill_per_s is None
    assert blind.estimate(0.0).hand_over_per_s is None


def test_short_prompts_say_nothing_of_the_speed() -> None:
    few = speeds(min_tokens=64)
    few.prefilled(64, 0, 1.0)
    few.handed_over(64, 1.0)
    assert few.estimate(0.0).prefill_per_s is None
    assert few.estimate(0.0).hand_over_per_s is None
    few.prefilled(65, 0, 1.0)
    assert few.estimate(0.0).prefill_per_s == 65


def test_another_process_is_not_known() -> None:
    known = speeds()
    known.prefilled(100, 0, 1.0)
    known.prefill_assigned(5.0)
    known.clear()
    assert known.estimate(6.0).prefill_per_s is None
    assert known.estimate(6.0).since_prefill_s == math.inf


def test_reports_show_the_speed_of_an_instance_that_had_work_all_the_time() -> None:
    busy = speeds()
    busy.report_received(num_prefilled_tokens=5000, num_waiting_tokens=900, now_s=10.0)
    busy.report_received(num_prefilled_tokens=5100, num_waiting_tokens=900, now_s=10.1)  # too short to say anything
    assert busy.estimate(10.1).prefill_per_s is None
    busy.report_received(num_prefilled_tokens=5500, num_waiting_tokens=400, now_s=10.5)
    assert busy.estimate(10.5).prefill_per_s == pytest.approx(1000)


def test_reports_of_an_instance_that_was_idle_meanwhile_show_nothing() -> None:
    idle = speeds()
    idle.report_received(5000, 900, 10.0)
    idle.report_received(5500, 0, 10.5)
    idle.report_received(6000, 900, 11.0)
    assert idle.estimate(11.0).prefill_per_s is None


def test_recent_prompts_are_those_of_five_seconds_assigned_here_or_computed_if_that_is_more() -> None:
    source, recent = random.Random(1), speeds()
    assigned: list[tuple[float, int]] = []
    for now_s in sorted(source.uniform(0.0, 20.0) for _ in range(500)):
        assigned.append((now_s, source.randrange(1000)))
        recent.prefill_assigned(*assigned[-1])
        num_tokens = sum(number for at_s, number in assigned if at_s >= now_s - 5.0)
        assert recent.estimate(now_s).recent_prefill_per_s == num_tokens / 5.0
    recent.report_received(1000, 0, 21.0)
    recent.report_received(1000 + 10**6, 0, 22.0)
    assert recent.estimate(22.0).num_recent_computed == 10**6
    assert recent.estimate(22.0).recent_prefill_per_s == 10**6 / 5.0
    assert recent.estimate(30.0).recent_prefill_per_s == 0.0
    recent.prefill_assigned(30.0, 10)
    assert recent.estimate(30.0).num_recent_computed == 0
    recent.clear()
    assert recent.estimate(30.0).recent_prefill_per_s == 0.0


def test_a_try_is_remembered() -> None:
    tried = speeds()
    tried.prefill_assigned(10.0)
    assert tried.estimate(12.5).since_prefill_s == 2.5


def test_a_slow_hand_over_counts_for_minutes_and_then_one_try_renews_it() -> None:
    slow = speeds(smoothing=0.2)
    slow.hand_over_assigned(10.0)
    slow.handed_over(1000, 5.0)  # the first one, which made the connections
    assert slow.estimate(310.0).hand_over_per_s == pytest.approx(200)
    assert slow.estimate(311.0).hand_over_per_s is None
    slow.hand_over_assigned(400.0)
    assert slow.estimate(400.0).hand_over_per_s == pytest.approx(200), "until the try has ended"
    slow.handed_over(1000, 0.5)
    assert slow.estimate(401.0).hand_over_per_s == pytest.approx(2000), "it alone counts"
    slow.hand_over_assigned(500.0)
    slow.handed_over(1000, 5.0)
    assert slow.estimate(501.0).hand_over_per_s == pytest.approx(333, abs=1), "both count again"
    slow.clear()
    assert slow.estimate(502.0).hand_over_per_s is None


def test_reports_alone_keep_no_more_than_those_of_the_last_seconds() -> None:
    """As at the second address of a process, where its estimate is not asked for."""
    reported = speeds()
    for number in range(1000):
        reported.report_received(10 * number, 0, number / 4)
    assert len(reported._recent_computed) == 21
    assert reported.estimate(999 / 4).num_recent_computed == 200
