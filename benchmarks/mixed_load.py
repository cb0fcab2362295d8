"""A load of long prompts among running streams, at several rates; used by pool_sizes and pd_isolation.

A stream has a short prompt and a long answer, a long prompt a short answer; both come as Poisson processes. The same
seed makes the same requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from tqdm import tqdm

from tandem.bench.serve.endpoint import PlannedRequest, RequestRecord
from tandem.bench.serve.grpc_endpoint import GrpcEndpoint
from tandem.bench.serve.load import LoadObserver, Progress, Sweep, run_sweep
from tandem.bench.serve.report import Objectives, Point, Report, summarise
from tandem.bench.serve.workload import Lengths, RandomWorkload, Schedule, Vocabulary

TIMEOUT_S = 120.0
PATIENT = ("--pools-core-silence-timeout-s", "30")
"""Flags of the router: where instances, router and clients share two cores, a long step is not a fault."""
_NUM_WARM_UP = 8
_PAUSE_S = 0.5
_END_IDS = frozenset({2})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Lengths in tokens; `long_share` of the requests are long prompts, the others streams."""

    stream_input_len: int
    stream_output_len: int
    long_input_len: int
    long_output_len: int
    long_share: float
    duration_s: float
    """Requests come for so long; the run ends when all have been answered."""

    def __str__(self) -> str:
        streams = (
            f"{1 - self.long_share:.0%} streams of {self.stream_input_len} tokens in, {self.stream_output_len} out"
        )
        longs = f"{self.long_share:.0%} long prompts of {self.long_input_len} in, {self.long_output_len} out"
        return f"{streams}; {longs}; Poisson, {self.duration_s:g} s"

    @property
    def mean_output_len(self) -> float:
        return (1 - self.long_share) * self.stream_output_len + self.long_share * self.long_output_len

    def is_long(self, record: RequestRecord) -> bool:
        return record.num_prompt_tokens == self.long_input_len


class MixedWorkload:
    """A `tandem.bench.serve.workload.Workload` of a mix."""

    def __init__(self, mix: Mix, vocab_size: int, seed: int = 0) -> None:
        vocabulary = Vocabulary.middle(vocab_size, end_ids=_END_IDS)
        schedule = Schedule(duration_s=mix.duration_s)
        streams, longs = (
            RandomWorkload(vocabulary, schedule, seed + offset, prompt=Lengths(n, n), output=Lengths(m, m))
            for offset, n, m in (
                (0, mix.stream_input_len, mix.stream_output_len),
                (1, mix.long_input_len, mix.long_output_len),
            )
        )
        self._parts = ((streams, 1 - mix.long_share), (longs, mix.long_share))

    def plan(self, run: int, rate: float | None) -> list[PlannedRequest]:
        """At `rate` requests a second of both kinds together, in the order in which they are due."""
        assert rate is not None, "a mix has a rate"
        requests = [one for part, share in self._parts for one in part.plan(run, rate * share)]
        return sorted(requests, key=lambda one: one.at_s)

    def warm_up(self, run: int, count: int) -> list[PlannedRequest]:
        """The two kinds in turn, so that every instance gets both."""
        pairs = zip(*(part.warm_up(run, count // 2) for part, _ in self._parts), strict=True)
        return [replace(one, max_tokens=min(one.max_tokens, 32)) for pair in pairs for one in pair]


class ProgressBar:
    """A `tandem.bench.serve.load.LoadObserver`: one line that changes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar: tqdm[Any] | None = None

    def warm_up(self, rate: float | None, num_requests: int) -> None:
        """Not shown."""

    def begin(self, rate: float | None, requests: Sequence[PlannedRequest]) -> None:
        self._bar = tqdm(
            total=len(requests), desc=f"{self._name}, {rate:g}/s", unit="request", leave=False, disable=None
        )

    def progress(self, progress: Progress) -> None:
        if self._bar is not None:
            self._bar.update(progress.done - self._bar.n)

    def end(self, point: Point) -> None:
        if self._bar is not None:
            self._bar.close()


def measure(
    address: str,
    mix: Mix,
    rates: Sequence[float],
    observer: LoadObserver,
    *,
    vocab_size: int,
    objectives: Objectives,
    seed: int = 0,
) -> list[Point]:
    """What the clients of the router at `address` see of `mix` at each of `rates` (requests a second)."""

    async def run() -> list[Point]:
        endpoint = GrpcEndpoint(address)
        sweep = Sweep(rates, objectives, None, TIMEOUT_S, num_warm_up=_NUM_WARM_UP, pause_s=_PAUSE_S)
        try:
            return await run_sweep(
                endpoint,
                MixedWorkload(mix, vocab_size, seed),
                sweep,
                observer,
                check=lambda requests: None,
                stop=asyncio.Event(),
            )
        finally:
            await endpoint.close()

    return asyncio.run(run())


def joined(runs: Sequence[Point], objectives: Objectives) -> Point:
    """Runs at one rate as one, each from its first sending on behind the end of the one before it: the duration is the
    sum of theirs. The offered rate is their mean, since nothing is offered while one drains. Lags are those of the run
    with the longest, so that one late run makes the whole late."""
    records: list[RequestRecord] = []
    for run in runs:
        end_s = max((record.ended_s for record in records), default=0.0)
        begin_s = min((record.sent_s for record in run.records), default=0.0)
        records += [_later(record, end_s - begin_s) for record in run.records]
    reports = [run.report for run in runs]
    report = replace(
        summarise(records, objectives),
        offered_per_s=fmean(one.offered_per_s for one in reports),
        lag=max((one.lag for one in reports), key=lambda lag: lag.p99),
        loop_lag=max((one.loop_lag for one in reports), key=lambda lag: lag.p99),
    )
    return Point(runs[0].rate, report, records)


def _later(record: RequestRecord, by_s: float) -> RequestRecord:
    return replace(
        record,
        due_s=record.due_s + by_s,
        sent_s=record.sent_s + by_s,
        token_s=[token_s + by_s for token_s in record.token_s],
        ended_s=record.ended_s + by_s,
    )


def of_kind(point: Point, mix: Mix, *, long: bool) -> Report:
    """The figures of the long prompts alone, or of the streams alone."""
    return summarise([record for record in point.records if mix.is_long(record) == long])


def num_bad(point: Point) -> int:
    """Requests that failed or were refused."""
    return point.report.num_failed + point.report.num_refused


def failed_cell(point: Point) -> str:
    """For a table: how many requests failed, and whether the load was late."""
    return str(num_bad(point)) + ("" if point.report.kept_schedule else ", the load was late")


def failures(points: Mapping[str, Sequence[Point]]) -> list[str]:
    """A line for each reason for which requests failed, by what they were put on."""
    return [
        f"FAILED: {name}, {point.rate:g}/s: {count} x {reason}"
        for name, some in points.items()
        for point in some
        for reason, count in point.report.failures.items()
    ]
