"""Waits on an event loop, and how often a channel to a name that reaches no peer is replaced."""

from __future__ import annotations

import asyncio

import pytest

from serving.waits import Redial, end_tasks, is_cancelling, wait_at_most, within


class TooSlow(Exception):
    """What a time-out is to raise."""


async def test_the_end_of_the_time_out_raises_the_given_error() -> None:
    with pytest.raises(TooSlow):
        async with within(asyncio.timeout(0.0), TooSlow):
            await asyncio.Event().wait()


async def test_a_time_out_that_is_raised_inside_stays_one() -> None:
    with pytest.raises(TimeoutError):
        async with within(asyncio.timeout(None), TooSlow):
            raise TimeoutError


async def test_a_wait_for_an_event_says_whether_it_is_set() -> None:
    event = asyncio.Event()
    assert not await wait_at_most(event, 0.0)
    event.set()
    assert await wait_at_most(event, None)


async def test_a_task_is_being_cancelled_only_if_it_is_cancelled_itself() -> None:
    seen: list[bool] = []

    async def wait_for(future: asyncio.Future[None]) -> None:
        try:
            await future
        except asyncio.CancelledError:
            seen.append(is_cancelling())

    futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
    tasks = [asyncio.create_task(wait_for(future)) for future in futures]
    await asyncio.sleep(0)
    futures[0].cancel()
    await tasks[0]
    await end_tasks(tasks[1])
    assert seen == [False, True]


async def test_tasks_end_in_whatever_way() -> None:
    async def fail() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise TooSlow

    tasks = [asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(fail())]
    await asyncio.sleep(0)
    await end_tasks(*tasks)
    assert all(task.done() for task in tasks)


def replaced_s(redial: Redial, times_s: range) -> list[int]:
    """When it is, of a channel that fails at all these times."""
    return [now_s for now_s in times_s if redial.is_due(now_s, is_ready=False, is_failed=True)]


def test_in_an_outage_each_replacement_waits_twice_as_long() -> None:
    assert replaced_s(Redial(1.0), range(100)) == [0, 1, 3, 7, 15, 31, 61, 91]


def test_a_channel_that_connects_is_not_replaced() -> None:
    assert not Redial(1.0).is_due(0.0, is_ready=False, is_failed=False)


def test_the_first_wait_returns_once_a_peer_is_reached() -> None:
    redial = Redial(1.0)
    assert replaced_s(redial, range(16)) == [0, 1, 3, 7, 15]
    assert not redial.is_due(15.5, is_ready=True, is_failed=False)
    assert replaced_s(redial, range(16, 20)) == [16, 18]


def test_the_first_wait_returns_where_the_end_of_an_outage_was_not_seen() -> None:
    """Calls alone look at the channel: between two outages there may be none, or one long stream."""
    redial = Redial(1.0)
    assert replaced_s(redial, range(100)) == [0, 1, 3, 7, 15, 31, 61, 91]
    assert replaced_s(redial, range(152, 160)) == [152, 153, 155, 159]
