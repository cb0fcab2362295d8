"""Which requests are rejected, when, and what the error says."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import pytest

from router.admission.capacity import Capacity, Usage
from router.admission.controller import AdmissionController, RunningClock
from router.admission.settings import AdmissionSettings, TenantSettings
from router.request.generation_request import GenerationRequest
from serving.errors import Overloaded, trailers
from tests.router.admission.admission_rig import GUARD_S, AdmissionRig, request, settled
from tests.waiting import until


async def test_a_full_queue_refuses_at_once_with_a_hint() -> None:
    rig = AdmissionRig(max_queued=1, retry_after_s=2.0)
    for name in "abcd":
        await rig.arrive(name)
    error = await rig.rejection("d")
    assert error.retry_after_s is not None
    assert 2.0 <= error.retry_after_s <= 3.0
    sent = dict(trailers(error, "text"))
    assert int(sent["grpc-retry-pushback-ms"]) >= 2000
    assert rig.admission.num_rejected == {"queue_full": 1}
    await rig.close()


async def test_hints_are_spread() -> None:
    rig = AdmissionRig(max_queued=0)
    for number in range(12):
        await rig.arrive(str(number))
    hints = {(await rig.rejection(str(number))).retry_after_s for number in range(2, 12)}
    assert len(hints) == 10
    await rig.close()


async def test_a_request_that_waits_too_long_is_rejected_at_the_limit() -> None:
    rig = AdmissionRig(queue_timeout_s=0.2)
    for name in "abc":
        await rig.arrive(name)
    started_s = asyncio.get_running_loop().time()
    error = await rig.rejection("c")
    assert asyncio.get_running_loop().time() - started_s >= 0.1
    assert error.retry_after_s is not None
    assert rig.admission.num_rejected == {"queue_timeout": 1}
    assert rig.admission.num_queued == 0
    await rig.close()


async def test_a_wait_that_would_be_too_long_is_refused_at_once() -> None:
    now_s = 0.0
    admission = AdmissionController(
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
    assert admission.num_rejected == {"wait_too_long": 1}
    assert raised.value.retry_after_s is not None
    assert 6.0 <= raised.value.retry_after_s <= 12.0, "seven wait, one a second begins"
    assert raised.value.message.endswith(" s, 4 at most"), "0.8 of the queue's time, as predictions err"
    for _ in range(5):
        holder = await turns.get()
        now_s += 1.0
        await holder.aclose()
    with pytest.raises(Overloaded):
        async with asyncio.timeout(GUARD_S), admission.admit(request(deadline_s=time.monotonic() + 1.0)):
            pass
    assert admission.num_rejected["deadline"] == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.in_use == Usage()
    assert admission.num_queued == 0


async def test_a_halt_of_the_router_is_no_slowness() -> None:
    now_s = 0.0
    rig = AdmissionRig(
        Capacity(num_instances=1, num_sequences=1), queue_timeout_s=5.0, clock=RunningClock(lambda: now_s)
    )
    for number in range(16):
        await rig.arrive(str(number))
    for number in range(12):  # two a second
        now_s += 0.5
        await rig.finish(str(number))
    rate_per_s = rig.admission.rate_per_s
    now_s += 3600.0
    await rig.finish("12")
    await rig.arrive("after")
    assert not rig.tasks["after"].done(), "three wait, two a second begin"
    assert rig.admission.rate_per_s == pytest.approx(rate_per_s, rel=0.2)
    await rig.close()


async def test_a_burst_after_a_quiet_spell_waits_for_its_turn() -> None:
    """The silence in which slots were free says nothing about when the next request ends."""
    now_s = 0.0
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=4), queue_timeout_s=5.0, clock=lambda: now_s)
    for name in ("long", "short"):
        await rig.arrive(name)
    now_s = 1.0
    await rig.finish("short")
    now_s = 31.0
    for number in range(6):
        await rig.arrive(f"burst-{number}")
    assert (len(rig.inside), rig.admission.num_queued) == (5, 3)
    now_s = 36.0
    await rig.arrive("late")
    assert "the wait would be 5.0 s" in (await rig.rejection("late")).message, "no slot has been free for so long"
    await rig.close()


async def test_a_tenant_at_its_own_limit_waits_for_the_end_of_one_of_its_own() -> None:
    now_s = 0.0
    one = {"one": TenantSettings(max_requests=1)}
    rig = AdmissionRig(
        Capacity(num_instances=1, num_sequences=4), queue_timeout_s=5.0, tenants=one, clock=lambda: now_s
    )
    await rig.arrive("stays", request(tenant="other"))
    await rig.arrive("own", request(tenant="one"))
    await rig.finish("own")
    await rig.arrive("long", request(tenant="one"))
    now_s = 30.0
    await rig.arrive("short", request(tenant="other"))
    await rig.finish("short")
    await rig.arrive("next", request(tenant="one"))
    assert "the wait would be 30.0 s" in (await rig.rejection("next")).message
    await rig.close()


async def test_a_tenant_near_its_own_limit_waits_only_for_the_ends_beyond_it() -> None:
    now_s = 0.0
    three = {"three": TenantSettings(max_requests=3)}
    rig = AdmissionRig(
        Capacity(num_instances=1, num_sequences=3), queue_timeout_s=5.0, tenants=three, clock=lambda: now_s
    )
    for name, tenant, max_tokens in (("long", "three", 1000), ("short", "three", 12), ("other", "other", 12)):
        await rig.arrive(name, request(tenant=tenant, max_tokens=max_tokens))
        rig.admission.prefilled(rig.tickets[name])
        rig.tickets[name].num_emitted = lambda: 10
    now_s = 10.0
    await rig.arrive("next", request(tenant="three"))
    await rig.arrive("behind", request(tenant="three"))
    assert rig.admission.num_queued == 2, "one of its two ends in two seconds, and so does the other tenant's"
    await rig.arrive("third", request(tenant="three"))
    assert "the wait would be" in (await rig.rejection("third")).message
    await rig.close()


async def test_slots_that_a_pause_leaves_over_were_not_free() -> None:
    now_s = 0.0
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=4), queue_timeout_s=5.0, clock=lambda: now_s)
    await rig.arrive("short", request(tenant="other"))
    for name in ("pair", "pair that stays"):
        await rig.arrive(name, request(tenant="greedy", n=2))
        if name == "pair":
            await rig.finish("short")
        rig.admission.prefilled(rig.tickets[name])
        rig.tickets[name].num_emitted = lambda: 6
    now_s = 30.0
    for name in ("first", "second"):
        await rig.arrive(name, request(tenant=name))
    now_s = 30.2
    await until(lambda: {"first", "second"} <= set(rig.inside))
    assert rig.admission.num_paused == 1
    await rig.arrive("third", request(tenant="third"))
    assert "the wait would be 30.2 s" in (await rig.rejection("third")).message
    await rig.close()


async def test_a_slot_that_was_taken_from_a_stream_was_not_free() -> None:
    now_s = 0.0
    rig = AdmissionRig(queue_timeout_s=5.0, clock=lambda: now_s)
    for name in ("short", "long-0"):
        await rig.arrive(name, request(tenant="greedy"))
    await rig.finish("short")
    await rig.arrive("long-1", request(tenant="greedy"))
    for name in ("long-0", "long-1"):
        rig.admission.prefilled(rig.tickets[name])
        rig.tickets[name].num_emitted = lambda: 3
    now_s = 30.0
    await rig.arrive("small", request(tenant="small"))
    now_s = 30.2
    await until(lambda: "small" in rig.inside)
    assert rig.admission.num_paused == 1
    await rig.arrive("third", request(tenant="third"))
    assert "the wait would be 30.2 s" in (await rig.rejection("third")).message
    await rig.close()


async def test_those_ahead_of_a_request_use_up_its_tenant_s_own_limit() -> None:
    now_s = 0.0
    two = {"two": TenantSettings(max_requests=2)}
    rig = AdmissionRig(queue_timeout_s=5.0, tenants=two, clock=lambda: now_s)
    await rig.arrive("stays", request(tenant="other"))
    await rig.arrive("own", request(tenant="two"))
    await rig.finish("own")
    await rig.arrive("long", request(tenant="two"))
    now_s = 30.0
    await rig.finish("stays")
    await rig.arrive("full", request(tenant="other"))
    await rig.arrive("next", request(tenant="two"))
    await rig.arrive("behind", request(tenant="two"))
    assert "the wait would be 30.0 s" in (await rig.rejection("behind")).message
    assert rig.admission.num_queued == 1
    await rig.close()


async def test_what_a_tenant_may_never_have_is_refused_for_good() -> None:
    rig = AdmissionRig(tenants={"small": TenantSettings(max_tokens=9)})
    await rig.arrive("a", request(tenant="small"))
    error = await rig.rejection("a")
    assert error.retry_after_s is None
    assert dict(trailers(error, "text"))["grpc-retry-pushback-ms"] == "-1"
    assert rig.admission.num_rejected == {"quota": 1}
    await rig.close()


async def test_higher_priority_displaces_the_last_of_lower_priority_of_its_tenant() -> None:
    rig = AdmissionRig(max_queued=2)
    for name in "abcd":
        await rig.arrive(name, request(priority=-1))
    await rig.arrive("urgent", request(priority=3))
    assert (await rig.rejection("d")).retry_after_s is not None
    assert rig.admission.num_rejected == {"displaced": 1}
    await rig.finish("a")
    assert rig.inside == ["a", "b", "urgent"]
    await rig.close()


async def test_requests_that_come_together_displace_one_each() -> None:
    rig = AdmissionRig(max_queued=2)
    for name in "abcd":
        await rig.arrive(name, request(priority=-1))
    await asyncio.gather(*(rig.arrive(f"urgent-{number}", request(priority=3)) for number in range(2)))
    for name in "cd":
        assert (await rig.rejection(name)).retry_after_s is not None
    assert rig.admission.num_rejected == {"displaced": 2}
    assert (rig.admission.num_queued, rig.admission.queue.queued_cost) == (2, 20)
    await rig.finish("a")
    await rig.finish("b")
    assert rig.inside == ["a", "b", "urgent-0", "urgent-1"]
    assert rig.admission.wait_s.count == 4
    await rig.close()


async def test_the_place_of_a_waiter_that_has_just_been_cancelled_is_free_once() -> None:
    rig = AdmissionRig(max_queued=2)
    for name in "abcd":
        await rig.arrive(name, request(priority=-1))
    urgent = request(priority=3)
    # The urgent ones come before the loop has resumed the cancelled one.
    await asyncio.gather(rig.arrive("urgent-0", urgent), rig.arrive("urgent-1", urgent), rig.cancel("d"))
    assert rig.tasks["d"].cancelled()
    assert "requests of higher priority" in (await rig.rejection("c")).message
    assert rig.admission.num_rejected == {"displaced": 1}
    assert (rig.admission.num_queued, rig.admission.queue.queued_cost) == (2, 20)
    await rig.finish("a")
    await rig.finish("b")
    assert rig.inside == ["a", "b", "urgent-0", "urgent-1"]
    await rig.close()


async def test_the_tokens_that_wait_are_bounded_and_parted_among_tenants() -> None:
    rig = AdmissionRig(max_queued_tokens=100, max_queued=1000)
    for number in range(20):
        await rig.arrive(f"flood-{number}", request(tenant="flood"))
    assert rig.admission.queue.queued_cost == 100
    await rig.arrive("other", request(tenant="other"))
    assert not rig.tasks["other"].done(), "the flood's tokens are not the other's"
    await rig.arrive("flood-20", request(tenant="flood"))
    await rig.rejection("flood-20")
    assert rig.admission.num_rejected == {"queue_full": 9}
    await rig.close()


async def test_a_request_alone_is_never_too_long_for_the_queue() -> None:
    rig = AdmissionRig(max_queued_tokens=9)
    for name in "abcd":
        await rig.arrive(name)
    assert not rig.tasks["c"].done()
    assert "20 tokens would wait, 9 are allowed while others wait" in (await rig.rejection("d")).message
    await rig.finish("a")
    assert rig.inside == ["a", "b", "c"]
    await rig.close()


@pytest.mark.parametrize("limits", [{"max_queued": 0}, {"max_queued_tokens": 0}])
async def test_without_a_queue_no_request_waits(limits: dict[str, Any]) -> None:
    rig = AdmissionRig(**limits)
    for name in "abc":
        await rig.arrive(name)
    await rig.rejection("c")
    assert rig.admission.num_rejected == {"queue_full": 1}
    await rig.close()
