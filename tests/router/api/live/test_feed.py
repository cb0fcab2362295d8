"""Watching: one sampling for all watchers, none without, and a slow watcher that catches up."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import aclosing
from typing import Any

import pytest

from router.api.live.feed import LiveFeed
from router.api.live.state import Json, Reading
from tests.process_logs import ProcessLogs
from tests.router.api.live.merge_patch import patched
from tests.router.api.live.test_state import WALL_S, reading
from tests.waiting import until


class Source:
    """Readings that count themselves."""

    def __init__(self) -> None:
        self.num_read = 0

    async def read(self) -> Reading:
        self.num_read += 1
        return reading(float(self.num_read), router={"number": self.num_read})


def applied(state: Json, event: bytes) -> Json:
    [(kind, content)] = json.loads(event).items()
    return content if kind == "snapshot" else patched(state, content)


async def test_watchers_share_one_sampling_that_ends_with_the_last_of_them() -> None:
    source = Source()
    feed = LiveFeed(source.read, interval_s=0.01)
    assert not feed.is_sampling
    before = asyncio.all_tasks()
    async with aclosing(feed.watch()) as first, aclosing(feed.watch()) as second:
        states: list[Json] = [{}, {}]
        for _ in range(5):
            for index, watch in enumerate((first, second)):
                states[index] = applied(states[index], await anext(watch))
        for state in states:
            assert state["at"] == WALL_S + state["router"]["number"], "all of it is of one reading"
        assert states[1]["router"]["number"] <= source.num_read, "one reading for both"
    assert not feed.is_sampling
    await until(lambda: asyncio.all_tasks() == before)
    num_read = source.num_read
    async with aclosing(feed.watch()) as again:
        assert "snapshot" in json.loads(await anext(again))
        assert source.num_read == num_read + 1


async def test_a_slow_watcher_gets_a_snapshot_and_others_patches() -> None:
    source = Source()
    feed = LiveFeed(source.read, interval_s=0.01)
    async with aclosing(feed.watch()) as watch:
        state = applied({}, await anext(watch))
        event = await anext(watch)
        assert "patch" in json.loads(event)
        state = applied(state, event)
        seen = source.num_read
        await until(lambda: source.num_read >= seen + 3)
        event = await anext(watch)
        assert "snapshot" in json.loads(event)
        assert applied(state, event)["router"]["number"] > seen


async def test_a_closed_feed_ends_its_watches_and_takes_no_others() -> None:
    feed = LiveFeed(Source().read, interval_s=60.0)
    watch = feed.watch()
    await anext(watch)
    waiting = asyncio.ensure_future(anext(watch, None))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting is None
    assert [event async for event in feed.watch()] == []


async def test_a_reading_that_fails_ends_the_watches_and_is_logged(
    caplog: pytest.LogCaptureFixture, process_logs: ProcessLogs
) -> None:
    async def read() -> Any:
        raise RuntimeError("no pools")

    feed = LiveFeed(read)
    with caplog.at_level(logging.ERROR), process_logs.expected("no pools"):
        assert [event async for event in feed.watch()] == []
    assert "no pools" in caplog.text
    assert not feed.is_sampling


async def test_a_reading_that_fails_ends_every_watch_though_another_begins_at_once(process_logs: ProcessLogs) -> None:
    source, begun = Source(), list[asyncio.Future[bytes]]()

    async def read() -> Reading:
        if source.num_read == 1:
            begun.append(asyncio.ensure_future(anext(second)))
            source.num_read += 1
            raise RuntimeError("no pools")
        return await source.read()

    feed = LiveFeed(read, interval_s=0.01)
    async with aclosing(feed.watch()) as first, aclosing(feed.watch()) as second:
        assert json.loads(await anext(first))["snapshot"]["router"] == {"number": 1}
        with process_logs.expected("no pools"):
            assert await anext(first, None) is None
        assert json.loads(await begun[0])["snapshot"]["router"] == {"number": 3}
    assert not feed.is_sampling
