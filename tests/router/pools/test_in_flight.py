"""What a report can have counted: neither twice nor not at all."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from router.pools.in_flight import REPORT_LAG_S, InFlightCalls
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.waiting import until


class Accounting:
    """InFlightCalls whose times are given; a number stands for a call."""

    def __init__(self, report_lag_s: float = 0.1) -> None:
        self._now_s = 0.0
        self.calls: Any = InFlightCalls(report_lag_s, clock=lambda: self._now_s)

    def sent(self, call: int, now_s: float, num_tokens: int = 0) -> None:
        self._now_s = now_s
        self.calls.add(call, num_tokens)
        self.calls.sent(call)

    def acknowledged(self, call: int) -> None:
        self.calls.acknowledge(call)

    def ended(self, call: int, now_s: float) -> None:
        self._now_s = now_s
        self.calls.complete(call)

    def reported(self, now_s: float, age_s: float = 0.0) -> None:
        self._now_s = now_s
        self.calls.report_received(age_s)

    def clear(self) -> None:
        self.calls.instance_restarted()

    def __getattr__(self, name: str) -> int:
        number: int = getattr(self.calls, name)
        return number


def test_a_request_is_unreported_until_a_report_follows_its_answer() -> None:
    inflight = Accounting(report_lag_s=0.5)
    inflight.sent(1, 0.0, num_tokens=7)
    inflight.reported(0.1)  # may have left before the request came
    assert (inflight.num_unreported, inflight.num_unreported_tokens) == (1, 7)
    inflight.acknowledged(1)
    assert inflight.num_unreported == 1
    inflight.reported(0.2)
    assert (inflight.num_unreported, inflight.num_unreported_tokens, inflight.num_requests) == (0, 0, 1)


def test_what_is_handed_over_needs_blocks_and_is_not_computed_there() -> None:
    calls: Any = InFlightCalls()
    calls.add("split", 70)
    calls.add("local", 50, 20)
    assert (calls.num_unreported_tokens, calls.num_unreported_to_prefill) == (120, 20)
    calls.expect("moves", 9)
    assert (calls.num_unreported_tokens, calls.num_unreported_to_prefill) == (129, 29)
    for call in ("moves", "local", "split"):
        calls.remove(call)
    assert (calls.num_unreported_tokens, calls.num_unreported_to_prefill) == (0, 0)


def test_a_request_without_an_answer_is_reported_after_the_lag() -> None:
    inflight = Accounting(report_lag_s=0.5)
    inflight.sent(1, 0.0)
    inflight.reported(0.6)
    assert inflight.num_unreported == 0


def test_a_report_of_a_silent_core_does_not_count_later_requests() -> None:
    inflight = Accounting(report_lag_s=0.1)
    inflight.sent(1, 10.0)
    inflight.acknowledged(1)  # by the front: the core is in a long step
    inflight.reported(11.0, age_s=1.5)
    assert inflight.num_unreported == 1
    inflight.reported(12.0, age_s=0.0)
    assert inflight.num_unreported == 0


def test_a_request_that_was_counted_stays_counted() -> None:
    inflight = Accounting(report_lag_s=0.1)
    inflight.sent(1, 0.0)
    inflight.reported(1.0)
    inflight.reported(2.0, age_s=2.0)
    assert inflight.num_unreported == 0


def test_an_end_corrects_the_report_that_counted_it_once() -> None:
    inflight = Accounting(report_lag_s=0.5)
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


@pytest.mark.parametrize(
    ("lag_s", "too_early", "late_enough"),
    [(0.1, (2.5, 1.0), (2.75, 0.0)), (0.5, (2.1, 0.7), (2.1, 0.5))],
    ids=["the core can have reported it", "a report that may be from after it"],
)
def test_an_end_is_remembered_until(
    lag_s: float, too_early: tuple[float, float], late_enough: tuple[float, float]
) -> None:
    """An answer takes as long on its way as a request does. Reports are given by when they come, and by their age."""
    inflight = Accounting(report_lag_s=lag_s)
    inflight.sent(1, 0.0)
    inflight.reported(1.0)
    inflight.ended(1, 2.0)
    inflight.reported(too_early[0], age_s=too_early[1])
    assert inflight.num_ended == 1
    inflight.reported(late_enough[0], age_s=late_enough[1])
    assert inflight.num_ended == 0


def test_another_process_has_no_requests_of_the_old_one() -> None:
    inflight = Accounting()
    inflight.sent(1, 0.0, num_tokens=5)
    inflight.sent(2, 0.0, num_tokens=5)
    inflight.reported(1.0)
    inflight.ended(2, 1.0)
    inflight.sent(3, 1.0, num_tokens=5)
    inflight.clear()
    inflight.ended(3, 2.0)
    counted = (inflight.num_requests, inflight.num_unreported, inflight.num_unreported_tokens, inflight.num_ended)
    assert counted == (0, 0, 0, 0)


def test_a_report_counts_no_request_that_is_not_sent_yet() -> None:
    inflight = Accounting(report_lag_s=0.1)
    inflight.calls.add(1, 5)
    inflight.calls.add(2, 5)
    inflight.reported(1.0)
    assert (inflight.num_unreported, inflight.num_unreported_tokens, inflight.num_requests) == (2, 10, 2)
    inflight.ended(1, 1.0)
    assert (inflight.num_unreported, inflight.num_ended) == (1, 0)
    inflight.calls.sent(2)
    inflight.reported(1.05)
    assert inflight.num_unreported == 1
    inflight.reported(1.2)
    assert inflight.num_unreported == 0
    inflight.ended(2, 1.2)
    assert inflight.num_ended == 1


def test_a_call_that_begins_again_counts_once() -> None:
    inflight = Accounting()
    inflight.sent(1, 0.0, num_tokens=5)
    inflight.sent(1, 0.0, num_tokens=6)
    assert (inflight.num_unreported, inflight.num_unreported_tokens) == (1, 6)


def test_an_expected_call_counts_until_it_is_removed_whatever_is_reported() -> None:
    inflight = Accounting()
    inflight.calls.expect(1, 7)
    inflight.reported(10.0)
    assert (inflight.num_requests, inflight.num_unreported, inflight.num_unreported_tokens) == (1, 1, 7)
    assert inflight.calls.is_empty, "nothing runs here yet"
    inflight.calls.remove(1)
    counted = (inflight.num_requests, inflight.num_unreported, inflight.num_unreported_tokens, inflight.num_ended)
    assert counted == (0, 0, 0, 0)


class Call:
    """A registered call that records how it was notified."""

    def __init__(self) -> None:
        self.notified: list[str] = []

    def instance_lost(self, reason: str) -> None:
        self.notified.append(f"lost: {reason}")

    def instance_ended(self, reason: str) -> None:
        self.notified.append(f"ended: {reason}")

    def instance_draining(self) -> None:
        self.notified.append("stopping")


async def test_running_calls_are_notified_and_completed_ones_keep_the_instance() -> None:
    calls, running, completed = InFlightCalls(), Call(), Call()
    calls.add(running)
    calls.add(completed)
    calls.complete(completed)
    calls.instance_draining()
    calls.instance_ended("gone")
    calls.instance_lost("silent")
    assert running.notified == ["stopping", "ended: gone", "lost: silent"]
    assert not completed.notified
    waiting = asyncio.create_task(calls.wait_until_empty())
    calls.remove(running)
    calls.remove(running)
    await asyncio.sleep(0)
    assert not calls.is_empty
    assert not waiting.done()
    calls.remove(completed)
    await asyncio.wait_for(waiting, 20)


def test_a_call_that_was_not_sent_before_its_instance_was_lost_is_no_load_any_more() -> None:
    calls, waits, sent = InFlightCalls(), Call(), Call()
    calls.add(waits, 5, 5)
    calls.add(sent, 7, 7)
    calls.sent(sent)
    calls.instance_lost("silent")
    assert waits.notified == sent.notified == ["lost: silent"]
    assert (calls.num_requests, calls.num_unreported, calls.num_unreported_to_prefill) == (1, 1, 7)
    calls.remove(sent)
    assert not calls.is_empty, "its request has yet to end"
    calls.sent(waits)
    calls.remove(waits)
    assert (calls.is_empty, calls.num_unreported, calls.num_ended) == (True, 0, 0)


async def test_calls_to_the_old_process_are_still_notified_after_a_restart() -> None:
    calls, old = InFlightCalls(), Call()
    calls.add(old, 5)
    calls.instance_restarted()
    assert (calls.num_requests, calls.num_unreported_tokens) == (0, 0)
    calls.instance_ended("gone")
    assert old.notified == ["ended: gone"]


async def test_reports_count_a_prompt_from_the_moment_in_which_its_reservation_is_made(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=Behaviour(reserve_s=60.0))
    async with run(prefill=1, decode=[decode], disaggregation={"mode": "always"}) as rig:
        [instance] = rig.app.pools.prefill.instances
        asking = asyncio.create_task(rig.generate(max_tokens=2))
        await decode.until("decode")
        sent_s = time.monotonic()
        await until(lambda: time.monotonic() - instance.report_age_s > sent_s + 2 * REPORT_LAG_S)
        assert (instance.calls.num_requests, instance.calls.num_unreported) == (1, 1)
        asking.cancel()
        await until(lambda: not instance.calls.num_requests)
        assert instance.calls.num_ended == 0


async def test_a_report_of_a_state_before_a_request_does_not_count_it(run: Run) -> None:
    """The age of the state is not the core's silence, from which pauses of the instance are left out."""
    permits = asyncio.Semaphore(0)
    fake = FakeInstance("decode", behaviour=Behaviour(permits=permits, load_age_s=1000.0))
    async with run(prefill=0, decode=[fake]) as rig:
        [instance] = rig.app.pools.decode.instances
        asking = asyncio.create_task(rig.generate(max_tokens=1))
        await fake.until("decode")
        sent_s = time.monotonic()
        await until(lambda: time.monotonic() - instance.report_age_s > sent_s + 2 * REPORT_LAG_S)
        assert instance.calls.num_unreported == 1
        fake.behaviour.load_age_s = 0.001
        await until(lambda: not instance.calls.num_unreported)
        permits.release()
        await asking
