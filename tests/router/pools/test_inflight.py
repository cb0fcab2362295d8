"""What a report can have counted: neither twice nor not at all."""

from __future__ import annotations

from router.pools.inflight import Inflight


def test_a_request_is_unreported_until_a_report_follows_its_answer() -> None:
    inflight = Inflight(report_lag_s=0.5)
    inflight.sent(1, 0.0, num_tokens=7)
    inflight.reported(0.1)  # may have left before the request came
    assert (inflight.num_unreported, inflight.num_unreported_tokens) == (1, 7)
    inflight.acknowledged(1)
    assert inflight.num_unreported == 1
    inflight.reported(0.2)
    assert (inflight.num_unreported, inflight.num_unreported_tokens, inflight.num_requests) == (0, 0, 1)


def test_a_request_without_an_answer_is_reported_after_the_lag() -> None:
    inflight = Inflight(report_lag_s=0.5)
    inflight.sent(1, 0.0)
    inflight.reported(0.6)
    assert inflight.num_unreported == 0


def test_a_report_of_a_silent_core_knows_nothing_of_what_came_since() -> None:
    inflight = Inflight(report_lag_s=0.1)
    inflight.sent(1, 10.0)
    inflight.acknowledged(1)  # by the front: the core is in a long step
    inflight.reported(11.0, age_s=1.5)
    assert inflight.num_unreported == 1
    inflight.reported(12.0, age_s=0.0)
    assert inflight.num_unreported == 0


def test_a_request_that_was_counted_stays_counted() -> None:
    inflight = Inflight(report_lag_s=0.1)
    inflight.sent(1, 0.0)
    inflight.reported(1.0)
    inflight.reported(2.0, age_s=2.0)
    assert inflight.num_unreported == 0


def test_an_end_corrects_the_report_that_counted_it_once() -> None:
    inflight = Inflight(report_lag_s=0.5)
    inflight.sent(1, 0.0)
    inflight.ended(1, 0.1)
    assert (inflight.num_unreported, inflight.num_ended) == (0, 0)  # no report ever counted it
    inflight.sent(2, 0.0)
    inflight.reported(1.0)
    inflight.ended(2, 1.05)
    inflight.ended(2, 1.06)
    assert inflight.num_ended == 1
    inflight.reported(1.1)
    assert inflight.num_ended == 0


def test_an_end_is_remembered_until_the_core_can_have_told_of_it() -> None:
    inflight = Inflight(report_lag_s=0.1)
    inflight.sent(1, 0.0)
    inflight.reported(1.0)
    inflight.ended(1, 2.0)
    inflight.reported(2.5, age_s=1.0)
    assert inflight.num_ended == 1
    inflight.reported(2.75, age_s=0.0)
    assert inflight.num_ended == 0


def test_another_process_has_nothing_of_the_old_one() -> None:
    inflight = Inflight()
    inflight.sent(1, 0.0, num_tokens=5)
    inflight.sent(2, 0.0, num_tokens=5)
    inflight.reported(1.0)
    inflight.ended(2, 1.0)
    inflight.sent(3, 1.0, num_tokens=5)
    inflight.clear()
    inflight.ended(3, 2.0)
    counted = (inflight.num_requests, inflight.num_unreported, inflight.num_unreported_tokens, inflight.num_ended)
    assert counted == (0, 0, 0, 0)


def test_a_leg_that_begins_again_counts_once() -> None:
    inflight = Inflight()
    inflight.sent(1, 0.0, num_tokens=5)
    inflight.sent(1, 0.0, num_tokens=6)
    assert (inflight.num_unreported, inflight.num_unreported_tokens) == (1, 6)
