"""Requests without a token whose instance rejects them or fails: retries, their limits, and the retry budget."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.sampling.params import SamplingParams
from protos.tandem.v1 import instance_pb2
from router.dispatch.trace import RequestTrace
from router.pools.instance_info import InstanceKey
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from router.resilience.retry import AttemptHistory, CallFailed, FailoverSettings, FailureKind, RetryBudget, give_up
from router.resilience.safeguards import Guard
from serving.errors import (
    AlreadyExists,
    InternalError,
    NotFound,
    Overloaded,
    PermissionDenied,
    ServiceError,
    StreamEnded,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from tests.fakes.behaviour import FULL, WRONG, Behaviour
from tests.router.conftest import Run
from tests.router.failing import busy, decodes, prefills, status_of
from tests.router.rig import NOTICED_BY_BEATS, PROMPT, request_of, slow
from tests.waiting import until


async def test_prefill_that_dies_before_the_first_token_is_retried(run: Run) -> None:
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


async def test_prefill_that_dies_after_the_first_token_costs_nothing(run: Run) -> None:
    async with run(decode=decodes(Behaviour(load_s=0.1))) as rig:
        call = rig.call()
        responses = aiter(call)
        ids = list((await anext(responses)).tokens.token_ids)
        await rig.prefill[0].kill()
        async for response in responses:
            ids += response.tokens.token_ids
        assert len(ids) == 12


@pytest.mark.parametrize("fault", ["kill", "freeze", "break_token_streams", "move"])
async def test_a_stream_that_a_prefill_instance_serves_alone_goes_on_elsewhere(run: Run, fault: str) -> None:
    cost = instance_pb2.StepCost(base_s=0.0035, per_stream_s=0.0006, per_token_s=1 / 4500)
    prefill, decode = prefills(slow(0.02, step_cost=cost)), decodes(slow(0.02, step_cost=cost, num_running=30))
    settings = {"disaggregation": {"speed_smoothing": 0.2}, "pools": NOTICED_BY_BEATS}
    async with run(prefill=prefill, decode=decode, **settings) as rig:
        asked = asyncio.create_task(rig.generate(max_tokens=40))
        await prefill[0].until("token", 5)
        assert prefill[0].recorded("batch"), "in the router's shared stream"
        if fault == "move":
            prefill[0].behaviour.draining = prefill[0].behaviour.moving_out = True
        elif fault == "kill":
            await prefill[0].kill()
        else:
            getattr(prefill[0], fault)()
        answer = await asked
        prefill[0].thaw()
        assert answer.is_exactly(40)
        assert answer.trailers["tandem-decode"] == "prefill-0,decode-0"
        assert not prefill[0].recorded("prefill")
        calls = rig.app.pools.prefill.instances[0].calls
        assert (calls.num_unreported_tokens, calls.is_empty) == (0, True)


async def test_a_call_that_broke_at_the_only_instance_is_tried_there_again(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(prefill_s=60.0))) as rig:
        asked = asyncio.create_task(rig.generate())
        await rig.decode[0].until("decode")
        rig.decode[0].behaviour.prefill_s = 0.0
        rig.decode[0].break_token_streams()
        assert (await asked).is_exactly(12)


async def test_a_call_whose_token_stream_the_instance_has_lost_first_is_tried_there_again(run: Run) -> None:
    """Its own status comes before the end of the stream; it says nothing else."""
    lost = Behaviour(refuse=StreamEnded("the token stream has ended"))
    async with run(prefill=0, decode=decodes(lost)) as rig:
        asked = asyncio.create_task(rig.generate())
        await rig.decode[0].until("refused")
        lost.refuse = None
        assert (await asked).is_exactly(12)


async def test_a_frozen_prefill_instance_is_left_before_the_first_token(run: Run) -> None:
    async with run(prefill=prefills(Behaviour(freeze_at=0), busy()), pools=NOTICED_BY_BEATS) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.prefill[0].recorded("froze")


async def test_a_full_decode_instance_is_excluded(run: Run) -> None:
    async with run(decode=decodes(Behaviour(refuse=FULL), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.decode[0].recorded("refused")


async def test_a_full_prefill_instance_is_excluded_and_its_transfer_released(run: Run) -> None:
    async with run(prefill=prefills(Behaviour(refuse=FULL), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert await rig.prefill[0].until("released by router")


async def test_full_everywhere_is_resource_exhausted_with_the_instances_hint(run: Run) -> None:
    async with run(decode=decodes(Behaviour(refuse=FULL), busy(refuse=FULL))) as rig:
        error = await status_of(rig)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("grpc-retry-pushback-ms", "500") in tuple(error.trailing_metadata() or ())
        await rig.until_idle()


async def test_what_no_instance_would_accept_is_sent_once(run: Run) -> None:
    async with run(decode=decodes(Behaviour(refuse=WRONG), busy())) as rig:
        assert (await status_of(rig)).code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not rig.decode[1].recorded("decode")


class Status(ServiceError):
    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__("the instance's own")
        self.code = code  # type: ignore[misc]


@pytest.mark.parametrize("name", ["UNKNOWN", "DATA_LOSS", "CANCELLED", "FAILED_PRECONDITION"])
async def test_a_status_that_is_not_the_requests_fault_is_tried_elsewhere(run: Run, name: str) -> None:
    refused = Behaviour(refuse=Status(grpc.StatusCode[name]))
    async with run(prefill=0, decode=decodes(refused, busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.decode[0].recorded("refused")


REJECTIONS = (
    PermissionDenied("no name (tls)"),
    Unauthenticated("no token (tls)"),
    AlreadyExists("used (tls)"),
    NotFound("no adapter (tls)"),
    Unsupported("Method not found! (tls)"),
)
"""Of the router, whatever the request. The last is gRPC's own, of an instance of a version without the method."""


