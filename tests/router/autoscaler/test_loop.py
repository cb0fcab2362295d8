"""The loop over time: load that rises, jitters, jumps and falls; owners and reports that fail; two routers at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from router.autoscaler.loop import Autoscaler
from router.autoscaler.observation import PoolObservation
from router.autoscaler.settings import PoolPolicy
from router.autoscaler.signals import Demand, demand_of
from router.pools.instance_info import Role
from tests.process_logs import ProcessLogs
from tests.router import virtual_time
from tests.router.autoscaler.builders import settings_of
from tests.router.autoscaler.simulation import (
    PER_INSTANCE,
    Load,
    Owner,
    Simulation,
    autoscaler,
    now,
    resizer_of,
    reversals,
    simulate,
)

INTERVAL_S = 5.0
WINDOW_S = 120.0
SETTINGS = settings_of(
    interval_s=INTERVAL_S,
    prefill={"max_size": 1},
    decode={"max_size": 8, "scale_in_window_s": WINDOW_S, "warm_up_s": 5.0},
)
SEEDS = range(3)
ONE_SEED = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])]
"""The others in `make test-slow`."""


def steps(*parts: tuple[float, float]) -> Load:
    """(until this minute, so many instances' worth of requests)."""
    return lambda at_s: next(worth for minute, worth in parts if at_s < minute * 60) * PER_INSTANCE


def run_loop(
    test: Callable[[Owner, Simulation], Coroutine[Any, Any, None]], load: Load | None = None, size: int = 2
) -> None:
    """`test` in virtual time, with instances that are not scaled yet; little load by default."""

    async def main() -> None:
        owner = Owner({"prefill": 1, "decode": size})
        await test(owner, Simulation(owner, load or steps((math.inf, 0.15)), SETTINGS))

    virtual_time.run(main())


# Load


@pytest.mark.parametrize("seed", ONE_SEED)
@pytest.mark.parametrize("worth", [1.0, 1.3, 2.2, 3.0])
def test_noise_does_not_make_it_flap(seed: int, worth: float) -> None:
    owner = virtual_time.run(simulate(steps((math.inf, worth)), 30, SETTINGS, seed=seed, size=math.ceil(worth / 0.65)))
    times = reversals(owner, math.ceil(worth / 0.65))
    assert not any(later - earlier < WINDOW_S for earlier, later in itertools.pairwise(times))
    assert len(owner.resizes) <= 4


@pytest.mark.parametrize("seed", ONE_SEED)
def test_ramp_spike_and_lull_turn_once_each_and_end_where_the_load_is(seed: int) -> None:
    def load(at_s: float) -> float:
        minute = at_s / 60
        worth = 0.5 + minute * 0.3 if minute < 8 else 5.0 if minute < 12 else 0.2
        return worth * PER_INSTANCE

    owner = virtual_time.run(simulate(load, 30, SETTINGS, seed=seed, size=1))
    sizes = [size for _, role, size in owner.resizes if role == "decode"]
    assert max(sizes) >= 7
    assert sizes[-1] == 1
    assert len(reversals(owner, 1)) == 1
    assert owner.most_at_once == 1


@pytest.mark.parametrize("seed", ONE_SEED)
def test_an_overload_that_persists_is_answered_within_two_intervals(seed: int) -> None:
    start_s = 10 * 60.0
    owner = virtual_time.run(simulate(steps((10, 1.0), (math.inf, 6.0)), 11, SETTINGS, seed=seed))
    first_s, _, size = next(resize for resize in owner.resizes if resize[0] > start_s)
    assert size > 2
    assert first_s - start_s <= 2 * INTERVAL_S


def test_an_instance_that_takes_long_to_start_is_not_asked_for_twice() -> None:
    owner = virtual_time.run(simulate(steps((math.inf, 3.0)), 6, SETTINGS, size=1, start_s=200.0))
    (first_s, _, size), (second_s, _, _), *_ = owner.resizes
    assert size == 2
    assert second_s - first_s >= 200.0 + SETTINGS.decode.warm_up_s


@pytest.mark.parametrize("seed", ONE_SEED)
def test_a_load_that_comes_and_goes_turns_it_at_most_once_per_window(seed: int) -> None:
    def load(at_s: float) -> float:
        return (2.4 if int(at_s / 60) % 2 else 0.3) * PER_INSTANCE

    owner = virtual_time.run(simulate(load, 30, SETTINGS, seed=seed))
    times = reversals(owner, 2)
    assert not any(later - earlier < WINDOW_S for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize(("worth", "waits"), [(2.2, True), (6.0, False)])
def test_load_that_is_back_soon_after_the_pool_has_shrunk_waits_unless_it_is_urgent(worth: float, waits: bool) -> None:
    async def returning(owner: Owner, simulation: Simulation) -> None:
        loop = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(6 * 60.0)
        first_s, second_s = reversals(owner, 2)
        assert (second_s - first_s >= WINDOW_S) == waits
        assert (loop.statuses["decode"].holds["direction"] > 0) == waits
        running.cancel()

    run_loop(returning, steps((1, 2.2), (3.1, 0.2), (math.inf, worth)))


# Reports


def test_a_blackhole_of_the_metrics_for_a_minute_resizes_nothing() -> None:
    async def blackhole(owner: Owner, simulation: Simulation) -> None:
        loop = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(100.0)
        simulation.blackout = True
        before = list(owner.resizes)
        await asyncio.sleep(60.0)
        assert owner.resizes == before
        assert loop.statuses["decode"].holds["missing"] >= 11
        decision = loop.statuses["decode"].decision
        assert decision is not None
        assert "none of 2 instances is warm and reports" in decision.reason
        simulation.blackout = False
        await asyncio.sleep(WINDOW_S - INTERVAL_S)
        assert owner.resizes == before  # the window has begun anew
        await asyncio.sleep(4 * INTERVAL_S)
        assert owner.of["decode"] == 1
        running.cancel()

    run_loop(blackhole)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_metrics_that_come_and_go_resize_at_most_once_per_cool_down(every: int) -> None:
    async def flapping(owner: Owner, simulation: Simulation) -> None:
        loop = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(loop.run())
        for beat in range(200):
            simulation.blackout = beat % every == 0
            await asyncio.sleep(INTERVAL_S)
        times = [at_s for at_s, _, _ in owner.resizes]
        cool_down_s = SETTINGS.decode.cool_down_s
        assert all(later - earlier >= cool_down_s for earlier, later in itertools.pairwise(times))
        running.cancel()

    run_loop(flapping, steps((4, 2.6), (8, 0.2), (12, 3.0), (math.inf, 0.1)))


def test_the_demand_of_an_observation_is_computed_once_however_long_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Role, float]] = []

    def counted(observation: PoolObservation, policy: PoolPolicy) -> Demand:
        asked.append((observation.role, observation.at_s))
        return demand_of(observation, policy)

    async def idle(owner: Owner, simulation: Simulation) -> None:
        running = asyncio.create_task(autoscaler(owner, simulation, SETTINGS).run())
        await asyncio.sleep(3 * WINDOW_S)
        running.cancel()

    monkeypatch.setattr("router.autoscaler.decide.demand_of", counted)
    run_loop(idle)
    assert len(asked) > 2 * WINDOW_S / INTERVAL_S
    assert len(set(asked)) == len(asked)


