"""Histograms for Prometheus, without its library: an engine core counts by them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""Upper bounds in seconds: vLLM's for the time to first token up to the longest hand-over, with finer ones below."""


class Histogram:
    """Counts values by size; an observation costs two additions. One thread observes, any may read."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        """`bounds` rise; each belongs to its bucket."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def counts(self) -> list[int]:
        """Values in each bucket, and above the last."""
        return list(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, values up to it) by rising bounds, as HistogramMetricFamily takes them."""
        return cumulative(self._bounds, self._counts)


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Prometheus' buckets of `counts`, which has one entry more than `bounds`: values above the last."""
    from prometheus_client.utils import floatToGoString

    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, accumulate(map(float, counts)), strict=True))
