"""Whether a request is split: what each mode promises, and how `auto` weighs what it knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.picking.disaggregation import Decision, Disaggregation, Reason, Situation, break_even, decide
from router.picking.settings import DisaggregationSettings
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import PROMPT, SHORT, request_of

SETTINGS = DisaggregationSettings(min_tokens=64, probe_s=30.0)
ALWAYS = DisaggregationSettings(mode="always")
IDLE = Situation(num_tokens=1000, decode_per_s=1000.0, prefill_per_s=1000.0, hand_over_per_s=10_000.0)
"""Two equal instances, and a hand-over ten times as fast as computing."""


def auto(situation: Situation, settings: DisaggregationSettings = SETTINGS, **kwargs: Any) -> Disaggregation:
    return decide(situation, settings, prefill_available=kwargs.pop("prefill_available", True), **kwargs)


# The modes


def test_never_and_always_do_not_look_at_the_request() -> None:
    for num_tokens in (1, 100_000):
        situation = replace(IDLE, num_tokens=num_tokens, num_ahead_at_prefill=10**9)
        never = decide(situation, DisaggregationSettings(mode="never"), prefill_available=True)
        always = decide(situation, ALWAYS, prefill_available=True)
        assert (never.decision, never.reason) == (Decision.LOCAL, Reason.OFF)
        assert (always.decision, always.reason) == (Decision.DISAGGREGATE, Reason.ON)


def test_without_a_prefill_instance_always_refuses_and_auto_stays_local() -> None:
    assert decide(IDLE, ALWAYS, prefill_available=False)[:2] == (Decision.REFUSE, Reason.NO_PREFILL)
    assert auto(IDLE, prefill_available=False)[:2] == (Decision.LOCAL, Reason.NO_PREFILL)


def test_a_stream_that_has_begun_goes_on_alone_and_says_so() -> None:
    decided = decide(IDLE, ALWAYS, prefill_available=False, has_begun=True)
    assert decided[:2] == (Decision.LOCAL, Reason.ALONE)
    assert "alone" in decided.explanation
    assert decide(IDLE, ALWAYS, prefill_available=True, has_begun=True).decision is Decision.DISAGGREGATE


# What auto weighs


def test_before_anything_is_measured_the_length_decides() -> None:
    def unmeasured(num_tokens: int, num_cached: int = 0) -> tuple[Decision, Reason]:
        return auto(Situation(num_tokens, num_cached, num_ahead_at_prefill=10**6))[:2]

    assert unmeasured(64) == (Decision.LOCAL, Reason.SHORT)
    assert unmeasured(65) == (Decision.DISAGGREGATE, Reason.UNMEASURED)
    assert unmeasured(1000, num_cached=936) == (Decision.LOCAL, Reason.CACHED)
    assert unmeasured(1000, num_cached=935) == (Decision.DISAGGREGATE, Reason.UNMEASURED)


def test_the_estimate_by_hand() -> None:
    # 3 streams and 1 expected are held up: a token costs 5 ms local; 1 ms and 0.1 ms split. 3.9 ms saved per token.
    # 7800 tokens wait at the prefill instance: 7.8 s more until its first token. So splitting pays above 2000.
    situation = replace(IDLE, num_streams=3, num_ahead_at_prefill=7800)
    assert break_even(situation, SETTINGS) == pytest.approx(2000)
    assert auto(replace(situation, num_tokens=2001))[:2] == (Decision.DISAGGREGATE, Reason.ESTIMATE)
    assert auto(replace(situation, num_tokens=1999))[:2] == (Decision.LOCAL, Reason.QUEUE)
    # The decode instance computes half as many per second: 8.9 ms saved per token, and 3000 that wait there take 6 s.
    behind = replace(situation, decode_per_s=500.0, num_ahead_at_decode=3000)
    assert break_even(behind, SETTINGS) == pytest.approx(1.8 / 0.0089)


def test_a_full_prefill_queue_keeps_requests_local_and_an_empty_one_does_not() -> None:
    assert auto(IDLE).decision is Decision.DISAGGREGATE
    assert auto(replace(IDLE, num_ahead_at_prefill=100_000))[:2] == (Decision.LOCAL, Reason.QUEUE)


def test_a_queue_at_the_decode_instance_makes_splitting_pay() -> None:
    behind = replace(IDLE, num_ahead_at_prefill=5000)
    assert auto(behind).decision is Decision.LOCAL
    assert auto(replace(behind, num_ahead_at_decode=5000)).decision is Decision.DISAGGREGATE


def test_running_streams_make_splitting_pay() -> None:
    slow_prefill = replace(IDLE, prefill_per_s=400.0)
    assert auto(slow_prefill)[:2] == (Decision.LOCAL, Reason.ESTIMATE)
    assert auto(replace(slow_prefill, num_streams=8)).decision is Decision.DISAGGREGATE


def test_a_hand_over_slower_than_computing_keeps_an_idle_instance_local() -> None:
    assert auto(replace(IDLE, hand_over_per_s=500.0))[:2] == (Decision.LOCAL, Reason.ESTIMATE)


def test_a_split_that_saves_no_time_per_token_is_not_worth_it() -> None:
    equal, no_streams = replace(IDLE, hand_over_per_s=None), SETTINGS.model_copy(update={"expected_streams": 0.0})
    decided = auto(equal, no_streams)
    assert decided[:2] == (Decision.LOCAL, Reason.ESTIMATE)
    assert "not worth splitting" in decided.explanation


def test_what_is_cached_at_decode_need_not_be_split() -> None:
    waiting = replace(IDLE, num_streams=3, num_ahead_at_prefill=1000)
    assert auto(waiting).decision is Decision.DISAGGREGATE
    assert auto(replace(waiting, num_cached_at_decode=800))[:2] == (Decision.LOCAL, Reason.ESTIMATE)


def test_what_is_cached_at_prefill_makes_splitting_pay() -> None:
    waiting = replace(IDLE, num_ahead_at_prefill=1000)
    assert auto(waiting).decision is Decision.LOCAL
    assert auto(replace(waiting, num_cached_at_prefill=900)).decision is Decision.DISAGGREGATE


def test_a_slow_measurement_does_not_rule_for_ever() -> None:
    slow = replace(IDLE, hand_over_per_s=1.0)
    assert auto(replace(slow, since_prefill_s=29.0)).decision is Decision.LOCAL
    probe = auto(replace(slow, since_prefill_s=31.0))
    assert probe[:2] == (Decision.DISAGGREGATE, Reason.PROBE)
    assert "measure" in probe.explanation


def test_nothing_is_probed_into_a_full_queue() -> None:
    full = replace(IDLE, num_ahead_at_prefill=10**6, since_prefill_s=1e9)
    assert auto(full)[:2] == (Decision.LOCAL, Reason.QUEUE)
    slow = replace(IDLE, hand_over_per_s=1.0, num_ahead_at_prefill=10, since_prefill_s=1e9)
    assert auto(slow)[:2] == (Decision.LOCAL, Reason.ESTIMATE)


def test_a_hand_over_that_was_never_measured_is_tried() -> None:
    assert auto(replace(IDLE, hand_over_per_s=None)).decision is Decision.DISAGGREGATE
    assert auto(replace(IDLE, decode_per_s=None)).decision is Decision.DISAGGREGATE


def test_the_explanation_holds_the_figures_and_fits_into_a_trailer() -> None:
    explanation = auto(replace(IDLE, num_streams=3, num_ahead_at_prefill=7800, num_tokens=5000)).explanation
    for figure in ("5000 tokens", "above 2000", "3 streams", "7800 tokens waiting", "1000 tokens/s", "10000 tokens/s"):
        assert figure in explanation
    assert explanation.isascii()
    assert len(explanation) < 400
    for num_tokens, tokens in ((1, "1 token"), (40, "40 tokens")):
        assert auto(replace(IDLE, num_tokens=num_tokens)).explanation.startswith(f"{tokens} to prefill")
    assert "worth splitting above 0 " in auto(replace(IDLE, num_ahead_at_decode=5000)).explanation


# What holds whatever the figures are

counts = st.integers(0, 10**6)
speeds = st.none() | st.floats(0.01, 1e7)
situations = st.builds(
    lambda num_tokens, at_decode, at_prefill, **known: Situation(
        num_tokens, min(at_decode, num_tokens), min(at_prefill, num_tokens), **known
    ),
    st.integers(1, 10**6),
    counts,
    counts,
    num_ahead_at_decode=counts,
    num_ahead_at_prefill=counts,
    num_streams=st.integers(0, 5000),
    decode_per_s=speeds,
    prefill_per_s=speeds,
    hand_over_per_s=speeds,
    since_prefill_s=st.floats(0, 1e6),
)
settings_in_auto = st.builds(
    DisaggregationSettings,
    min_tokens=st.integers(0, 5000),
    interruption_weight=st.floats(0, 100),
    expected_streams=st.floats(0, 100),
    probe_s=st.floats(0.001, 1e6),
)


def is_split(situation: Situation, settings: DisaggregationSettings) -> bool:
    return auto(situation, settings).decision is Decision.DISAGGREGATE


@given(situations, settings_in_auto, st.integers(1, 10**6))
def test_a_longer_prompt_is_never_local_where_a_shorter_one_is_split(
    situation: Situation, settings: DisaggregationSettings, more: int
) -> None:
    if is_split(situation, settings):
        assert is_split(replace(situation, num_tokens=situation.num_tokens + more), settings)


@given(situations, settings_in_auto, st.integers(1, 10**6))
def test_less_in_the_decode_instance_s_cache_never_makes_a_split_request_local(
    situation: Situation, settings: DisaggregationSettings, less: int
) -> None:
    if is_split(situation, settings):
        fewer = max(0, situation.num_cached_at_decode - less)
        assert is_split(replace(situation, num_cached_at_decode=fewer), settings)


@given(situations, settings_in_auto, st.integers(1, 10**6))
def test_a_longer_queue_at_prefill_never_makes_a_local_request_split(
    situation: Situation, settings: DisaggregationSettings, more: int
) -> None:
    situation = replace(situation, since_prefill_s=0.0)  # a probe is for its own sake
    if not is_split(situation, settings):
        assert not is_split(replace(situation, num_ahead_at_prefill=situation.num_ahead_at_prefill + more), settings)


@given(situations, settings_in_auto)
def test_an_endless_queue_at_prefill_keeps_everything_local(
    situation: Situation, settings: DisaggregationSettings
) -> None:
    if situation.prefill_per_s is not None:
        queue = replace(situation, num_ahead_at_prefill=10**30, since_prefill_s=0.0)
        assert not is_split(queue, settings)


@given(situations, settings_in_auto, st.integers(1, 5000), counts)
def test_a_busier_decode_instance_never_makes_a_split_request_local(
    situation: Situation, settings: DisaggregationSettings, streams: int, ahead: int
) -> None:
    if is_split(situation, settings):
        busier = replace(
            situation,
            num_streams=situation.num_streams + streams,
            num_ahead_at_decode=situation.num_ahead_at_decode + ahead,
        )
        assert is_split(busier, settings)


@given(situations, settings_in_auto, st.sampled_from(["always", "auto", "never"]), st.booleans(), st.booleans())
def test_every_decision_has_an_explanation_for_a_trailer(
    situation: Situation, settings: DisaggregationSettings, mode: str, available: bool, has_begun: bool
) -> None:
    decided = decide(
        situation, settings.model_copy(update={"mode": mode}), prefill_available=available, has_begun=has_begun
    )
    assert decided.explanation
    assert decided.explanation.isascii()
    assert decided.explanation.isprintable()
    assert available or decided.decision is not Decision.DISAGGREGATE
    assert mode == "always" or decided.decision is not Decision.REFUSE


# In a router


def another(prompt: list[int], number: int = 1) -> list[int]:
    """A prompt as long, of which nothing is cached anywhere."""
    return [20 + number % 200, 20 + number // 200, *reversed(prompt[2:])]


@pytest.mark.slow
async def test_auto_learns_that_a_prefill_instance_is_slow_and_tries_it_again(run: Run) -> None:
    slow = FakeInstance("prefill", behaviour=Behaviour(prefill_s=1.5))
    measured = {"speed_smoothing": 0.5, "probe_s": 6.0, "expected_streams": 0.0}
    async with run(
        prefill=[slow], decode=[FakeInstance("decode", behaviour=Behaviour(load_s=0.05))], disaggregation=measured
    ) as rig:
        first = await rig.generate()
        assert first.trailers["tandem-disaggregated"] == "yes"
        assert "no speed is measured" in first.trailers["tandem-reason"]
        # No other request runs at the decode instance, which is assumed as slow: the hand-over makes the difference.
        second = await rig.generate(request_of(prompt := another(PROMPT)))
        assert second.is_exactly(12, prompt=prompt)
        assert second.trailers["tandem-disaggregated"] == "no"
        assert "not worth splitting" in second.trailers["tandem-reason"]
        assert "tokens/s" in second.trailers["tandem-reason"]
        tried = len(slow.recorded("prefill"))
        number = 2
        while len(slow.recorded("prefill")) == tried:
            number += 1
            probe = await rig.generate(request_of(another(PROMPT, number), max_tokens=2))
        assert "split to measure again" in probe.trailers["tandem-reason"]


async def test_auto_leaves_a_busy_prefill_instance_alone(run: Run) -> None:
    prefill = FakeInstance("prefill", behaviour=Behaviour(prefill_s=0.1))
    async with run(prefill=[prefill], disaggregation={"speed_smoothing": 0.5}) as rig:
        assert (await rig.generate()).trailers["tandem-disaggregated"] == "yes"
        prefill.behaviour.num_waiting_tokens = 10**6
        while rig.app.pools.prefill.views()[0].load.num_waiting_tokens == 0:
            await rig.app.pools.wait_for_change(0.02)
        answer = await rig.generate(request_of(another(PROMPT)))
        assert answer.trailers["tandem-disaggregated"] == "no"
        assert "1000000 tokens waiting" in answer.trailers["tandem-reason"]


async def test_a_refusal_in_always_is_counted_and_honest(run: Run) -> None:
    async with run(prefill=0, disaggregation={"mode": "always"}) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(request_of(SHORT))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert rig.app.service.metrics.decisions == {("refuse", "no_prefill"): 1}
        assert not rig.decode[0].recorded("decode")


async def test_a_stream_that_lost_its_prefill_instance_says_that_it_went_on_alone(run: Run) -> None:
    decode = [
        FakeInstance("decode", "decode-0", behaviour=Behaviour(die_at=5, token_s=0.05)),
        FakeInstance("decode", "decode-1", behaviour=Behaviour(num_running=9)),
    ]
    async with run(decode=decode, disaggregation={"mode": "always"}) as rig:
        call = rig.call(max_tokens=20)
        num_tokens = len((await anext(aiter(call))).tokens.token_ids)
        await rig.prefill[0].kill()
        async for response in call:
            num_tokens += len(response.tokens.token_ids)
        trailers = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
        assert num_tokens == 20
        assert trailers["tandem-disaggregated"] == "yes,no"
        assert trailers["tandem-reason"].endswith("the decode instance continues alone")
        assert trailers["tandem-decode"] == "decode-0,decode-1"
        assert rig.app.service.metrics.decisions == {("disaggregate", "on"): 1, ("local", "alone"): 1}


async def test_all_decisions_are_counted_with_their_reasons(run: Run) -> None:
    async with run() as rig:
        await rig.generate(request_of(SHORT))
        await rig.generate(request_of(PROMPT))
        await rig.generate(request_of(another(PROMPT)))
        await rig.generate(request_of(PROMPT))
        assert rig.app.service.metrics.decisions == {
            ("local", "short"): 1,
            ("disaggregate", "unmeasured"): 2,
            ("local", "cached"): 1,
        }
