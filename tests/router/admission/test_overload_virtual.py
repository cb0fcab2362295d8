"""Admission under load, in virtual time: pools full and not overfull, short waits, tenants treated fairly.

The pool is the simplest that is honest: slots, each of which gives a token every few milliseconds, and a queue before
them in the order of arrival. What goes over sockets is in test_overload_processes.py.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.sampling.params import SamplingParams
from router.admission.capacity import Capacity, Usage
from router.admission.controller import AdmissionController
from router.admission.settings import AdmissionSettings, TenantSettings
from router.admission.slots import Ticket
from router.request.generation_request import GenerationRequest
from serving.errors import Overloaded
from tests.router import virtual_time

SLOTS = 32
TOKEN_S = 0.02
NUM_TOKENS = 50
"""Mean output of a request."""
SERVICE_S = NUM_TOKENS * TOKEN_S
CAPACITY_PER_S = SLOTS / SERVICE_S
LIMIT_S = 5.0


@dataclass
class RequestRecord:
    """One request and its outcome."""

    tenant: str
    came_s: float
    taken_s: float | None = None
    """When the router admitted it."""
    began_s: float | None = None
    """When it got a slot."""
    ended_s: float = 0.0
    refusal: Overloaded | None = None
    num_tokens: int = 0

    @property
    def wait_s(self) -> float:
        return (self.ended_s if self.taken_s is None else self.taken_s) - self.came_s


@dataclass
class OverloadScenario:
    """An admission controller, a pool behind it, and clients before it."""

    lengths: str = "equal"
    slots: int = SLOTS
    fields: dict[str, Any] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)
    length_of: dict[str, int] = field(default_factory=dict)
    """Mean output of a tenant's requests, where it is another."""

    def __post_init__(self) -> None:
        self.rng = random.Random(1)
        self.settings = AdmissionSettings(**{"queue_timeout_s": LIMIT_S, **self.fields})
        loop = asyncio.get_running_loop()
        self.capacity = Capacity(num_instances=1, num_sequences=self.slots)
        self.admission = AdmissionController(self.settings, lambda: self.capacity, rng=self.rng, clock=loop.time)
        self._pool = asyncio.Semaphore(self.slots)
        self._tasks: set[asyncio.Task[None]] = set()

    async def offer(self, seconds: float, **per_s: float) -> None:
        """Lets requests of each tenant come at random, `per_s` on average."""
        streams = [asyncio.create_task(self._stream(tenant, rate, seconds)) for tenant, rate in per_s.items()]
        await asyncio.gather(*streams)

    async def lose(self, num_slots: int) -> None:
        """An instance goes: as many slots as it had, as soon as they are free."""
        self.capacity = Capacity(num_instances=2, num_sequences=self.slots - num_slots)
        for _ in range(num_slots):
            await self._pool.acquire()

    async def end(self) -> None:
        """Waits for all requests and checks that nothing is left."""
        await asyncio.gather(*self._tasks)
        assert self.admission.in_use == Usage()
        assert (self.admission.num_queued, len(self.admission.queue._flows)) == (0, 0)

    def per_s(self, begin_s: float, end_s: float, tenant: str | None = None) -> float:
        """Tokens of whole answers a second, as requests of mean length."""
        ended = [one for one in self.records if one.refusal is None and begin_s <= one.ended_s < end_s]
        tokens = sum(one.num_tokens for one in ended if tenant in (None, one.tenant))
        return tokens / NUM_TOKENS / (end_s - begin_s)

    async def _stream(self, tenant: str, per_s: float, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + seconds
        while loop.time() < end_s:
            task = asyncio.create_task(self._ask(tenant))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(self.rng.expovariate(per_s))

    async def _ask(self, tenant: str) -> None:
        loop = asyncio.get_running_loop()
        record = RequestRecord(tenant, loop.time())
        self.records.append(record)
        mean = self.length_of.get(tenant, NUM_TOKENS)
        params = SamplingParams(max_tokens=mean if self.lengths == "equal" else 4000)
        length = mean if self.lengths == "equal" else min(max(1, round(self.rng.expovariate(1 / mean))), 4000)
        wanted = GenerationRequest("label", "id", "model", (1,) * 10, params, tenant=tenant)
        try:
            async with self.admission.admit(wanted) as ticket:
                record.taken_s = loop.time()
                while record.num_tokens < length:
                    await ticket.slot.wait_held()
                    async with self._pool:
                        await self._run(ticket, record, length)
                ticket.num_emitted = lambda: length
        except Overloaded as refusal:
            record.refusal = refusal
        record.ended_s = loop.time()

    async def _run(self, ticket: Ticket, record: RequestRecord, length: int) -> None:
        """Until it has all its tokens, or another tenant gets its slot."""
        loop, num_before = asyncio.get_running_loop(), record.num_tokens
        began_s = loop.time()
        record.began_s = record.began_s or began_s
        ticket.num_emitted = lambda: num_before + int((loop.time() - began_s) / TOKEN_S + 1e-6)
        taken = _Taken(asyncio.Event())
        ticket.slot.add(taken)
        try:
            if not ticket.prefilled:
                await asyncio.sleep(TOKEN_S)
                self.admission.prefilled(ticket)
            async with asyncio.timeout_at(began_s + (length - num_before) * TOKEN_S):
                await taken.event.wait()
        except TimeoutError:
            pass
        finally:
            ticket.slot.remove(taken)
        record.num_tokens = num_emitted = ticket.num_emitted()
        ticket.num_emitted = lambda: num_emitted


@dataclass(eq=False)
class _Taken:
    event: asyncio.Event

    def slot_taken(self) -> None:
        self.event.set()


LONG = pytest.param(60.0, marks=pytest.mark.slow)
"""A minute of load; half of one shows the same. The requests of a run are always the same ones."""


async def overload(lengths: str, **fields: Any) -> OverloadScenario:
    """A minute at 1×, a minute at 3×."""
    scenario = OverloadScenario(lengths, fields=fields)
    await scenario.offer(60, flood=CAPACITY_PER_S)
    await scenario.offer(60, flood=3 * CAPACITY_PER_S)
    await scenario.end()
    return scenario


@pytest.mark.parametrize("lengths", [pytest.param("equal", marks=pytest.mark.slow), "exponential"])
def test_overload_costs_no_goodput_and_no_rejected_request_has_waited(lengths: str) -> None:
    scenario = virtual_time.run(overload(lengths))
    peak, over = scenario.per_s(10, 60), scenario.per_s(70, 120)
    waits_s = [one.wait_s for one in scenario.records]
    refused = [one for one in scenario.records if one.refusal is not None]
    after_wait = [one for one in refused if one.wait_s > 0]
    at_pool_s = [one.began_s - one.taken_s for one in scenario.records if one.began_s and one.taken_s]
    print(f"\n{lengths}: {peak:.1f}/s, then {over:.1f}/s; {len(refused)} refused, {len(after_wait)} after a wait;")
    print(f"longest wait {max(waits_s):.2f} s, at the pool {max(at_pool_s):.2f} s; {scenario.admission.num_rejected}")
    assert over >= 0.97 * CAPACITY_PER_S
    assert over >= 0.9 * peak
    assert max(waits_s) <= LIMIT_S + 1e-6
    assert len(after_wait) <= 0.01 * len(refused)
    assert all(one.refusal is not None and (one.refusal.retry_after_s or 0) >= 1 for one in refused)


@pytest.mark.parametrize("seconds", [30.0, LONG])
@pytest.mark.parametrize(("share", "longest_wait_s"), [(0.3, 1.0), (0.5, LIMIT_S)])
def test_a_tenant_within_its_share_gets_it_beside_a_flood(share: float, longest_wait_s: float, seconds: float) -> None:
    async def run_scenario() -> OverloadScenario:
        scenario = OverloadScenario("exponential")
        await scenario.offer(seconds, flood=2.5 * CAPACITY_PER_S, calm=share * CAPACITY_PER_S)
        await scenario.end()
        return scenario

    scenario = virtual_time.run(run_scenario())
    calm = [one for one in scenario.records if one.tenant == "calm"]
    refused = [one for one in calm if one.refusal is not None]
    got_per_s, wait_s = scenario.per_s(10, seconds, "calm"), max(one.wait_s for one in calm)
    print(f"\ncalm {got_per_s:.1f}/s, longest wait {wait_s:.2f} s, {len(refused)} refused of {len(calm)}")
    assert got_per_s >= 0.9 * share * CAPACITY_PER_S
    assert wait_s <= longest_wait_s
    assert len(refused) <= 0.05 * len(calm)
    assert scenario.per_s(10, seconds) >= 0.97 * CAPACITY_PER_S


def test_a_turn_that_comes_in_the_last_moment_is_taken() -> None:
    async def run_scenario() -> tuple[int, int]:
        # as long as until the pools are checked again
        scenario = OverloadScenario(slots=1, fields={"queue_timeout_s": 0.05})
        loop = asyncio.get_running_loop()
        loop.call_later(0.04, setattr, scenario, "capacity", Capacity(num_instances=1, num_sequences=2))
        await asyncio.gather(scenario._ask("holder"), scenario._ask("waiter"))
        await scenario.end()
        return scenario.admission.wait_s.count, scenario.admission.num_rejected.total()

    assert virtual_time.run(run_scenario()) == (2, 0)


@pytest.mark.parametrize("seconds", [30.0, LONG])
def test_weights_divide_a_saturated_pool(seconds: float) -> None:
    async def run_scenario() -> OverloadScenario:
        scenario = OverloadScenario("exponential", fields={"tenants": {"gold": TenantSettings(weight=3)}})
        await scenario.offer(seconds, gold=2 * CAPACITY_PER_S, iron=2 * CAPACITY_PER_S)
        await scenario.end()
        return scenario

    scenario = virtual_time.run(run_scenario())
    assert 2.6 < scenario.per_s(10, seconds, "gold") / scenario.per_s(10, seconds, "iron") < 3.4


@pytest.mark.parametrize("seconds", [30.0, pytest.param(120.0, marks=pytest.mark.slow)])
def test_a_tenant_with_long_requests_gets_no_more_tokens_than_the_others(seconds: float) -> None:
    async def run_scenario() -> OverloadScenario:
        scenario = OverloadScenario("exponential")
        scenario.length_of["long"] = 5 * NUM_TOKENS
        await scenario.offer(seconds, long=CAPACITY_PER_S, short=2 * CAPACITY_PER_S)
        await scenario.end()
        return scenario

    scenario = virtual_time.run(run_scenario())
    got = [scenario.per_s(seconds / 4, seconds, tenant) for tenant in ("long", "short")]
    print(f"\nlong {got[0]:.1f}, short {got[1]:.1f}")
    assert 0.75 < got[0] / got[1] < 1.35


@pytest.mark.parametrize(("weight", "fair_share"), [(1.0, 1 / 2), (3.0, 3 / 4)])
def test_a_tenant_gets_its_share_of_slots_that_long_streams_fill(weight: float, fair_share: float) -> None:
    begin_s, num_slots = 10.0, 16

    async def run_scenario() -> OverloadScenario:
        fields = {"tenants": {"modest": TenantSettings(weight=weight)}}
        scenario = OverloadScenario(slots=num_slots, fields=fields)
        scenario.length_of["greedy"] = 100 * NUM_TOKENS
        greedy = asyncio.create_task(scenario.offer(begin_s + 30, greedy=5.0))
        await asyncio.sleep(begin_s)
        await scenario.offer(30, modest=2 * num_slots / SERVICE_S)
        await greedy
        await scenario.end()
        return scenario

    scenario = virtual_time.run(run_scenario())
    modest, greedy = ([one for one in scenario.records if one.tenant == tenant] for tenant in ("modest", "greedy"))
    refused = [one for one in scenario.records if one.refusal is not None and one.came_s >= begin_s]
    waits_s = sorted(one.wait_s for one in refused)
    part = scenario.per_s(begin_s + 2, begin_s + 30, "modest") / (fair_share * num_slots / SERVICE_S)
    print(f"\nmodest: {part:.1%} of its share, first after {min(one.wait_s for one in modest):.2f} s;", end=" ")
    print(
        f"{len(refused)} refused, p99 {waits_s[int(0.99 * len(waits_s))]:.3f} s, longest {waits_s[-1]:.2f} s;", end=" "
    )
    print(f"{scenario.admission.num_paused} pauses")
    assert 0.9 <= part <= 1.15
    assert waits_s[int(0.99 * len(waits_s))] <= 0.05
    served = [one for one in greedy if one.refusal is None]
    assert len(served) >= num_slots
    assert all(one.num_tokens == scenario.length_of["greedy"] for one in served), "a pause ends no stream"


@pytest.mark.parametrize("num_tenants", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_no_request_is_rejected_while_there_is_enough_for_all(num_tenants: int) -> None:
    async def run_scenario() -> OverloadScenario:
        scenario = OverloadScenario("exponential")
        per_s = {f"tenant-{i}": 0.9 * CAPACITY_PER_S / num_tenants for i in range(num_tenants)}
        await scenario.offer(60, **per_s)
        await scenario.end()
        return scenario

    scenario = virtual_time.run(run_scenario())
    assert [one.refusal for one in scenario.records if one.refusal is not None] == []


def test_a_burst_that_fits_the_queue_is_served_by_a_house_that_was_idle() -> None:
    async def run_scenario() -> OverloadScenario:
        scenario = OverloadScenario("exponential")
        await scenario.offer(20, tenant=0.2 * CAPACITY_PER_S)
        await scenario.offer(1.0, tenant=3 * CAPACITY_PER_S)
        await scenario.end()
        return scenario

    scenario = virtual_time.run(run_scenario())
    assert [one.refusal for one in scenario.records if one.refusal is not None] == []


def test_half_the_pool_goes_and_the_waits_stay_within_the_limit() -> None:
    async def run_scenario() -> OverloadScenario:
        scenario = OverloadScenario("exponential")
        load = asyncio.create_task(scenario.offer(60, tenant=1.5 * CAPACITY_PER_S))
        await asyncio.sleep(20)
        await scenario.lose(SLOTS // 2)
        await load
        await scenario.end()
        return scenario

    scenario = virtual_time.run(run_scenario())
    assert max(one.wait_s for one in scenario.records) <= LIMIT_S + 1e-6
    assert scenario.per_s(30, 60) >= 0.9 * CAPACITY_PER_S / 2
    late = [one for one in scenario.records if one.came_s > 40 and one.refusal is not None]
    assert len([one for one in late if one.wait_s > 0]) <= 0.02 * len(late)
