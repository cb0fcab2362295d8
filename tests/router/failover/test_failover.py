"""What becomes of a request that has no token yet when an instance refuses or breaks, and when it is given up."""

from __future__ import annotations

import time

import grpc
import grpc.aio

from router.config import FailoverSettings
from router.failover.history import History, give_up
from router.legs import FailureKind, LegFailed
from router.pools.instances import InstanceKey
from serving.errors import InternalError, Overloaded, ServiceError, Unavailable
from tests.fakes.behaviour import FULL, WRONG, Behaviour
from tests.router.conftest import Run
from tests.router.failing import busy, decodes, prefills, status_of


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
