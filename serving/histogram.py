"""Histograms that cost an event two additions. Light: an engine core counts by them, and its front tells Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """How often something was how large. One thread observes, any may read."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` rise; each belongs to its bucket."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """All of them."""
        return sum(self._counts)

    def counts(self) -> list[int]:
        """How many came into each bucket, and above the last."""
        return list(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, how many were no larger) by rising bounds, as HistogramMetricFamily wants them."""
        return cumulative(self._bounds, self._counts)


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Prometheus' buckets of `counts`, which has one entry more than `bounds`: those above the last."""
    from prometheus_client.utils import floatToGoString

    told = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(told, accumulate(map(float, counts)), strict=True))
