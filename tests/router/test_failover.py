"""What becomes of a request when an instance refuses, breaks, freezes or says something wrong."""

from __future__ import annotations

import asyncio
import time

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import common_pb2
from router.config import FailoverSettings
from router.failover import History, give_up
from router.instances import InstanceKey
from router.legs import FailureKind, LegFailed
from serving.errors import InternalError, Overloaded, ServiceError, Unavailable
from tests.fakes.behaviour import FULL, WRONG, Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import PROMPT, Rig, request_of


def decodes(*behaviours: Behaviour) -> list[FakeInstance]:
    return [FakeInstance("decode", f"decode-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


def prefills(*behaviours: Behaviour) -> list[FakeInstance]:
    return [FakeInstance("prefill", f"prefill-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


def busy(**fields: object) -> Behaviour:
    """An instance that is only taken when the other has failed."""
    return Behaviour(num_running=9, **fields)  # type: ignore[arg-type]


async def status_of(rig: Rig, **fields: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.generate(**fields)
    return raised.value


@pytest.mark.parametrize("position", [1, 2, 7, 19])
async def test_a_stream_goes_on_exactly_when_its_decode_instance_dies(run: Run, position: int) -> None:
    async with run(prefill=1, decode=decodes(Behaviour(die_at=position), busy())) as rig:
        answer = await rig.generate(max_tokens=20)
        assert rig.decode[0].recorded("died")
        assert answer.is_exactly(20)
        assert answer.finish().usage.completion_tokens == 20
        resumed = rig.decode[1].recorded("decode")[0].detail.request
        assert len(resumed.emitted_token_ids) == position
        assert list(resumed.prompt_token_ids) == PROMPT
        assert resumed.stream_epoch == 2
        assert answer.trailers["tandem-decode"] == "decode-0,decode-1"


@pytest.mark.parametrize("disaggregation", ["always", "never"])
async def test_logprobs_have_no_gap_where_the_stream_moves(run: Run, disaggregation: str) -> None:
    decode = decodes(Behaviour(die_at=5), busy())
    async with run(prefill=1, decode=decode, disaggregation={"mode": disaggregation}) as rig:
        wanted = request_of(max_tokens=9)
        wanted.sampling.MergeFrom(common_pb2.SamplingParams(logprobs=0, presence_penalty=1.0))
        answer = await rig.generate(wanted)
        told = [position.candidates[0] for chunk in answer.chunks() for position in chunk.logprobs]
        assert [one.token_id for one in told] == answer.ids()
        assert [one.logprob for one in told] == [-0.5 * position for position in range(9)]
        resumed = rig.decode[1].recorded("decode")[0].detail.request
        assert (resumed.sampling.logprobs, resumed.sampling.presence_penalty) == (0, 1.0)
        assert len(resumed.emitted_token_ids) == 5


async def test_an_instance_that_leaves_logprobs_out_is_not_believed(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(mute_logprobs_at=3), busy())) as rig:
        wanted = request_of(max_tokens=6)
        wanted.sampling.logprobs = 0
        answer = await rig.generate(wanted)
        assert [len(chunk.logprobs) for chunk in answer.chunks()] == [1] * 6
        assert answer.trailers["tandem-decode"] == "decode-0,decode-1"


async def test_a_dead_decode_instance_s_transfer_is_released_by_the_router(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=1), busy())) as rig:
        await rig.generate()
        transfer_id = rig.decode[0].recorded("decode")[0].transfer_id
        released = await rig.prefill[0].until("released by router")
        assert [record.transfer_id for record in released] == [transfer_id]
        await rig.until_idle()


async def test_a_local_stream_goes_on_exactly_as_well(run: Run) -> None:
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
    async with run(decode=decodes(Behaviour(freeze_at=5), busy())) as rig:
        started_s = time.monotonic()
        answer = await rig.generate(max_tokens=20)
        assert rig.decode[0].recorded("froze")
        assert answer.is_exactly(20)
        assert time.monotonic() - started_s < 1.5
        rig.decode[0].thaw()
        await rig.until_ready()  # the same process may come back


async def test_a_stream_goes_on_at_its_only_instance_once_that_is_back(run: Run) -> None:
    async with run(decode=decodes(Behaviour(freeze_at=5)), failover={"resume_wait_s": 5.0}) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        await rig.decode[0].until("froze")
        rig.decode[0].behaviour.freeze_at = None
        await asyncio.sleep(1.0)
        rig.decode[0].thaw()
        assert (await asking).is_exactly(20)


async def test_a_choice_that_has_not_begun_waits_for_an_instance_when_its_request_has(run: Run) -> None:
    slow = Behaviour(token_s=0.05)
    always = {"mode": "always"}
    async with run(prefill=1, decode=decodes(slow), disaggregation=always, failover={"resume_wait_s": 5.0}) as rig:
        asking = asyncio.create_task(rig.generate(n=3, max_tokens=30))
        await rig.prefill[0].until("token", 1)  # choice 0 has begun, the others are about to
        rig.prefill[0].freeze()
        await asyncio.sleep(1.0)
        rig.prefill[0].thaw()
        answer = await asking
        assert all(answer.is_exactly(30, choice=choice) for choice in range(3))


async def test_a_wedged_engine_behind_living_beats_is_left(run: Run) -> None:
    async with run(decode=decodes(Behaviour(token_s=0.05), busy())) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=40))
        await rig.decode[0].until("token", 3)
        rig.decode[0].behaviour.token_s = 100
        rig.decode[0].behaviour.core_silence_s = 10
        assert (await asking).is_exactly(40)
        assert rig.decode[1].recorded("token")


