"""The admission controller: admits what fits, queues a bounded rest, rejects the excess at once, and leaks nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.capacity import Capacity
from router.admission.settings import TenantSettings
from router.admission.slots import Ticket
from serving.errors import Unavailable
from tests.router.admission.admission_rig import GUARD_S, AdmissionRig, request, settled


async def test_what_fits_goes_in_at_once_and_the_rest_waits_its_turn() -> None:
    rig = AdmissionRig()
    for name in "abcd":
        await rig.arrive(name)
    assert rig.inside == ["a", "b"]
    assert (rig.admission.in_use.num_requests, rig.admission.num_queued) == (2, 2)
    await rig.finish("b")
    assert rig.inside == ["a", "b", "c"]
    await rig.finish("a")
    assert rig.inside == ["a", "b", "c", "d"]
    assert rig.admission.wait_s.count == 4
    await rig.close()


async def test_every_choice_counts() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=3, num_blocks=100, block_size=4))
    await rig.arrive("a", request(n=2))
    held = rig.admission.in_use
    assert (held.num_sequences, held.num_tokens, held.num_blocks, held.num_prefill_tokens) == (2, 20, 6, 6)
    await rig.arrive("b", request(n=2))
    assert rig.inside == ["a"]
    await rig.finish("a")
    assert rig.inside == ["a", "b"]
    await rig.close()


async def test_a_request_alone_is_never_too_big() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=1, num_blocks=1, num_batched_tokens=1), max_tokens=1)
    await rig.arrive("giant", request(1000, 1000, n=8))
    assert rig.inside == ["giant"]
    await rig.close()


async def test_a_prompt_is_work_until_its_first_token() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_batched_tokens=10), prefill_steps=1)
    tickets: list[Ticket] = []

    async def stay() -> None:
        async with rig.admission.admit(request(10)) as ticket:
            tickets.append(ticket)
            await asyncio.Event().wait()

    rig.tasks = {name: asyncio.create_task(stay()) for name in "ab"}
    await settled()
    assert len(tickets) == 1
    rig.admission.prefilled(tickets[0])
    prefill_s = tickets[0].prefill_s
    assert 0.0 < prefill_s < GUARD_S
    rig.admission.prefilled(tickets[0])
    assert tickets[0].prefill_s == prefill_s
    await settled()
    assert len(tickets) == 2
    await rig.close()


async def test_prompts_past_their_ttft_keep_no_other_from_being_admitted() -> None:
    """Where instances compute them last."""
    capacity = Capacity(num_instances=1, num_batched_tokens=10)
    rig = AdmissionRig(capacity, prefill_steps=1, ttft_s=0.2)
    for name in "ab":
        await rig.arrive(name, request(10))
    await asyncio.sleep(0.4)
    assert rig.inside == ["a"]
    rig.capacity = replace(capacity, puts_late_last=True)
    async with asyncio.timeout(GUARD_S):
        while rig.inside != ["a", "b"]:
            await asyncio.sleep(0.01)
    await rig.finish("a")
    await rig.close()


async def test_room_that_an_instance_brings_is_used() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=1))
    for name in "abc":
        await rig.arrive(name)
    assert rig.inside == ["a"]
    rig.capacity = Capacity(num_instances=2, num_sequences=2)
    async with asyncio.timeout(GUARD_S):
        while rig.inside != ["a", "b"]:
            await asyncio.sleep(0.005)
    await rig.close()


async def test_room_that_an_instance_takes_along_is_missed() -> None:
    rig = AdmissionRig(Capacity(num_instances=2, num_sequences=2))
    await rig.arrive("a")
    await rig.arrive("b")
    rig.capacity = Capacity(num_instances=1, num_sequences=1)
    await asyncio.sleep(0.05)
    await rig.arrive("c")
    await rig.finish("a")
    assert rig.inside == ["a", "b"]
    await rig.finish("b")
    assert rig.inside == ["a", "b", "c"]
    await rig.close()


@pytest.mark.parametrize("has_own", [False, True])
async def test_a_burst_at_a_quiet_router_leaves_the_others_what_they_use(has_own: bool) -> None:
    """The pool is full of another router's requests; this one is asked nothing for a minute."""
    now_s = 0.0
    capacity = Capacity(num_instances=1, num_sequences=8, used_sequences=8)
    rig = AdmissionRig(capacity, num_routers=2, clock=lambda: now_s)
    if has_own:
        await rig.arrive("long")
    for _ in range(240):
        now_s += 0.25
        rig.admission.refresh()
    for number in range(8):
        await rig.arrive(str(number))
    assert rig.admission.in_use.num_sequences == 4, "its part"
    await rig.close()


