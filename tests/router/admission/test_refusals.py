"""Who is refused at the door, when, and what the refusal says."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from router.admission.budget import Budget
from router.admission.capacity import Capacity
from router.admission.door import Admission
from router.config import AdmissionSettings, TenantSettings
from router.request import GenerationRequest
from serving.errors import Overloaded, trailers
from tests.router.admission.house import GUARD_S, House, request, settled


async def test_a_full_queue_refuses_at_once_with_a_hint() -> None:
    house = House(max_queued=1, retry_after_s=2.0)
    for name in "abcd":
        await house.come(name)
    error = await house.refusal("d")
    assert error.retry_after_s is not None
    assert 2.0 <= error.retry_after_s <= 3.0
    told = dict(trailers(error, "text"))
    assert int(told["grpc-retry-pushback-ms"]) >= 2000
    assert house.admission.num_refused == {"queue_full": 1}
    await house.empty()


async def test_hints_are_spread() -> None:
    house = House(max_queued=0)
    for number in range(12):
        await house.come(str(number))
    hints = {(await house.refusal(str(number))).retry_after_s for number in range(2, 12)}
    assert len(hints) == 10
    await house.empty()


async def test_who_waits_too_long_is_told_at_the_limit() -> None:
    house = House(queue_timeout_s=0.2)
    for name in "abc":
        await house.come(name)
    started_s = asyncio.get_running_loop().time()
    error = await house.refusal("c")
    assert asyncio.get_running_loop().time() - started_s >= 0.1
    assert error.retry_after_s is not None
    assert house.admission.num_refused == {"queue_timeout": 1}
    assert house.admission.num_queued == 0
    await house.empty()


async def test_a_wait_that_would_be_too_long_is_refused_at_once() -> None:
    now_s = 0.0
    admission = Admission(
        AdmissionSettings(sequence_fraction=1.0, queue_timeout_s=5.0, max_retry_after_s=60.0),
        lambda: Capacity(num_instances=1, num_sequences=1),
        clock=lambda: now_s,
    )

    async def stay(wanted: GenerationRequest, turns: asyncio.Queue[AsyncExitStack]) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(admission.admit(wanted))
            turns.put_nowait(stack)
            await asyncio.Event().wait()

    turns: asyncio.Queue[AsyncExitStack] = asyncio.Queue()
    tasks = [asyncio.create_task(stay(request(), turns)) for _ in range(20)]
    for _ in range(12):  # one a second
        holder = await turns.get()
        now_s += 1.0
        await holder.aclose()
    await settled()
    assert admission.num_queued == 7
    with pytest.raises(Overloaded) as raised:
        async with asyncio.timeout(GUARD_S), admission.admit(request()):
            pass
    assert admission.num_refused == {"wait_too_long": 1}
    assert raised.value.retry_after_s is not None
    assert 6.0 <= raised.value.retry_after_s <= 12.0, "seven wait, one a second begins"
    for _ in range(5):
        holder = await turns.get()
        now_s += 1.0
        await holder.aclose()
    with pytest.raises(Overloaded):
        async with asyncio.timeout(GUARD_S), admission.admit(request(deadline_s=now_s + 1.0)):
            pass
    assert admission.num_refused["deadline"] == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert vars(admission.held) == vars(Budget())
    assert admission.num_queued == 0


async def test_what_a_tenant_may_never_have_is_refused_for_good() -> None:
    house = House(tenants={"small": TenantSettings(max_tokens=9)})
    await house.come("a", request(tenant="small"))
    error = await house.refusal("a")
    assert error.retry_after_s is None
    assert dict(trailers(error, "text"))["grpc-retry-pushback-ms"] == "-1"
    assert house.admission.num_refused == {"quota": 1}
    await house.empty()


async def test_higher_priority_displaces_the_last_of_lower_priority_of_its_tenant() -> None:
    house = House(max_queued=2)
    for name in "abcd":
        await house.come(name, request(priority=-1))
    await house.come("urgent", request(priority=3))
    assert (await house.refusal("d")).retry_after_s is not None
    assert house.admission.num_refused == {"displaced": 1}
    await house.go("a")
    assert house.inside == ["a", "b", "urgent"]
    await house.empty()


async def test_the_tokens_that_wait_are_bounded_and_parted_among_tenants() -> None:
    house = House(max_queued_tokens=100, max_queued=1000)
    for number in range(20):
        await house.come(f"flood-{number}", request(tenant="flood"))
    assert house.admission.num_queued_tokens == 100
    await house.come("other", request(tenant="other"))
    assert not house.tasks["other"].done(), "the flood's tokens are not the other's"
    await house.come("flood-20", request(tenant="flood"))
    await house.refusal("flood-20")
    assert house.admission.num_refused == {"queue_full": 9}
    await house.empty()