async def test_a_stream_waits_for_its_only_decode_instance_to_come_back(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5))) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        await rig.decode[0].until("died")
        await rig.until_ready(num_decode=0)
        rig.decode[0].behaviour.die_at = None
        await rig.decode[0].restart()
        assert (await asking).is_exactly(20)


async def test_a_stream_waits_for_room_where_it_was_refused(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5), busy())) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        rig.decode[1].behaviour.refuse = FULL
        await rig.decode[1].until("refused")
        rig.decode[1].behaviour.refuse = None
        assert (await asking).is_exactly(20)


async def test_a_stream_without_anyone_to_go_on_ends_unavailable(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5)), failover={"resume_wait_s": 0.2}) as rig:
        error = await status_of(rig, max_tokens=20)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "127.0.0.1" not in str(error.details())


async def test_an_instance_of_another_identity_never_goes_on_with_a_stream(run: Run) -> None:
    other = FakeInstance("decode", "decode-1", behaviour=busy(), identity={"weights_digest": "other"})
    async with run(decode=[*decodes(Behaviour(die_at=5)), other], failover={"resume_wait_s": 0.2}) as rig:
        assert (await status_of(rig, max_tokens=20)).code() is grpc.StatusCode.UNAVAILABLE
        assert not other.recorded("decode")


