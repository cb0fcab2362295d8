"""Instances that fail in a row are left out for a while, never too many of them and never the last."""

from __future__ import annotations

import asyncio

import pytest

from router.config import EjectionSettings
from router.failover.ejection import Ejection
from router.pools.instances import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport
from tests.fakes.behaviour import FULL, Behaviour
from tests.router.conftest import Run
from tests.router.failing import busy, decodes


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


class Story:
    """A pool of ready instances and what happens to them."""

    def __init__(self, size: int) -> None:
        self.clock = Clock()
        self.pool = [view(f"d{i}") for i in range(size)]
        self.ejection = Ejection(EjectionSettings(), self.clock)

    def fail(self, index: int, times: int = 5) -> None:
        for _ in range(times):
            self.clock.now_s += 0.2
            self.ejection.failed(self.pool[index].key, self.pool)

    def out(self) -> list[int]:
        marked = self.ejection.marked(self.pool)
        return [index for index, one in enumerate(marked) if one.out is not None]


def test_five_failures_in_a_row_eject_for_half_a_minute() -> None:
    story = Story(4)
    story.fail(1, 4)
    assert story.out() == []
    story.fail(1, 1)
    assert story.out() == [1]
    assert story.ejection.marked(story.pool)[1].out == "ejected for 30 s more"
    story.clock.now_s += 29.9
    assert story.out() == [1]
    story.clock.now_s += 0.2
    assert story.out() == []


def test_a_token_between_failures_begins_the_count_anew() -> None:
    story = Story(4)
    for _ in range(3):
        story.fail(1, 4)
        story.ejection.succeeded(story.pool[1].key)
    assert story.out() == []


def test_streams_that_break_at_the_same_moment_are_one_failure() -> None:
    story = Story(4)
    for _ in range(50):
        story.ejection.failed(story.pool[1].key, story.pool)
    assert story.out() == []
    for _ in range(500):  # a hundred failures a second are not one event for ever
        story.clock.now_s += 0.01
        story.ejection.failed(story.pool[1].key, story.pool)
    assert story.out() == [1]


def test_on_probation_one_failure_ejects_again_and_for_longer() -> None:
    story = Story(4)
    story.fail(1)
    story.clock.now_s += 30.1
    story.fail(1, 1)
    assert story.out() == [1]
    story.clock.now_s += 59.0
    assert story.out() == [1]
    story.clock.now_s += 1.1
    assert story.out() == []


def test_a_token_ends_the_probation_and_time_without_failures_the_memory() -> None:
    story = Story(4)
    story.fail(1)
    story.clock.now_s += 30.1
    story.ejection.succeeded(story.pool[1].key)
    story.fail(1, 4)
    assert story.out() == []
    story.ejection.succeeded(story.pool[1].key)
    story.clock.now_s += 31.0
    story.fail(1)
    story.clock.now_s += 30.1
    assert story.out() == [], "the earlier ejection is forgotten, so this one lasts as long as the first"


def test_at_most_half_of_a_pool_is_ejected() -> None:
    story = Story(5)
    for index in range(5):
        story.fail(index)
    assert story.out() == [0, 1]
    story.clock.now_s += 30.1
    story.fail(4, 1)
    assert story.out() == [4], "it had failed all the while"


@pytest.mark.parametrize("size", [1, 2])
def test_the_last_ready_instance_is_never_ejected(size: int) -> None:
    story = Story(size)
    story.pool[1:] = [view(f"d{index}", out="silent") for index in range(1, size)]
    story.fail(0, 20)
    assert 0 not in story.out()


def test_another_process_at_the_address_begins_anew() -> None:
    story = Story(4)
    story.fail(1)
    key = InstanceKey("d1", "later")
    story.pool[1] = InstanceView(key=key, info=story.pool[1].info, load=LoadReport("later"))
    assert story.out() == []


def test_an_instance_whose_engine_has_crashed_is_out_at_once_even_if_it_is_the_last() -> None:
    story = Story(2)
    for one in story.pool:
        story.ejection.crashed(one.key)
    assert story.out() == [0, 1]


async def test_an_instance_that_beats_and_fails_is_asked_no_more_and_comes_back(run: Run) -> None:
    settings = {"failures": 2, "ejection_s": 5.0}
    async with run(prefill=0, decode=decodes(Behaviour(index_error_at=0), busy()), ejection=settings) as rig:
        for _ in range(2):
            assert (await rig.generate()).is_exactly(12)
            await asyncio.sleep(0.15)
        num_asked = len(rig.decode[0].recorded("decode"))
        assert num_asked == 2
        assert (await rig.generate()).is_exactly(12)
        assert len(rig.decode[0].recorded("decode")) == num_asked
        rig.decode[0].behaviour.index_error_at = None
        async with asyncio.timeout(20):
            while len(rig.decode[0].recorded("decode")) == num_asked:
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


async def test_a_full_instance_is_not_ejected(run: Run) -> None:
    settings = {"failures": 1, "ejection_s": 60.0}
    async with run(prefill=0, decode=decodes(Behaviour(refuse=FULL), busy()), ejection=settings) as rig:
        for num_refused in range(1, 4):
            assert (await rig.generate()).is_exactly(12)
            assert len(rig.decode[0].recorded("refused")) == num_refused
            await asyncio.sleep(0.15)
