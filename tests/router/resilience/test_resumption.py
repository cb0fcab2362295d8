"""Streams whose instance dies, freezes or violates the stream: they resume exactly on another instance."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import common_pb2
from router.dispatch.handler import ResponseWriter
from router.request.validation import ServedModel
from tests.fakes.behaviour import FULL, Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import EOS_ID, write_model_folder
from tests.fakes.tokens import VOCAB_SIZE
from tests.router.conftest import Run
from tests.router.failing import busy, decodes, status_of
from tests.router.rig import NOTICED_BY_BEATS, PROMPT, request_of, running
from tests.waiting import until


@pytest.mark.parametrize("position", [1, 2, 7, 19])
async def test_a_stream_continues_exactly_when_its_decode_instance_dies(run: Run, position: int) -> None:
    permits = asyncio.Semaphore(0)  # it dies when the client has read every token before; the first is a prefill's
    async with run(prefill=1, decode=decodes(Behaviour(die_at=position, permits=permits), busy())) as rig:
        answer = await rig.generate(max_tokens=20, permits=permits)
        assert rig.decode[0].recorded("died")
        assert answer.is_exactly(20)
        assert answer.finish().usage.completion_tokens == 20
        # The last token alone needs no decode instance.
        name, other = ("decode-1", rig.decode[1]) if position < 19 else ("prefill-0", rig.prefill[0])
        resumed = other.recorded("decode")[0].detail.request
        assert len(resumed.emitted_token_ids) == position
        assert list(resumed.prompt_token_ids) == PROMPT
        assert resumed.stream_epoch == 2
        assert answer.trailers["tandem-decode"] == f"decode-0,{name}"


async def test_cached_tokens_are_those_of_the_first_attempt(run: Run) -> None:
    permits = asyncio.Semaphore(1)
    decode = decodes(Behaviour(die_at=2, permits=permits, cached_tokens=32), busy(cached_tokens=96))
    async with run(prefill=0, decode=decode) as rig:
        answer = await rig.generate(max_tokens=6, permits=permits)
        assert decode[0].recorded("died")
        assert answer.finish().usage.cached_tokens == 32
        assert not any(chunk.HasField("usage") for chunk in answer.chunks())


async def test_every_attempt_has_the_eos_ids_of_the_routers_model(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, eos_token_id=[7, EOS_ID, VOCAB_SIZE, -1])
    permits = asyncio.Semaphore(0)
    decode = decodes(Behaviour(die_at=2, permits=permits), busy())
    async with running(ServedModel.from_folder(folder, "fake"), folder, prefill=1, decode=decode) as rig:
        assert (await rig.generate(max_tokens=6, permits=permits)).is_exactly(6)
        assert decode[0].recorded("died")
        for calls in (fake.recorded(fake.role) for fake in [*rig.prefill, *decode]):
            assert calls
            assert all(list(call.detail.request.eos_token_ids) == [7, EOS_ID] for call in calls)


@pytest.mark.parametrize("streams_tokens", [True, False])
async def test_a_router_that_is_behind_reads_the_end_of_a_stream_whose_last_instance_has_left(
    run: Run, monkeypatch: pytest.MonkeyPatch, streams_tokens: bool
) -> None:
    emit, has_left = ResponseWriter.emit, asyncio.Event()

    async def late(self: ResponseWriter, chunk: common_pb2.TokenChunk) -> None:
        await has_left.wait()
        await emit(self, chunk)

    monkeypatch.setattr(ResponseWriter, "emit", late)
    only = decodes(Behaviour(streams_tokens=streams_tokens))
    async with run(prefill=0, decode=only, failover={"resume_wait_s": 0.1}) as rig:
        asked = asyncio.create_task(rig.generate(max_tokens=30))
        decode = rig.decode[0]
        await decode.until("decode")
        await until(lambda: not decode.is_busy)  # it has said everything
        await decode.kill()
        await rig.until_ready(num_decode=0)
        has_left.set()
        assert (await asked).is_exactly(30)


@pytest.mark.parametrize("disaggregation", ["always", "never"])
async def test_logprobs_have_no_gap_where_the_stream_moves(run: Run, disaggregation: str) -> None:
    permits = asyncio.Semaphore(disaggregation == "never")  # for the first token
    decode = decodes(Behaviour(die_at=5, permits=permits), busy())
    async with run(prefill=1, decode=decode, disaggregation={"mode": disaggregation}) as rig:
        wanted = request_of(max_tokens=9)
        wanted.sampling.MergeFrom(common_pb2.SamplingParams(logprobs=0, presence_penalty=1.0))
        answer = await rig.generate(wanted, permits=permits)
        positions = [position.candidates[0] for chunk in answer.chunks() for position in chunk.logprobs]
        assert [one.token_id for one in positions] == answer.ids()
        assert [one.logprob for one in positions] == [-0.5 * position for position in range(9)]
        resumed = rig.decode[1].recorded("decode")[0].detail.request
        assert (resumed.sampling.logprobs, resumed.sampling.presence_penalty) == (0, 1.0)
        assert len(resumed.emitted_token_ids) == 5


async def test_an_instance_that_omits_logprobs_fails_its_call(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(mute_logprobs_at=3), busy())) as rig:
        wanted = request_of(max_tokens=6)
        wanted.sampling.logprobs = 0
        answer = await rig.generate(wanted)
        assert sum(len(chunk.logprobs) for chunk in answer.chunks()) == 6
        assert answer.trailers["tandem-decode"] == "decode-0,decode-1"


async def test_a_dead_decode_instance_s_transfer_is_released_by_the_router(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=1), busy())) as rig:
        await rig.generate()
        transfer_id = rig.decode[0].recorded("decode")[0].transfer_id
        released = await rig.prefill[0].until("released by router")
        assert [record.transfer_id for record in released] == [transfer_id]
        await rig.until_idle()


async def test_a_local_stream_continues_exactly_as_well(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(die_at=5), busy())) as rig:
        assert (await rig.generate(max_tokens=20)).is_exactly(20)
        assert rig.decode[0].recorded("died")


async def test_a_stream_survives_three_deaths_and_no_more(run: Run) -> None:
    deaths = [Behaviour(die_at=position, num_running=position) for position in (2, 4, 6, 8)]
    async with run(prefill=1, decode=decodes(*deaths[:3], busy())) as rig:
        assert (await rig.generate(max_tokens=20)).is_exactly(20)
        assert all(fake.recorded("died") for fake in rig.decode[:3])
    deaths = [Behaviour(die_at=position, num_running=position) for position in (2, 4, 6, 8)]
    async with run(prefill=1, decode=decodes(*deaths, busy())) as rig:
        assert (await status_of(rig, max_tokens=20)).code() is grpc.StatusCode.UNAVAILABLE
        assert not rig.decode[4].recorded("decode")


async def test_a_frozen_decode_instance_is_left_within_its_beat_timeout(run: Run) -> None:
    async with run(decode=decodes(Behaviour(freeze_at=5), busy()), pools=NOTICED_BY_BEATS) as rig:
        answer = await rig.generate(max_tokens=20)
        assert rig.decode[0].recorded("froze")
        assert answer.is_exactly(20)
        rig.decode[0].thaw()
        await rig.until_ready()  # the same process may come back


async def test_a_stream_continues_on_its_only_instance_once_that_is_back(run: Run) -> None:
    waits = {"failover": {"resume_wait_s": 20.0}, "pools": NOTICED_BY_BEATS}
    async with run(decode=decodes(Behaviour(freeze_at=5)), **waits) as rig:
        pending = asyncio.create_task(rig.generate(max_tokens=20))
        await rig.decode[0].until("froze")
        rig.decode[0].behaviour.freeze_at = None
        await until(lambda: rig.app.pools.decode.instances[0].calls.is_empty)  # its call is given up
        rig.decode[0].thaw()
        assert (await pending).is_exactly(20)
        assert len(rig.decode[0].recorded("decode")) == 2


async def test_a_choice_that_has_not_begun_waits_for_an_instance_when_its_request_has(run: Run) -> None:
    slow = Behaviour(token_s=0.05)
    waits = {"failover": {"resume_wait_s": 20.0}, "pools": NOTICED_BY_BEATS}
    async with run(prefill=1, decode=decodes(slow), disaggregation={"mode": "always"}, **waits) as rig:
        pending = asyncio.create_task(rig.generate(n=3, max_tokens=30))
        await rig.prefill[0].until("token", 1)  # choice 0 has begun, the others are about to
        rig.prefill[0].freeze()
        await rig.until_ready(num_prefill=0)
        rig.prefill[0].thaw()
        answer = await pending
        assert all(answer.is_exactly(30, choice=choice) for choice in range(3))


async def test_a_wedged_engine_behind_living_beats_is_left(run: Run) -> None:
    async with run(decode=decodes(Behaviour(token_s=0.05), busy())) as rig:
        pending = asyncio.create_task(rig.generate(max_tokens=40))
        await rig.decode[0].until("token", 3)
        rig.decode[0].behaviour.token_s = 100
        rig.decode[0].behaviour.core_silence_s = 30
        assert (await pending).is_exactly(40)
        assert rig.decode[1].recorded("token")


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_new_request_waits_for_an_engine_core_that_is_silent(run: Run, role: str) -> None:
    """As in a step that takes far longer than predicted; it is not rejected at once, as without an instance."""
    always = {"mode": "always"}
    settings = {"disaggregation": always} if role == "prefill" else {"prefill": 0}
    async with run(failover={"resume_wait_s": 20.0}, **settings) as rig:
        silent, pool = (
            (rig.prefill[0], rig.app.pools.prefill) if role == "prefill" else (rig.decode[0], rig.app.pools.decode)
        )
        silent.behaviour.core_silence_s = 30
        await rig.until_ready(**{f"num_{role}": 0})
        assert pool.instances[0].state == "wedged"
        pending = asyncio.create_task(rig.generate(max_tokens=20))
        while not rig.app.admission.in_use.num_requests:
            assert not pending.done()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not pending.done()
        silent.behaviour.core_silence_s = 0.0
        assert (await pending).is_exactly(20)


async def test_and_not_for_long(run: Run) -> None:
    async with run(prefill=0, failover={"resume_wait_s": 0.1}) as rig:
        rig.decode[0].behaviour.core_silence_s = 30
        await rig.until_ready(num_decode=0)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_waits_for_room_where_there_was_none(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5), busy()), failover={"resume_wait_s": 20.0}) as rig:
        pending = asyncio.create_task(rig.generate(max_tokens=20))
        rig.decode[1].behaviour.refuse = FULL
        await rig.decode[1].until("refused")
        rig.decode[1].behaviour.refuse = None
        assert (await pending).is_exactly(20)


async def test_a_stream_waits_for_room_however_often_it_is_refused(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5), busy()), failover={"resume_wait_s": 20.0}) as rig:
        pending = asyncio.create_task(rig.generate(max_tokens=20))
        rig.decode[1].behaviour.refuse = FULL
        await until(lambda: len(rig.decode[1].recorded("refused")) > 4 or pending.done())
        rig.decode[1].behaviour.refuse = None
        assert (await pending).is_exactly(20)


async def test_a_stream_without_another_instance_ends_unavailable(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5)), failover={"resume_wait_s": 0.2}) as rig:
        error = await status_of(rig, max_tokens=20)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "127.0.0.1" not in str(error.details())


async def test_an_instance_of_another_identity_never_continues_a_stream(run: Run) -> None:
    other = FakeInstance("decode", "decode-1", behaviour=busy(), identity={"weights_digest": "other"})
    async with run(decode=[*decodes(Behaviour(die_at=5)), other], failover={"resume_wait_s": 0.2}) as rig:
        assert (await status_of(rig, max_tokens=20)).code() is grpc.StatusCode.UNAVAILABLE
        assert not other.recorded("decode")


async def test_an_instance_with_too_short_a_context_never_continues_a_stream(run: Run) -> None:
    permits = asyncio.Semaphore(5)
    short = FakeInstance("decode", "short", behaviour=Behaviour(draining=True), max_model_len=len(PROMPT) + 19)
    decode = [*decodes(Behaviour(permits=permits), busy()), short]
    async with run(prefill=0, decode=decode, wait=False) as rig:
        await rig.until_ready(num_decode=2)
        pending = asyncio.create_task(rig.generate(max_tokens=20))
        await decode[0].until("token", 5)
        short.behaviour.draining = False
        await rig.until_ready()
        await decode[0].kill()
        answer = await pending
        assert answer.is_exactly(20)
        assert answer.trailers["tandem-decode"] == "decode-0,decode-1"
        assert not short.recorded("decode")


async def test_a_token_under_a_wrong_index_is_dropped_and_the_stream_resumes(run: Run) -> None:
    async with run(decode=decodes(Behaviour(index_error_at=4, token_s=0.02), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.decode[0].recorded("decode cancelled")
        assert len(rig.decode[1].recorded("decode")[0].detail.request.emitted_token_ids) == 4


async def test_a_token_of_an_earlier_epoch_is_dropped(run: Run) -> None:
    async with run(decode=decodes(Behaviour(stale_at=4), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert not rig.decode[1].recorded("decode")


async def test_a_stream_resumes_without_prefill_instances_even_in_always(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5, token_s=0.02), busy()), disaggregation={"mode": "always"}) as rig:
        pending = asyncio.create_task(rig.generate(max_tokens=20))
        await rig.decode[0].until("token", 2)
        await rig.prefill[0].kill()
        assert (await pending).is_exactly(20)


async def test_the_other_choices_continue_when_one_moves(run: Run) -> None:
    async with run(prefill=1, decode=decodes(Behaviour(token_s=0.01, die_at=6), busy())) as rig:
        answer = await rig.generate(n=3)
        assert all(answer.is_exactly(12, choice=choice) for choice in range(3))


async def test_four_deaths_under_load_lose_nothing(run: Run) -> None:
    # A death here is a broken connection; silence is what a busy machine makes of the living.
    async with run(prefill=2, decode=3, pools={"beat_timeout_s": 5.0}) as rig:
        for round_ in range(4):
            victim = rig.decode[round_ % 3]
            for fake in rig.decode:
                fake.behaviour = Behaviour(token_s=0.005)
            prompts = [[20 + i, round_ + 20, *PROMPT] for i in range(10)]
            pending = [asyncio.create_task(rig.generate(request_of(p, max_tokens=30))) for p in prompts]
            await victim.until("token", 1 + round_ * 10)
            await victim.kill()
            for prompt, answer in zip(prompts, await asyncio.gather(*pending), strict=True):
                assert answer.is_exactly(30, prompt=prompt)
                assert answer.finish().reason == common_pb2.FINISH_REASON_LENGTH
            await victim.restart()
            await rig.until_ready()
        await rig.until_idle()
