"""An open-loop load on one event loop, and a sweep of it over request rates.

Requests are sent when they are due, whether or not earlier ones have been answered.

    planned ─due─▶ held (max_concurrency) ─▶ sent ─on_tokens…─▶ ended: succeeded | failed | refused
                      └────────── stop ──────────┴─────────────▶ failed, INTERRUPTED

A request that was never sent has no record. The concurrency limit delays a held request (`held_s`); any other delay
between due and sent is caused by this process (`lag_s`), and the figures are then about the load, not the endpoint.

    planning all rates ─ stop ─▶ no Point
    for each rate   warming up ─all ended─▶ idle (pause) ─▶ running ─all ended─▶ Point
                        └─ none succeeded ─▶ WarmUpFailed       └─ stop ─▶ Point of the requests so far, the last one
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.errors import without_request_id
from serving.waits import end_tasks, wait_at_most
from tandem.bench.serve.endpoint import INTERRUPTED, Endpoint, PlannedRequest, RequestFailed, RequestRecord
from tandem.bench.serve.report import Objectives, Point, summarise
from tandem.bench.serve.workload import Workload

_LAG_INTERVAL_S = 0.01
_WARM_UP_CONCURRENCY = 4
_PLANNED_AT_ONCE = 16


@dataclass(slots=True)
class Progress:
    in_flight: int = 0
    done: int = 0
    """Ended, with or without success."""
    failed: int = 0
    """Of those, without success; refused ones too."""


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None = None,
    timeout_s: float = 600.0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    stop: asyncio.Event | None = None,
) -> list[RequestRecord]:
    """Sends `requests`, in the order of `at_s`, and waits until all have ended. Returns a record of each that was sent.

    At most `max_concurrency` are in flight; the next one waits, in its order. A request that takes longer than
    `timeout_s` fails with the status TIMEOUT. `on_progress` is called whenever a request is sent or ends. Setting
    `stop` ends the load at once: requests in flight are cancelled and recorded as INTERRUPTED. Cancelling the call
    cancels them too, without records.
    """
    places = asyncio.Semaphore(max_concurrency or sys.maxsize)
    in_order = sorted(requests, key=lambda request: request.at_s)
    load = _Load(endpoint, in_order, places, timeout_s, on_progress)
    sending = asyncio.create_task(load.send_all())
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(stopping, sending)
    if not sending.cancelled():
        sending.result()
    return load.records


@dataclass(slots=True)
class _Load:
    """One run: owns the records and the clock."""

    endpoint: Endpoint
    requests: Sequence[PlannedRequest]
    places: asyncio.Semaphore
    """One for each request that may be in flight."""
    timeout_s: float
    on_progress: Callable[[Progress], None]
    progress: Progress = field(default_factory=Progress)
    records: list[RequestRecord] = field(default_factory=list)
    started_s: float = field(default_factory=time.perf_counter)

    async def send_all(self) -> None:
        """Returns when every request has ended; cancellation cancels all requests."""
        async with asyncio.TaskGroup() as group:
            held_until_s = 0.0  # until then a request waited for a place; later ones are not sent before it
            for request in self.requests:
                await asyncio.sleep(max(0.0, request.at_s - self._now_s()))
                had_to_wait = self.places.locked()
                await self.places.acquire()
                held_until_s = self._now_s() if had_to_wait else held_until_s
                group.create_task(self._send(request, held_s=max(0.0, held_until_s - request.at_s)))

    async def _send(self, request: PlannedRequest, *, held_s: float) -> None:
        record = RequestRecord(
            request.at_s, self._now_s(), len(request.prompt_token_ids), request.max_tokens, held_s=held_s
        )
        self.records.append(record)
        self.progress.in_flight += 1
        self.on_progress(self.progress)
        try:
            await self._follow(request, record)
        finally:
            record.ended_s = self._now_s()
            self.places.release()
            self.progress.in_flight -= 1
            self.progress.done += 1
            self.progress.failed += not record.succeeded
            self.on_progress(self.progress)

    async def _follow(self, request: PlannedRequest, record: RequestRecord) -> None:
        def on_tokens(count: int) -> None:
            record.token_s.extend([self._now_s()] * count)

        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self.endpoint.generate(request, on_tokens)
        except RequestFailed as error:
            _fail(record, error.status, error.message)
            record.refused = error.refused
        except TimeoutError:
            _fail(record, "TIMEOUT", f"did not end within {self.timeout_s:g} s")
        except asyncio.CancelledError:
            _fail(record, INTERRUPTED, "the load was stopped")
            raise
        else:
            record.finish_reason = answer.finish_reason
            record.num_reported_tokens = answer.num_reported_tokens
            record.num_cached_tokens, record.num_stored_tokens = answer.num_cached_tokens, answer.num_stored_tokens
            if answer.num_prompt_tokens is not None:
                record.num_prompt_tokens = answer.num_prompt_tokens
            if not record.token_s:
                _fail(record, "NO TOKENS", f"the answer ended ({answer.finish_reason or 'no reason'}) without a token")

    def _now_s(self) -> float:
        return time.perf_counter() - self.started_s


def _fail(record: RequestRecord, status: str, message: str) -> None:
    record.status, record.error = status, f"{status}: {message}"


@contextlib.asynccontextmanager
async def loop_lags() -> AsyncIterator[list[float]]:
    """How late this process's event loop wakes up, and so how late it reads tokens, for every 10 ms; seconds.

    A stall of 50 ms has the samples 50, 40, 30, 20 and 10 ms, those of the wake-ups that were due meanwhile: with one
    alone, percentiles would hide stalls, the longer the better.
    """
    lags_s: list[float] = []

    async def watch() -> None:
        while True:
            slept_from_s = time.perf_counter()
            await asyncio.sleep(_LAG_INTERVAL_S)
            lag_s = max(0.0, time.perf_counter() - slept_from_s - _LAG_INTERVAL_S)
            lags_s.extend(lag_s - missed * _LAG_INTERVAL_S for missed in range(int(lag_s / _LAG_INTERVAL_S) + 1))

    task = asyncio.create_task(watch())
    try:
        yield lags_s
    finally:
        await end_tasks(task)


class WarmUpFailed(Exception):
    """No request of a warm-up succeeded; the message has their errors."""

    def __init__(self, message: str, points: list[Point]) -> None:
        super().__init__(message)
        self.points = points
        """Of the previous rates."""


@dataclass(frozen=True, slots=True)
class Sweep:
    rates: Sequence[float | None]
    """Requests per second; inf: all at once; None: as in the trace."""
    objectives: Objectives
    max_concurrency: int | None
    timeout_s: float
    num_warm_up: int
    pause_s: float


class LoadObserver(Protocol):
    """Is notified of the progress of a sweep."""

    def warm_up(self, rate: float | None, num_requests: int) -> None:
        """A warm-up of `num_requests` begins."""

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        """The measured run begins."""

    def progress(self, progress: Progress) -> None:
        """A request was sent or has ended."""

    def end(self, point: Point) -> None:
        """The measured run has ended, by itself or by `stop`."""


async def run_sweep(
    endpoint: Endpoint,
    workload: Workload,
    sweep: Sweep,
    observer: LoadObserver,
    *,
    check: Callable[[Sequence[PlannedRequest]], None],
    stop: asyncio.Event,
) -> list[Point]:
    """A point for each rate. After `stop` there are no further rates, and the last point may have fewer requests.

    `check` raises an error of its own for requests that cannot be sent. Raises WarmUpFailed, TooManyRequests.
    """
    points: list[Point] = []
    for run, rate in enumerate(sweep.rates, 1):  # all of them first: else a later one's mistake costs measured figures
        requests = await _planned(workload.plan(run, rate), stop)
        if stop.is_set():
            return points
        check(requests)
        del requests
    for run, rate in enumerate(sweep.rates, 1):
        requests = await _planned(workload.plan(run, rate), stop)
        if stop.is_set():
            break
        warm_up = await _planned(workload.warm_up(run, sweep.num_warm_up), stop)
        if stop.is_set():
            break
        if warm_up:
            observer.warm_up(rate, len(warm_up))
        tried = await run_load(
            endpoint, warm_up, max_concurrency=_WARM_UP_CONCURRENCY, timeout_s=sweep.timeout_s, stop=stop
        )
        is_stopped = await wait_at_most(stop, sweep.pause_s)
        if tried and not is_stopped and not any(record.succeeded for record in tried):
            errors = "; ".join(dict.fromkeys(without_request_id(record.error) for record in tried))
            raise WarmUpFailed(f"none of the {len(tried)} requests of the warm-up succeeded: {errors}", points)
        if stop.is_set():
            break
        observer.begin(rate, requests)
        async with loop_lags() as lags_s:
            records = await run_load(
                endpoint,
                requests,
                max_concurrency=sweep.max_concurrency,
                timeout_s=sweep.timeout_s,
                on_progress=observer.progress,
                stop=stop,
            )
        points.append(Point(rate, summarise(records, sweep.objectives, lags_s), records))
        observer.end(points[-1])
        if stop.is_set():
            break
    return points


async def _planned(requests: Iterable[PlannedRequest], stop: asyncio.Event) -> list[PlannedRequest]:
    """All of them, or the first ones if `stop` is set meanwhile: the loop goes on and sees signals."""
    planned: list[PlannedRequest] = []
    for request in requests:
        planned.append(request)
        if len(planned) % _PLANNED_AT_ONCE == 0:
            await asyncio.sleep(0)
            if stop.is_set():
                break
    return planned