async def test_a_token_under_a_wrong_index_is_dropped_and_the_stream_goes_on_elsewhere(run: Run) -> None:
    async with run(decode=decodes(Behaviour(index_error_at=4), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.decode[0].recorded("decode cancelled")
        assert len(rig.decode[1].recorded("decode")[0].detail.request.emitted_token_ids) == 4


async def test_a_token_of_an_earlier_epoch_is_dropped(run: Run) -> None:
    async with run(decode=decodes(Behaviour(stale_at=4), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert not rig.decode[1].recorded("decode")


async def test_prefill_that_dies_before_the_first_token_is_tried_elsewhere(run: Run) -> None:
    async with run(prefill=prefills(Behaviour(die_at=0), busy())) as rig:
        answer = await rig.generate()
        assert rig.prefill[0].recorded("died")
        assert answer.is_exactly(12)
        assert answer.trailers["tandem-prefill"] == "prefill-0,prefill-1"
        await rig.until_idle()


async def test_prefill_that_dies_alone_leaves_decode_to_prefill(run: Run) -> None:
    async with run(prefill=prefills(Behaviour(die_at=0))) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.prefill[0].recorded("died")


async def test_a_stream_that_has_begun_goes_on_without_prefill_instances_even_in_always(run: Run) -> None:
    async with run(decode=decodes(Behaviour(die_at=5, token_s=0.02), busy()), disaggregation={"mode": "always"}) as rig:
        asking = asyncio.create_task(rig.generate(max_tokens=20))
        await rig.decode[0].until("token", 2)
        await rig.prefill[0].kill()
        assert (await asking).is_exactly(20)


async def test_prefill_that_dies_after_the_first_token_costs_nothing(run: Run) -> None:
    async with run(decode=decodes(Behaviour(load_s=0.1))) as rig:
        call = rig.call()
        responses = aiter(call)
        ids = list((await anext(responses)).tokens.token_ids)
        await rig.prefill[0].kill()
        async for response in responses:
            ids += response.tokens.token_ids
        assert len(ids) == 12


async def test_a_frozen_prefill_instance_is_left_before_the_first_token(run: Run) -> None:
    async with run(prefill=prefills(Behaviour(freeze_at=0), busy())) as rig:
        started_s = time.monotonic()
        assert (await rig.generate()).is_exactly(12)
        assert rig.prefill[0].recorded("froze")
        assert time.monotonic() - started_s < 1.5


async def test_a_full_decode_instance_is_passed_over(run: Run) -> None:
    async with run(decode=decodes(Behaviour(refuse=FULL), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.decode[0].recorded("refused")


async def test_a_full_prefill_instance_is_passed_over_and_told_to_release(run: Run) -> None:
    async with run(prefill=prefills(Behaviour(refuse=FULL), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert await rig.prefill[0].until("released by router")


async def test_full_everywhere_is_resource_exhausted_with_the_instances_hint(run: Run) -> None:
    async with run(decode=decodes(Behaviour(refuse=FULL), busy(refuse=FULL))) as rig:
        error = await status_of(rig)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("grpc-retry-pushback-ms", "500") in tuple(error.trailing_metadata() or ())
        await rig.until_idle()


async def test_what_no_instance_would_accept_is_asked_once(run: Run) -> None:
    async with run(decode=decodes(Behaviour(refuse=WRONG), busy())) as rig:
        assert (await status_of(rig)).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not rig.decode[1].recorded("decode")


async def test_a_request_that_breaks_two_instances_is_not_handed_round(run: Run) -> None:
    async with run(prefill=0, decode=decodes(*(Behaviour(fail_at=0, num_running=i) for i in range(3)))) as rig:
        error = await status_of(rig)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "RuntimeError" not in str(error.details())
        assert not rig.decode[2].recorded("decode")


async def test_a_reservation_that_does_not_come_is_given_up(run: Run) -> None:
    settings = {"reserve_timeout_s": 0.2}
    async with run(decode=decodes(Behaviour(reserve_s=60), busy()), disaggregation=settings) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert not rig.decode[0].recorded("reserved")
        await rig.until_idle()


async def test_the_other_choices_go_on_when_one_moves(run: Run) -> None:
    async with run(prefill=1, decode=decodes(Behaviour(token_s=0.01, die_at=6), busy())) as rig:
        answer = await rig.generate(n=3)
        assert all(answer.is_exactly(12, choice=choice) for choice in range(3))


async def test_twenty_deaths_under_load_lose_nothing(run: Run) -> None:
    # A death here is a broken connection; silence is what a busy machine makes of the living.
    async with run(prefill=2, decode=3, pools={"beat_timeout_s": 5.0}) as rig:
        for round_ in range(4):
            victim = rig.decode[round_ % 3]
            for fake in rig.decode:
                fake.behaviour = Behaviour(token_s=0.005)
            prompts = [[20 + i, round_ + 20, *PROMPT] for i in range(10)]
            asking = [asyncio.create_task(rig.generate(request_of(p, max_tokens=30))) for p in prompts]
            await victim.until("token", 1 + round_ * 10)
            await victim.kill()
            for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
                assert answer.is_exactly(30, prompt=prompt)
                assert answer.finish().reason == common_pb2.FINISH_REASON_LENGTH
            await victim.restart()
            await rig.until_ready()
        await rig.until_idle(3)


LIMITS = FailoverSettings(max_retries=2, max_resumptions=3)


def failures(*kinds: tuple[FailureKind, bool], error: ServiceError | None = None) -> ServiceError | None:
    """The verdict after these failures, each with whether its attempt brought tokens."""
    history, verdict = History(), None
    for i, (kind, progressed) in enumerate(kinds):
        failure = LegFailed(InstanceKey(str(i), ""), kind, error or Unavailable("gone"), "")
        history.record(failure, progressed=progressed)
        verdict = give_up(failure, history, LIMITS, 1.0)
    return verdict


def test_two_fruitless_attempts_are_retried_and_the_third_is_not() -> None:
    assert failures(("broken", False), ("refused", False)) is None
    assert isinstance(failures(*[("broken", False)] * 3), Unavailable)


def test_progress_resets_the_retries_but_not_the_resumptions() -> None:
    assert (
        failures(("broken", False), ("broken", False), ("broken", True), ("broken", False), ("broken", False)) is None
    )
    assert failures(*[("broken", True)] * 3) is None
    assert isinstance(failures(*[("broken", True)] * 4), Unavailable)


def test_refusals_everywhere_keep_their_kind_and_get_a_hint() -> None:
    verdict = failures(*[("refused", False)] * 3, error=Overloaded("full", None))
    assert isinstance(verdict, Overloaded)
    assert verdict.retry_after_s == 1.0


def test_an_internal_error_is_tried_once_more() -> None:
    assert failures(("internal", False)) is None
    assert isinstance(failures(("internal", False), ("internal", True)), InternalError)
