"""Latencies of recent requests, and which requests count."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import common_pb2
from router.autoscaler.router_signals import RecentLatencies, Window, quantile
from router.dispatch.trace import RequestTrace
from router.metrics import RouterMetrics
from router.picking.disaggregation import Decision, Disaggregation, Reason
from router.picking.placement import Plan
from router.pools.instance_info import InstanceView
from router.pools.throughput import Work
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.request.request_log import TokenGaps
from serving.logging import RequestEvent
from tests.router.autoscaler.builders import instance, settings_of


def test_a_quantile_is_that_of_the_weighted_samples() -> None:
    window = Window(60.0)
    for index, seconds in enumerate((0.4, 0.1, 0.3, 0.2)):
        window.add(float(index), seconds)
    assert [quantile(window.samples(4.0), part, 1) for part in (0.25, 0.5, 0.75, 1.0)] == [0.1, 0.2, 0.3, 0.4]
    window.add(4.0, 9.0, weight=100.0)
    assert quantile(window.samples(4.0), 0.5, 1) == 9.0


def test_old_samples_are_forgotten_and_few_tell_nothing() -> None:
    window = Window(30.0)
    for at_s in (0.0, 10.0, 20.0):
        window.add(at_s, at_s)
    assert quantile(window.samples(20.0), 1.0, 3) == 20.0
    assert quantile(window.samples(35.0), 1.0, 3) is None
    assert quantile(window.samples(35.0), 0.5, 2) == 10.0
    assert quantile(window.samples(51.0), 0.5, 1) is None


@given(samples=st.lists(st.floats(0, 1e6), min_size=1, max_size=50), part=st.floats(0.01, 1.0))
def test_at_least_the_asked_part_is_no_larger_than_the_quantile(samples: list[float], part: float) -> None:
    window = Window(60.0)
    for seconds in samples:
        window.add(0.0, seconds)
    found = quantile(window.samples(0.0), part, 1)
    assert found in samples
    assert sum(seconds <= found for seconds in samples) >= part * len(samples) - 1e-6
    assert sum(seconds < found for seconds in samples) < part * len(samples) + 1e-6


def plan(decode_up_s: float, prefill_up_s: float | None) -> Plan:
    def at(name: str, up_s: float) -> InstanceView:
        view = instance(name, up_s=up_s).view
        assert view is not None
        return view

    prefill = None if prefill_up_s is None else at("prefill-0", prefill_up_s)
    decision = Disaggregation(Decision.LOCAL, Reason.OFF, "as the test says")
    return Plan(at("decode-0", decode_up_s), prefill, decision, Work(0, 0), "as the test says")


@pytest.mark.parametrize(
    ("decode_up_s", "prefill_up_s", "counts"),
    [(100.0, 100.0, True), (100.0, None, True), (3.0, 100.0, False), (100.0, 3.0, False)],
)
def test_a_request_that_touched_an_instance_still_warming_up_does_not_count(
    decode_up_s: float, prefill_up_s: float | None, counts: bool
) -> None:
    metrics = RouterMetrics(recent=RecentLatencies(settings_of(min_samples=1)))
    trace, request = (
        RequestTrace(metrics),
        GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=20), seed=1),
    )
    choice = Choice(request, 0)
    trace.picked(plan(decode_up_s, prefill_up_s))
    trace.first_token()
    trace.validated(request, [choice])
    for index in range(11):
        choice.accept(common_pb2.TokenChunk(token_index=index, token_ids=[7]))
    trace.ended(RequestEvent.FINISHED, request, 11)
    assert (metrics.recent.of("prefill") is not None) == counts
    assert (metrics.recent.of("decode") is not None) == counts
    assert metrics.ended["finished"] == 1


def test_itl_is_the_gap_after_the_first_token() -> None:
    recent = RecentLatencies(settings_of(min_samples=1))
    metrics = RouterMetrics(recent=recent)
    trace = RequestTrace(metrics)
    start_s = trace.timeline.marks[0][1]
    trace.timeline.mark(RequestEvent.FIRST_TOKEN, start_s + 5.0)
    trace.timeline.mark(RequestEvent.FINISHED, start_s + 6.0)
    metrics.request_ended("finished", trace.timeline, "local", gaps=TokenGaps(1.0, 10), num_prompt=5, num_output=11)
    assert recent.of("decode") == pytest.approx(0.1)


def test_long_answers_weigh_by_their_tokens() -> None:
    recent = RecentLatencies(settings_of(min_samples=1, latency_quantile=0.5), clock=lambda: 0.0)
    rng = random.Random(1)
    for _ in range(20):
        recent.ended(rng.uniform(0.5, 1.0), 1)
    recent.ended(0.02, 400)
    assert recent.of("decode") == 0.02


def test_the_start_of_a_later_choice_is_no_gap() -> None:
    """Of four choices, three begin 0.5 s after the first; each has a token every 0.1 s, and one has a single token."""
    params = SamplingParams(max_tokens=20, n=4)
    request = GenerationRequest("label", "id", "model", (1,), params, seed=1)
    choices = [Choice(request, index) for index in range(4)]
    metrics = RouterMetrics(recent=RecentLatencies(settings_of(min_samples=1)))
    trace = RequestTrace(metrics)
    trace.validated(request, choices)
    trace.picked(plan(100.0, None))
    trace.first_token()
    for choice, start_s, num_tokens in zip(choices, (0.0, 0.5, 0.5, 0.5), (11, 6, 3, 1), strict=True):
        choice.begin_attempt()
        choice.now = iter([start_s + index * 0.1 for index in range(num_tokens)]).__next__
        for index in range(num_tokens):
            choice.accept(common_pb2.TokenChunk(stream_epoch=1, choice=choice.index, token_index=index, token_ids=[7]))
    trace.ended(RequestEvent.FINISHED, request, 21)
    assert metrics.output_token["local"].count == 1
    assert metrics.output_token["local"].sum == pytest.approx(0.1)
    [sample] = metrics.recent.samples("decode")
    assert (sample.seconds, sample.weight) == (pytest.approx(0.1), 10 + 5 + 2)
