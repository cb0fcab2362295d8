"""What one observation says of a pool, what makes it say nothing, and what is observed of a running router."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.capacity import Charge, Limits, Usage, limits_of
from router.admission.controller import AdmissionController
from router.admission.fair_queue import Entry, ServiceRate
from router.admission.settings import AdmissionSettings, TenantSettings
from router.admission.slots import Ticket
from router.app import RouterApp
from router.autoscaler.observation import (
    InstanceSample,
    Observer,
    Problem,
    ProcessCounts,
    counts_of,
    is_for_decode,
    lacking_pool,
    observe,
    queue_of,
)
from router.autoscaler.router_signals import EMPTY_QUEUE, QueueSample, RecentLatencies
from router.autoscaler.settings import PoolPolicy
from router.pools.instance import State
from router.pools.instance_info import Role
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.autoscaler.builders import (
    BLOCK_SIZE,
    NOW_S,
    NUM_BLOCKS,
    NUM_SEQS,
    SPEED,
    STALE_S,
    instance,
    policy_of,
    pool,
    pool_of,
    settings_of,
    starting,
)
from tests.router.conftest import Run
from tests.router.rig import PROMPT, Rig, request_of, slow
from tests.router.rig import settings_of as router_settings
from tests.waiting import until

REPORTED = (
    *("num_waiting", "num_running", "num_loading", "num_waiting_tokens"),
    *("free_blocks", "cached_blocks", "held_blocks", "quarantined_blocks"),
)


def test_a_look_tells_what_each_instance_carries() -> None:
    [load] = pool(instance(num_waiting=2, num_running=3, num_loading=1, num_waiting_tokens=500, used_blocks=250)).warm
    assert load.score == (4 * 2 + 3 + 1) / NUM_SEQS
    assert load.waiting_s == 500 / SPEED
    assert load.kv_use == 250 / NUM_BLOCKS


def test_tokens_at_an_instance_of_unknown_speed_go_by_the_others_speed() -> None:
    unknown = instance("b", speed=None, num_waiting_tokens=1000)
    first, second, _ = pool(instance("a", speed=3000.0), unknown, instance("c", speed=1000.0)).warm
    assert (first.waiting_s, second.waiting_s) == (0.0, 0.5)
    own, _ = pool(instance("a", speed=2000.0, num_waiting_tokens=1000), instance("b", speed=500.0)).warm
    assert own.waiting_s == 0.5
    [alone] = pool(instance(speed=None, num_waiting_tokens=1000)).warm
    assert alone.waiting_s is None
    assert pool(instance(speed=None)).warm[0].waiting_s == 0.0


def test_samples_of_an_instance_that_is_still_warming_up_are_no_reason_to_grow() -> None:
    observation = pool(instance("a", num_running=2), instance("b", up_s=1.0, num_waiting=50), size=2)
    assert [load.name for load in observation.warm] == ["a"]
    assert [load.name for load in observation.others] == ["b"]
    assert observation.num_pending == 1
    assert observation.problem is None


def test_draining_and_ejected_instances_carry_load_and_are_no_warm_ones() -> None:
    lost, ejected = instance("d", state="lost", num_running=9), instance("c", out="ejected for 9 s more")
    observation = pool(instance("a"), instance("b", state="draining"), ejected, lost, size=2)
    assert [load.name for load in observation.warm] == ["a"]
    assert [load.name for load in observation.others] == ["b", "c"]
    assert observation.num_ending == 1


@pytest.mark.parametrize(
    ("sample", "is_ejected"),
    [
        (instance(), False),
        (instance(out="ejected for 9 s more"), True),
        (instance(state="draining", out="draining"), False),
        (InstanceSample("a", "ready", 0.1, None), False),
        (starting(), False),
    ],
)
def test_an_ejected_instance_is_ready_and_out(sample: InstanceSample, is_ejected: bool) -> None:
    assert sample.is_ejected == is_ejected


def test_what_is_to_go_and_has_not_begun_to_counts_as_ending() -> None:
    observation = pool(instance("a"), instance("b"), instance("c"), size=1)
    assert (observation.num_ending, observation.num_pending) == (2, 0)


def test_instances_that_end_count_whatever_the_others_report() -> None:
    observation = pool(instance("a", state="draining"), instance("b", num_waiting=-3), instance("c"), size=1)
    assert observation.problem is not None
    assert observation.problem.kind == "nonsense"
    assert observation.num_ending == 2


def test_processes_that_end_are_neither_ready_nor_present() -> None:
    ending = [instance("d", state="draining"), instance("e", state="leaving")]
    samples = [instance("a"), instance("b", up_s=1.0), starting("c"), *ending]
    assert counts_of(samples, policy_of()) == ProcessCounts(num_ready=1, num_ending=2)
    assert pool(*samples).num_present == 3


@pytest.mark.parametrize("num_waiting", [0, -3], ids=["valid", "nonsense"])
def test_of_a_pool_of_unknown_size_what_stays_is_present_and_no_surplus(num_waiting: int) -> None:
    instances = instance("a", num_waiting=num_waiting), starting("b"), instance("c", state="leaving")
    observation = observe("decode", NOW_S, None, instances, EMPTY_QUEUE, None, policy_of(), STALE_S)
    assert (observation.num_present, observation.num_ending) == (2, 1)


def test_a_second_address_of_a_process_is_no_second_process_that_is_to_go() -> None:
    assert pool(instance("a"), InstanceSample("a", "ready", 0.1, None), size=1).num_ending == 0


def test_an_instance_that_was_never_heard_of_is_pending_and_not_silent() -> None:
    observation = pool(instance("a"), starting(), size=2)
    assert (observation.num_pending, observation.num_silent, observation.problem) == (1, 0, None)


@pytest.mark.parametrize("state", ["lost", "wedged"])
def test_what_a_silent_instance_carries_is_not_known_for_a_while(state: State) -> None:
    policy: PoolPolicy = policy_of(start_timeout_s=60.0)
    assert pool(instance("a"), instance("b", state=state, report_age_s=20.0), policy=policy).num_silent == 1
    long_silences: tuple[dict[str, Any], ...] = ({"report_age_s": 61.0}, {"core_silence_s": 61.0})
    for silence in long_silences:
        assert pool(instance("a"), instance("b", state=state, **silence), policy=policy).num_silent == 0


def test_a_pool_without_reports_decides_nothing() -> None:
    assert pool(size=2).problem == Problem("missing", "no instance is warm and reports")
    problem = pool(instance("a", state="lost"), instance("b", state="lost"), size=2).problem
    assert problem == Problem("missing", "none of 2 instances is warm and reports; 2 fell silent")


def test_a_stale_report_decides_nothing() -> None:
    instances = instance("a"), instance("b", report_age_s=14.0), instance("c", report_age_s=13.0)
    assert pool(*instances).problem == Problem("stale", "b reported 14.0 s ago, 12 s are too long")
    assert pool(instance(report_age_s=math.nan)).problem is not None


@pytest.mark.parametrize("field", REPORTED)
def test_a_negative_number_decides_nothing(field: str) -> None:
    negative: dict[str, Any] = {field: -3}
    problem = pool(instance("a"), instance("b", **negative)).problem
    assert problem == Problem("nonsense", f"b: {field} = -3, which is invalid")


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, -1.0])
def test_a_number_that_is_not_finite_decides_nothing(nonsense: float) -> None:
    for observation in (
        pool(instance(step_s=nonsense)),
        pool(instance(core_silence_s=nonsense)),
        pool(instance(speed=nonsense, num_waiting_tokens=10)),
        pool(instance(speed=5e-324, num_waiting_tokens=10)),  # for ever, or longer than a number says
        pool(instance(), latency_s=nonsense),
        pool(instance(), queue=QueueSample(1, nonsense)),
        pool(instance("a"), instance("cold", up_s=0.0, step_s=nonsense)),
    ):
        assert observation.problem is not None
        assert observation.problem.kind == "nonsense"


def test_more_blocks_than_there_are_decide_nothing() -> None:
    problem = pool(instance(cached_blocks=1)).problem
    assert problem == Problem("nonsense", f"decode-0 reports {NUM_BLOCKS + 1} blocks and has {NUM_BLOCKS}")


def test_an_instance_that_does_not_tell_what_it_can_run_decides_nothing() -> None:
    problem = pool(instance(num_seqs=0)).problem
    assert problem is not None
    assert problem.message == "decode-0 reports max_num_seqs = 0, which must be positive"
    assert pool(instance(num_seqs=1)).problem is None


def test_held_kv_is_no_prefill_load() -> None:
    held: dict[str, Any] = {"used_blocks": 600, "held_blocks": 500}
    [prefill] = pool(instance(**held), role="prefill").warm
    assert prefill.kv_use == 100 / NUM_BLOCKS
    [decode] = pool(instance(**held)).warm
    assert decode.kv_use == 600 / NUM_BLOCKS


def test_a_prefill_queue_that_stands_still_for_held_kv_is_no_prefill_load() -> None:
    stuck: dict[str, Any] = {"num_waiting": 9, "num_waiting_tokens": 9000, "used_blocks": 500, "held_blocks": 500}
    observation = pool(instance(**stuck), role="prefill", queue=QueueSample(5, 3.0))
    [load] = observation.warm
    assert load.is_blocked
    assert (load.score, load.waiting_s, observation.queue.delay_s) == (0.0, 0.0, 0.0)
    beside_another = pool(instance("a", **stuck), instance("b"), role="prefill", queue=QueueSample(5, 3.0))
    assert beside_another.queue == EMPTY_QUEUE
    [working] = pool(instance(**stuck, num_running=1, num_prefilling=1), role="prefill").warm
    assert not working.is_blocked
    assert working.score > 3
    [decoding] = pool(instance(**stuck, num_running=1), role="prefill").warm
    assert decoding.is_blocked, "streams that it serves alone are no prompts"
    assert not pool(instance(**stuck, num_loading=1), role="prefill").is_blocked
    assert not pool(instance(**stuck | {"num_waiting": 0}), role="prefill").is_blocked, "nothing waits"
    assert not pool(instance(**stuck)).is_blocked, "a decode instance waits for no reader"


def test_a_prefill_queue_that_moves_is_prefill_load_whatever_is_held() -> None:
    """Between two steps no prompt is begun, and KV that was just computed is held."""
    busy: dict[str, Any] = {"num_waiting": 9, "num_waiting_tokens": 9000, "used_blocks": 100, "held_blocks": 100}
    observation = pool(instance(**busy, num_recent=100 * BLOCK_SIZE), role="prefill", queue=QueueSample(5, 3.0))
    [load] = observation.warm
    assert not load.is_blocked
    assert (load.num_waiting, load.waiting_s, observation.queue.delay_s) == (9, 9000 / SPEED, 3.0)
    [trickling] = pool(instance(**busy, num_recent=100 * BLOCK_SIZE - 1), role="prefill").warm
    assert trickling.is_blocked, "what it holds is older than what it has computed lately"


@given(
    report=st.fixed_dictionaries({field: st.integers(-(2**63), 2**63 - 1) for field in REPORTED}),
    floats=st.fixed_dictionaries({field: st.floats() for field in ("step_s", "core_silence_s")}),
    speed=st.none() | st.floats(),
)
def test_whatever_an_instance_tells_a_look_is_sane_or_says_what_is_wrong(
    report: dict[str, Any], floats: dict[str, Any], speed: float | None
) -> None:
    observation = pool(instance(**report, **floats, speed=speed))
    if observation.problem is not None:
        assert observation.problem.message
        return
    [load] = observation.warm
    assert math.isfinite(load.score)
    assert load.score >= 0
    assert 0 <= load.kv_use <= 1
    assert load.waiting_s is None or (math.isfinite(load.waiting_s) and load.waiting_s >= 0)


# A running router


def observer_of(rig: Rig, **fields: Any) -> Observer:
    settings = settings_of(min_samples=1, **fields)
    rig.app.service.metrics.recent = RecentLatencies(settings)
    return Observer(rig.app.safeguards, rig.app.admission, rig.app.service.metrics.recent, settings, rig.app.peers)


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


async def test_instances_are_cold_at_first_for_as_long_as_their_pool_says(run: Run) -> None:
    prefill = FakeInstance("prefill", behaviour=Behaviour(slots=10))
    async with run(prefill=[prefill], decode=[idle("decode-0")]) as rig:
        observations = observer_of(rig, prefill={"warm_up_s": 0.0}).observe({"prefill": 1, "decode": 1})
        assert observations["prefill"].problem is None
        observation = observations["decode"]
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
        limits = limits_of(rig.app.admission.capacity(), Usage(), AdmissionSettings())
        admission = admission_of(Charge(1, 150, 10, 100), replace(limits, num_prefill_tokens=100))
        assert lacking_pool(admission) == role


def test_the_queue_waits_for_decode_where_prefill_stands_still_for_what_it_holds() -> None:
    stuck = pool_of(1, role="prefill", num_waiting=5, used_blocks=500, held_blocks=500)
    working = pool_of(
        1, role="prefill", num_waiting=5, num_running=1, num_prefilling=1, used_blocks=500, held_blocks=500
    )
    assert is_for_decode("prefill", stuck)
    assert is_for_decode("prefill", replace(stuck, warm=(*stuck.warm, *working.warm))), "one of them stands still"
    assert not is_for_decode("prefill", working)
    assert is_for_decode("decode", working)
    assert not is_for_decode(None, stuck)


async def test_queued_requests_wait_for_the_pool_that_is_lacking_alone(run: Run) -> None:
    """One slot, one request in it, another one in the queue."""
    prefill = FakeInstance("prefill", behaviour=Behaviour(slots=10))
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    async with run(prefill=[prefill], decode=[decode], admission={"sequence_fraction": 1.0}) as rig:
        observer = observer_of(rig, **COLD_NEVER)
        assert queue_of(rig.app.admission) == EMPTY_QUEUE
        running = [asyncio.create_task(rig.generate(max_tokens=40)) for _ in range(2)]
        await until(lambda: rig.app.admission.num_queued)
        observations = observer.observe({"prefill": 1, "decode": 1})
        assert observations["decode"].queue.num_queued == 1
        assert observations["decode"].queue.delay_s is None  # nothing has ended yet
        assert (observations["prefill"].queue, observations["prefill"].problem) == (EMPTY_QUEUE, None)
        admission = rig.app.admission
        admission.limits = replace(admission.limits, num_prefill_tokens=0, prefilled_by="prefill")
        observations = observer.observe({"prefill": 1, "decode": 1})
        assert (observations["prefill"].queue.num_queued, observations["decode"].queue) == (1, EMPTY_QUEUE)
        await asyncio.gather(*running)
        await rig.until_idle(20)


async def test_the_queue_delay_is_known_once_the_rate_is(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=slow(0.05, slots=1))
    async with run(decode=[decode], admission={"sequence_fraction": 1.0, "queue_timeout_s": 60.0}) as rig:
        await rig.generate(max_tokens=4)
        running = [asyncio.create_task(rig.generate(max_tokens=20)) for _ in range(3)]
        await until(lambda: rig.app.admission.num_queued >= 2)
        observation = queue_of(rig.app.admission)
        assert isinstance(observation, QueueSample)
        assert observation.delay_s is not None
        assert 0.0 < observation.delay_s < math.inf
        await asyncio.gather(*running)
        await rig.until_idle(20)


# The whole router


@asynccontextmanager
async def scaling(model: ServedModel, model_folder: Any, socket: str) -> AsyncIterator[RouterApp]:
    settings = router_settings(
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
    async with scaling(model, model_folder, f"unix:{tmp_path}/absent") as app:
        scaler = app.autoscaler
        assert scaler is not None
        await until(lambda: scaler.num_failures >= 2)
        status = scaler.to_wire("decode")
        assert not status.leads
        assert "stack" in status.reason
        assert (status.min_size, status.max_size) == (1, 8)


async def test_a_router_that_is_not_asked_to_scales_nothing(run: Run) -> None:
    async with run() as rig:
        assert rig.app.autoscaler is None