# Fairness


async def test_a_tenant_below_its_share_does_not_wait_behind_a_flood() -> None:
    rig = AdmissionRig()
    for number in range(50):
        await rig.arrive(f"flood-{number}", request(tenant="flood"))
    await rig.arrive("calm", request(tenant="calm"))
    await rig.finish("flood-0")
    await rig.finish("flood-1")
    assert "calm" in rig.inside
    await rig.close()


async def test_a_tenant_at_its_bound_waits_while_others_go_in() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=10), tenants={"one": TenantSettings(max_requests=1)})
    for name in ("one-a", "one-b"):
        await rig.arrive(name, request(tenant="one"))
    await rig.arrive("two", request(tenant="two"))
    assert rig.inside == ["one-a", "two"]
    await rig.finish("one-a")
    assert rig.inside == ["one-a", "two", "one-b"]
    await rig.close()


# Leaving


async def test_a_waiter_that_is_cancelled_leaves_the_queue_at_once() -> None:
    rig = AdmissionRig()
    for name in "abcd":
        await rig.arrive(name)
    await rig.cancel("c")
    assert (rig.admission.num_queued, rig.admission.num_rejected.total()) == (1, 0)
    await rig.finish("a")
    assert rig.inside == ["a", "b", "d"]
    await rig.close()


async def test_a_waiter_cancelled_in_the_moment_of_its_turn_gives_its_place_back() -> None:
    rig = AdmissionRig()
    for name in "abcd":
        await rig.arrive(name)
    rig._ends["a"].set()
    await asyncio.sleep(0)
    while rig.admission.queue.num_in_service != 2 or rig.admission.num_queued != 1:
        await asyncio.sleep(0)  # until c has been given a's ticket and has not run yet
    assert "c" not in rig.inside
    await rig.cancel("c")
    assert rig.inside == ["a", "b", "d"]
    await rig.close()


async def test_a_failure_inside_gives_everything_back() -> None:
    rig = AdmissionRig()
    with pytest.raises(RuntimeError):
        async with rig.admission.admit(request()):
            raise RuntimeError
    await rig.close()


async def test_without_an_instance_newcomers_are_admitted_and_waiting_requests_end_as_unavailable() -> None:
    rig = AdmissionRig(queue_timeout_s=0.3)
    for name in "abc":
        await rig.arrive(name)
    rig.capacity = Capacity()
    await asyncio.sleep(0.05)
    await rig.arrive("new")
    assert rig.inside == ["a", "b", "new"], "the error is decided where an instance is picked"
    with pytest.raises(Unavailable):
        async with asyncio.timeout(GUARD_S):
            await rig.tasks["c"]
    await rig.close()


async def test_real_lengths_decide_how_many_fit() -> None:
    capacity = Capacity(num_instances=1, num_blocks=100, block_size=10)
    rig = AdmissionRig(capacity, expected_tokens=990)
    for number in range(300):
        await rig.arrive(f"first-{number}", request(10, 4000), num_output_tokens=90)
        await rig.finish(f"first-{number}")
    for number in range(12):
        await rig.arrive(f"then-{number}", request(10, 4000))
    assert len(rig.inside) - 300 in (9, 10), "1000 tokens of room, about 100 a request, whatever it may generate"
    await rig.close()


@given(st.lists(st.tuples(st.sampled_from("cgxw"), st.integers(0, 30), st.integers(1, 3)), max_size=40))
@settings(max_examples=60)
def test_nothing_leaks_whatever_happens(happenings: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        rig = AdmissionRig(Capacity(num_instances=1, num_sequences=4), max_queued=6, queue_timeout_s=0.02)
        for number, (what, which, n) in enumerate(happenings):
            names = [name for name, task in rig.tasks.items() if not task.done()]
            inside = [name for name in names if name in rig.inside]
            if what == "c":
                wanted = request(n=n, tenant=f"tenant-{which % 3}", priority=which % 2)
                await rig.arrive(str(number), wanted, num_output_tokens=which)
            elif what == "g" and inside:
                await rig.finish(inside[which % len(inside)])
            elif what == "x" and names:
                await rig.cancel(names[which % len(names)])
            elif what == "w" and not which % 4:
                await asyncio.sleep(0.03)
            held = rig.admission.in_use
            assert held.num_sequences <= 4
            assert held.num_requests == len([name for name in rig.inside if not rig.tasks[name].done()])
        await rig.close()

    asyncio.run(run())
