"""When an instance counts as gone: the figures, and what a late clock means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from router.pools.instance import FailureDetector
from tests.waiting import until

TIMEOUT_S = 0.5


@dataclass
class Reported:
    """What a detector has reported, and when."""

    silent_s: list[float] = field(default_factory=list)
    wedged_s: list[float] = field(default_factory=list)


@asynccontextmanager
async def watching(report_timeout_s: float = TIMEOUT_S) -> AsyncIterator[tuple[FailureDetector, Reported]]:
    reported = Reported()
    detector = FailureDetector(
        report_timeout_s,
        TIMEOUT_S,
        on_silent=lambda: reported.silent_s.append(time.monotonic()),
        on_wedged=lambda: reported.wedged_s.append(time.monotonic()),
    )
    detector.start()
    yield detector, reported
    detector.stop()


async def test_an_instance_that_stops_reporting_is_detected_once() -> None:
    async with watching() as (detector, reported):
        for _ in range(2 * int(TIMEOUT_S / 0.05)):
            detector.report_received(0.0, 0.0)
            await asyncio.sleep(0.05)
        assert not reported.silent_s
        detector.report_received(0.0, 0.0)
        last_s = time.monotonic()
        await until(lambda: reported.silent_s)
        assert reported.silent_s[0] - last_s >= TIMEOUT_S - 0.01
        await asyncio.sleep(TIMEOUT_S)
        assert len(reported.silent_s) == 1
        assert not reported.wedged_s


async def test_an_instance_that_never_reports_is_silent() -> None:
    async with watching(0.1) as (_, reported):
        await until(lambda: reported.silent_s)


async def test_nothing_is_detected_after_the_stop() -> None:
    async with watching(0.1) as (detector, reported):
        detector.stop()
        await asyncio.sleep(0.5)
        assert not reported.silent_s


async def test_a_wedged_core_is_detected_once_until_it_has_reported_again() -> None:
    async with watching(report_timeout_s=60.0) as (detector, reported):
        spoke_s = time.monotonic()
        while not reported.wedged_s:
            detector.report_received(time.monotonic() - spoke_s, 0.0)
            await asyncio.sleep(0.05)
        assert reported.wedged_s[0] - spoke_s >= TIMEOUT_S - 0.01
        for _ in range(4):
            detector.report_received(time.monotonic() - spoke_s, 0.0)
            await asyncio.sleep(0.05)
        assert (detector.is_wedged, len(reported.wedged_s)) == (True, 1)
        detector.report_received(0.0, 0.0)
        assert not detector.is_wedged
        await until(lambda: len(reported.wedged_s) == 2)
        assert not reported.silent_s


async def test_a_core_that_fell_silent_after_a_report_is_detected_without_another_report() -> None:
    async with watching(report_timeout_s=60.0) as (detector, reported):
        detector.report_received(TIMEOUT_S - 0.1, 0.0)
        await until(lambda: reported.wedged_s)


async def test_a_core_that_is_silent_in_its_first_report_is_detected_at_once() -> None:
    async with watching(report_timeout_s=60.0) as (detector, reported):
        detector.report_received(10.0, 0.0)
        assert detector.is_wedged
        await until(lambda: reported.wedged_s)


async def test_a_step_that_takes_as_long_as_predicted_is_no_wedge() -> None:
    async with watching(report_timeout_s=60.0) as (detector, reported):
        detector.report_received(4.5, step_s=1.0)  # five of them
        assert (detector.is_wedged, len(reported.wedged_s)) == (False, 0)
        detector.report_received(5.1, step_s=1.0)
        assert detector.is_wedged
        await until(lambda: reported.wedged_s)


@pytest.mark.parametrize("beat_waits", [True, False])
async def test_a_router_that_was_held_up_itself_checks_once_more(beat_waits: bool) -> None:
    async with watching() as (detector, reported):
        detector.report_received(0.0, 0.0)
        time.sleep(3 * TIMEOUT_S)  # nothing runs in this process; reports wait in its buffers
        assert not detector.is_wedged, "a request that comes now must not be rejected"
        await asyncio.sleep(0.01)  # by now the timer has gone off
        assert not reported.silent_s
        if beat_waits:
            detector.report_received(0.0, 0.0)
            await asyncio.sleep(TIMEOUT_S / 2)
            assert not reported.silent_s
        await until(lambda: reported.silent_s)
