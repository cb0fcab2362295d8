"""How many attempts may be under way again, who waits, and who does not."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import grpc
import grpc.aio
import pytest

from router.config import FailoverSettings
from router.failover.retry_budget import RetryBudget
from tests.fakes.behaviour import Behaviour
from tests.router.conftest import Run
from tests.router.failing import busy, decodes, status_of
from tests.router.rig import PROMPT, request_of
from tests.waiting import until

PATIENT = {"beat_timeout_s": 20.0}


def budget_of(num_active: int, stack: ExitStack, **settings: float) -> RetryBudget:
    budget = RetryBudget(FailoverSettings(**{"retry_wait_s": 0.02, **settings}))
    for _ in range(num_active):
        stack.enter_context(budget.active())
    return budget


@pytest.mark.parametrize(("num_active", "limit"), [(1, 3), (15, 3), (20, 4), (100, 20)])
def test_a_fifth_of_the_active_may_be_retried_and_always_three(num_active: int, limit: int) -> None:
    with ExitStack() as stack:
        assert budget_of(num_active, stack).limit == limit


async def test_a_retry_without_a_turn_is_refused_after_its_wait() -> None:
    with ExitStack() as stack:
        budget = budget_of(1, stack)
        turns = [await budget.retry() for _ in range(3)]
        assert await budget.retry() is None
        assert turns[0] is not None
        turns[0].end()
        turns[0].end()  # counts once
        assert budget.num_under_way == 2
        assert await budget.retry() is not None


async def test_a_retry_waits_for_a_turn() -> None:
    with ExitStack() as stack:
        budget = budget_of(1, stack, retry_wait_s=20)
        turns = [budget.resume() for _ in range(3)]
        waiting = [asyncio.create_task(budget.retry()) for _ in range(2)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in waiting)
        turns[0].end()
        done, still = await asyncio.wait(waiting, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == len(still) == 1
        turns[1].end()
        await asyncio.gather(*still)
        assert budget.num_under_way == 3


async def test_a_resumption_never_waits_but_retries_wait_for_it() -> None:
    with ExitStack() as stack:
        budget = budget_of(1, stack)
        turns = [budget.resume() for _ in range(10)]
        assert budget.num_under_way == 10
        assert await budget.retry() is None
        for turn in turns:
            turn.end()
        assert budget.num_under_way == 0


async def test_many_that_one_death_has_failed_are_all_served_a_few_at_a_time(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(prefill_s=100), busy(prefill_s=0.02)), pools=PATIENT) as rig:
        asking = [asyncio.create_task(rig.generate(request_of([20 + i, *PROMPT]))) for i in range(20)]
        await rig.decode[0].until("decode", 3)
        rig.decode[1].behaviour.num_running = 0
        num_before = len(rig.decode[1].recorded("decode"))
        await rig.decode[0].kill()
        most = 0
        while not all(task.done() for task in asking):
            most = max(most, rig.app.safeguards.budget.num_under_way)
            await asyncio.sleep(0.005)
        for i, answer in enumerate(await asyncio.gather(*asking)):
            assert answer.is_exactly(12, prompt=[20 + i, *PROMPT])
        assert len(rig.decode[1].recorded("decode")) > num_before
        assert 0 < most <= 4
        assert rig.app.safeguards.budget.num_under_way == 0


async def test_where_retries_hang_further_ones_are_refused_with_a_hint(run: Run) -> None:
    hanging = [Behaviour(prefill_s=100, num_running=i) for i in range(2)]
    settings = {"retry_wait_s": 0.05, "min_retries_under_way": 1}
    async with run(prefill=0, decode=decodes(*hanging), failover=settings, pools=PATIENT) as rig:
        asking = [asyncio.create_task(status_of(rig, request=request_of([20 + i, *PROMPT]))) for i in range(6)]
        await until(lambda: sum(len(fake.recorded("decode")) for fake in rig.decode) == len(asking))
        victim = max(rig.decode, key=lambda fake: len(fake.recorded("decode")))
        num_cut = len(victim.recorded("decode"))
        assert num_cut >= 2
        await victim.kill()
        await until(lambda: sum(task.done() for task in asking) >= num_cut - 1)
        done, still = await asyncio.wait(asking, timeout=0.2)  # the others hang for much longer
        assert len(done) == num_cut - 1
        for task in done:
            error = task.result()
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "tried again" in str(error.details())
            assert ("grpc-retry-pushback-ms", "1000") in tuple(error.trailing_metadata() or ())
        for task in still:
            task.cancel()
        await asyncio.gather(*still, return_exceptions=True)
