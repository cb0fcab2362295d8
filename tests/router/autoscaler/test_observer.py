"""What the observer reads of a running router, and what the router tells of its autoscaler."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.admission.budget import Charge
from router.admission.capacity import Limits
from router.admission.door import Admission
from router.app import RouterApp
from router.autoscaler.latencies import RecentLatencies
from router.autoscaler.observation import EMPTY_DOOR, DoorLook
from router.autoscaler.observer import Observer, door_of, is_for_decode, lacks
from router.config import AdmissionSettings
from router.model import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.autoscaler.scene import pool_of
from tests.router.autoscaler.scene import settings_of as policy_of
from tests.router.conftest import Run
from tests.router.rig import PROMPT, Rig, request_of, settings_of, slow


def observer_of(rig: Rig, **fields: Any) -> Observer:
    settings = policy_of(min_samples=1, **fields)
    rig.app.service.metrics.recent = RecentLatencies(settings)
    return Observer(rig.app.safeguards, rig.app.admission, rig.app.service.metrics.recent, settings)


def idle(name: str) -> FakeInstance:
    return FakeInstance("decode", name, behaviour=Behaviour(slots=10))


COLD_NEVER = {"prefill": {"warm_up_s": 0.0}, "decode": {"warm_up_s": 0.0}}


async def test_it_sees_the_load_that_instances_report(run: Run) -> None:
    loaded = FakeInstance("decode", "decode-0", behaviour=Behaviour(num_waiting=2, num_running=3, slots=10))
    async with run(decode=[loaded, idle("decode-1")]) as rig:
        look = observer_of(rig, **COLD_NEVER).look({"prefill": 1, "decode": 3})
        decode = look["decode"]
        assert decode.problem is None
        assert {load.name for load in decode.warm} == {"decode-0", "decode-1"}
        [busy] = [load for load in decode.warm if load.name == "decode-0"]
        assert (busy.num_waiting, busy.num_running, busy.score) == (2, 3, 1.1)
        assert (decode.size, decode.num_pending) == (3, 1)
        assert look["prefill"].role == "prefill"


async def test_instances_are_cold_at_first(run: Run) -> None:
    async with run(decode=[idle("decode-0")]) as rig:
        look = observer_of(rig).look({"prefill": 1, "decode": 1})["decode"]
        assert look.problem is not None
        assert look.problem.kind == "missing"
        assert [load.name for load in look.others] == ["decode-0"]


async def test_an_instance_that_dies_is_silent_and_one_that_drains_is_ending(run: Run) -> None:
    async with run(decode=[idle("decode-0"), idle("decode-1")]) as rig:
        observer = observer_of(rig, **COLD_NEVER)
        await rig.decode[0].kill()
        rig.decode[1].behaviour.draining = True
        await rig.until_ready(num_decode=0)
        look = observer.look({"prefill": 1, "decode": 2})["decode"]
        assert (look.num_silent, look.num_ending) == (1, 1)
        assert look.problem is not None


async def test_a_size_that_nobody_tells_is_not_known(run: Run) -> None:
    async with run() as rig:
        assert observer_of(rig).look({"decode": 1})["prefill"].size is None


async def test_requests_tell_it_their_ttft_at_once_and_their_itl_at_their_end(run: Run) -> None:
    prefill = FakeInstance("prefill", behaviour=Behaviour(prefill_s=0.3, slots=10))
    async with run(prefill=[prefill], decode=[FakeInstance("decode", behaviour=slow(0.05, slots=10))]) as rig:
        observer = observer_of(rig, **COLD_NEVER)
        sizes = {"prefill": 1, "decode": 1}
        running = asyncio.create_task(rig.generate(request_of(PROMPT, max_tokens=20)))
        await rig.decode[0].until("token", 3)
        looks = observer.look(sizes)
        assert (looks["prefill"].latency_s or 0.0) >= 0.3
        assert looks["decode"].latency_s is None
        await running
        async with asyncio.timeout(20):
            while (itl_s := observer.look(sizes)["decode"].latency_s) is None:
                await asyncio.sleep(0.01)
        assert itl_s >= 0.04


# The door


def door(held: Charge, limits: Limits) -> Admission:
    admission = Admission(AdmissionSettings())
    admission.held.take(held)
    admission.limits = limits
    return admission


@pytest.mark.parametrize(
    ("limits", "role"),
    [
        (Limits(num_prefill_tokens=100), "prefill"),
        (Limits(num_prefill_tokens=101, num_blocks=10), "decode"),
        (Limits(num_prefill_tokens=100, num_requests=1), None),
        (Limits(num_prefill_tokens=100, num_tokens=150), None),
    ],
)
def test_the_queue_waits_for_the_pool_whose_limit_is_reached(limits: Limits, role: str | None) -> None:
    assert lacks(door(Charge(1, 150, 10, 100), limits)) == role


def test_the_queue_waits_for_decode_where_prefill_stands_still_for_what_it_holds() -> None:
    stuck = pool_of(1, role="prefill", num_waiting=5, used_blocks=500, held_blocks=500)
    working = pool_of(1, role="prefill", num_waiting=5, num_running=1, used_blocks=500, held_blocks=500)
    assert is_for_decode("prefill", stuck)
    assert not is_for_decode("prefill", working)
    assert is_for_decode("decode", working)
    assert not is_for_decode(None, stuck)


async def test_who_waits_at_the_door_waits_for_decode_when_its_places_are_taken(run: Run) -> None:
    """One place, one request in it, another one before the door."""
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    async with run(decode=[decode], admission={"sequence_fraction": 1.0}) as rig:
        observer = observer_of(rig, **COLD_NEVER)
        assert door_of(rig.app.admission) == EMPTY_DOOR
        running = [asyncio.create_task(rig.generate(max_tokens=40)) for _ in range(2)]
        async with asyncio.timeout(20):
            while not rig.app.admission.num_queued:
                await asyncio.sleep(0.01)
        looks = observer.look({"prefill": 1, "decode": 1})
        assert looks["decode"].door.num_queued == 1
        assert looks["decode"].door.delay_s is None  # nothing has ended yet
        assert looks["prefill"].door == EMPTY_DOOR
        await asyncio.gather(*running)
        await rig.until_idle(20)


async def test_the_wait_is_told_once_the_rate_is_known(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    async with run(decode=[decode], admission={"sequence_fraction": 1.0}) as rig:
        await rig.generate(max_tokens=4)
        running = [asyncio.create_task(rig.generate(max_tokens=20)) for _ in range(3)]
        async with asyncio.timeout(20):
            while rig.app.admission.num_queued < 2:
                await asyncio.sleep(0.01)
        look = door_of(rig.app.admission)
        assert isinstance(look, DoorLook)
        assert look.delay_s is not None
        assert 0.0 < look.delay_s < math.inf
        await asyncio.gather(*running)
        await rig.until_idle(20)


# The whole router


@asynccontextmanager
async def scaling(model: ServedModel, model_folder: Any, socket: str) -> AsyncIterator[RouterApp]:
    settings = settings_of(
        model_folder,
        [],
        [],
        pools={"prefill": "", "decode": "", "stack": socket},
        autoscaler={"enabled": True, "interval_s": 0.05, "stale_s": 1.0, "lead_ttl_s": 1.0},
    )
    app = RouterApp(settings, model)
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def test_a_router_whose_stack_is_gone_runs_and_says_so(
    model: ServedModel, model_folder: Any, tmp_path: Any
) -> None:
    async with scaling(model, model_folder, f"unix:{tmp_path}/nobody") as app:
        assert app.autoscaler is not None
        async with asyncio.timeout(20):
            while app.autoscaler.num_failures < 2:
                await asyncio.sleep(0.01)
        status = app.autoscaler.status("decode")
        assert not status.leads
        assert "stack" in status.reason
        assert (status.min_size, status.max_size) == (1, 8)


async def test_a_router_that_is_not_asked_to_scales_nothing(run: Run) -> None:
    async with run() as rig:
        assert rig.app.autoscaler is None
