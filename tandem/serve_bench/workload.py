"""What is sent: prompts and output lengths, planned before the first request goes out.

The same seed makes the same requests, in any process. Every run of a sweep and its warm-up have prompts of their own,
or each would find the last one's in the prefix cache; shared prefixes are meant to be found and stay the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tandem.serve_bench.arrivals import all_at_once, cut, even_arrivals, filling, gamma_arrivals
from tandem.serve_bench.records import PlannedRequest
from tandem.serve_bench.traces import FIRST_TOKEN_ID, TracePlan, TraceRow, TraceUse, plan
from tandem.serve_bench.vocabulary import Vocabulary

_ARRIVALS, _PREFIXES, _PROMPTS = range(3)
_ONCE_AND_FOR_ALL = 0
"""In the place of the number of a run, which counts from 1."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, each as likely as any other, from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(
                f"lengths from {self.low} to {self.high}: the first must be at least 1, the second no less"
            )

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, or `256:1024`. Raises ValueError."""
        low, _, high = text.partition(":")
        try:
            return cls(int(low), int(high or low))
        except ValueError as error:
            reason = str(error) if "lengths from" in str(error) else "it is no number"
            raise ValueError(f"{text!r}: {reason}; a length looks like 512, a range like 256:1024") from None

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        drawn: list[int] = rng.integers(self.low, self.high, size=count, endpoint=True).tolist()
        return drawn


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests come and when they cease to."""

    burstiness: float | None = 1.0
    """See `gamma_arrivals`; None: one every 1 / rate seconds."""
    num_requests: int | None = None
    duration_s: float | None = None

    def times_s(self, rate: float, seed: int) -> list[float]:
        """At `rate` requests a second; inf: all at once. Of one seed, twice the rate is the same series at twice the
        speed. A number of requests fills number / rate seconds; in a duration come as many as happen to."""
        if rate == float("inf"):
            return cut(all_at_once(), num_requests=self.num_requests, duration_s=self.duration_s)
        if self.burstiness is None:
            return cut(even_arrivals(rate), num_requests=self.num_requests, duration_s=self.duration_s)
        arrivals = gamma_arrivals(rate, self.burstiness, _rng(seed, _ONCE_AND_FOR_ALL, _ARRIVALS))
        if self.num_requests is not None and self.duration_s is None:
            return filling(arrivals, num_requests=self.num_requests, duration_s=self.num_requests / rate)
        return cut(arrivals, num_requests=self.num_requests, duration_s=self.duration_s)


class Workload(Protocol):
    """Makes the requests of each run."""

    def plan(self, run: int, rate: float | None) -> list[PlannedRequest]:
        """Those of measured run number `run`, from 1, at `rate` requests a second; None: as recorded in the trace."""

    def warm_up(self, run: int, count: int) -> list[PlannedRequest]:
        """So many requests like those of run `run`, but with other prompts, all due at once."""


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Prompts of random ids: one of `num_prefixes` shared prefixes of `prefix_len` ids, then the request's own."""

    vocabulary: Vocabulary
    schedule: Schedule
    seed: int
    prompt: Lengths
    """Of the part that is the request's own."""
    output: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1

    def __str__(self) -> str:
        prefix = f" after {self.num_prefixes} x {self.prefix_len} that are shared" if self.prefix_len else ""
        return f"prompts of {self.prompt}{prefix}, answers of {self.output} tokens; ids {self.vocabulary.origin}"

    def plan(self, run: int, rate: float | None) -> list[PlannedRequest]:
        """See Workload. Prefixes take turns."""
        if rate is None:
            raise ValueError("random prompts come at a rate")
        return self._requests(self.schedule.times_s(rate, self.seed), 2 * run)

    def warm_up(self, run: int, count: int) -> list[PlannedRequest]:
        """See Workload."""
        return self._requests([0.0] * count, 2 * run + 1)

    def _requests(self, times_s: Sequence[float], series: int) -> list[PlannedRequest]:
        rng = _rng(self.seed, series, _PROMPTS)
        prefixes = itertools.cycle(self._prefixes())
        lengths = zip(self.prompt.draw(len(times_s), rng), self.output.draw(len(times_s), rng), strict=True)
        return [
            PlannedRequest(at_s, next(prefixes) + self.vocabulary.draw(prompt_len, rng), output_len)
            for at_s, (prompt_len, output_len) in zip(times_s, lengths, strict=True)
        ]

    def _prefixes(self) -> Iterator[tuple[int, ...]]:
        rng = _rng(self.seed, _ONCE_AND_FOR_ALL, _PREFIXES)
        return (self.vocabulary.draw(self.prefix_len, rng) for _ in range(self.num_prefixes))


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Lengths and shared prefixes of a trace, and its times too unless a rate is asked for."""

    vocabulary: Vocabulary
    schedule: Schedule
    seed: int
    rows: Sequence[TraceRow]
    use: TraceUse

    def __str__(self) -> str:
        taken = plan(self.rows, self.use, vocab_size=FIRST_TOKEN_ID + 1)  # what is cut does not depend on the ids
        return f"trace: {taken}; ids {self.vocabulary.origin}"

    def traced(self, run: int) -> TracePlan:
        """What becomes of the rows, before they are cut to the schedule's number and duration."""
        traced = plan(
            self.rows, self.use, vocab_size=FIRST_TOKEN_ID + len(self.vocabulary.ids), seed=self.seed + (run << 32)
        )
        traced.requests = [replace(one, prompt_token_ids=self._ordinary(one)) for one in traced.requests]
        return traced

    def plan(self, run: int, rate: float | None) -> list[PlannedRequest]:
        """See Workload. At a rate of its own a trace gives no more requests than it has rows."""
        requests = self.traced(2 * run).requests
        num_requests = min(len(requests), self.schedule.num_requests or len(requests))
        if rate is not None:
            times_s = replace(self.schedule, num_requests=num_requests).times_s(rate, self.seed)
            return [replace(one, at_s=at_s) for one, at_s in zip(requests, times_s, strict=False)]
        times_s = cut((one.at_s for one in requests), num_requests=num_requests, duration_s=self.schedule.duration_s)
        return requests[: len(times_s)]

    def warm_up(self, run: int, count: int) -> list[PlannedRequest]:
        """See Workload."""
        return [replace(one, at_s=0.0) for one in self.traced(2 * run + 1).requests[:count]]

    def _ordinary(self, request: PlannedRequest) -> tuple[int, ...]:
        return self.vocabulary.at([one - FIRST_TOKEN_ID for one in request.prompt_token_ids])


def _rng(seed: int, series: int, what: int) -> np.random.Generator:
    return np.random.default_rng([seed, series, what])
