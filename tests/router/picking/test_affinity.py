"""Where prompts and sessions ran is remembered, bounded, and only a preference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from engine.sampling.params import SamplingParams
from router.picking.affinity import Affinity, RequestAffinity, Sessions
from router.picking.settings import PickingSettings
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport
from router.request.generation_request import GenerationRequest
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import PROMPT, SHORT

A, B = InstanceKey("a", "1"), InstanceKey("b", "1")


def view(key: InstanceKey) -> InstanceView:
    info = InstanceInfo(key.address, key.epoch, "decode", key.address, Identity(block_size=16))
    return InstanceView(key, info, LoadReport(key.epoch))


def request(prompt: list[int], *, salt: str = "", session: str = "") -> GenerationRequest:
    params = SamplingParams(max_tokens=1)
    return GenerationRequest("l", "r", "m", tuple(prompt), params, 0, cache_salt=salt, session=session)


def affinity(**settings: object) -> Affinity:
    return Affinity(PickingSettings.model_validate({"decode_scorers": "queue=1,prefix=1,session=1", **settings}))


def test_a_prompt_is_believed_to_be_cached_where_it_ran() -> None:
    memory, prompt = affinity(), list(range(100))
    RequestAffinity(memory, request(prompt)).record_cached(view(A))
    longer = RequestAffinity(memory, request([*prompt, *range(50)]))
    assert (longer.num_cached_tokens(view(A)), longer.num_cached_tokens(view(B))) == (96, 0)
    assert RequestAffinity(memory, request(prompt, salt="another tenant")).num_cached_tokens(view(A)) == 0


def test_an_answer_is_cached_with_its_prompt() -> None:
    memory, prompt = affinity(), list(range(40))
    RequestAffinity(memory, request(prompt)).record_cached(view(A), [7] * 60)
    assert RequestAffinity(memory, request([*prompt, *[7] * 60, 1, 2])).num_cached_tokens(view(A)) == 96


def test_processes_that_are_gone_are_forgotten_and_those_that_are_lost_for_a_moment_are_not() -> None:
    memory, prompt = affinity(), list(range(64))
    memory.index.retain([A, B])
    known = RequestAffinity(memory, request(prompt))
    known.record_cached(view(A))
    known.record_cached(view(B))
    memory.index.retain([A, InstanceKey("b", "2")])
    assert (known.num_cached_tokens(view(A)), known.num_cached_tokens(view(B))) == (64, 0)
    assert len(memory.index) == 4


def test_a_session_is_remembered_per_pool_and_the_oldest_goes_first() -> None:
    sessions = Sessions(max_sessions=2)
    sessions.record("one", "decode", A)
    sessions.record("one", "prefill", B)
    sessions.record("two", "decode", B)
    assert (sessions.instance("one", "decode"), sessions.instance("one", "prefill")) == (A, B)
    sessions.record("one", "decode", B)
    sessions.record("three", "decode", A)
    assert [sessions.instance(name, "decode") for name in ("one", "two", "three")] == [B, None, A]
    sessions.record("", "decode", A)
    assert len(sessions) == 2
    assert sessions.instance("", "decode") is None


def test_a_session_that_a_prefill_instance_served_alone_is_remembered_for_its_pool() -> None:
    memory = affinity()
    alone = replace(view(B), info=replace(view(B).info, role="prefill"))
    RequestAffinity(memory, request([1], session="s")).record_placement(view(A), None)
    RequestAffinity(memory, request([1], session="s")).record_placement(alone, None)
    assert (memory.sessions.instance("s", "decode"), memory.sessions.instance("s", "prefill")) == (A, B)


async def test_a_session_stays_where_it_ran_until_that_instance_has_more_to_do(run: Run) -> None:
    async with run(prefill=0, decode=4, picking={"decode_scorers": "queue=1,session=2"}) as rig:
        first = (await rig.generate(prompt=SHORT, session="s")).trailers["tandem-decode"]
        again = {(await rig.generate(prompt=SHORT, session="s")).trailers["tandem-decode"] for _ in range(8)}
        assert again == {first}
        others = {(await rig.generate(prompt=SHORT)).trailers["tandem-decode"] for _ in range(40)}
        assert len(others) > 1, "without a session any instance does"
        busy = next(fake for fake in rig.decode if fake.name == first)
        busy.behaviour.num_waiting = 3
        await _until_reported(rig.app.pools.decode.views, busy, num_waiting=3)
        assert (await rig.generate(prompt=SHORT, session="s")).trailers["tandem-decode"] != first


async def test_a_prompt_goes_where_its_beginning_is_cached(run: Run) -> None:
    scorers = "queue=1,prefix=3"
    picking = {"decode_scorers": scorers, "prefill_scorers": scorers}
    async with run(prefill=3, decode=3, picking=picking, disaggregation={"mode": "always"}) as rig:
        where = ("tandem-prefill", "tandem-decode")
        first = (await rig.generate()).trailers
        assert all(first[name] for name in where)
        for _ in range(6):
            again = (await rig.generate(prompt=[*PROMPT, *range(5)])).trailers
            assert [again[name] for name in where] == [first[name] for name in where]
        others = [(await rig.generate(prompt=[number, *PROMPT])).trailers for number in range(20)]
        for name in where:
            assert len({other[name] for other in others}) == 3, "another beginning is cached nowhere"


@pytest.mark.parametrize("mode", ["auto", "always", "never"])
async def test_of_idle_instances_a_prompt_goes_where_its_beginning_is_cached(run: Run, mode: str) -> None:
    """By the default scorers, which count requests alone: a cache decides between equals."""
    async with run(prefill=3, decode=3, disaggregation={"mode": mode}) as rig:
        where = ("tandem-prefill", "tandem-decode")[mode != "always" :]
        first = (await rig.generate()).trailers
        for _ in range(6):
            again = (await rig.generate(prompt=[*PROMPT, *range(5)])).trailers
            assert [again[name] for name in where] == [first[name] for name in where]
        busy = next(fake for fake in rig.decode if fake.name == first["tandem-decode"])
        busy.behaviour.num_waiting = 1
        await _until_reported(rig.app.pools.decode.views, busy, num_waiting=1)
        assert (await rig.generate()).trailers["tandem-decode"] != first["tandem-decode"]


async def test_what_an_instance_had_goes_with_its_process(run: Run) -> None:
    async with run(prefill=0, decode=1) as rig:
        await rig.generate()
        assert len(rig.app.affinity.index) > 0
        await rig.decode[0].kill()
        await rig.until_ready(num_decode=0)
        assert len(rig.app.affinity.index) > 0, "it may be back"
        await rig.decode[0].restart()
        async with asyncio.timeout(20):
            while len(rig.app.affinity.index):
                await asyncio.sleep(0.01)


async def _until_reported(views: Callable[[], Sequence[InstanceView]], fake: FakeInstance, *, num_waiting: int) -> None:
    async with asyncio.timeout(20):
        while not any(one.instance_id == fake.name and one.load.num_waiting == num_waiting for one in views()):
            await asyncio.sleep(0.01)
