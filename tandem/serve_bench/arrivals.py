"""When requests come, seconds after the start of a run: endless series, and how to cut them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

_DRAWN_AT_ONCE = 1024


def gamma_arrivals(rate: float, burstiness: float, rng: np.random.Generator) -> Iterator[float]:
    """Independent gaps of a gamma distribution of the shape `burstiness` and the mean 1 / `rate` seconds.

    1 is a Poisson process; below, requests come in bursts, above, more evenly: the gaps' standard deviation over their
    mean is 1 / sqrt(burstiness). The first gap lies before the first request. Raises ValueError.
    """
    _check(rate, "rate")
    _check(burstiness, "burstiness")
    now_s = 0.0
    while True:
        for gap_s in rng.gamma(burstiness, 1 / (rate * burstiness), _DRAWN_AT_ONCE).tolist():
            now_s += gap_s
            yield now_s


def even_arrivals(rate: float) -> Iterator[float]:
    """One request every 1 / `rate` seconds, the first at 0. Raises ValueError."""
    _check(rate, "rate")
    return (number / rate for number in itertools.count())


def all_at_once() -> Iterator[float]:
    """Every request at 0."""
    return itertools.repeat(0.0)


def cut(arrivals: Iterable[float], *, num_requests: int | None, duration_s: float | None) -> list[float]:
    """The first `num_requests` of those before `duration_s`; None: no such end. One of them must be given."""
    if num_requests is None and duration_s is None:
        raise ValueError("the series is endless: give num_requests, duration_s, or both")
    within = arrivals if duration_s is None else itertools.takewhile(lambda at_s: at_s < duration_s, arrivals)
    return list(itertools.islice(within, num_requests))


def filling(arrivals: Iterable[float], *, num_requests: int, duration_s: float) -> list[float]:
    """The first `num_requests`, stretched so that the one after them would come at `duration_s`.

    A short series is then no faster or slower than was asked for. Gamma gaps stay what they are among each other: of a
    Poisson process this is the process given that `num_requests` come within `duration_s`, which are that many
    independent moments, each as likely as any other (Devroye, Non-Uniform Random Variate Generation, 1986, chapter V).
    """
    *times_s, end_s = itertools.islice(arrivals, num_requests + 1)
    return [at_s * duration_s / end_s for at_s in times_s]


def _check(value: float, name: str) -> None:
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value:g}; it must be above 0 and finite")
