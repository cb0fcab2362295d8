"""Instances that fail in a row are ejected for a while, never too many of them and never the last."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import instance_pb2
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.resilience.retry import CallFailed, Death, FailureKind
from router.resilience.safeguards import EjectionSettings, Guard, OutlierDetection
from serving.errors import Aborted, ServiceError, Unavailable
from tests.fakes.behaviour import FULL, WRONG, Behaviour
from tests.router.conftest import Run
from tests.router.failing import busy, decodes, prefills
from tests.router.rig import request_of
from tests.waiting import until

NO_SEED = Aborted("no seed within the reservation time")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def view(name: str, out: str | None = None) -> InstanceView:
    key = InstanceKey(name, "e")
    info = InstanceInfo(name, "e", "decode", name, Identity())
    return InstanceView(key=key, info=info, load=LoadReport("e"), out=out)


class Scenario:
    """A pool of ready instances and what happens to them."""

    def __init__(self, size: int, **settings: Any) -> None:
        self.clock = Clock()
        self.pool = [view(f"d{i}") for i in range(size)]
        self.detection = OutlierDetection(EjectionSettings(**settings), self.clock)

    def fail(self, index: int, times: int = 5) -> None:
        for _ in range(times):
            self.clock.now_s += 0.2
            self.detection.failed(self.pool[index].key, self.pool)

    def out(self) -> list[int]:
        marked = self.detection.marked(tuple(self.pool))
        return [index for index, one in enumerate(marked) if one.out is not None]


def test_five_failures_in_a_row_eject_for_half_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    scenario = Scenario(4)
    scenario.fail(1, 4)
    assert scenario.out() == []
    scenario.fail(1, 1)
    assert scenario.out() == [1]
    assert scenario.detection.marked(tuple(scenario.pool))[1].out == "ejected for 30 s more"
    assert "d1 is ejected for 30 s: 5 failures in a row" in caplog.text
    scenario.fail(1, 5)  # what still ran there
    scenario.clock.now_s += 28.9
    assert scenario.out() == [1]
    scenario.clock.now_s += 0.2
    assert scenario.out() == []


def test_a_token_between_failures_begins_the_count_anew() -> None:
    scenario = Scenario(4)
    for _ in range(3):
        scenario.fail(1, 4)
        scenario.detection.succeeded(scenario.pool[1].key)
    assert scenario.out() == []


def test_streams_that_break_at_the_same_moment_are_one_failure() -> None:
    scenario = Scenario(4)
    for _ in range(50):
        scenario.detection.failed(scenario.pool[1].key, scenario.pool)
    assert scenario.out() == []
    for _ in range(500):  # a hundred failures a second are not one event for ever
        scenario.clock.now_s += 0.01
        scenario.detection.failed(scenario.pool[1].key, scenario.pool)
    assert scenario.out() == [1]


def test_on_probation_one_failure_ejects_again_and_for_longer() -> None:
    scenario = Scenario(4)
    scenario.fail(1)
    scenario.clock.now_s += 30.1
    scenario.fail(1, 1)
    assert scenario.out() == [1]
    scenario.clock.now_s += 59.0
    assert scenario.out() == [1]
    scenario.clock.now_s += 1.1
    assert scenario.out() == []


def test_a_token_ends_the_probation_and_time_without_failures_the_memory() -> None:
    scenario = Scenario(4)
    scenario.fail(1)
    scenario.clock.now_s += 30.1
    scenario.detection.succeeded(scenario.pool[1].key)
    scenario.fail(1, 4)
    assert scenario.out() == []
    scenario.detection.succeeded(scenario.pool[1].key)
    scenario.clock.now_s += 31.0
    scenario.fail(1)
    scenario.clock.now_s += 30.1
    assert scenario.out() == [], "the earlier ejection is forgotten, so this one lasts as long as the first"
    scenario.clock.now_s += 1000.0
    scenario.fail(1)
    scenario.clock.now_s += 29.0
    assert scenario.out() == [1], "nor does a long time without failures shorten one"


def test_at_most_half_of_a_pool_is_ejected() -> None:
    scenario = Scenario(5)
    for index in range(5):
        scenario.fail(index)
    assert scenario.out() == [0, 1]
    scenario.clock.now_s += 30.1
    scenario.fail(4, 1)
    assert scenario.out() == [4], "it had failed all the while"


@pytest.mark.parametrize("out", ["draining", "its address has left the pool", "no load report for 2 s"])
def test_instances_that_are_out_otherwise_do_not_count_in_the_share(out: str) -> None:
    """As the old ones in a rolling update."""
    scenario = Scenario(8)
    scenario.pool[4:] = [view(f"d{index}", out=out) for index in range(4, 8)]
    for index in range(4):
        scenario.fail(index)
    assert [index for index in scenario.out() if index < 4] == [0, 1]


@pytest.mark.parametrize(
    "ending", [{"load": LoadReport("e", draining=True), "out": "draining"}, {"out": "its address has left the pool"}]
)
def test_ejected_instances_that_end_take_no_share(ending: dict[str, Any]) -> None:
    scenario = Scenario(8)
    for index in range(4):
        scenario.fail(index)
    scenario.pool[:4] = [replace(one, **ending) for one in scenario.pool[:4]]
    scenario.fail(4)
    scenario.fail(5)
    scenario.fail(6)
    assert [index for index in scenario.out() if index >= 4] == [4, 5]
    marked = scenario.detection.marked(tuple(scenario.pool))
    assert [one.out for one in marked[:4]] == [ending["out"]] * 4, "for how long they are ejected no longer matters"


def test_ejected_instances_that_are_lost_count_in_both() -> None:
    scenario = Scenario(6)
    for index in range(2):
        scenario.fail(index)
        scenario.pool[index] = replace(scenario.pool[index], out="its load stream ended")
    scenario.fail(2)
    scenario.fail(3)
    assert scenario.out() == [0, 1, 2]


def test_an_instance_that_is_lost_whenever_it_fails_is_ejected() -> None:
    scenario = Scenario(2)
    healthy, scenario.pool[0] = scenario.pool[0], view("d0", out="its load stream ended")
    scenario.fail(0)
    scenario.pool[0] = healthy
    assert scenario.out() == [0]


def test_instances_that_are_lost_together_are_not_all_ejected() -> None:
    scenario = Scenario(8)
    healthy = scenario.pool
    scenario.pool = [*(view(f"d{index}", out="its load stream ended") for index in range(7)), healthy[7]]
    for index in range(7):
        scenario.fail(index)
    scenario.pool = healthy
    assert scenario.out() == [0]


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_ready_instance_is_never_ejected(size: int) -> None:
    scenario = Scenario(size)
    scenario.pool[1:] = [view(f"d{index}", out="silent") for index in range(1, size)]
    scenario.fail(0, 20)
    assert 0 not in scenario.out()
    scenario = Scenario(size, max_share=1.0)
    for index in range(size):
        scenario.fail(index)
    assert scenario.out() == list(range(size - 1))


def test_another_process_at_the_address_begins_anew() -> None:
    scenario = Scenario(4)
    scenario.fail(1)
    key = InstanceKey("d1", "later")
    scenario.pool[1] = InstanceView(key=key, info=scenario.pool[1].info, load=LoadReport("later"))
    assert scenario.out() == []
    scenario.clock.now_s += 30.1
    scenario.fail(2, 1)
    assert list(scenario.detection._records) == [scenario.pool[2].key], "of the former process nothing is kept"


def test_an_ejected_process_that_comes_back_is_still_ejected() -> None:
    scenario = Scenario(4)
    scenario.fail(1)
    gone = scenario.pool.pop(1)
    scenario.fail(1, 1)
    scenario.pool.insert(1, gone)
    assert scenario.out() == [1]


def test_crashes_of_processes_that_are_gone_are_forgotten() -> None:
    """Each restart of a pod is another process."""
    scenario = Scenario(2)
    for number in range(100):
        scenario.clock.now_s += 60.0
        scenario.detection.crashed(InstanceKey("d0", f"epoch {number}"), scenario.pool)
    assert len(scenario.detection._records) == 1


def test_an_instance_whose_engine_has_crashed_is_out_at_once_even_if_it_is_the_last() -> None:
    scenario = Scenario(2)
    for one in scenario.pool:
        scenario.detection.crashed(one.key, scenario.pool)
    assert scenario.out() == [0, 1]


async def test_an_instance_that_reports_and_fails_is_ejected_and_comes_back(run: Run) -> None:
    settings = {"failures": 2, "ejection_s": 5.0}
    async with run(prefill=0, decode=decodes(Behaviour(index_error_at=0), busy()), ejection=settings) as rig:
        for _ in range(2):
            assert (await rig.generate()).is_exactly(12)
            await asyncio.sleep(0.15)
        num_sent = len(rig.decode[0].recorded("decode"))
        assert num_sent == 2
        assert (await rig.generate()).is_exactly(12)
        assert len(rig.decode[0].recorded("decode")) == num_sent
        rig.decode[0].behaviour.index_error_at = None
        async with asyncio.timeout(20):
            while len(rig.decode[0].recorded("decode")) == num_sent:
                assert (await rig.generate()).is_exactly(12)
                await asyncio.sleep(0.05)
        assert rig.decode[0].recorded("decode ended")


async def test_an_ejected_instance_is_better_than_none(run: Run) -> None:
    settings = {"failures": 1, "ejection_s": 60.0}
    async with run(prefill=0, decode=decodes(Behaviour(index_error_at=0), busy()), ejection=settings) as rig:
        assert (await rig.generate()).is_exactly(12)
        rig.decode[0].behaviour.index_error_at = None
        await rig.decode[1].kill()
        await rig.until_ready(num_decode=1)
        assert (await rig.generate()).is_exactly(12)


async def test_requests_that_an_instance_calls_invalid_do_not_eject_it(run: Run) -> None:
    settings = {"failures": 1, "ejection_s": 60.0}
    async with run(prefill=0, decode=decodes(Behaviour(refuse=WRONG), busy()), ejection=settings) as rig:
        for num_refused in range(1, 4):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await rig.generate()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert len(rig.decode[0].recorded("refused")) == num_refused
            await asyncio.sleep(0.15)


@pytest.mark.parametrize("answer", [FULL, NO_SEED], ids=["full", "no seed"])
async def test_an_instance_that_is_full_or_gets_no_kv_is_not_ejected(run: Run, answer: ServiceError) -> None:
    settings = {"failures": 1, "ejection_s": 60.0}
    async with run(prefill=0, decode=decodes(Behaviour(refuse=answer), busy()), ejection=settings) as rig:
        for num_refused in range(1, 4):
            assert (await rig.generate()).is_exactly(12)
            assert len(rig.decode[0].recorded("refused")) == num_refused
            await asyncio.sleep(0.15)


@pytest.mark.parametrize("mode", ["auto", "always"])
async def test_a_prefill_instance_that_fails_is_ejected_also_where_it_serves_alone(run: Run, mode: str) -> None:
    cost = instance_pb2.StepCost(base_s=0.0035, per_stream_s=0.0006, per_token_s=1 / 4500)
    failing, working = prefills(Behaviour(step_cost=cost, index_error_at=0), Behaviour(step_cost=cost, num_running=2))
    decode = decodes(Behaviour(step_cost=cost, num_running=30))
    settings = {
        "disaggregation": {"speed_smoothing": 0.2, "mode": mode},
        "ejection": {"failures": 2, "ejection_s": 60.0},
    }
    async with run(prefill=[failing, working], decode=decode, **settings) as rig:
        for number in range(8):
            prompt = [20 + number] * 400
            assert (await rig.generate(request_of(prompt))).is_exactly(12, prompt=prompt)
            await asyncio.sleep(0.15)  # failures at the same moment count once
        num_tried = len(failing.recorded("prefill")) + len(failing.recorded("decode"))
        assert 2 <= num_tried <= 4, "idle as it looks, all eight would go there"


async def test_a_token_of_a_call_ends_a_row_of_failures(run: Run) -> None:
    clock = Clock()
    choice = Choice(GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=1)), 0)
    async with run(prefill=0, decode=2) as rig:
        rig.app.safeguards.outliers["decode"]._clock = clock
        key = rig.app.pools.decode.views()[0].key

        def fail(guard: Guard, times: int) -> bool:
            for _ in range(times):
                clock.now_s += 1.0
                guard.computing(key, "decode")
                guard.failed(CallFailed(key, "decode", "broken", Unavailable("gone"), ""))
            return rig.app.safeguards.outliers["decode"].ejected_s(key) is not None

        with Guard(rig.app.safeguards, choice) as guard:
            assert not fail(guard, 4)
            guard.computing(key, "decode")
            guard.token()
            assert not fail(guard, 4)
            assert fail(guard, 1)


@pytest.mark.parametrize(
    ("kind", "death", "is_computing", "is_suspect"),
    [
        ("broken", "vanished", True, True),
        ("broken", "vanished", False, False),
        ("broken", None, True, False),
        ("internal", None, True, True),
        ("refused", None, True, False),
    ],
)
async def test_a_request_is_a_suspect_of_the_death_of_what_computed_it(
    run: Run, kind: FailureKind, death: Death | None, is_computing: bool, is_suspect: bool
) -> None:
    choice = Choice(GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=1)), 0)
    async with run(prefill=0, decode=2) as rig:
        safeguards = rig.app.safeguards
        first, second = (view.key for view in rig.app.pools.decode.views())
        with Guard(safeguards, choice) as guard:
            assert await guard.wait_permit()
            guard.computing(first if is_computing else second, "decode")
            failure = CallFailed(first, "decode", kind, Unavailable("gone"), "", death=death)
            guard.failed(failure)
            assert (not safeguards.poison.is_empty and safeguards.poison.is_suspect(guard.suspect)) == is_suspect
            assert await guard.rejection(failure) is None
            assert safeguards.budget.num_under_way == 0, "before the next attempt"


async def test_a_token_gives_the_permit_back_and_clears_a_suspect(run: Run) -> None:
    choice = Choice(GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=1)), 0)
    async with run(prefill=0, decode=2) as rig:
        safeguards = rig.app.safeguards
        first, second = (view.key for view in rig.app.pools.decode.views())
        with Guard(safeguards, choice) as guard:
            guard.computing(first, "decode")
            guard.failed(CallFailed(first, "decode", "internal", Unavailable("it broke"), ""))
            assert safeguards.poison.is_suspect(guard.suspect)
            assert await guard.wait_permit()
            await guard.wait_probation(second)
            guard.computing(second, "decode")
            assert safeguards.budget.num_under_way == 1
            guard.token()
            assert safeguards.budget.num_under_way == 0
            assert not safeguards.poison.is_suspect(guard.suspect)


async def test_a_process_that_has_left_its_pool_counts_for_the_pool_that_was_called(run: Run) -> None:
    """Another process may answer at its address before the failure of the call is handled."""
    gone = InstanceKey("127.0.0.1:1", "earlier")
    choice = Choice(GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=1)), 0)
    async with run(prefill=1, decode=1) as rig:
        safeguards = rig.app.safeguards
        with Guard(safeguards, choice) as guard:
            guard.failed(CallFailed(gone, "prefill", "broken", Unavailable("gone"), "", death="crashed"))
        assert safeguards.outliers["prefill"].ejected_s(gone) is not None
        assert safeguards.outliers["decode"].ejected_s(gone) is None
        assert safeguards.is_gone(gone)
        [decode], [prefill] = rig.app.pools.decode.views(), rig.app.pools.prefill.views()
        assert not safeguards.is_gone(decode.key)
        safeguards._known_gone_after_s = 0.01
        async with asyncio.timeout(20):
            await safeguards.wait_gone(decode.key)  # a live one has reported by then
        rig.decode[0].behaviour.draining = True
        await rig.until_ready(num_decode=0)
        assert not safeguards.is_gone(decode.key), "a drain is no end"
        assert not safeguards.is_gone(prefill.key)
        await rig.prefill[0].kill()
        await until(lambda: safeguards.is_gone(prefill.key))
