"""What requests have seen lately: TTFT and ITL of the last seconds, at the quantile that is to meet the objective.

A request counts unless it has touched an instance that was still warming up: what a first request waits for
(compilation, empty caches) more instances would only wait for more often. Its TTFT counts with its first token; its
ITL, the mean gap after that, with its end, once for each gap, so that the quantile is one of tokens.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import accumulate

from router.autoscaler.policy import AutoscalerSettings
from router.picking.plan import Plan
from router.pools.instances import Role

_MAX_SAMPLES = 4096
"""Enough for any quantile; the newest stay."""


class Window:
    """Weighted samples of the last `length_s` seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, at_s: float, seconds: float, weight: float = 1.0) -> None:
        """One sample. `at_s` never falls."""
        self._samples.append((at_s, seconds, weight))

    def quantile(self, now_s: float, fraction: float, min_samples: int) -> float | None:
        """The least value that `fraction` of the weight does not exceed; None with fewer than `min_samples`."""
        while self._samples and now_s - self._samples[0][0] > self._length_s:
            self._samples.popleft()
        if len(self._samples) < min_samples:
            return None
        by_value = sorted((seconds, weight) for _, seconds, weight in self._samples)
        upto = [*accumulate(weight for _, weight in by_value)]
        return by_value[bisect_left(upto, fraction * upto[-1])][0]


class RecentLatencies:
    """One per router. Requests tell it on the event loop; the autoscaler asks."""

    def __init__(self, settings: AutoscalerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._windows: dict[Role, Window] = {
            "prefill": Window(settings.latency_window_s),
            "decode": Window(settings.latency_window_s),
        }

    def are_warm(self, plan: Plan) -> bool:
        """Whether what a request sees at the instances of `plan` counts."""
        prefill = plan.prefill.instance.up_s if plan.prefill is not None else math.inf
        return (
            plan.decode.instance.up_s >= self._settings.decode.warm_up_s and prefill >= self._settings.prefill.warm_up_s
        )

    def first_token(self, ttft_s: float) -> None:
        """A request has its first token, `ttft_s` after its call."""
        self._windows["prefill"].add(self._clock(), ttft_s)

    def ended(self, itl_s: float, num_gaps: float) -> None:
        """A request is over; between its tokens were `num_gaps` gaps, `itl_s` in the mean."""
        self._windows["decode"].add(self._clock(), itl_s, num_gaps)

    def of(self, role: Role) -> float | None:
        """TTFT for the prefill pool, ITL for the decode pool, seconds; None: too few requests to tell."""
        settings = self._settings
        return self._windows[role].quantile(self._clock(), settings.latency_quantile, settings.min_samples)