@pytest.mark.parametrize("rejection", REJECTIONS, ids=lambda error: error.code.name)
async def test_where_one_instance_rejects_the_router_another_one_serves(run: Run, rejection: ServiceError) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(refuse=rejection), busy())) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert rig.decode[0].recorded("refused")
        assert rig.app.safeguards.poison.is_empty


@pytest.mark.parametrize("rejection", REJECTIONS, ids=lambda error: error.code.name)
async def test_where_every_instance_rejects_the_router_the_log_says_why_and_not_the_client(
    run: Run, caplog: pytest.LogCaptureFixture, rejection: ServiceError
) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(refuse=rejection))) as rig:
        error = await status_of(rig)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "tls" not in str(error.details())
    assert f"{rejection.code.name}: {rejection}" in caplog.text


async def test_a_request_that_breaks_two_instances_is_sent_to_no_third(run: Run) -> None:
    async with run(prefill=0, decode=decodes(*(Behaviour(fail_at=0, num_running=i) for i in range(3)))) as rig:
        error = await status_of(rig)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "RuntimeError" not in str(error.details())
        assert not rig.decode[2].recorded("decode")


async def test_a_reservation_that_does_not_come_is_abandoned(run: Run) -> None:
    settings = {"reserve_timeout_s": 0.2}
    async with run(decode=decodes(Behaviour(reserve_s=60), busy()), disaggregation=settings) as rig:
        assert (await rig.generate()).is_exactly(12)
        assert not rig.decode[0].recorded("reserved")
        await rig.until_idle()


LIMITS = FailoverSettings(max_retries=2, max_resumptions=3)

FRUITLESS: tuple[FailureKind, bool] = ("broken", False)
PROGRESSED: tuple[FailureKind, bool] = ("broken", True)
REFUSED: tuple[FailureKind, bool] = ("refused", False)


def failures(
    *kinds: tuple[FailureKind, bool],
    error: ServiceError | None = None,
    limits: FailoverSettings = LIMITS,
    has_begun: bool = False,
) -> ServiceError | None:
    """What `give_up` returns after these failures, each with whether its attempt brought tokens."""
    history, result = AttemptHistory(), None
    for i, (kind, progressed) in enumerate(kinds):
        failure = CallFailed(InstanceKey(str(i), ""), "decode", kind, error or Unavailable("gone"), "")
        history.record(failure, progressed=progressed)
        result = give_up(failure, history, limits, 1.0, has_begun=has_begun)
    return result


def test_two_fruitless_attempts_are_retried_and_the_third_is_not() -> None:
    assert failures(("broken", False), ("refused", False)) is None
    result = failures(*[FRUITLESS] * 3)
    assert isinstance(result, Unavailable)
    assert result.retry_after_s == 1.0


def test_progress_resets_the_retries_but_not_the_resumptions() -> None:
    assert (
        failures(("broken", False), ("broken", False), ("broken", True), ("broken", False), ("broken", False)) is None
    )
    assert failures(*[PROGRESSED] * 3) is None
    assert isinstance(failures(*[PROGRESSED] * 4), Unavailable)


