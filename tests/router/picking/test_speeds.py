"""What an attempt and a report tell of an instance's speed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.picking.speeds import AttemptClock, Speed, Speeds, Work
from serving.events import RequestEvent


class Hand:
    """A clock that a test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def mark(self, event: RequestEvent) -> float:
        return self.now_s


def speeds(smoothing: float = 1.0, min_tokens: int = 0) -> Speeds:
    return Speeds(smoothing, min_tokens)


def test_a_speed_is_unknown_until_something_was_seen() -> None:
    assert Speed(0.5).per_s is None
    assert speeds().pace(0.0).prefill_per_s is None
    assert speeds().pace(0.0).untried_s == math.inf


def test_a_long_observation_counts_for_more_than_a_short_one() -> None:
    speed = Speed(0.5)
    speed.observe(10, 1.0)
    speed.observe(10_000, 10.0)
    assert 900 < (speed.per_s or 0) < 1000


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-6, 1e3)), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_a_speed_lies_between_the_slowest_and_the_fastest_that_was_seen(
    seen: list[tuple[int, float]], smoothing: float
) -> None:
    speed = Speed(smoothing)
    for num_tokens, seconds in seen:
        speed.observe(num_tokens, seconds)
    each = [num_tokens / seconds for num_tokens, seconds in seen]
    assert speed.per_s is not None
    assert min(each) * 0.999 <= speed.per_s <= max(each) * 1.001


def test_an_old_speed_gives_way_to_what_is_seen_now() -> None:
    speed = Speed(0.2)
    speed.observe(1000, 100.0)  # the first prompt, which compiled everything
    for _ in range(40):
        speed.observe(1000, 1.0)
    assert speed.per_s == pytest.approx(1000, rel=0.05)


def test_without_smoothing_nothing_is_measured() -> None:
    blind = speeds(smoothing=0.0)
    blind.prefilled(1000, 0, 1.0)
    blind.handed_over(1000, 1.0)
    assert blind.pace(0.0).prefill_per_s is None
    assert blind.pace(0.0).hand_over_per_s is None


def test_short_prompts_say_nothing_of_the_speed() -> None:
    few = speeds(min_tokens=64)
    few.prefilled(64, 0, 1.0)
    few.handed_over(64, 1.0)
    assert few.pace(0.0).prefill_per_s is None
    assert few.pace(0.0).hand_over_per_s is None
    few.prefilled(65, 0, 1.0)
    assert few.pace(0.0).prefill_per_s == 65


def test_another_process_is_not_known() -> None:
    known = speeds()
    known.prefilled(100, 0, 1.0)
    known.tried(5.0)
    known.clear()
    assert known.pace(6.0).prefill_per_s is None
    assert known.pace(6.0).untried_s == math.inf


def test_a_split_attempt_shows_both_speeds() -> None:
    hand, prefill, decode = Hand(), speeds(), speeds()
    clock = AttemptClock(Work(num_to_prefill=900, num_ahead=100, num_to_move=1000), prefill, decode, hand.mark, hand)
    hand.now_s += 7.0  # the reservation is nobody's speed
    clock.mark(RequestEvent.PREFILL_STARTED)
    hand.now_s += 2.0
    clock.first_token()
    hand.now_s += 0.5
    clock.mark(RequestEvent.KV_LOADED)
    assert prefill.pace(hand()).prefill_per_s == 500  # the queue ahead of it was worked off too
    assert decode.pace(hand()).hand_over_per_s == 2000
    assert decode.pace(hand()).prefill_per_s is None


def test_a_local_attempt_shows_how_fast_the_decode_instance_prefills() -> None:
    hand, decode = Hand(), speeds()
    clock = AttemptClock(Work(num_to_prefill=1000, num_ahead=0), decode, None, hand.mark, hand)
    clock.started()
    hand.now_s += 2.0
    clock.mark(RequestEvent.DECODE_STARTED)
    assert decode.pace(hand()).prefill_per_s == 500
    assert decode.pace(hand()).hand_over_per_s is None


def test_an_attempt_that_fails_before_its_first_token_shows_nothing() -> None:
    hand, prefill, decode = Hand(), speeds(), speeds()
    clock = AttemptClock(Work(1000, 0, 1000), prefill, decode, hand.mark, hand)
    clock.mark(RequestEvent.PREFILL_STARTED)
    hand.now_s += 5.0
    assert prefill.pace(hand()).prefill_per_s is None


def test_reports_show_the_speed_of_an_instance_that_had_work_all_the_time() -> None:
    busy = speeds()
    busy.reported(num_prefilled_tokens=5000, num_waiting_tokens=900, now_s=10.0)
    busy.reported(num_prefilled_tokens=5100, num_waiting_tokens=900, now_s=10.1)  # too short to say anything
    assert busy.pace(10.1).prefill_per_s is None
    busy.reported(num_prefilled_tokens=5500, num_waiting_tokens=400, now_s=10.5)
    assert busy.pace(10.5).prefill_per_s == pytest.approx(1000)


def test_reports_of_an_instance_that_was_idle_meanwhile_show_nothing() -> None:
    idle = speeds()
    idle.reported(5000, 900, 10.0)
    idle.reported(5500, 0, 10.5)
    idle.reported(6000, 900, 11.0)
    assert idle.pace(11.0).prefill_per_s is None


def test_a_try_is_remembered() -> None:
    tried = speeds()
    tried.tried(10.0)
    assert tried.pace(12.5).untried_s == 2.5
