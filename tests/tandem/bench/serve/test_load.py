"""The load: when requests are sent, how many at a time, and their records."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from tandem.bench.serve.endpoint import INTERRUPTED, Answer, OnTokens, PlannedRequest, RequestFailed, ServedModel
from tandem.bench.serve.load import Progress, Sweep, loop_lags, run_load, run_sweep
from tandem.bench.serve.report import Objectives

GUARD_S = 30.0


class LocalEndpoint:
    """Answers in this process; `script` is one request's whole course."""

    name = "local"
    counting = "one by one"

    def __init__(self, script: Callable[[PlannedRequest, OnTokens], Awaitable[None]]) -> None:
        self._script = script
        self.order: list[int] = []
        self.in_flight = self.max_in_flight = 0

    async def served_model(self) -> ServedModel:
        return ServedModel("local")

    async def generate(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        self.order.append(request.max_tokens)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            await self._script(request, on_tokens)
        finally:
            self.in_flight -= 1
        return Answer("length")

    async def close(self) -> None:
        pass


async def quick(request: PlannedRequest, on_tokens: OnTokens) -> None:
    for _ in range(request.max_tokens):
        await asyncio.sleep(0)
        on_tokens(1)


async def never(request: PlannedRequest, on_tokens: OnTokens) -> None:
    on_tokens(1)
    await asyncio.Event().wait()


def requests(*at_s: float) -> list[PlannedRequest]:
    """The number of tokens tells them apart: 1, 2, 3…"""
    return [PlannedRequest(one, (5, 6), number) for number, one in enumerate(at_s, 1)]


async def test_every_request_is_sent_not_before_it_is_due_and_in_order() -> None:
    endpoint = LocalEndpoint(quick)
    records = await run_load(endpoint, requests(0.2, 0.0, 0.1))
    assert endpoint.order == [2, 3, 1]
    assert [record.due_s for record in records] == [0.0, 0.1, 0.2]
    for record in records:
        assert record.due_s <= record.sent_s <= record.token_s[0] <= record.token_s[-1] <= record.ended_s
        assert len(record.token_s) == record.max_tokens
        assert (record.finish_reason, record.error, record.num_prompt_tokens) == ("length", "", 2)


async def test_a_slow_answer_delays_no_other_request() -> None:
    answered = asyncio.Event()

    async def first_waits_for_last(request: PlannedRequest, on_tokens: OnTokens) -> None:
        if request.max_tokens == 1:
            await answered.wait()
        elif request.max_tokens == 5:
            answered.set()
        on_tokens(1)

    async with asyncio.timeout(GUARD_S):
        records = await run_load(LocalEndpoint(first_waits_for_last), requests(0, 0, 0, 0, 0))
    assert all(record.succeeded for record in records)


@pytest.mark.parametrize("limit", [1, 3])
async def test_the_limit_on_concurrency_is_never_exceeded_and_is_reached(limit: int) -> None:
    async def brief(request: PlannedRequest, on_tokens: OnTokens) -> None:
        await asyncio.sleep(0.01)
        on_tokens(1)

    endpoint = LocalEndpoint(brief)
    records = await run_load(endpoint, requests(*[0.0] * 12), max_concurrency=limit)
    assert endpoint.max_in_flight == limit
    assert endpoint.order == list(range(1, 13))
    # the last one waited for all others: that was the limit's doing
    assert records[-1].held_s > 0
    assert records[0].held_s == 0


async def test_requests_behind_a_held_one_are_held_too_and_not_late() -> None:
    async def slow(request: PlannedRequest, on_tokens: OnTokens) -> None:
        await asyncio.sleep(0.3)
        on_tokens(1)

    # 1 runs from 0 to 0.3; 2 is held until then, and 3, due at 0.1, could not even be looked at before
    _, second, third = await run_load(LocalEndpoint(slow), requests(0, 0, 0.1), max_concurrency=1)
    assert second.held_s >= 0.3
    assert third.held_s >= 0.5
    assert third.sent_s - third.due_s - third.lag_s == pytest.approx(third.held_s)


async def test_a_busy_loop_is_late_and_reported() -> None:
    async def blocks(request: PlannedRequest, on_tokens: OnTokens) -> None:
        time.sleep(0.2)
        on_tokens(1)

    async with loop_lags() as lags_s:
        await asyncio.sleep(0.05)
        records = await run_load(LocalEndpoint(blocks), requests(0, 0.05))
    assert records[1].lag_s >= 0.1
    assert records[1].held_s == 0
    assert max(lags_s) >= 0.1


async def test_a_stall_counts_for_all_its_time() -> None:
    """One sample for each stall would be 1 of 50 here, and of less frequent ones fewer than a percentile shows."""
    async with loop_lags() as lags_s:
        await asyncio.sleep(0.5)
        time.sleep(1.0)
        await asyncio.sleep(0.05)
    assert sum(lag_s > 0.005 for lag_s in lags_s) >= 95
    longest = lags_s.index(max(lags_s))
    shares = [lags_s[longest] - 0.01 * missed for missed in range(95)]
    assert lags_s[longest : longest + 95] == pytest.approx(shares), "a wake-up late in a stall is less late"


async def test_failures_are_recorded_with_what_came_before_them() -> None:
    async def fails(request: PlannedRequest, on_tokens: OnTokens) -> None:
        if request.max_tokens == 1:
            raise RequestFailed("RESOURCE_EXHAUSTED", "full", refused=True)
        if request.max_tokens == 2:
            on_tokens(2)
            raise RequestFailed("INTERNAL", "gone")
        if request.max_tokens == 4:
            await never(request, on_tokens)

    records = await run_load(LocalEndpoint(fails), requests(0, 0, 0, 0), timeout_s=0.2)
    assert [record.status for record in records] == ["RESOURCE_EXHAUSTED", "INTERNAL", "NO TOKENS", "TIMEOUT"]
    assert [record.refused for record in records] == [True, False, False, False]
    assert [len(record.token_s) for record in records] == [0, 2, 0, 1]
    assert records[1].error == "INTERNAL: gone"
    assert not any(record.succeeded for record in records)


async def test_stop_ends_it_at_once_and_keeps_what_there_is() -> None:
    async def some_never(request: PlannedRequest, on_tokens: OnTokens) -> None:
        await (quick if request.max_tokens == 1 else never)(request, on_tokens)

    endpoint, stop = LocalEndpoint(some_never), asyncio.Event()

    def when_two_are_sent(progress: Progress) -> None:
        if progress.done == 1 and progress.in_flight == 1:
            stop.set()

    async with asyncio.timeout(GUARD_S):
        records = await run_load(endpoint, requests(0, 0, 1e6), on_progress=when_two_are_sent, stop=stop, timeout_s=1e6)
    assert [record.status for record in records] == ["", INTERRUPTED]
    assert records[0].succeeded
    assert len(records[1].token_s) == 1
    assert endpoint.in_flight == 0


async def test_cancellation_cancels_every_request() -> None:
    endpoint = LocalEndpoint(never)
    load = asyncio.create_task(run_load(endpoint, requests(0, 0)))
    async with asyncio.timeout(GUARD_S):
        while endpoint.in_flight < 2:
            await asyncio.sleep(0.01)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
    assert endpoint.in_flight == 0


async def test_a_bug_in_an_endpoint_is_no_failed_request() -> None:
    async def broken(request: PlannedRequest, on_tokens: OnTokens) -> None:
        raise KeyError("a bug")

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await run_load(LocalEndpoint(broken), requests(0))


class EndlessWorkload:
    """Its plan never ends."""

    def plan(self, run: int, rate: float | None) -> Iterator[PlannedRequest]:
        return itertools.repeat(PlannedRequest(0.0, (5, 6), 1))

    def warm_up(self, run: int, count: int) -> list[PlannedRequest]:
        return requests(0)


class NoProgress:
    """A LoadObserver that counts what begins."""

    num_begun = 0

    def warm_up(self, rate: float | None, num_requests: int) -> None:
        self.num_begun += 1

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        self.num_begun += 1

    def progress(self, progress: Progress) -> None:
        pass

    def end(self, point: object) -> None:
        pass


async def test_stop_ends_the_planning() -> None:
    stop, endpoint, observer = asyncio.Event(), LocalEndpoint(quick), NoProgress()
    asyncio.get_running_loop().call_later(0.01, stop.set)
    sweep = Sweep((1.0, 2.0), Objectives(), None, 1.0, 1, 0.0)
    points = await run_sweep(
        endpoint, EndlessWorkload(), sweep, observer, check=lambda planned: pytest.fail("not planned"), stop=stop
    )
    assert (points, endpoint.order, observer.num_begun) == ([], [], 0)


async def test_progress_counts_every_request() -> None:
    async def second_fails(request: PlannedRequest, on_tokens: OnTokens) -> None:
        if request.max_tokens == 2:
            raise RequestFailed("INTERNAL", "gone")
        on_tokens(1)

    seen: list[tuple[int, int, int]] = []
    await run_load(
        LocalEndpoint(second_fails),
        requests(0, 0, 0),
        max_concurrency=1,
        on_progress=lambda now: seen.append((now.in_flight, now.done, now.failed)),
    )
    assert seen == [(1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 2, 1), (1, 2, 1), (0, 3, 1)]
