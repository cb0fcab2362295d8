"""Load reports beat, follow changes, and a slow watcher sees the newest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from engine.core.async_engine import AsyncEngine
from engine.core.messages import EngineLoad, StepCost
from instance.drain import DrainController
from instance.load import LoadReporter, changed_significantly
from router.pools.instance_info import LoadReport
from serving.limits import OpenCalls
from serving.server import Health
from tests.instance.scripted_core import ScriptedCore
from tests.waiting import until


@asynccontextmanager
async def reporting(interval_s: float) -> AsyncIterator[tuple[ScriptedCore, AsyncEngine, LoadReporter]]:
    core = ScriptedCore()
    engine = core.engine()
    drain = DrainController(Health(), OpenCalls(max_per_peer=1, max_in_all=1), engine)
    reporter = LoadReporter(engine, instance_epoch="e", drain=drain, interval_s=interval_s)
    task = asyncio.create_task(reporter.report_until_cancelled())
    try:
        yield core, engine, reporter
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.shutdown()


def test_a_change_that_moves_a_pick_is_much() -> None:
    load = EngineLoad(free_blocks=100, num_running=1)
    assert not changed_significantly(load, EngineLoad(free_blocks=97, running_blocks=3, num_running=1))
    assert changed_significantly(load, EngineLoad(free_blocks=90, running_blocks=10, num_running=1))
    assert changed_significantly(load, EngineLoad(free_blocks=100, num_running=2))


async def test_reports_beat_while_nothing_changes_and_the_silence_grows() -> None:
    async with reporting(0.03) as (_, _, reporter), aclosing(reporter.watch()) as watch:
        reports = [await anext(watch) for _ in range(4)]
    sequence = [report.sequence for report in reports]
    assert sequence == list(range(sequence[0], sequence[0] + 4))
    assert all(report.instance_epoch == "e" for report in reports)
    silences = [report.core_silence_s for report in reports]
    assert silences == sorted(silences)


async def test_a_pause_of_this_process_is_not_reported_as_silence_of_the_core() -> None:
    """All processes of a paused machine run again together, and the core's next message is still to come."""
    async with reporting(0.03) as (_, engine, reporter), aclosing(reporter.watch()) as watch:
        first = await anext(watch)
        time.sleep(2.0)
        while (report := await anext(watch)).sequence == first.sequence:
            pass
        assert report.core_silence_s < 1.5
        assert report.load_age_s > 1.9
        await until(lambda: engine.core_silence_s > 1.5)  # it counts again


async def test_a_watcher_gets_reports_as_often_as_it_needs_them() -> None:
    async with reporting(3600.0) as (_, _, reporter), aclosing(reporter.watch(0.03)) as watch:
        sequence = [(await anext(watch)).sequence for _ in range(4)]
    assert sequence == list(range(sequence[0], sequence[0] + 4))


async def test_a_change_is_reported_long_before_the_beat() -> None:
    async with reporting(10.0) as (core, _, reporter), aclosing(reporter.watch()) as watch:
        await anext(watch)
        core.emit(num_waiting=3)
        async with asyncio.timeout(5):
            assert (await anext(watch)).num_waiting == 3


async def test_a_slow_watcher_skips_to_the_newest_report() -> None:
    async with reporting(10.0) as (core, _, reporter), aclosing(reporter.watch()) as watch:
        first = await anext(watch)
        for num_running in range(1, 6):
            core.emit(num_running=num_running)
            await until(lambda wanted=num_running: reporter.latest.num_running == wanted)  # type: ignore[misc]
        assert (await anext(watch)).num_running == 5
        assert reporter.latest.sequence == first.sequence + 5


async def test_a_report_has_what_a_step_costs_once_it_is_known() -> None:
    async with reporting(10.0) as (core, _, reporter):
        assert not reporter.latest.HasField("step_cost")
        assert LoadReport.from_wire(reporter.latest).step_cost is None
        cost = StepCost(0.003, 0.0006, 0.0002)
        core.emit(num_running=3, num_prefilling=1, num_uncomputed_tokens=900, step_cost=cost)
        await until(lambda: reporter.latest.num_running == 3)
        report = LoadReport.from_wire(reporter.latest)
        assert (report.num_prefilling, report.num_uncomputed_tokens, report.step_cost) == (1, 900, cost)
