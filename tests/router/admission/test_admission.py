"""The router's door: as much as fits, a bounded queue for the rest, a refusal at once beyond it, and nothing leaks."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.capacity import Capacity
from router.admission.door import Place
from router.config import TenantSettings
from serving.errors import Unavailable
from tests.router.admission.house import GUARD_S, House, request, settled


async def test_what_fits_goes_in_at_once_and_the_rest_waits_its_turn() -> None:
    house = House()
    for name in "abcd":
        await house.come(name)
    assert house.inside == ["a", "b"]
    assert (house.admission.num_requests, house.admission.num_queued) == (2, 2)
    await house.go("b")
    assert house.inside == ["a", "b", "c"]
    await house.go("a")
    assert house.inside == ["a", "b", "c", "d"]
    assert house.admission.wait_s.count == house.admission.num_admitted == 4
    await house.empty()


async def test_every_choice_counts() -> None:
    house = House(Capacity(num_instances=1, num_sequences=3, num_blocks=100, block_size=4))
    await house.come("a", request(n=2))
    held = house.admission.held
    assert (held.num_sequences, held.num_tokens, held.num_blocks, held.num_prefill_tokens) == (2, 20, 6, 6)
    await house.come("b", request(n=2))
    assert house.inside == ["a"]
    await house.go("a")
    assert house.inside == ["a", "b"]
    await house.empty()


async def test_a_request_alone_is_never_too_big() -> None:
    house = House(Capacity(num_instances=1, num_sequences=1, num_blocks=1, num_batched_tokens=1), max_tokens=1)
    await house.come("giant", request(1000, 1000, n=8))
    assert house.inside == ["giant"]
    await house.empty()


async def test_a_prompt_is_work_until_its_first_token() -> None:
    house = House(Capacity(num_instances=1, num_batched_tokens=10), prefill_steps=1)
    places: list[Place] = []

    async def stay() -> None:
        async with house.admission.admit(request(10)) as place:
            places.append(place)
            await asyncio.Event().wait()

    house.tasks = {name: asyncio.create_task(stay()) for name in "ab"}
    await settled()
    assert len(places) == 1
    house.admission.prefilled(places[0])
    house.admission.prefilled(places[0])
    await settled()
    assert len(places) == 2
    await house.empty()


async def test_room_that_an_instance_brings_is_used() -> None:
    house = House(Capacity(num_instances=1, num_sequences=1))
    for name in "abc":
        await house.come(name)
    assert house.inside == ["a"]
    house.capacity = Capacity(num_instances=2, num_sequences=2)
    async with asyncio.timeout(GUARD_S):
        while house.inside != ["a", "b"]:
            await asyncio.sleep(0.005)
    await house.empty()


async def test_room_that_an_instance_takes_along_is_missed() -> None:
    house = House(Capacity(num_instances=2, num_sequences=2))
    await house.come("a")
    await house.come("b")
    house.capacity = Capacity(num_instances=1, num_sequences=1)
    await asyncio.sleep(0.05)
    await house.come("c")
    await house.go("a")
    assert house.inside == ["a", "b"]
    await house.go("b")
    assert house.inside == ["a", "b", "c"]
    await house.empty()


# Fairness


async def test_a_tenant_below_its_share_does_not_wait_behind_a_flood() -> None:
    house = House()
    for number in range(50):
        await house.come(f"flood-{number}", request(tenant="flood"))
    await house.come("calm", request(tenant="calm"))
    await house.go("flood-0")
    await house.go("flood-1")
    assert "calm" in house.inside
    await house.empty()


async def test_a_tenant_at_its_bound_waits_while_others_go_in() -> None:
    house = House(Capacity(num_instances=1, num_sequences=10), tenants={"one": TenantSettings(max_requests=1)})
    for name in ("one-a", "one-b"):
        await house.come(name, request(tenant="one"))
    await house.come("two", request(tenant="two"))
    assert house.inside == ["one-a", "two"]
    await house.go("one-a")
    assert house.inside == ["one-a", "two", "one-b"]
    await house.empty()


# Leaving


async def test_a_waiter_that_is_cancelled_leaves_the_queue_at_once() -> None:
    house = House()
    for name in "abcd":
        await house.come(name)
    await house.cancel("c")
    assert (house.admission.num_queued, house.admission.num_abandoned) == (1, 1)
    await house.go("a")
    assert house.inside == ["a", "b", "d"]
    await house.empty()


async def test_a_waiter_cancelled_in_the_moment_of_its_turn_gives_its_place_back() -> None:
    house = House()
    for name in "abcd":
        await house.come(name)
    house._ends["a"].set()
    await asyncio.sleep(0)
    while house.admission._queue.num_in_service != 2 or house.admission.num_queued != 1:
        await asyncio.sleep(0)  # until c has been given a's place and has not run yet
    assert "c" not in house.inside
    await house.cancel("c")
    assert house.inside == ["a", "b", "d"]
    await house.empty()


async def test_a_failure_inside_gives_everything_back() -> None:
    house = House()
    with pytest.raises(RuntimeError):
        async with house.admission.admit(request()):
            raise RuntimeError
    await house.empty()


async def test_without_an_instance_newcomers_pass_and_who_waits_is_told_unavailable() -> None:
    house = House(queue_timeout_s=0.3)
    for name in "abc":
        await house.come(name)
    house.capacity = Capacity()
    await asyncio.sleep(0.05)
    await house.come("new")
    assert house.inside == ["a", "b", "new"], "what it is told is for those who look for an instance"
    with pytest.raises(Unavailable):
        async with asyncio.timeout(GUARD_S):
            await house.tasks["c"]
    await house.empty()


async def test_real_lengths_decide_how_many_fit() -> None:
    capacity = Capacity(num_instances=1, num_blocks=100, block_size=10)
    house = House(capacity, expected_tokens=990)
    for number in range(300):
        await house.come(f"first-{number}", request(10, 4000), num_output_tokens=90)
        await house.go(f"first-{number}")
    for number in range(12):
        await house.come(f"then-{number}", request(10, 4000))
    assert len(house.inside) - 300 in (9, 10), "1000 tokens of room, about 100 a request, whatever it may generate"
    await house.empty()


@given(st.lists(st.tuples(st.sampled_from("cgxw"), st.integers(0, 30), st.integers(1, 3)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_nothing_leaks_whatever_happens(happenings: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        house = House(Capacity(num_instances=1, num_sequences=4), max_queued=6, queue_timeout_s=0.02)
        for number, (what, which, n) in enumerate(happenings):
            names = [name for name, task in house.tasks.items() if not task.done()]
            inside = [name for name in names if name in house.inside]
            if what == "c":
                wanted = request(n=n, tenant=f"tenant-{which % 3}", priority=which % 2)
                await house.come(str(number), wanted, num_output_tokens=which)
            elif what == "g" and inside:
                await house.go(inside[which % len(inside)])
            elif what == "x" and names:
                await house.cancel(names[which % len(names)])
            elif what == "w" and not which % 4:
                await asyncio.sleep(0.03)
            held = house.admission.held
            assert held.num_sequences <= 4
            assert held.num_requests == len([name for name in house.inside if not house.tasks[name].done()])
        await house.empty()

    asyncio.run(run())