def test_overload_everywhere_keeps_its_kind_and_gets_a_hint() -> None:
    result = failures(*[REFUSED] * 3, error=Overloaded("full", None))
    assert isinstance(result, Overloaded)
    assert result.retry_after_s == 1.0


def test_refusals_end_a_stream_only_when_its_wait_for_room_is_over() -> None:
    patient, impatient = (LIMITS.model_copy(update={"resume_wait_s": wait_s}) for wait_s in (1e6, 0.0))
    refused = [PROGRESSED, *[REFUSED] * 10]
    assert failures(*refused, limits=patient, has_begun=True) is None
    assert isinstance(failures(*refused, limits=impatient, has_begun=True), Unavailable)
    assert isinstance(failures(*refused, limits=patient), Unavailable), "of a request without a token"
    assert isinstance(failures(*refused, FRUITLESS, limits=patient, has_begun=True), Unavailable)


def test_the_wait_for_room_begins_with_the_first_refusal_in_a_row() -> None:
    history, error = AttemptHistory(), Unavailable("gone")

    def fail(kind: FailureKind, *, progressed: bool = False) -> float | None:
        failure = CallFailed(InstanceKey("", ""), "decode", kind, error, "")
        history.record(failure, progressed=progressed)
        return history.refused_since_s

    assert fail("broken") is None
    first_s = fail("refused")
    assert first_s is not None
    long_ago_s = history.refused_since_s = first_s - 1e6
    assert [fail(kind) for kind in ("refused", "broken", "refused")] == [long_ago_s] * 3
    assert not history.may_wait_for_room(1e6 - 1)
    assert fail("broken", progressed=True) is None
    assert (fail("refused") or 0.0) >= first_s


def test_a_move_is_no_failure() -> None:
    history, moved = AttemptHistory(), CallFailed(InstanceKey("a", ""), "decode", "moved", Unavailable("gone"), "")
    for _ in range(10):
        history.record(moved, progressed=True)
        history.record(moved, progressed=False)
    assert give_up(moved, history, LIMITS, 1.0, has_begun=True) is None
    assert not history.excluded


def test_an_internal_error_is_retried_once() -> None:
    assert failures(("internal", False)) is None
    assert isinstance(failures(("internal", False), ("internal", True)), InternalError)
    once = LIMITS.model_copy(update={"max_retries": 0})
    assert isinstance(failures(("internal", False), error=InternalError("it broke"), limits=once), InternalError)


def test_what_reported_an_internal_error_is_not_used_again_after_a_wait() -> None:
    history, error = AttemptHistory(), Unavailable("gone")
    internal, full, lost = (InstanceKey(name, "") for name in ("internal", "full", "lost"))
    history.record(CallFailed(internal, "decode", "internal", error, ""), progressed=False)
    history.record(CallFailed(full, "decode", "refused", error, ""), progressed=False)
    history.record(CallFailed(lost, "decode", "broken", error, "", death="vanished"), progressed=False)
    assert (history.excluded, history.vanished) == ({internal, full, lost}, {lost})
    history.forgive()
    assert (history.excluded, history.vanished) == ({internal}, set())


# The retry budget


PATIENT = {"beat_timeout_s": 20.0}


def budget_of(num_active: int, **settings: Any) -> RetryBudget:
    budget = RetryBudget(FailoverSettings(**{"retry_wait_s": 0.02, **settings}))
    budget.num_active = num_active
    return budget


@pytest.mark.parametrize(("num_active", "limit"), [(1, 3), (15, 3), (20, 4), (100, 20)])
def test_a_fifth_of_the_active_may_be_retried_and_always_three(num_active: int, limit: int) -> None:
    assert budget_of(num_active).limit == limit


async def test_a_retry_without_a_permit_is_rejected_after_its_wait() -> None:
    budget = budget_of(1)
    permits = [await budget.wait_permit() for _ in range(3)]
    assert await budget.wait_permit() is None
    assert permits[0] is not None
    permits[0].close()
    permits[0].close()  # counts once
    assert budget.num_under_way == 2
    assert await budget.wait_permit() is not None


async def test_a_retry_waits_for_a_permit() -> None:
    budget = budget_of(1, retry_wait_s=20)
    permits = [budget.resume() for _ in range(3)]
    waiting = [asyncio.create_task(budget.wait_permit()) for _ in range(2)]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waiting)
    permits[0].close()
    done, still = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == len(still) == 1
    permits[1].close()
    await asyncio.gather(*still)
    assert budget.num_under_way == 3


