"""The live page's state, from readings at given moments."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from router.api.live.state import MAX_ENDED, MAX_RUNNING, Json, LiveState, PoolReading, Reading, stages_of
from router.autoscaler.decide import ScaleDecision
from router.autoscaler.loop import PoolStatus
from router.autoscaler.resizer import Change
from router.autoscaler.settings import DecodePolicy
from router.pools.instance_info import Role
from router.pools.throughput import ThroughputEstimate
from router.request.request_log import RequestLog, RequestSummary, TokenGaps
from serving.logging import RequestEvent
from tests.fakes.behaviour import Behaviour
from tests.router.api.live.synthetic import STAGES
from tests.router.autoscaler.builders import instance, starting
from tests.router.conftest import Run
from tests.router.failing import busy, decodes
from tests.router.rig import SHORT
from tests.waiting import until

WALL_S = 1_700_000_000.0


def request(
    number: int, start_s: float, *, ttft_s: float = 0.5, end_s: float | None = None, **fields: Any
) -> RequestSummary:
    """A request that got its first token after `ttft_s`; running, or with `end_s` finished then, with the gaps of one
    choice that ran until `end_s`."""
    marks = [(event, start_s + ttft_s * index / 5) for index, event in enumerate(STAGES[:-1])]
    if end_s is not None:
        marks.append((RequestEvent.FINISHED, end_s))
        gaps = TokenGaps(end_s - start_s - ttft_s, max(fields.get("num_tokens", 0) - 1, 0))
        fields = {"outcome": "finished", "gaps": gaps, **fields}
    values = {"num_choices": 1, "num_prompt_tokens": 100, "prefill": ("prefill-0",), "decode": ("decode-0",), **fields}
    return RequestSummary(number, f"r{number}", tuple(marks), **values)


def reading(
    now_s: float, *, running: Sequence[RequestSummary] = (), ended: Sequence[RequestSummary] = (), **fields: Any
) -> Reading:
    values: dict[str, Any] = {
        "router": {"queued": 2},
        "pools": {"prefill": PoolReading(1, None, None), "decode": PoolReading(1, 1, None)},
        "instances": [],
        **fields,
    }
    return Reading(at_s=WALL_S + now_s, now_s=now_s, running=running, ended=ended, **values)


def last_point(state: Json) -> Json:
    point: Json = state["points"][max(state["points"], key=int)]
    return point


def test_a_second_has_the_ttfts_and_gaps_of_its_requests() -> None:
    states = LiveState()
    states.next(reading(100.0, running=[request(1, 99.0, num_tokens=10, gaps=TokenGaps(0.5, 9))]))
    running = [
        request(1, 99.0, num_tokens=20, gaps=TokenGaps(1.5, 19)),
        request(2, 100.3, ttft_s=0.2, num_tokens=6, gaps=TokenGaps(0.5, 5)),
        *(RequestSummary(number, f"r{number}", ((RequestEvent.RECEIVED, 100.5),)) for number in (3, 4)),
    ]
    state = states.next(reading(101.0, running=running))
    point = last_point(state)
    assert max(state["points"]) == str(int(WALL_S) + 101)
    assert (point["tokens_per_s"], point["running"], point["queued"]) == (16.0, 2, 2)
    assert point["ttft_p50_ms"] == pytest.approx(200.0)
    assert point["itl_p50_ms"] == pytest.approx(100.0), "5 gaps in 0.5 s, and 10 in 1 s"


def test_a_stream_that_stalls_is_seen_while_it_stalls() -> None:
    states, stalled = LiveState(), request(1, 99.0, num_tokens=10, gaps=TokenGaps(0.5, 9))
    states.next(reading(100.0, running=[stalled]))
    assert "itl_p95_ms" not in last_point(states.next(reading(101.0, running=[stalled])))
    assert last_point(states.next(reading(102.0, running=[stalled])))["itl_p95_ms"] == 2000.0
    assert last_point(states.next(reading(103.0, running=[stalled])))["itl_p95_ms"] == 3000.0
    moving = dataclasses.replace(stalled, num_tokens=11, gaps=TokenGaps(4.5, 10))
    assert last_point(states.next(reading(104.0, running=[moving])))["itl_p95_ms"] == 4000.0


def test_the_gaps_of_several_choices_are_those_within_each() -> None:
    """Three of four choices begin a second after the first; each has a token every 0.1 s."""
    states = LiveState()
    states.next(reading(100.0, running=[request(1, 99.5, num_choices=4, num_tokens=1)]))
    alone = request(1, 99.5, num_choices=4, num_tokens=11, gaps=TokenGaps(1.0, 10))
    assert last_point(states.next(reading(101.0, running=[alone])))["itl_p95_ms"] == 100.0
    four = request(1, 99.5, end_s=102.0, num_choices=4, num_tokens=51, gaps=TokenGaps(4.7, 47))
    state = states.next(reading(102.0, ended=[four]))
    assert last_point(state)["itl_p95_ms"] == state["ended"]["1"]["itl_ms"] == 100.0
    by_history = LiveState().next(reading(110.0, ended=[four]))["points"]
    assert {point.get("itl_p95_ms", 100.0) for point in by_history.values()} == {100.0}


def test_the_minutes_before_the_first_reading_come_from_the_ended_requests() -> None:
    ended = [
        request(1, 10.5, end_s=15.0, num_tokens=41),
        request(2, 12.0, end_s=13.0, num_tokens=1, outcome="unavailable"),
    ]
    points = LiveState().next(reading(20.2, ended=ended))["points"]
    by_second = {int(name) - int(WALL_S): point for name, point in points.items()}
    assert [by_second[second]["running"] for second in (10, 11, 12, 13, 14)] == [1, 1, 2, 1, 1]
    assert by_second[11]["ttft_p50_ms"] == 500.0
    assert by_second[11]["tokens_per_s"] == 11.0, "the first token, and 40 in 4 s"
    assert by_second[12]["itl_p95_ms"] == 100.0
    assert sum(point["tokens_per_s"] for point in points.values()) == pytest.approx(42.0)
    assert (by_second[13]["ended"], by_second[13]["failed"], by_second[15]["ended"]) == (1, 1, 1)


def test_a_queued_request_of_the_minutes_before_does_not_run() -> None:
    marks = ((RequestEvent.RECEIVED, 10.0), (RequestEvent.ADMITTED, 12.5), (RequestEvent.FINISHED, 14.0))
    points = LiveState().next(reading(20.0, ended=[RequestSummary(1, "r1", marks, outcome="finished")]))["points"]
    by_second = {int(name) - int(WALL_S): (point["running"], point["queued"]) for name, point in points.items()}
    assert [by_second[second] for second in (10, 11, 12, 13)] == [(0, 1), (0, 1), (1, 0), (1, 0)]


def test_the_stages_of_a_request_add_up_to_the_whole() -> None:
    whole = request(1, 10.0, end_s=12.0, num_tokens=5)
    names = ["queue", "pick", "reserve", "wait", "prefill", "hand_over", "schedule", "decode"]
    assert [name for name, _ in stages_of(whole)] == names
    assert sum(seconds for _, seconds in stages_of(whole)) == pytest.approx(2.0)
    rejected = RequestSummary(
        2, "", ((RequestEvent.RECEIVED, 1.0), (RequestEvent.FAILED, 1.5)), outcome="resource_exhausted"
    )
    assert stages_of(rejected) == [("queue", 0.5)]
    shown = LiveState().next(reading(20.0, ended=[whole, rejected]))["ended"]
    assert (shown["1"]["ttft_ms"], shown["1"]["total_ms"], shown["1"]["itl_ms"]) == (500.0, 2000.0, 375.0)
    assert "ttft_ms" not in shown["2"]


async def test_a_request_that_one_instance_computes_is_prefilled_and_decoded_there(run: Run) -> None:
    async with run() as rig:
        log = rig.app.service.metrics.log = RequestLog()
        permits = rig.decode[0].behaviour.permits = asyncio.Semaphore(0)

        def stages() -> list[str]:
            state = LiveState().next(reading(200.0, running=[summary() for summary in log.running.values()]))
            return [one["stage"] for one in state["requests"].values()]

        call = asyncio.create_task(rig.generate(prompt=SHORT))
        await until(lambda: rig.decode[0].num_open_calls)
        assert stages() == ["prefill"]
        permits.release()
        await until(lambda: stages() == ["decode"])
        for _ in range(11):
            permits.release()
        await call
        assert [name for name, _ in stages_of(log.ended[0])] == ["queue", "pick", "prefill", "decode"]


async def test_a_resumed_attempt_has_a_hand_over_of_its_own(run: Run) -> None:
    permits = asyncio.Semaphore(0)
    decode = decodes(Behaviour(die_at=2, permits=permits), busy())
    async with run(decode=decode, disaggregation={"mode": "always"}) as rig:
        log = rig.app.service.metrics.log = RequestLog()
        await rig.generate(max_tokens=12, permits=permits)
        assert decode[0].recorded("died")
        attempt = ["pick", "reserve", "wait", "prefill", "hand_over", "schedule", "decode"]
        assert [name for name, _ in stages_of(log.ended[0])] == ["queue", *attempt, *attempt]


def test_lists_of_requests_are_bounded_and_each_end_is_listed_once() -> None:
    states = LiveState()
    ended = [request(number, 1.0, end_s=2.0 + number / 1000) for number in range(150)]
    running = [request(number, 3.0) for number in range(200, 400)]
    state = states.next(reading(10.0, ended=ended, running=running))
    assert list(state["ended"]) == [str(number) for number in range(150 - MAX_ENDED, 150)]
    assert list(state["requests"]) == [str(number) for number in range(200, 200 + MAX_RUNNING)]
    ended.append(request(400, 9.5, end_s=10.5, num_tokens=3))
    state = states.next(reading(11.0, ended=ended))
    assert (list(state["ended"])[-1], len(state["ended"])) == ("400", MAX_ENDED)
    assert (last_point(state)["ended"], last_point(state)["tokens_per_s"]) == (1, 3.0)
    assert last_point(states.next(reading(12.0, ended=ended)))["ended"] == 0


def test_instances_have_their_load_rates_and_hit_rates() -> None:
    def at(now_s: float, num_generated: int) -> Reading:
        sample = instance(
            "decode-10", used_blocks=50, cached_blocks=100, num_running=3, num_generated_tokens=num_generated
        )
        view = sample.view
        assert view is not None
        identity = dataclasses.replace(view.info.identity, block_size=16)
        info = dataclasses.replace(view.info, identity=identity, bytes_per_block=16_000)
        view = dataclasses.replace(view, info=info, throughput=ThroughputEstimate(hand_over_per_s=2000.0))
        others = [("decode", instance("decode-9")), ("decode", starting("c"))]
        ended = [request(1, 1.0, end_s=now_s - 1, num_cached_tokens=25, prefilled_by="decode-10")]
        return reading(now_s, ended=ended, instances=[("decode", sample._replace(view=view)), *others])

    states = LiveState()
    states.next(at(100.0, 500))
    shown = states.next(at(102.0, 700))["instances"]
    assert list(shown) == ["c", "decode-9", "decode-10"], "by role and name, numbers by value"
    tenth = shown["decode-10"]
    assert (tenth["tokens_per_s"], tenth["hand_over_bytes_per_s"]) == (100.0, 2_000_000)
    assert (tenth["hit_rate"], tenth["running"], tenth["state"]) == (0.25, 3, "ready")
    assert tenth["kv"] == {"blocks": 1000, "free": 950, "cached": 100, "held": 0, "pinned": 0}
    assert shown["c"] == {"name": "c", "role": "decode", "state": "connecting", "out": "connecting"}


@pytest.mark.parametrize("own", ["prefill", "decode"])
def test_an_instance_that_is_given_for_both_pools_is_shown_in_its_own(own: Role) -> None:
    other: Role = "decode" if own == "prefill" else "prefill"
    foreign = starting("a:1")._replace(state="foreign", out=f"its role is {own}, not {other}")
    instances = [(own, instance("one")._replace(address="a:1")), (other, foreign)]
    shown = LiveState().next(reading(10.0, instances=instances))["instances"]["a:1"]
    assert (shown["name"], shown["role"], shown["state"]) == ("one", own, "ready")
    assert "out" not in shown


def test_decisions_and_operators_resizes_are_listed_in_order() -> None:
    status = PoolStatus(DecodePolicy())
    for at_s, new_size, hold in ((1.0, 1, "steady"), (2.0, 1, "steady"), (3.0, 2, None)):
        status.decided(ScaleDecision("decode", at_s, 1, 2, new_size, hold, f"why {at_s}"), leads=True)  # type: ignore[arg-type]
    change = Change("prefill", 1, 3, "operator", "", 2.5)
    pools = {"prefill": PoolReading(1, 3, None), "decode": PoolReading(1, 2, status)}
    state = LiveState().next(reading(10.0, pools=pools, changes=[change]))
    shown = [
        (one["pool"], one["from"], one["to"], one["cause"], one["at"] - WALL_S) for one in state["decisions"].values()
    ]
    assert shown == [
        ("decode", 1, 1, "autoscaler", 1.0),
        ("prefill", 1, 3, "operator", 2.5),
        ("decode", 1, 2, "autoscaler", 3.0),
    ]
    assert state["pools"]["decode"]["reason"] == "why 3.0"


def test_a_failure_of_the_autoscaler_is_not_shown_with_what_held_the_size_before() -> None:
    status = PoolStatus(DecodePolicy())
    status.decided(ScaleDecision("decode", 1.0, 2, 2, 2, "steady", "load 0.7"), leads=True)
    status.failed("no answer within 15 s")
    pools = {"prefill": PoolReading(1, None, None), "decode": PoolReading(2, None, status)}
    shown = LiveState().next(reading(10.0, pools=pools))["pools"]["decode"]
    assert (shown["hold"], shown["reason"]) == ("no_answer", "no answer within 15 s")


def test_a_state_is_json_without_nulls() -> None:
    status = PoolStatus(DecodePolicy())
    pools = {"prefill": PoolReading(0, None, status), "decode": PoolReading(0, None, None)}
    instances = [("prefill", starting()), ("decode", instance("y"))]
    ended = [request(1, 1.0, end_s=2.0), RequestSummary(2, "", ((RequestEvent.RECEIVED, 1.0),), outcome="internal")]
    state = LiveState().next(reading(5.0, pools=pools, instances=instances, ended=ended, running=[request(3, 4.0)]))
    assert "null" not in json.dumps(state)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_the_charts_go_on_after_a_step_of_the_wall_clock(step_s: float) -> None:
    """Or after a suspend: the monotonic clock stands still meanwhile."""

    def stepped(now_s: float) -> Reading:
        return dataclasses.replace(reading(now_s, ended=[ended], running=[running]), at_s=WALL_S + step_s + now_s)

    states, running, ended = LiveState(), request(1, 99.0, num_tokens=10), request(2, 90.0, end_s=95.0, num_tokens=41)
    for now_s in (100.0, 101.0):
        states.next(reading(now_s, ended=[ended], running=[running]))
    states.next(stepped(102.0))
    state = states.next(stepped(103.0))
    seconds = [int(name) for name in state["points"]]
    assert max(seconds) == int(state["at"])
    assert min(seconds) == int(state["at"]) - 13
    assert state["ended"]["2"]["at"] == WALL_S + step_s + 90.0
    assert last_point(state)["ended"] == 0


def test_a_clock_that_is_slewed_keeps_the_names_of_the_points() -> None:
    states = LiveState()
    states.next(reading(100.0))
    states.next(reading(101.0))
    state = states.next(dataclasses.replace(reading(102.0), at_s=WALL_S + 102.3))
    assert list(state["points"]) == [str(int(WALL_S) + second) for second in (101, 102)]
