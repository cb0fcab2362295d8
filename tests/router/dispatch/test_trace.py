"""Each event of a request is reported once and feeds the timeline, the throughput estimates and the guard."""

from __future__ import annotations

from typing import Any
from unittest.mock import create_autospec

import pytest

from router.dispatch.trace import AttemptTrace, RequestTrace
from router.picking.disaggregation import Decision, Disaggregation, Reason
from router.picking.placement import Plan
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport, Role
from router.pools.throughput import ThroughputEstimator, Work
from router.resilience.safeguards import Guard
from serving.logging import RequestEvent

PREFILL, DECODE = InstanceKey("prefill-0", "e"), InstanceKey("decode-0", "e")


def view_of(role: Role) -> InstanceView:
    name = f"{role}-0"
    info = InstanceInfo(name, "e", role, name, Identity())
    return InstanceView(key=InstanceKey(name, "e"), info=info, load=LoadReport("e"))


class Attempt:
    """An attempt at instances whose throughput nothing has measured yet, on a clock that the test moves."""

    def __init__(self, work: Work, *, is_split: bool) -> None:
        self.now_s = 100.0
        self.prefill, self.decode = ThroughputEstimator(1.0, 0), ThroughputEstimator(1.0, 0)
        self.guard: Any = create_autospec(Guard, instance=True)
        self.request = RequestTrace()
        decision = Disaggregation(Decision.DISAGGREGATE if is_split else Decision.LOCAL, Reason.ON, "as set")
        plan = Plan(view_of("decode"), view_of("prefill") if is_split else None, decision, work, "as set")
        choice = self.request.choice(0, self.guard)
        choice.__enter__()
        prefilling, loading = (self.prefill, self.decode) if is_split else (self.decode, None)
        choice.picked(plan, prefilling, loading)
        self.trace = AttemptTrace(choice, plan, prefilling, loading, lambda: self.now_s)

    @property
    def events(self) -> list[RequestEvent]:
        return [event for event, _ in self.request.timeline.marks]

    def prefill_per_s(self, estimator: ThroughputEstimator) -> float | None:
        return estimator.estimate(self.now_s).prefill_per_s


def test_a_split_attempt_measures_prefill_and_hand_over() -> None:
    attempt = Attempt(Work(num_to_prefill=900, num_ahead=100, num_to_move=1000), is_split=True)
    attempt.now_s += 7.0  # the reservation counts for neither
    attempt.trace.event(RequestEvent.KV_RESERVED)
    attempt.trace.computing("prefill")
    attempt.trace.event(RequestEvent.PREFILL_STARTED)
    attempt.now_s += 2.0
    attempt.trace.token()
    attempt.trace.computing("decode")
    attempt.now_s += 0.5
    attempt.trace.event(RequestEvent.KV_LOADED)
    attempt.trace.token()
    assert attempt.prefill_per_s(attempt.prefill) == 500, "the queue ahead of it was processed too"
    assert attempt.decode.estimate(attempt.now_s).hand_over_per_s == 2000
    assert attempt.prefill_per_s(attempt.decode) is None
    assert attempt.events == [
        RequestEvent.RECEIVED,
        RequestEvent.PICKED,
        RequestEvent.KV_RESERVED,
        RequestEvent.PREFILL_STARTED,
        RequestEvent.FIRST_TOKEN,
        RequestEvent.HAND_OVER_STARTED,
        RequestEvent.KV_LOADED,
        RequestEvent.DECODE_STARTED,
    ]


def test_the_first_to_compute_the_prompt_counts_for_its_cached_tokens() -> None:
    attempt = Attempt(Work(900, 0, 900), is_split=True)
    assert attempt.request.summary().prefilled_by == "", "picked, but nothing computed"
    attempt.trace.computing("prefill")
    attempt.trace.token()
    assert attempt.request.summary().prefilled_by == attempt.request.summary().prefill[0] != ""


def test_a_local_attempt_measures_the_prefill_of_the_decode_instance() -> None:
    attempt = Attempt(Work(num_to_prefill=1000, num_ahead=0), is_split=False)
    attempt.trace.computing("decode")
    attempt.now_s += 2.0
    attempt.trace.token()
    assert attempt.prefill_per_s(attempt.decode) == 500
    assert attempt.decode.estimate(attempt.now_s).hand_over_per_s is None
    assert attempt.events[2:] == [RequestEvent.DECODE_STARTED, RequestEvent.FIRST_TOKEN]


def test_an_attempt_that_fails_before_its_first_token_measures_nothing() -> None:
    attempt = Attempt(Work(1000, 0, 1000), is_split=True)
    attempt.trace.event(RequestEvent.PREFILL_STARTED)
    attempt.now_s += 5.0
    assert attempt.prefill_per_s(attempt.prefill) is None


@pytest.mark.parametrize("num_tokens", [1, 50])
def test_the_guard_is_notified_once_per_instance_however_many_tokens_come(num_tokens: int) -> None:
    attempt = Attempt(Work(10, 0, 10), is_split=True)
    attempt.trace.computing("prefill")
    attempt.trace.token()
    attempt.trace.computing("decode")
    for _ in range(num_tokens):
        attempt.trace.token()
    calls = [(name, args) for name, args, _ in attempt.guard.method_calls]
    assert calls == [
        ("computing", (PREFILL, "prefill")),
        ("token", ()),
        ("computing", (DECODE, "decode")),
        ("token", ()),
    ]
    assert attempt.events.count(RequestEvent.FIRST_TOKEN) == attempt.events.count(RequestEvent.DECODE_STARTED) == 1
