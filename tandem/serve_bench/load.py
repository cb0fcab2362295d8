"""An open-loop load on one event loop: requests are sent when they are due, whether or not others have been answered.

    planned ─due─▶ held (max_concurrency) ─▶ sent ─on_tokens…─▶ ended: succeeded | failed | refused
                      └────────── stop ──────────┴─────────────▶ failed, INTERRUPTED

A request that was never sent has no record. One that is held is late by its own limit (`held_s`), any other delay
between due and sent is this process's own (`lag_s`): then the figures are about the load and not about the endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tandem.serve_bench.endpoints import AskFailed, Endpoint
from tandem.serve_bench.records import INTERRUPTED, PlannedRequest, RequestRecord

DEFAULT_TIMEOUT_S = 600.0
TIMEOUT = "TIMEOUT"
_WATCH_S = 0.01


@dataclass(slots=True)
class Progress:
    """How far a load is, in requests."""

    num_requests: int
    in_flight: int = 0
    done: int = 0
    """Ended, well or not."""
    failed: int = 0
    """Of those, ended not well; refusals too."""


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> list[RequestRecord]:
    """Sends `requests`, in the order of `at_s`, and waits for every end. Returns a record of each that was sent.

    At most `max_concurrency` are in flight; the next one waits, in its order. A request may take `timeout_s` in all,
    then it fails with the status TIMEOUT. `on_progress` is called whenever a request is sent or ends. Setting `stop`
    ends the load at once: what is in flight is hung up and recorded as INTERRUPTED. Cancelling the call hangs up
    likewise, without records. Raises ValueError for a max_concurrency below 1.
    """
    load = _Load(endpoint, requests, max_concurrency, timeout_s, on_progress)
    sending = asyncio.create_task(load.send_all())
    stopping = asyncio.create_task((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        sending.cancel()
        await asyncio.gather(sending, stopping, return_exceptions=True)
    if not sending.cancelled():
        sending.result()
    return load.records


class _Load:
    """One run: owns the records and the clock."""

    def __init__(
        self,
        endpoint: Endpoint,
        requests: Sequence[PlannedRequest],
        max_concurrency: int | None,
        timeout_s: float,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ValueError(f"max_concurrency is {max_concurrency}; at least 1, or None for no limit")
        self.records: list[RequestRecord] = []
        self._endpoint = endpoint
        self._requests = sorted(requests, key=lambda request: request.at_s)
        self._places = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._timeout_s = timeout_s
        self._progress = Progress(len(requests))
        self._on_progress = on_progress or (lambda progress: None)
        self._started_s = time.perf_counter()

    async def send_all(self) -> None:
        """Returns when every request has ended; cancelled, it hangs up."""
        async with asyncio.TaskGroup() as group:
            held_until_s = 0.0  # nothing is sent before this, for a place was waited for until then
            for request in self._requests:
                await asyncio.sleep(max(0.0, request.at_s - self._now_s()))
                if self._places is not None:
                    had_to_wait = self._places.locked()
                    await self._places.acquire()
                    held_until_s = self._now_s() if had_to_wait else held_until_s
                group.create_task(self._send(request, held_s=max(0.0, held_until_s - request.at_s)))

    async def _send(self, request: PlannedRequest, *, held_s: float) -> None:
        record = RequestRecord(
            request.at_s, self._now_s(), len(request.prompt_token_ids), request.max_tokens, held_s=held_s
        )
        self.records.append(record)
        self._progress.in_flight += 1
        self._on_progress(self._progress)
        try:
            await self._ask(request, record)
        finally:
            record.ended_s = self._now_s()
            if self._places is not None:
                self._places.release()
            self._progress.in_flight -= 1
            self._progress.done += 1
            self._progress.failed += not record.succeeded
            self._on_progress(self._progress)

    async def _ask(self, request: PlannedRequest, record: RequestRecord) -> None:
        def on_tokens(count: int) -> None:
            record.token_s.extend([self._now_s()] * count)

        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._endpoint.ask(request, on_tokens)
        except AskFailed as error:
            _fail(record, error.status, error.message)
            record.refused = error.refused
        except TimeoutError:
            _fail(record, TIMEOUT, f"no end within {self._timeout_s:g} s")
        except asyncio.CancelledError:
            _fail(record, INTERRUPTED, "the load was stopped")
            raise
        else:
            record.finish_reason = answer.finish_reason
            record.num_told_tokens = answer.num_told_tokens
            if answer.num_prompt_tokens is not None:
                record.num_prompt_tokens = answer.num_prompt_tokens
            if not record.token_s:
                _fail(record, "NO TOKENS", f"the answer ended ({answer.finish_reason or 'no reason'}) without a token")

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s


def _fail(record: RequestRecord, status: str, message: str) -> None:
    record.status, record.error = status, f"{status}: {message}"


class LoopWatch:
    """How late this process's event loop wakes up, sampled every 10 ms: what reads tokens so late measures itself.

    Used around `run_load`, in an `async with`; `lags_s` then has the samples in seconds.
    """

    def __init__(self) -> None:
        self.lags_s: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            slept_from_s = time.perf_counter()
            await asyncio.sleep(_WATCH_S)
            self.lags_s.append(max(0.0, time.perf_counter() - slept_from_s - _WATCH_S))