# The owner of the instances


def test_an_owner_that_does_not_answer_is_asked_less_and_less_and_mentioned_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing(owner: Owner, simulation: Simulation) -> None:
        loop = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(2 * INTERVAL_S)
        owner.failure, owner.num_asked = "the stack's socket is gone", 0
        await asyncio.sleep(300.0)
        assert 3 < owner.num_asked < 12  # 60 intervals
        assert (loop.to_wire("decode").reason, loop.leads) == ("the stack's socket is gone", False)
        owner.failure = None
        await asyncio.sleep(120.0)
        assert loop.leads
        assert loop.to_wire("decode").reason != "the stack's socket is gone"
        running.cancel()

    with caplog.at_level(logging.INFO, logger="router.autoscaler.loop"):
        run_loop(failing)
    assert [record.getMessage() for record in caplog.records if record.name == "router.autoscaler.loop"] == [
        "autoscaler: reading the pools' sizes from their owner failed: the stack's socket is gone",
        "autoscaler recovered: reading the pools' sizes from their owner",
    ]


def test_an_unexpected_exception_does_not_end_the_loop(
    caplog: pytest.LogCaptureFixture, process_logs: ProcessLogs
) -> None:
    async def failing(owner: Owner, simulation: Simulation) -> None:
        loop = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(loop.run())
        owner.failure = ValueError("a value that was not expected")
        await asyncio.sleep(300.0)
        assert 3 < owner.num_asked < 12  # 60 intervals
        assert loop.to_wire("decode").reason == "ValueError: a value that was not expected"
        assert loop.num_failures == owner.num_asked
        owner.failure = None
        await asyncio.sleep(120.0)
        assert loop.leads
        assert not running.done()
        running.cancel()

    caplog.set_level(logging.INFO, logger="router.autoscaler.loop")
    with process_logs.expected("a value that was not expected"):
        run_loop(failing)
    records = [record for record in caplog.records if record.name == "router.autoscaler.loop"]
    assert [(record.getMessage(), record.exc_info is not None) for record in records] == [
        ("autoscaler: a step failed: ValueError: a value that was not expected", True),
        ("autoscaler recovered: a step", False),
    ]


