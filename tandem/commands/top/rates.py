"""Tokens per second from the counters of successive load reports, and percentiles from the router's histograms."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from protos.tandem.v1 import pools_pb2
from tandem.commands.admin import pool_name

T = TypeVar("T")
SPAN_S = 5.0
"""A rate is the mean over this time."""
LATENCY_SPAN_S = 60.0
_NUM_POINTS = 120
TTFT = "tandem_router_time_to_first_token_seconds"
TPOT = "tandem_router_time_per_output_token_seconds"


@dataclass(slots=True)
class _Counter:
    """One process' counter of tokens over the last SPAN_S."""

    epoch: str
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    """Seconds and count; the first may be older than the span."""

    def add(self, at_s: float, count: int) -> None:
        _append(self.samples, at_s, count, SPAN_S)

    @property
    def rate(self) -> float:
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0


class TokenRates:
    """Tokens per second of instances and pools: prefilled ones at prefill, generated ones at decode instances."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}
        self.history = {pool: deque([0.0], maxlen=_NUM_POINTS) for pool in ("prefill", "decode")}
        """Of each pool, one point for each update."""

    def update(self, at_s: float, answer: pools_pb2.ListPoolsResponse) -> None:
        """Takes the reports that were read at `at_s` (seconds of a monotonic clock)."""
        totals = dict.fromkeys(self.history, 0.0)
        for one in answer.instances:
            pool, load = pool_name(one.role), one.load
            counter = self._counters.get(one.address)
            if counter is None or counter.epoch != load.instance_epoch:
                counter = self._counters[one.address] = _Counter(load.instance_epoch)
            counter.add(at_s, load.num_prefilled_tokens if pool == "prefill" else load.num_generated_tokens)
            totals[pool] = totals.get(pool, 0.0) + counter.rate
        for address in self._counters.keys() - {one.address for one in answer.instances}:
            del self._counters[address]
        for pool, points in self.history.items():
            points.append(totals[pool])

    def of(self, address: str) -> float:
        """Of one instance that the last update had."""
        return self._counters[address].rate


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by upper bound in seconds, as Prometheus has them."""

    counts: dict[float, float]

    def since(self, earlier: Histogram) -> Histogram:
        return Histogram({bound: count - earlier.counts.get(bound, 0.0) for bound, count in self.counts.items()})

    def percentile(self, share: float) -> float | None:
        """Interpolated within its bucket, in seconds; None without observations."""
        bounds = [(0.0, 0.0), *sorted(self.counts.items())]
        wanted = share * bounds[-1][1]
        if wanted <= 0:
            return None
        for (low, before), (high, count) in pairwise(bounds):
            if count >= wanted:
                return low if high == float("inf") else low + (high - low) * (wanted - before) / (count - before)
        return None


@dataclass(slots=True)
class _Process:
    """The histograms of one worker, or of a router without workers, over the last LATENCY_SPAN_S."""

    samples: deque[tuple[float, dict[str, Histogram]]] = field(default_factory=deque)
    """Seconds and histograms; the first may be older than the span."""

    def add(self, at_s: float, read: dict[str, Histogram]) -> None:
        if self.samples and any(_total(read[name]) < _total(self.samples[-1][1][name]) for name in read):
            self.samples.clear()
        _append(self.samples, at_s, read, LATENCY_SPAN_S)

    def recent(self, name: str) -> Histogram:
        return self.samples[-1][1][name].since(self.samples[0][1][name])


class Latencies:
    """TTFT and TPOT of the last minute, from texts of the router's /metrics. A worker that does not answer a scrape is
    absent from that text."""

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}

    def update(self, at_s: float, text: str) -> None:
        """Takes the text that was read at `at_s`; a restarted process begins anew. Raises ValueError for others."""
        for worker, read in _histograms(text, (TTFT, TPOT)).items():
            self._processes.setdefault(worker, _Process()).add(at_s, read)
        silent = [key for key, one in self._processes.items() if one.samples[-1][0] <= at_s - LATENCY_SPAN_S]
        for worker in silent:
            del self._processes[worker]

    def recent(self, name: str) -> Histogram:
        """TTFT or TPOT, of all processes."""
        counts: defaultdict[float, float] = defaultdict(float)
        for process in self._processes.values():
            for bound, count in process.recent(name).counts.items():
                counts[bound] += count
        return Histogram(dict(counts))

    def percentiles(self, name: str, shares: Iterable[float]) -> list[float | None]:
        """Of TTFT or TPOT, in seconds."""
        recent = self.recent(name)
        return [recent.percentile(share) for share in shares]


def _append(samples: deque[tuple[float, T]], at_s: float, value: T, span_s: float) -> None:
    """And drops the samples that are not needed for the `span_s` seconds before `at_s`."""
    samples.append((at_s, value))
    while len(samples) > 2 and samples[1][0] <= at_s - span_s:
        samples.popleft()


def _total(histogram: Histogram) -> float:
    return max(histogram.counts.values(), default=0.0)


def _histograms(text: str, names: Sequence[str]) -> dict[str, dict[str, Histogram]]:
    """By worker, empty without workers, and name, summed over the other labels."""
    from prometheus_client.parser import text_string_to_metric_families

    read: dict[str, dict[str, Histogram]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_bucket") and family.name in names:
                of_worker = read.setdefault(sample.labels.get("worker", ""), {name: Histogram({}) for name in names})
                counts, bound = of_worker[family.name].counts, float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return read
