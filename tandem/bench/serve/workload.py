"""The requests of a load: arrival times, prompts and output lengths, planned before the first one is sent.

The same seed makes the same requests, in any process. Every run of a sweep and every warm-up has its own prompts, so
that none is in the prefix cache; shared prefixes are meant to be cached and stay the same.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from tandem.bench.serve.endpoint import PlannedRequest
from tandem.bench.serve.traces import MAX_LEN, TraceRow, TraceUse, count, plan

MAX_REQUESTS = 1_000_000
"""Of one run: all of them are in memory before the first one is sent."""
_DRAWN_AT_ONCE = 1024


class TooManyRequests(ValueError):
    """A run would have more than MAX_REQUESTS; the message names the options that limit them."""


def gamma_arrivals(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Endless arrival times with independent gamma gaps of shape `burstiness` and mean 1 / `rate` seconds.

    1 is a Poisson process, less is burstier, more is more even: the gaps' standard deviation over their mean is
    1 / sqrt(burstiness). The first gap lies before the first request.
    """
    now_s = 0.0
    while True:
        for gap_s in rng.gamma(burstiness, 1 / (rate * burstiness), _DRAWN_AT_ONCE).tolist():
            now_s += gap_s
            yield now_s


def even_arrivals(rate: float) -> Iterator[float]:
    """One request every 1 / `rate` seconds, the first at 0."""
    return (number / rate for number in itertools.count())


def cut(arrivals: Iterable[float], *, num_requests: int, duration_s: float | None) -> list[float]:
    """The first `num_requests` of those before `duration_s`; None: of all."""
    within = arrivals if duration_s is None else itertools.takewhile(lambda at_s: at_s < duration_s, arrivals)
    return list(itertools.islice(within, num_requests))


def filling(arrivals: Iterable[float], *, num_requests: int, duration_s: float) -> list[float]:
    """The first `num_requests`, stretched so that the next one would be at `duration_s`.

    A short series then has the requested rate. The ratios of gamma gaps are kept: for a Poisson process this is the
    process conditioned on `num_requests` arrivals within `duration_s`, which are independent and uniform (Devroye,
    Non-Uniform Random Variate Generation, 1986, chapter V). Gaps that are all 0, of a tiny shape, stay 0.
    """
    *times_s, end_s = itertools.islice(arrivals, num_requests + 1)
    return [at_s * duration_s / end_s if end_s else 0.0 for at_s in times_s]


_MIDDLE = (1 / 8, 1 / 2)
"""The part of a vocabulary without special tokens: known ones have them at either end."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ordinary token ids to draw from, and their origin, for messages."""

    ids: tuple[int, ...]
    origin: str

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError(f"{self.origin}: no ordinary token is left for prompts")

    @classmethod
    def of_tokenizer(cls, folder: Path, *, vocab_size: int | None = None, end_ids: frozenset[int]) -> Vocabulary:
        """All ids of the tokenizer.json in `folder` (or of that file) below `vocab_size`, except added and special
        tokens. Raises ValueError with the problem of the file."""
        file = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            text = file.read_text(encoding="utf-8")
            added = {int(token["id"]) for token in json.loads(text)["added_tokens"]}
            known = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=False).values()
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{file} is not a readable tokenizer.json: {error}") from None
        within = known if vocab_size is None else (one for one in known if one < vocab_size)
        return cls(tuple(sorted(set(within) - added - end_ids)), f"of {file} without special tokens")

    @classmethod
    def middle(cls, vocab_size: int, *, end_ids: frozenset[int]) -> Vocabulary:
        """For a model whose tokenizer is not available."""
        begin, end = (int(part * vocab_size) for part in _MIDDLE)
        ids = tuple(one for one in range(begin, end) if one not in end_ids)
        return cls(ids, f"{begin} to {end - 1}, where vocabularies have no special tokens")

    def draw(self, count: int, rng: np.random.Generator) -> tuple[int, ...]:
        """`count` ids, uniformly."""
        return tuple(self.ids[place] for place in rng.integers(len(self.ids), size=count).tolist())


_ARRIVALS, _PREFIXES, _PROMPTS, _ORDER = range(4)
_ALL_RUNS = 0
"""Instead of the number of a run, which counts from 1."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, uniform from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(
                f"lengths from {self.low} to {self.high}: the first must be at least 1, the second no less"
            )
        if self.high > MAX_LEN:
            raise ValueError(f"lengths from {self.low} to {self.high}: the second must be at most {MAX_LEN}")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, or `256:1024`. Raises ValueError."""
        low, _, high = text.partition(":")
        try:
            return cls(int(low), int(high or low))
        except ValueError as error:
            reason = str(error) if "lengths from" in str(error) else "not a number"
            raise ValueError(f"{text!r}: {reason}; write a length like 512, a range like 256:1024") from None

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        drawn: list[int] = rng.integers(self.low, self.high, size=count, endpoint=True).tolist()
        return drawn


@dataclass(frozen=True, slots=True)
class Schedule:
    """Arrival times, and the end of the run."""

    burstiness: float | None = 1.0
    """See `gamma_arrivals`; None: one every 1 / rate seconds."""
    num_requests: int | None = None
    duration_s: float | None = None

    def times_s(self, rate: float, seed: int) -> list[float]:
        """At `rate` requests per second; inf: all at once. With one seed, twice the rate is the same series at twice
        the speed. A number of requests takes number / rate seconds; within a duration their number varies.
        Raises TooManyRequests."""
        limit = MAX_REQUESTS + 1
        num_requests = limit if self.num_requests is None else min(self.num_requests, limit)
        times_s = self._times_s(rate, seed, num_requests)
        if len(times_s) > MAX_REQUESTS:
            when = "at once" if rate == float("inf") else f"at {rate:g}/s"
            raise TooManyRequests(
                f"more than {MAX_REQUESTS} requests {when}: lower --rate, --duration or --num-requests"
            )
        return times_s

    def _times_s(self, rate: float, seed: int, num_requests: int) -> list[float]:
        if rate == float("inf"):
            arrivals: Iterator[float] = itertools.repeat(0.0)
        elif self.burstiness is None:
            arrivals = even_arrivals(rate)
        else:
            arrivals = gamma_arrivals(rate, self.burstiness, _rng(seed, _ALL_RUNS, _ARRIVALS))
            if self.duration_s is None:
                return filling(arrivals, num_requests=num_requests, duration_s=num_requests / rate)
        return cut(arrivals, num_requests=num_requests, duration_s=self.duration_s)


