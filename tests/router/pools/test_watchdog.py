"""When an instance counts as gone: the figures, and what a late clock means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from router.pools.watchdog import Watchdog
from tests.waiting import until

TIMEOUT_S = 0.5


@dataclass
class Told:
    """What a watchdog said, and when."""

    silent_s: list[float] = field(default_factory=list)
    wedged_s: list[float] = field(default_factory=list)


@asynccontextmanager
async def watching(beat_timeout_s: float = TIMEOUT_S) -> AsyncIterator[tuple[Watchdog, Told]]:
    told = Told()
    watchdog = Watchdog(
        beat_timeout_s,
        TIMEOUT_S,
        on_silent=lambda: told.silent_s.append(time.monotonic()),
        on_wedged=lambda: told.wedged_s.append(time.monotonic()),
    )
    watchdog.begin()
    yield watchdog, told
    watchdog.stop()


async def test_an_instance_that_reports_is_let_be_and_one_that_stops_is_told_once() -> None:
    async with watching() as (watchdog, told):
        for _ in range(2 * int(TIMEOUT_S / 0.05)):
            watchdog.beat(0.0, 0.0)
            await asyncio.sleep(0.05)
        assert not told.silent_s
        watchdog.beat(0.0, 0.0)
        last_s = time.monotonic()
        await until(lambda: told.silent_s)
        assert told.silent_s[0] - last_s >= TIMEOUT_S - 0.01
        await asyncio.sleep(TIMEOUT_S)
        assert len(told.silent_s) == 1
        assert not told.wedged_s


async def test_an_instance_that_never_reports_is_silent() -> None:
    async with watching(0.1) as (_, told):
        await until(lambda: told.silent_s)


async def test_nothing_is_told_after_the_stop() -> None:
    async with watching(0.1) as (watchdog, told):
        watchdog.stop()
        await asyncio.sleep(0.5)
        assert not told.silent_s


async def test_a_wedged_core_is_told_once_until_it_has_spoken_again() -> None:
    async with watching(beat_timeout_s=60.0) as (watchdog, told):
        spoke_s = time.monotonic()
        while not told.wedged_s:
            watchdog.beat(time.monotonic() - spoke_s, 0.0)
            await asyncio.sleep(0.05)
        assert told.wedged_s[0] - spoke_s >= TIMEOUT_S - 0.01
        for _ in range(4):
            watchdog.beat(time.monotonic() - spoke_s, 0.0)
            await asyncio.sleep(0.05)
        assert watchdog.is_wedged
        assert len(told.wedged_s) == 1
        watchdog.beat(0.0, 0.0)
        assert not watchdog.is_wedged
        await until(lambda: len(told.wedged_s) == 2)
        assert not told.silent_s


async def test_a_core_that_fell_silent_after_a_report_is_told_without_another_report() -> None:
    async with watching(beat_timeout_s=60.0) as (watchdog, told):
        watchdog.beat(TIMEOUT_S - 0.1, 0.0)
        await until(lambda: told.wedged_s)


async def test_a_core_that_is_silent_when_first_heard_of_is_told_at_once() -> None:
    async with watching(beat_timeout_s=60.0) as (watchdog, told):
        watchdog.beat(10.0, 0.0)
        assert watchdog.is_wedged
        await until(lambda: told.wedged_s)


async def test_a_step_that_takes_as_long_as_predicted_is_no_wedge() -> None:
    async with watching(beat_timeout_s=60.0) as (watchdog, told):
        watchdog.beat(4.5, step_s=1.0)  # five of them
        assert not watchdog.is_wedged
        watchdog.beat(5.1, step_s=1.0)
        assert watchdog.is_wedged
        await until(lambda: told.wedged_s)


@pytest.mark.parametrize("beat_waits", [True, False])
async def test_a_router_that_was_held_up_itself_looks_once_more(beat_waits: bool) -> None:
    async with watching() as (watchdog, told):
        watchdog.beat(0.0, 0.0)
        time.sleep(3 * TIMEOUT_S)  # nothing runs in this process; reports wait in its buffers
        await asyncio.sleep(0.01)  # by now the timer has gone off
        assert not told.silent_s
        if beat_waits:
            watchdog.beat(0.0, 0.0)
            await asyncio.sleep(TIMEOUT_S / 2)
            assert not told.silent_s
        await until(lambda: told.silent_s)
