"""A stream leaves an instance that is about to end only for one that can take it, and that counts as no failure."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import common_pb2, decode_pb2
from router.dispatch.instance_call import DecodeCall
from router.picking.plan import has_place, has_room
from router.pools.in_flight import InFlightCalls
from router.pools.instance import ExpectedInstance, UpstreamInstance
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport
from router.pools.settings import PoolSettings
from router.pools.throughput import ThroughputEstimator
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.resilience.retry import CallFailed
from tests.fakes.behaviour import FULL, Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids
from tests.router.conftest import Run
from tests.router.failing import decodes
from tests.router.pools.test_in_flight import Call
from tests.router.rig import PROMPT, SEED, Rig
from tests.waiting import until

TOKEN_S = 0.02


def view_of(free: int, cached: int, *, num_blocks: int = 64) -> InstanceView:
    identity = Identity(block_size=16)
    info = InstanceInfo("decode-0", "e", "decode", "a:1", identity, num_blocks=num_blocks)
    return InstanceView(InstanceKey("a:1", "e"), info, LoadReport("e", free_blocks=free, cached_blocks=cached))


def test_room_is_a_block_for_every_token_there_is_and_for_the_next() -> None:
    assert has_room(view_of(1, 0), 15)
    assert not has_room(view_of(1, 0), 16)
    assert has_room(view_of(1, 1), 16)
    assert not has_room(view_of(0, 0), 1)
    assert has_room(view_of(0, 0, num_blocks=0), 1000), "an unknown size counts as room"


def test_what_was_sent_since_the_report_may_share_its_blocks() -> None:
    """As the choices of one prompt do: they stay where it is."""
    assert has_room(replace(view_of(10, 0), num_unreported=1, num_unreported_tokens=100), 150)


@pytest.mark.parametrize("num_unreported", [0, 1, 2])
def test_a_place_is_room_and_a_slot(num_unreported: int) -> None:
    view = view_of(10, 0)
    info, load = replace(view.info, max_num_seqs=4), replace(view.load, num_running=2)
    assert has_place(replace(view, info=info, load=load, num_unreported=num_unreported), 100) == (num_unreported < 2)
    assert not has_place(replace(view, info=info, load=load), 160)


async def test_a_token_that_comes_after_the_decision_to_move_does_not_pin_the_stream_to_what_it_leaves() -> None:
    key, unused = InstanceKey("a:1", "e"), cast("Any", None)
    instance = cast("Any", SimpleNamespace(calls=InFlightCalls(), key=key, expected=ExpectedInstance("decode")))
    choice = Choice(GenerationRequest("l", "r", "m", (1, 2, 3), SamplingParams(max_tokens=5)), 0)
    choice.begin_attempt()
    async with DecodeCall(instance, key, choice, unused, move_target=lambda: instance) as call:
        call._joined = cast("Any", SimpleNamespace(leave=lambda number: None)), unused
        call.receive(decode_pb2.DecodeResponse(tokens=common_pb2.TokenChunk(stream_epoch=1, token_ids=[7])))
        call.instance_draining()
        with pytest.raises(CallFailed) as raised:
            await call.next_tokens()
    assert (raised.value.kind, choice.num_emitted) == ("moved", 0)


async def test_the_calls_are_asked_to_move_at_intervals_however_many_reports_come() -> None:
    """Each of them looks for a place on the event loop."""
    call, unused = Call(), cast("Any", None)
    settings = PoolSettings()
    instance = UpstreamInstance(
        "a:1", ExpectedInstance("decode"), unused, settings, lambda: None, ThroughputEstimator()
    )
    instance.info = view_of(1, 0).info
    instance.calls.add(call)
    report = LoadReport("e", draining=True, moving_out=True)
    for _ in range(1000):
        assert instance._observe(report)
    num_asked = len(call.notified)
    assert 1 <= num_asked < 100
    await until(lambda: instance._observe(report) and len(call.notified) > num_asked)


def slow(**fields: object) -> Behaviour:
    return Behaviour(token_s=TOKEN_S, **fields)  # type: ignore[arg-type]


def fewer_than(num_tokens: int) -> asyncio.Semaphore:
    """Permits with which no stream of so many tokens ends, even if prefill emits its first one."""
    return asyncio.Semaphore(num_tokens - 2)


def ask_to_leave(fake: FakeInstance) -> None:
    fake.behaviour.draining = fake.behaviour.moving_out = True


def num_failovers(rig: Rig) -> int:
    metrics = rig.app.service.metrics
    return metrics.num_retried + metrics.num_resumed


@pytest.mark.parametrize("disaggregation", ["always", "never"])
async def test_streams_go_on_elsewhere_exactly_when_they_are_asked_to(run: Run, disaggregation: str) -> None:
    decode = decodes(slow(permits=fewer_than(40)), slow(num_running=50))
    async with run(prefill=1, decode=decode, disaggregation={"mode": disaggregation}) as rig:
        asking = [asyncio.create_task(rig.generate(max_tokens=40)) for _ in range(4)]
        await decode[0].until("token", 20)
        ask_to_leave(decode[0])
        for answer in await asyncio.gather(*asking):
            assert answer.is_exactly(40)
            assert answer.finish().usage.completion_tokens == 40
            assert answer.trailers["tandem-decode"] == "decode-0,decode-1"
        assert len(decode[0].recorded("decode cancelled")) == 4
        await rig.until_idle()


async def test_a_drain_alone_moves_nothing(run: Run) -> None:
    decode = decodes(slow(), slow(num_running=50))
    async with run(prefill=1, decode=decode) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=40))
        await decode[0].until("token", 5)
        decode[0].behaviour.draining = True
        answer = await asking
        assert answer.is_exactly(40)
        assert answer.trailers["tandem-decode"] == "decode-0"


async def test_a_stream_that_no_other_instance_can_take_runs_to_its_end(run: Run) -> None:
    decode = decodes(slow(), slow(num_running=50, draining=True))
    async with run(prefill=1, decode=decode, wait=False) as rig:
        await rig.until_ready(num_decode=1)
        asking = asyncio.create_task(rig.generate(max_tokens=40))
        await decode[0].until("token", 5)
        ask_to_leave(decode[0])
        answer = await asking
        assert answer.is_exactly(40)
        assert answer.trailers["tandem-decode"] == "decode-0"
        assert not decode[0].recorded("decode cancelled")


async def test_a_stream_moves_as_soon_as_another_instance_can_take_it(run: Run) -> None:
    permits = asyncio.Semaphore(5)
    decode = decodes(slow(permits=permits), slow(num_running=50, draining=True))
    async with run(prefill=1, decode=decode, wait=False) as rig:
        await rig.until_ready(num_decode=1)
        asking = asyncio.create_task(rig.generate(max_tokens=60))
        await decode[0].until("token", 5)
        ask_to_leave(decode[0])
        await until(lambda: rig.app.pools.decode.instances[0].state == "draining")
        for _ in range(5):
            permits.release()
        await decode[0].until("token", 10)
        decode[1].behaviour.draining = False
        answer = await asking
        assert answer.is_exactly(60)
        assert answer.trailers["tandem-decode"] == "decode-0,decode-1"


@pytest.mark.parametrize("limit", [{"slots": 1}, {"free_blocks": 12}])
async def test_no_more_streams_leave_at_once_than_the_other_instance_has_room_for(
    run: Run, limit: dict[str, int]
) -> None:
    """A stream has 100 tokens and at most 40 more: 12 blocks of 16 are enough for one and not for two."""
    source_permits, target_permits = asyncio.Semaphore(20), asyncio.Semaphore(0)
    # As its core is silent, its reports count nothing of what this test sends.
    target = slow(permits=target_permits, draining=True, core_silence_s=1000.0, **limit)
    decode = decodes(slow(permits=source_permits), target)
    async with run(decode=decode, pools={"core_silence_timeout_s": 10_000.0}, wait=False) as rig:
        await rig.until_ready(num_decode=1)
        asking = [asyncio.create_task(rig.generate(max_tokens=40)) for _ in range(4)]
        await decode[0].until("token", 20)
        decode[1].behaviour.draining = False
        await rig.until_ready()
        ask_to_leave(decode[0])
        await decode[1].until("decode")
        for _ in range(4 * 40):
            source_permits.release()
        stayed = [await answer for answer in islice(asyncio.as_completed(asking), 3)]
        assert [answer.trailers["tandem-decode"] for answer in stayed] == ["decode-0"] * 3
        assert len(decode[1].recorded("decode")) == 1
        for _ in range(40):
            target_permits.release()
        answers = await asyncio.gather(*asking)
        assert all(answer.is_exactly(40) for answer in answers)
        assert sum(answer.trailers["tandem-decode"] == "decode-0,decode-1" for answer in answers) == 1
        await rig.until_idle()


async def test_moving_uses_up_no_retries_and_no_resumptions(run: Run) -> None:
    leaving = [slow(num_running=50 * i, permits=fewer_than(80 // 4)) for i in range(4)]
    decode = decodes(*leaving, slow(num_running=200))
    limits = {"max_retries": 0, "max_resumptions": 0}
    async with run(prefill=1, decode=decode, failover=limits) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=80))
        for fake in decode[:-1]:
            await fake.until("token", 5)
            ask_to_leave(fake)
        answer = await asking
        assert answer.is_exactly(80)
        assert answer.trailers["tandem-decode"] == ",".join(fake.name for fake in decode)
        await rig.until_idle()
        assert num_failovers(rig) == 0


async def test_what_failed_before_a_stream_s_tokens_does_not_count_after_it_has_moved(run: Run) -> None:
    permits = asyncio.Semaphore(0)
    decode = decodes(Behaviour(refuse=FULL), slow(num_running=50), Behaviour(permits=permits, num_running=100))
    settings = {"failover": {"max_retries": 1, "resume_wait_s": 20.0}}
    async with run(prefill=0, decode=decode, **settings) as rig:
        call = rig.call(max_tokens=40)
        responses = aiter(call)
        ids = [token_id for _ in range(3) for token_id in (await anext(responses)).tokens.token_ids]
        assert decode[0].recorded("refused")
        ask_to_leave(decode[1])
        await decode[2].until("decode")
        decode[0].behaviour.refuse = None
        decode[2].break_token_streams()
        for _ in range(40):
            permits.release()
        async for response in responses:
            ids += response.tokens.token_ids
        assert ids == expected_ids(PROMPT, SEED, 40)
        await until(lambda: num_failovers(rig) == 2)


@pytest.mark.parametrize("slots", [None, 1])
async def test_a_prompt_that_is_being_computed_moves_as_well(run: Run, slots: int | None) -> None:
    """At its decode instance it has a place already."""
    prefill = [FakeInstance("prefill", f"prefill-{i}", behaviour=Behaviour(num_running=50 * i)) for i in range(2)]
    prefill[0].behaviour.prefill_s = 60.0
    async with run(prefill=prefill, decode=decodes(Behaviour(slots=slots)), disaggregation={"mode": "always"}) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=10))
        await prefill[0].until("prefill")
        ask_to_leave(prefill[0])
        assert (await asking).is_exactly(10)
        assert prefill[0].recorded("prefill cancelled")
        await rig.until_idle()
        assert num_failovers(rig) == 0


async def test_a_prompt_moves_that_fills_its_decode_instance_beside_one_without_room(run: Run) -> None:
    prefill = [FakeInstance("prefill", f"prefill-{i}", behaviour=Behaviour(num_running=50 * i)) for i in range(2)]
    prefill[0].behaviour.prefill_s = 60.0
    permits = asyncio.Semaphore(0)
    # 12 blocks of 16 are enough for one prompt of 100 tokens and not for two.
    decode = decodes(Behaviour(slots=1), Behaviour(permits=permits, free_blocks=12, core_silence_s=1000.0))
    decode[1].behaviour.draining = True
    settings = {"disaggregation": {"mode": "always"}, "pools": {"core_silence_timeout_s": 10_000.0}}
    async with run(prefill=prefill, decode=decode, wait=False, **settings) as rig:
        await rig.until_ready(num_decode=1)
        asking = [asyncio.create_task(rig.generate(max_tokens=10))]
        await prefill[0].until("prefill")
        decode[1].behaviour.draining = False
        await rig.until_ready()
        asking.append(asyncio.create_task(rig.generate(max_tokens=10)))
        await prefill[0].until("prefill", 2)
        ask_to_leave(prefill[0])
        first = await asking[0]
        assert (first.is_exactly(10), first.trailers["tandem-decode"]) == (True, "decode-0")
        for _ in range(10):
            permits.release()
        assert (await asking[1]).trailers["tandem-decode"] == "decode-1"
        await rig.until_idle()
        assert num_failovers(rig) == 0


async def test_a_prompt_is_computed_anew_where_its_decode_instance_leaves(run: Run) -> None:
    permits = asyncio.Semaphore(0)
    prefill = [FakeInstance("prefill", behaviour=Behaviour(permits=permits))]
    decode = decodes(Behaviour(), Behaviour(num_running=50))
    async with run(prefill=prefill, decode=decode, disaggregation={"mode": "always"}) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=10))
        await prefill[0].until("prefill")
        ask_to_leave(decode[0])
        await decode[0].until("decode cancelled")
        for _ in range(3):  # one is for the token that the router no longer reads
            permits.release()
        assert (await asking).is_exactly(10)
        assert not decode[1].recorded("decode")[0].detail.request.emitted_token_ids
        await rig.until_idle()
        assert num_failovers(rig) == 0


async def test_streams_that_move_at_random_moments_stay_exact(run: Run) -> None:
    source = random.Random(4)
    decode = decodes(*(Behaviour(token_s=0.002) for _ in range(3)))

    async def shuffle(rig: Rig) -> None:
        while True:
            fake = source.choice(rig.decode)
            ask_to_leave(fake)
            await asyncio.sleep(source.uniform(0.05, 0.15))
            fake.behaviour.draining = fake.behaviour.moving_out = False
            await asyncio.sleep(0.1)

    async with run(prefill=2, decode=decode) as rig:
        shuffling = asyncio.create_task(shuffle(rig))
        answers = await asyncio.gather(*(rig.generate(max_tokens=200) for _ in range(12)))
        shuffling.cancel()
        assert all(answer.is_exactly(200) for answer in answers)
        assert sum(len(fake.recorded("decode cancelled")) for fake in decode) > 5
        await rig.until_idle()