async def test_a_resumption_never_waits_but_retries_wait_for_it() -> None:
    budget = budget_of(1)
    permits = [budget.resume() for _ in range(10)]
    assert budget.num_under_way == 10
    assert await budget.wait_permit() is None
    for permit in permits:
        permit.close()
    assert budget.num_under_way == 0


async def test_a_choice_that_pauses_keeps_no_permit(run: Run) -> None:
    choice = Choice(GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=1)), 0)
    async with run() as rig:
        safeguards = rig.app.safeguards
        with Guard(safeguards, choice) as guard, RequestTrace().choice(0, guard) as trace:
            assert await guard.wait_permit()
            assert safeguards.budget.num_under_way == 1
            trace.paused()
            assert safeguards.budget.num_under_way == 0


async def test_a_choice_counts_as_active_and_under_way_until_it_ends(run: Run) -> None:
    choice = Choice(GenerationRequest("l", "r", "m", (1,), SamplingParams(max_tokens=1)), 0)
    async with run() as rig:
        budget = rig.app.safeguards.budget
        with Guard(rig.app.safeguards, choice) as first, Guard(rig.app.safeguards, choice):
            assert await first.wait_permit()
            assert (budget.num_active, budget.num_under_way) == (2, 1)
        assert (budget.num_active, budget.num_under_way) == (0, 0)


async def test_a_choice_without_a_permit_ends_no_other_one_whose_tokens_the_client_has(run: Run) -> None:
    permits = asyncio.Semaphore(0)
    settings = {"retry_share": 0.0, "min_retries_under_way": 1, "retry_wait_s": 0.05}
    decode = decodes(Behaviour(permits=permits), busy())
    async with run(prefill=0, decode=decode, failover=settings) as rig:
        with rig.app.safeguards.budget.resume():  # the only permit is another request's
            pending = asyncio.create_task(rig.generate(n=2))
            await decode[0].until("decode")
            decode[0].behaviour.refuse = FULL  # the second choice, once the first one has a token
            permits.release()
            await until(lambda: decode[1].recorded("decode") or pending.done())
            for _ in range(11):
                permits.release()
            answer = await pending
        assert decode[0].recorded("refused")
        assert all(answer.is_exactly(12, choice=choice) for choice in range(2))


async def test_many_that_one_death_has_failed_are_all_served_a_few_at_a_time(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(prefill_s=100), busy(prefill_s=0.02)), pools=PATIENT) as rig:
        pending = [asyncio.create_task(rig.generate(request_of([20 + i, *PROMPT]))) for i in range(20)]
        await rig.decode[0].until("decode", 3)
        rig.decode[1].behaviour.num_running = 0
        num_before = len(rig.decode[1].recorded("decode"))
        await rig.decode[0].kill()
        most = 0
        while not all(task.done() for task in pending):
            most = max(most, rig.app.safeguards.budget.num_under_way)
            await asyncio.sleep(0.005)
        for i, answer in enumerate(await asyncio.gather(*pending)):
            assert answer.is_exactly(12, prompt=[20 + i, *PROMPT])
        assert len(rig.decode[1].recorded("decode")) > num_before
        assert 0 < most <= 4
        assert rig.app.safeguards.budget.num_under_way == 0


async def test_where_retries_hang_further_ones_are_rejected_with_a_hint(run: Run) -> None:
    hanging = [Behaviour(prefill_s=100, num_running=i) for i in range(2)]
    settings = {"retry_wait_s": 0.05, "min_retries_under_way": 1}
    async with run(prefill=0, decode=decodes(*hanging), failover=settings, pools=PATIENT) as rig:
        pending = [asyncio.create_task(status_of(rig, request=request_of([20 + i, *PROMPT]))) for i in range(6)]
        await until(lambda: sum(len(fake.recorded("decode")) for fake in rig.decode) == len(pending))
        victim = max(rig.decode, key=lambda fake: len(fake.recorded("decode")))
        num_cut = len(victim.recorded("decode"))
        assert num_cut >= 2
        await victim.kill()
        await until(lambda: sum(task.done() for task in pending) >= num_cut - 1)
        done, still = await asyncio.wait(pending, timeout=0.2)  # the others hang for much longer
        assert len(done) == num_cut - 1
        for task in done:
            error = task.result()
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "tried again" in str(error.details())
            assert ("grpc-retry-pushback-ms", "1000") in tuple(error.trailing_metadata() or ())
        for task in still:
            task.cancel()
        await asyncio.gather(*still, return_exceptions=True)
