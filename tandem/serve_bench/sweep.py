"""A sweep over request rates: warm-up, quiet, measured run, one rate after another.

for each rate:  warming up ─all ended─▶ quiet (pause) ─▶ running ─all ended─▶ Point
                     └─ none succeeded ─▶ NothingAnswers       └─ stop ─▶ Point of what there is, and no further rate
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.serve_bench.endpoints import Endpoint
from tandem.serve_bench.load import DEFAULT_TIMEOUT_S, LoopWatch, Progress, run_load
from tandem.serve_bench.records import PlannedRequest, RequestRecord
from tandem.serve_bench.report import Objectives, summarise
from tandem.serve_bench.results import Point
from tandem.serve_bench.workload import Workload

_WARM_UP_CONCURRENCY = 4


class NothingAnswers(Exception):
    """Not one request of a warm-up succeeded; the message says what came back."""

    def __init__(self, message: str, points: list[Point]) -> None:
        super().__init__(message)
        self.points = points
        """Of the rates before."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is run."""

    rates: Sequence[float | None]
    """Requests a second; inf: all at once; None: as in the trace."""
    objectives: Objectives
    max_concurrency: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Of each request."""
    num_warm_up: int = 4
    """Requests before each measured run, which count for nothing."""
    pause_s: float = 1.0
    """Of quiet before each measured run."""


class View(Protocol):
    """Who is told how far it is."""

    def warm_up(self, rate: float | None, num_requests: int) -> None:
        """So many requests are sent before those of `rate`."""

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        """The measured run begins."""

    def progress(self, progress: Progress) -> None:
        """A request of it was sent or has ended."""

    def end(self, point: Point) -> None:
        """It has ended, by itself or by `stop`."""


async def run_sweep(
    endpoint: Endpoint,
    workload: Workload,
    sweep: Sweep,
    view: View,
    *,
    check: Callable[[Sequence[PlannedRequest]], None],
    stop: asyncio.Event,
) -> list[Point]:
    """A point for each rate; those that `stop` left out are missing, and the last one may be of fewer requests.

    `check` raises what it likes for requests that cannot be sent. Raises NothingAnswers.
    """
    points: list[Point] = []
    for run, rate in enumerate(sweep.rates, 1):
        requests = workload.plan(run, rate)
        check(requests)
        warmed = await _warm_up(endpoint, workload.warm_up(run, sweep.num_warm_up), rate, sweep, view, stop)
        if warmed and not stop.is_set() and not any(record.succeeded for record in warmed):
            raise NothingAnswers(_first_errors(warmed), points)
        if stop.is_set():
            break
        view.begin(rate, requests)
        async with LoopWatch() as watch:
            records = await run_load(
                endpoint,
                requests,
                max_concurrency=sweep.max_concurrency,
                timeout_s=sweep.timeout_s,
                on_progress=view.progress,
                stop=stop,
            )
        points.append(Point(rate, summarise(records, sweep.objectives, watch.lags_s), records))
        view.end(points[-1])
        if stop.is_set():
            break
    return points


async def _warm_up(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    rate: float | None,
    sweep: Sweep,
    view: View,
    stop: asyncio.Event,
) -> list[RequestRecord]:
    """Sends `requests`, waits for their ends and for the pause."""
    records: list[RequestRecord] = []
    if requests:
        view.warm_up(rate, len(requests))
        records = await run_load(
            endpoint, requests, max_concurrency=_WARM_UP_CONCURRENCY, timeout_s=sweep.timeout_s, stop=stop
        )
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), sweep.pause_s)
    return records


def _first_errors(records: Sequence[RequestRecord]) -> str:
    errors = "; ".join(dict.fromkeys(record.error for record in records))
    return f"not one of the {len(records)} requests of the warm-up succeeded: {errors}"