def test_a_pool_that_cannot_be_resized_does_not_hold_up_the_other() -> None:
    """Where one is short of memory, the other one may have to shrink first."""
    settings = settings_of(interval_s=INTERVAL_S, prefill={"min_size": 2, "max_size": 2}, decode={"max_size": 8})

    async def refusing(owner: Owner, simulation: Simulation) -> None:
        owner.refused = "prefill"
        loop = autoscaler(owner, simulation, settings)
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(2 * settings.decode.scale_in_window_s)
        assert owner.of == {"prefill": 1, "decode": 1}
        assert loop.to_wire("prefill").reason.endswith("; no memory for 2 instances")
        owner.refused = None
        await asyncio.sleep(120.0)
        assert owner.of["prefill"] == 2
        running.cancel()

    run_loop(refusing)


def test_an_owner_that_hangs_holds_nothing_up_for_ever() -> None:
    async def hanging(owner: Owner, simulation: Simulation) -> None:
        loop = autoscaler(owner, simulation, SETTINGS)
        owner.delay_s = 10_000.0
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(200.0)
        assert owner.resizes == []
        assert owner.most_at_once == 1
        assert loop.to_wire("decode").reason.endswith("; no answer within 15 s")
        owner.delay_s = 0.0
        await asyncio.sleep(200.0)
        assert owner.of["decode"] > 2
        running.cancel()

    run_loop(hanging, steps((math.inf, 2.5)))


def test_an_operator_s_resize_counts_as_a_change_and_is_gone_on_from() -> None:
    async def by_hand(owner: Owner, simulation: Simulation) -> None:
        resizer = resizer_of(owner)
        running = asyncio.create_task(autoscaler(owner, simulation, SETTINGS, resizer=resizer).run())
        await asyncio.sleep(WINDOW_S - 2 * INTERVAL_S)  # almost long enough to shrink to one
        await resizer.resize({"decode": 4}, cause="operator", reason="a busy day ahead")
        await asyncio.sleep(WINDOW_S - INTERVAL_S)
        assert owner.of["decode"] == 4
        await asyncio.sleep(4 * INTERVAL_S)
        assert owner.of["decode"] == 2
        running.cancel()

    run_loop(by_hand)


def test_what_another_router_has_resized_counts_as_a_change_too() -> None:
    async def elsewhere(owner: Owner, simulation: Simulation) -> None:
        running = asyncio.create_task(autoscaler(owner, simulation, SETTINGS).run())
        await asyncio.sleep(WINDOW_S - 2 * INTERVAL_S)
        owner.of["decode"] = 3
        await asyncio.sleep(WINDOW_S - INTERVAL_S)
        assert owner.resizes == []
        await asyncio.sleep(4 * INTERVAL_S)
        assert len(owner.resizes) == 1
        running.cancel()

    run_loop(elsewhere)


