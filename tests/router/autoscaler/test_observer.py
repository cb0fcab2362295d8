"""What the observer reads of a running router, and what the router tells of its autoscaler."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from router.admission.capacity import Charge, ExternalLoad, Limits, limits_of
from router.admission.controller import AdmissionController
from router.admission.fair_queue import Entry, ServiceRate
from router.admission.settings import AdmissionSettings, TenantSettings
from router.admission.slots import Ticket
from router.app import RouterApp
from router.autoscaler.observation import Observer, is_for_decode, lacking_pool, queue_of
from router.autoscaler.router_signals import EMPTY_QUEUE, QueueSample, RecentLatencies
from router.pools.instance_info import Role
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.autoscaler.builders import pool_of
from tests.router.autoscaler.builders import settings_of as policy_of
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
        observation = observer_of(rig, **COLD_NEVER).observe({"prefill": 1, "decode": 3})
        decode = observation["decode"]
        assert decode.problem is None
        assert {load.name for load in decode.warm} == {"decode-0", "decode-1"}
        [busy] = [load for load in decode.warm if load.name == "decode-0"]
        assert (busy.num_waiting, busy.num_running, busy.score) == (2, 3, 1.1)
        assert (decode.size, decode.num_pending) == (3, 1)
        assert observation["prefill"].role == "prefill"


async def test_instances_are_cold_at_first(run: Run) -> None:
    async with run(decode=[idle("decode-0")]) as rig:
        observation = observer_of(rig).observe({"prefill": 1, "decode": 1})["decode"]
        assert observation.problem is not None
        assert observation.problem.kind == "missing"
        assert [load.name for load in observation.others] == ["decode-0"]


async def test_an_instance_that_dies_is_silent_and_one_that_drains_is_ending(run: Run) -> None:
    async with run(decode=[idle("decode-0"), idle("decode-1")]) as rig:
        observer = observer_of(rig, **COLD_NEVER)
        await rig.decode[0].kill()
        rig.decode[1].behaviour.draining = True
        await rig.until_ready(num_decode=0)
        observation = observer.observe({"prefill": 1, "decode": 2})["decode"]
        assert (observation.num_silent, observation.num_ending) == (1, 1)
        assert observation.problem is not None


async def test_a_size_without_an_owner_is_unknown(run: Run) -> None:
    async with run() as rig:
        assert observer_of(rig).observe({"decode": 1})["prefill"].size is None


async def test_ttft_is_recorded_at_the_first_token_and_itl_at_the_end(run: Run) -> None:
    prefill = FakeInstance("prefill", behaviour=Behaviour(prefill_s=0.3, slots=10))
    async with run(prefill=[prefill], decode=[FakeInstance("decode", behaviour=slow(0.05, slots=10))]) as rig:
        observer = observer_of(rig, **COLD_NEVER)
        sizes: dict[Role, int] = {"prefill": 1, "decode": 1}
        running = asyncio.create_task(rig.generate(request_of(PROMPT, max_tokens=20)))
        await rig.decode[0].until("token", 3)
        observations = observer.observe(sizes)
        assert (observations["prefill"].latency_s or 0.0) >= 0.3
        assert observations["decode"].latency_s is None
        await running
        async with asyncio.timeout(20):
            while (itl_s := observer.observe(sizes)["decode"].latency_s) is None:
                await asyncio.sleep(0.01)
        assert itl_s >= 0.04


# The queue


def queue(admission: AdmissionController, tenant: str, *, num_tokens: int) -> Entry[Ticket]:
    ticket = Ticket(Charge(1, num_tokens, 1, num_tokens), num_tokens)
    return admission.queue.push(tenant, ticket, cost=num_tokens, priority=0)


def admission_of(held: Charge, limits: Limits) -> AdmissionController:
    admission = AdmissionController(AdmissionSettings())
    admission.in_use.add(held)
    admission.limits = limits
    return admission


@pytest.mark.parametrize(
    ("limits", "role"),
    [
        (Limits(num_prefill_tokens=100, prefilled_by="prefill"), "prefill"),
        (Limits(num_prefill_tokens=100, prefilled_by="decode"), "decode"),
        (Limits(num_prefill_tokens=101, num_blocks=10, prefilled_by="prefill"), "decode"),
        (Limits(num_prefill_tokens=100, num_requests=1), None),
        (Limits(num_prefill_tokens=100, num_tokens=150), None),
    ],
)
def test_the_queue_waits_for_the_pool_whose_limit_is_reached(limits: Limits, role: str | None) -> None:
    assert lacking_pool(admission_of(Charge(1, 150, 10, 100), limits)) == role


@pytest.mark.parametrize(("max_tokens", "role"), [(169, None), (170, "decode")])
def test_a_queue_whose_next_request_exceeds_the_routers_tokens_waits_for_no_pool(
    max_tokens: int, role: str | None
) -> None:
    admission = admission_of(Charge(1, 150, 10, 100), Limits(num_tokens=max_tokens))
    queue(admission, "any", num_tokens=20)
    assert lacking_pool(admission) == role


def test_what_its_tenants_own_limit_holds_back_waits_for_no_pool() -> None:
    tenants = {"small": TenantSettings(max_requests=1), "short": TenantSettings(max_tokens=100)}
    admission = AdmissionController(AdmissionSettings(tenants=tenants))
    for tenant in tenants:
        admission.queue.start(queue(admission, tenant, num_tokens=60), 0.0)
        for _ in range(3):
            queue(admission, tenant, num_tokens=60)
    assert lacking_pool(admission) is None
    admission.num_held = 1
    assert lacking_pool(admission) == "decode", "one waits for the first instance"
    admission.num_held = 0
    queue(admission, "any", num_tokens=60)
    assert lacking_pool(admission) == "decode"


def test_the_queue_delay_is_that_of_requests_within_their_tenants_own_limits() -> None:
    admission = AdmissionController(AdmissionSettings(tenants={"small": TenantSettings(max_requests=1)}))
    admission.queue.start(queue(admission, "small", num_tokens=60), 0.0)
    rate = ServiceRate()
    admission._rate = rate
    rate.observe(0.0, waiting=True)
    for step in range(1, 101):
        rate.observe(step / 10, waiting=True, cost=10)
    for tenant in ("small", "small", "any"):
        queue(admission, tenant, num_tokens=60)
    assert queue_of(admission).num_queued == 3
    assert queue_of(admission).delay_s == pytest.approx(0.6), "60 tokens at 100 per second"


@pytest.mark.parametrize(
    ("num_prefill", "mode", "role"), [(1, "auto", "prefill"), (0, "auto", "decode"), (1, "never", "decode")]
)
async def test_queued_prompts_wait_for_the_pool_that_computes_them(
    run: Run, num_prefill: int, mode: str, role: str
) -> None:
    async with run(prefill=num_prefill, disaggregation={"mode": mode}) as rig:
        limits = limits_of(rig.app.admission.capacity(), ExternalLoad(), AdmissionSettings())
        admission = admission_of(Charge(1, 150, 10, 100), replace(limits, num_prefill_tokens=100))
        assert lacking_pool(admission) == role


def test_the_queue_waits_for_decode_where_prefill_stands_still_for_what_it_holds() -> None:
    stuck = pool_of(1, role="prefill", num_waiting=5, used_blocks=500, held_blocks=500)
    working = pool_of(
        1, role="prefill", num_waiting=5, num_running=1, num_prefilling=1, used_blocks=500, held_blocks=500
    )
    assert is_for_decode("prefill", stuck)
    assert not is_for_decode("prefill", working)
    assert is_for_decode("decode", working)
    assert not is_for_decode(None, stuck)


async def test_queued_requests_wait_for_decode_when_its_slots_are_taken(run: Run) -> None:
    """One slot, one request in it, another one in the queue."""
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    async with run(decode=[decode], admission={"sequence_fraction": 1.0}) as rig:
        observer = observer_of(rig, **COLD_NEVER)
        assert queue_of(rig.app.admission) == EMPTY_QUEUE
        running = [asyncio.create_task(rig.generate(max_tokens=40)) for _ in range(2)]
        async with asyncio.timeout(20):
            while not rig.app.admission.num_queued:
                await asyncio.sleep(0.01)
        observations = observer.observe({"prefill": 1, "decode": 1})
        assert observations["decode"].queue.num_queued == 1
        assert observations["decode"].queue.delay_s is None  # nothing has ended yet
        assert observations["prefill"].queue == EMPTY_QUEUE
        await asyncio.gather(*running)
        await rig.until_idle(20)


async def test_the_queue_delay_is_known_once_the_rate_is(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    async with run(decode=[decode], admission={"sequence_fraction": 1.0, "queue_timeout_s": 60.0}) as rig:
        await rig.generate(max_tokens=4)
        running = [asyncio.create_task(rig.generate(max_tokens=20)) for _ in range(3)]
        async with asyncio.timeout(20):
            while rig.app.admission.num_queued < 2:
                await asyncio.sleep(0.01)
        observation = queue_of(rig.app.admission)
        assert isinstance(observation, QueueSample)
        assert observation.delay_s is not None
        assert 0.0 < observation.delay_s < math.inf
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
        status = app.autoscaler.to_wire("decode")
        assert not status.leads
        assert "stack" in status.reason
        assert (status.min_size, status.max_size) == (1, 8)


async def test_a_router_that_is_not_asked_to_scales_nothing(run: Run) -> None:
    async with run() as rig:
        assert rig.app.autoscaler is None
