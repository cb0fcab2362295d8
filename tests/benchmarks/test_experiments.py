"""How the experiments choose, count and predict."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import stub_engines
from benchmarks.mixed_load import Mix, MixedWorkload, failed_cell, failures, joined, of_kind
from benchmarks.pd_isolation import Experiment, Subject
from benchmarks.pool_sizes import Live, Phase
from protos.tandem.v1 import decode_pb2
from tandem.bench.serve import plots
from tandem.bench.serve.endpoint import RequestRecord
from tandem.bench.serve.report import Objectives, Point, summarise

MIX = Mix(
    stream_input_len=8, stream_output_len=20, long_input_len=64, long_output_len=4, long_share=0.25, duration_s=40.0
)
OBJECTIVES = Objectives(tpot_ms=50)


def answered(sent_s: float, gap_s: float, input_len: int = 8) -> RequestRecord:
    token_s = [sent_s + 0.1 + gap_s * index for index in range(4)]
    return RequestRecord(sent_s, sent_s, input_len, 4, token_s, token_s[-1], "length")


def point(rate: float, *gaps_s: float) -> Point:
    records = [answered(index, gap_s) for index, gap_s in enumerate(gaps_s)]
    return Point(rate, summarise(records, OBJECTIVES), records)


def test_the_best_aggregated_stack_is_chosen_at_each_rate_by_goodput_and_then_by_itl() -> None:
    small, large, split = Subject("64", "never", 64), Subject("512", "never", 512), Subject("1P1D", "always", 512)
    points = {
        small: [point(1, 0.01, 0.01), point(2, 0.01, 0.09)],
        large: [point(1, 0.02, 0.02), point(2, 0.04, 0.04)],
        split: [point(1, 0.001, 0.001), point(2, 0.001, 0.001)],
    }
    best = Experiment("33m", MIX, OBJECTIVES, points).best()
    assert [(subject, found.rate) for subject, found in best] == [(small, 1), (large, 2)]


def test_of_stacks_that_meet_nothing_the_one_that_fails_least_is_the_best() -> None:
    failing, slow = Subject("64", "never", 64), Subject("512", "never", 512)
    failed = RequestRecord(0.0, 0.0, 8, 4, error="UNAVAILABLE: gone", status="UNAVAILABLE")
    records = [answered(0.0, 0.06), failed]
    one_failed = Point(1.0, summarise(records, OBJECTIVES), records)
    points = {failing: [one_failed], slow: [point(1, 0.07, 0.07)]}
    ((best, _),) = Experiment("33m", MIX, OBJECTIVES, points).best()
    assert best is slow
    assert failures({"64": [one_failed], "512": points[slow]}) == ["FAILED: 64, 1/s: 1 x UNAVAILABLE"]


def test_joined_runs_count_as_one_behind_the_other() -> None:
    whole = joined([point(2.0, 0.01, 0.01), point(2.0, 0.09)], OBJECTIVES)
    assert [record.sent_s for record in whole.records] == [0, 1, pytest.approx(1.13)]
    assert whole.report.num_requests == 3
    assert whole.report.attainment == pytest.approx(2 / 3)
    assert whole.report.itl.max == pytest.approx(90)


def run_from(begin_s: float, *, lag_s: float = 0.0, loop_lag_s: float = 0.0) -> Point:
    """One request a second for 9 s; the last one is answered after 21."""
    records = [answered(begin_s + number, 0.01) for number in range(10)]
    records[-1] = answered(begin_s + 9, 4.0)
    records = [replace(record, due_s=record.sent_s - lag_s) for record in records]
    return Point(1.0, summarise(records, OBJECTIVES, [loop_lag_s] * 10), records)


def test_the_ends_of_joined_runs_are_no_part_of_what_was_offered() -> None:
    whole = joined([run_from(0.0), run_from(3.0), run_from(7.0)], OBJECTIVES)
    assert whole.report.offered_per_s == pytest.approx(1.0)
    assert whole.report.duration_s == pytest.approx(3 * 21.1)
    assert whole.report.goodput_per_s == pytest.approx(27 / (3 * 21.1))
    (axis,) = plots.goodput_over_rate({"joined": [whole]}).axes
    (line,) = [one for one in axis.get_lines() if one.get_label() == "joined"]
    assert np.asarray(line.get_xydata()) == pytest.approx(np.array([[1.0, 0.9]]))


@pytest.mark.parametrize("late", [{"lag_s": 0.5}, {"loop_lag_s": 0.5}])
def test_joined_runs_are_late_if_one_of_them_is(late: dict[str, float]) -> None:
    runs = [run_from(0.0) for _ in range(200)]
    assert joined(runs, OBJECTIVES).report.kept_schedule
    whole = joined([*runs, run_from(0.0, **late)], OBJECTIVES)
    assert not whole.report.kept_schedule
    assert failed_cell(whole) == "0, the load was late"


def test_a_mix_has_both_kinds_in_their_shares_and_in_order() -> None:
    workload = MixedWorkload(MIX, vocab_size=1000)
    requests = workload.plan(1, 20.0)
    assert all(earlier.at_s <= later.at_s for earlier, later in itertools.pairwise(requests))
    longs = [one for one in requests if len(one.prompt_token_ids) == MIX.long_input_len]
    streams = [one for one in requests if len(one.prompt_token_ids) == MIX.stream_input_len]
    assert len(longs) + len(streams) == len(requests)
    assert {one.max_tokens for one in longs} == {4}
    assert {one.max_tokens for one in streams} == {20}
    # Poisson counts of means 200 and 600: five standard deviations
    assert abs(len(longs) - 200) < 5 * 200**0.5
    assert abs(len(streams) - 600) < 5 * 600**0.5
    assert requests == MixedWorkload(MIX, vocab_size=1000).plan(1, 20.0)
    assert not {one.prompt_token_ids for one in requests} & {one.prompt_token_ids for one in workload.warm_up(1, 8)}


def test_a_request_belongs_to_the_phase_in_which_it_was_sent() -> None:
    records = [answered(sent_s, 0.01, input_len) for sent_s, input_len in ((0, 8), (9, 64), (10, 8), (12, 8), (15, 8))]
    live = Live(records, [Phase((1, 1), 0.0, 10.0), Phase((2, 1), 12.0, 20.0)])
    points = live.points(1.0)
    assert {name: [one.sent_s for one in found.records] for name, found in points.items()} == {
        "1P1D": [0, 9],
        "2P1D": [12, 15],
    }
    assert of_kind(points["1P1D"], MIX, long=True).num_requests == 1


@pytest.mark.parametrize(("token_rate", "per_request_s"), [(100.0, 0.001), (600.0, 0.0005), (1500.0, 0.0004)])
def test_the_expected_step_is_that_of_simulated_streams(token_rate: float, per_request_s: float) -> None:
    """A discrete simulation of steps and Poisson arrivals is the oracle of the formula on the page."""
    speeds, output_len = stub_engines.Speeds(step_s=0.02, per_request_s=per_request_s), 50
    rng = random.Random(1)
    now_s, due_s, running, streams, steps_s = 0.0, 0.0, [], 0, 0.0
    while streams < 200_000:
        while due_s <= now_s:
            running.append(output_len)
            due_s += rng.expovariate(token_rate / output_len)
        step_s = speeds.step(len(running)) if running else due_s - now_s
        streams += len(running)
        steps_s += step_s * len(running)
        running = [left - 1 for left in running if left > 1]
        now_s += step_s
    assert speeds.expected_step(token_rate) == pytest.approx(steps_s / streams, rel=0.1)


def test_an_instance_that_cannot_keep_up_has_no_step() -> None:
    assert stub_engines.Speeds(per_request_s=0.001).expected_step(1000) == float("inf")


async def test_stub_steps_give_every_running_stream_one_token_and_new_ones_none() -> None:
    stub = stub_engines.DecodeStub("decode-0", stub_engines.Pools(0, 1, stub_engines.Speeds(step_s=0.3), 100))
    received: list[tuple[str, int]] = []

    async def requests(num_tokens: int) -> AsyncIterator[decode_pb2.DecodeRequest]:
        start = decode_pb2.DecodeStart()
        start.request.sampling.max_tokens = num_tokens
        yield decode_pb2.DecodeRequest(start=start)

    async def read(name: str, num_tokens: int) -> None:
        async for answer in stub.Decode(requests(num_tokens), None):
            received.append((name, answer.tokens.token_index))

    async with asyncio.timeout(20):
        first = asyncio.create_task(read("first", 3))
        while not stub.num_running:
            await asyncio.sleep(0)
        await asyncio.gather(first, read("second", 1))
        assert received == [("first", 0), ("first", 1), ("second", 0), ("first", 2)]
        await read("later", 1)
    assert received[-1] == ("later", 0), "steps begin again after a pause"