# Several routers


def test_of_two_routers_one_leads_and_the_other_takes_over_when_it_dies() -> None:
    async def two(owner: Owner, simulation: Simulation) -> None:
        loops = {name: autoscaler(owner, simulation, SETTINGS, name) for name in ("one", "two")}
        running = {name: asyncio.create_task(loop.run()) for name, loop in loops.items()}
        await asyncio.sleep(60.0)
        assert owner.leads == ["one"]
        assert [loop.leads for loop in loops.values()] == [True, False]
        assert owner.of["decode"] > 1
        changes = [loop.statuses["decode"].changes.total() for loop in loops.values()]
        assert changes[0] == len(owner.resizes) > 0
        assert changes[1] == 0
        assert loops["two"].statuses["decode"].holds["not_leading"] > 0

        running["one"].cancel()
        before = len(owner.resizes)
        await asyncio.sleep(SETTINGS.lead_ttl_s + INTERVAL_S)
        assert owner.leads == ["one", "two"]
        await asyncio.sleep(10 * 60.0)
        assert owner.of["decode"] == 1
        assert loops["two"].statuses["decode"].changes.total() == len(owner.resizes) - before > 0
        running["two"].cancel()

    run_loop(two, steps((3, 2.5), (math.inf, 0.2)), size=1)


def test_a_router_leads_while_it_renews_its_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def renewing(owner: Owner, simulation: Simulation) -> None:
        led: list[bool] = []
        take_lead = owner.take_lead

        async def slowly(holder: str, ttl_s: float) -> bool:
            await asyncio.sleep(1.0)
            led.append(loop.leads)
            return await take_lead(holder, ttl_s)

        monkeypatch.setattr(owner, "take_lead", slowly)
        loop = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(loop.run())
        await asyncio.sleep(4 * INTERVAL_S)
        assert led == [False, True, True, True]
        running.cancel()

    run_loop(renewing)


def test_a_router_that_was_held_up_longer_than_its_lead_resizes_nothing() -> None:
    async def held_up(owner: Owner, simulation: Simulation) -> None:
        steps_taken = 0

        def slow_clock() -> float:
            return now() + (20.0 if steps_taken else 0.0)

        def observation(sizes: Mapping[Role, int]) -> dict[Role, PoolObservation]:
            nonlocal steps_taken
            observations = simulation.observe(sizes)
            steps_taken += 1
            return observations

        late = Autoscaler(resizer_of(owner), observation, SETTINGS, holder="late", clock=slow_clock)
        owner.of["decode"] = 20  # outside of the bounds: it would resize at once
        await late.step()
        assert owner.resizes == []
        assert late.statuses["decode"].holds["not_leading"] == 1

    run_loop(held_up)


# Operators and clusters that are full


def test_what_has_no_room_is_ordered_once_and_again_when_there_is_some() -> None:
    async def test(owner: Owner, simulation: Simulation) -> None:
        scaler = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(scaler.run())
        owner.lack = "no node takes 1 of 2 pods: 0/3 nodes are available"
        await asyncio.sleep(30 * 60)
        assert owner.resizes == []
        status = scaler.statuses["decode"]
        assert "0/3 nodes are available" in status.reason
        assert status.holds["no_room"] > 0
        owner.lack = None
        await asyncio.sleep(60)
        assert owner.of["decode"] > 2
        running.cancel()

    run_loop(test, load=steps((math.inf, 3.0)))


def test_a_pause_holds_every_size_until_it_ends() -> None:
    async def test(owner: Owner, simulation: Simulation) -> None:
        scaler = autoscaler(owner, simulation, SETTINGS)
        running = asyncio.create_task(scaler.run())
        owner.pause = "paused by the annotation"
        await asyncio.sleep(10 * 60)
        assert owner.resizes == []
        assert scaler.statuses["decode"].holds["paused"] > 0
        assert scaler.num_failures == 0
        owner.pause = None
        await asyncio.sleep(60)
        assert owner.of["decode"] > 2
        running.cancel()

    run_loop(test, load=steps((math.inf, 3.0)))