class Workload(Protocol):
    def plan(self, run: int, rate: float | None) -> Iterable[PlannedRequest]:
        """Those of measured run `run`, from 1, at `rate` requests per second; None: as in the trace.

        Each is made when it is taken: all of them may take minutes. Raises TooManyRequests.
        """

    def warm_up(self, run: int, count: int) -> Iterable[PlannedRequest]:
        """`count` requests like those of run `run`, but with other prompts, all due at once. Made like those."""


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Prompts of random ids: one of `num_prefixes` shared prefixes of `prefix_len` ids, then unique ids.

    With several `turns`, requests are those of conversations: a prompt is the one of the turn before, `output` ids in
    the place of its answer, and new ids. All conversations have their first turn, then all their second one, and so on.
    """

    vocabulary: Vocabulary
    schedule: Schedule
    seed: int
    prompt: Lengths
    """Length of the unique part."""
    output: Lengths
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1

    def __str__(self) -> str:
        turns = f", in conversations of at most {self.turns} turns" if self.turns > 1 else ""
        prefix = f" after {self.num_prefixes} x {self.prefix_len} shared ones" if self.prefix_len else ""
        return f"prompts of {self.prompt}{prefix}, answers of {self.output} tokens{turns}; ids {self.vocabulary.origin}"

    def plan(self, run: int, rate: float | None) -> Iterator[PlannedRequest]:
        """Each round of prefixes has an order of its own, or an instance that is picked in turns would get the same."""
        assert rate is not None, "ServeOptions has a rate where there is no trace"
        return self._requests(self.schedule.times_s(rate, self.seed), 2 * run, self.turns)

    def warm_up(self, run: int, count: int) -> Iterator[PlannedRequest]:
        return self._requests([0.0] * count, 2 * run + 1, 1)

    def _requests(self, times_s: Sequence[float], series: int, turns: int) -> Iterator[PlannedRequest]:
        rng = _rng(self.seed, series, _PROMPTS)
        drawn = [lengths.draw(len(times_s), rng) for lengths in (self.prompt, self.output)]
        open_texts = deque(itertools.islice(self._prefixes(series), math.ceil(len(times_s) / turns)))
        for at_s, prompt_len, output_len in zip(times_s, *drawn, strict=True):
            prompt = open_texts.popleft() + self.vocabulary.draw(prompt_len, rng)
            yield PlannedRequest(at_s, prompt, output_len)
            if turns > 1:
                open_texts.append(prompt + self.vocabulary.draw(output_len, rng))

    def _prefixes(self, series: int) -> Iterator[tuple[int, ...]]:
        """Endless: all of them, then all of them in another order, and so on."""
        rng = _rng(self.seed, _ALL_RUNS, _PREFIXES)
        prefixes = [self.vocabulary.draw(self.prefix_len, rng) for _ in range(self.num_prefixes)]
        order = _rng(self.seed, series, _ORDER)
        while True:
            yield from (prefixes[place] for place in order.permutation(self.num_prefixes).tolist())


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Lengths and shared prefixes of a trace, and its times unless a rate is given."""

    vocabulary: Vocabulary
    schedule: Schedule
    seed: int
    rows: Sequence[TraceRow]
    use: TraceUse

    def __str__(self) -> str:
        limits = {"--num-requests": self.schedule.num_requests, "--duration": self.schedule.duration_s}
        given = " and ".join(name for name, limit in limits.items() if limit is not None)
        before = f", before {given}" if given else ""
        return f"trace: {count(self.rows, self.use)}{before}; ids {self.vocabulary.origin}"

    def plan(self, run: int, rate: float | None) -> Iterator[PlannedRequest]:
        """A trace gives no more requests than it has rows, also at a given rate."""
        use, end_s = self.use, self.schedule.duration_s
        if rate is None and end_s is not None:
            use = replace(use, duration_s=min(use.duration_s, end_s * use.speed))
        num_rows = count(self.rows, use).num_planned
        num_requests = min(num_rows, self.schedule.num_requests or num_rows)
        requests = itertools.islice(self._requests(2 * run, use), num_requests)
        if rate is not None:
            times_s = replace(self.schedule, num_requests=num_requests).times_s(rate, self.seed)
            return (replace(one, at_s=at_s) for at_s, one in zip(times_s, requests, strict=False))
        if num_requests > MAX_REQUESTS:
            raise TooManyRequests(
                f"more than {MAX_REQUESTS} requests of the trace: lower --trace-for, --duration or --num-requests"
            )
        return requests

    def warm_up(self, run: int, count: int) -> Iterator[PlannedRequest]:
        requests = itertools.islice(self._requests(2 * run + 1, self.use), count)
        return (replace(one, at_s=0.0) for one in requests)

    def _requests(self, series: int, use: TraceUse) -> Iterator[PlannedRequest]:
        return plan(self.rows, use, self.vocabulary.ids, seed=self.seed + (series << 32))


def _rng(seed: int, series: int, purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, series, purpose])
