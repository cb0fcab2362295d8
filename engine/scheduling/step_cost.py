"""What a step costs, fitted while the engine runs.

    seconds of a step = base_s + per_stream_s * streams + per_token_s * prompt tokens

Observations lie in buckets of similar steps, and each bucket counts with the median of its last few: a stall, a
compilation or a cold cache changes nothing while most steps of a bucket were normal, and rare steps weigh as much as
frequent ones. The fit is by relative error, so that short steps are predicted as well as long ones.

Steps of prompts alone count as those of one stream: they take no less than one, and often hide what a step costs
without prompts (reading the weights) behind their products. If nothing but such steps and those of one stream was
observed, the difference would be taken for the cost of a stream, a second one would not be let in, and the mistake not
be found.

That is a straight line, for plans. `StepTimes` knows the stair of small steps, for drafts; `RecentRate` is how much has
been computed of late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.core.messages import StepCost

_PER_BUCKET = 5
_MIN_OBSERVATIONS = 3
"""Of a bucket, before it counts: the first step of a kind often compiles or touches memory."""
_EAGER_FITS = 64
_FIT_INTERVAL = 64
"""Observations between two fits, after the first `_EAGER_FITS`: a fit takes some 100 µs."""
_HALF_LIFE = 200
"""Observations after which a bucket without a new one counts half."""
_RIDGE = 0.05
"""Relative weight of "streams and tokens cost nothing": what the observations cannot separate goes to `base_s`."""
_MARGIN = 1.5
"""Times what a token adds to a step on average, where no step with so many was observed."""
_MAX_AGE = 1024
"""Steps after which a time is not known any more, and the step is tried again."""
_TRIALS_PART = 0.02
"""Of the time of all steps: what trials may have taken longer than expected, beyond one step."""
_MAX_LOSS = 4.0
"""Of a trial, in times of what was expected: a stall of the machine does not end trials for long."""
_DECAY_S = 5.0
"""In which a token's part of the recent rate decays to 1/e."""


@dataclass(slots=True)
class _Bucket:
    latest: int = 0
    observations: deque[tuple[int, int, float]] = field(default_factory=lambda: deque(maxlen=_PER_BUCKET))
    """(streams, prompt tokens, seconds)."""

    def median(self) -> tuple[int, int, float]:
        """The observation with the median time."""
        return sorted(self.observations, key=lambda one: one[2])[len(self.observations) // 2]


class StepCostEstimator:
    """Fits `cost` to the steps that `record` receives. Belongs to the thread of the step loop."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None
        """None: too few steps so far."""
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._num_observations = 0

    def record(self, seconds: float, num_streams: int, num_prompt_tokens: int) -> None:
        """A step took `seconds` for one token of each of `num_streams`, and `num_prompt_tokens` others."""
        if seconds <= 0:
            return
        self._num_observations += 1
        key = (num_streams.bit_length(), num_prompt_tokens.bit_length())
        bucket = self._buckets.setdefault(key, _Bucket())
        bucket.latest = self._num_observations
        bucket.observations.append((max(num_streams, 1), num_prompt_tokens, seconds))
        if self._num_observations <= _EAGER_FITS or self._num_observations % _FIT_INTERVAL == 0:
            self._fit()

    def _fit(self) -> None:
        known = [bucket for bucket in self._buckets.values() if len(bucket.observations) >= _MIN_OBSERVATIONS]
        if known:
            ages = np.array([self._num_observations - bucket.latest for bucket in known])
            points = np.array([bucket.median() for bucket in known], np.float64)
            self.cost = StepCost(*_least_squares(points, 0.5 ** (ages / _HALF_LIFE)))


def _least_squares(points: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> list[float]:
    """The non-negative (base, per stream, per token) with the least weighted squares of relative errors.

    `points` [n, 3] are (streams, prompt tokens, seconds), `weights` [n].
    """
    roots = np.sqrt(weights / weights.sum())
    rows = np.column_stack([np.ones(len(points)), points[:, :2]]) / points[:, 2:] * roots[:, None]
    ridge = np.diag(_RIDGE * np.sqrt((rows**2).sum(axis=0)))[1:]
    matrix, target = np.vstack([rows, ridge]), np.concatenate([roots, np.zeros(2)])
    columns, solution = [0, 1, 2], np.zeros(3)
    while columns:
        part = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        if part.min() >= 0:
            solution[columns] = part
            break
        del columns[int(part.argmin())]
    return [float(value) for value in solution]


class RecentRate:
    """Tokens per second, those of the last seconds weighing most."""

    def __init__(self) -> None:
        self._sum, self._at_s = 0.0, 0.0

    def add(self, num_tokens: int, now_s: float) -> None:
        self._sum, self._at_s = self._decayed(now_s) + num_tokens, now_s

    def per_s(self, now_s: float) -> float:
        return self._decayed(now_s) / _DECAY_S

    def _decayed(self, now_s: float) -> float:
        return self._sum * math.exp(min(self._at_s - now_s, 0.0) / _DECAY_S)


class StepTimes:
    """What steps take by how many single tokens they have. It grows by leaps, where kernels take several rows at once,
    or one more is too many for a cache."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._observed: dict[int, tuple[int, deque[float]]] = {}
        """By number of tokens: the last step that had as many, and what the last few took."""
        self._expected: dict[int, float] = {}
        """Of the numbers that the last plan would have tried."""
        self._total_s = self._lost_s = 0.0
        """In all steps, and in trials beyond what was expected."""

    def record(self, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        self._total_s += seconds
        if (expected_s := self._expected.get(num_tokens)) is not None:
            self._lost_s += min(max(0.0, seconds - expected_s), _MAX_LOSS * expected_s)
        self._expected = {}
        observed = self._lately(num_tokens) or deque(maxlen=_PER_BUCKET)
        observed.append(seconds)
        self._observed[num_tokens] = (self._num_steps, observed)

    def seconds(self, num_tokens: int, most_added: int, per_token_s: float, *, may_try: bool = True) -> list[float]:
        """Of steps with `num_tokens` and up to `most_added` more: the median of those observed lately, else of the next
        smaller one, and somewhat more than `per_token_s`. Infinite instead where trials have taken too long, and
        without `may_try`, as for steps that are not recorded. Empty if no step with `num_tokens` was."""
        self._expected = {}
        if (observed := self._lately(num_tokens)) is None:
            return []
        times = [_median(observed)]
        for added in range(1, most_added + 1):
            observed = self._lately(num_tokens + added)
            times.append(times[-1] + _MARGIN * per_token_s if observed is None else _median(observed))
            if observed is None:
                self._expected[num_tokens + added] = times[-1]
        if may_try and self._lost_s <= _TRIALS_PART * self._total_s + times[0]:
            return times
        unknown, self._expected = self._expected, {}
        return [math.inf if num in unknown else seconds for num, seconds in enumerate(times, num_tokens)]

    def _lately(self, num_tokens: int) -> deque[float] | None:
        last, observed = self._observed.get(num_tokens, (-_MAX_AGE, None))
        return observed if self._num_steps - last < _MAX_AGE else None


def _median(times: Collection[float]) -> float:
    """The lower one of two in the middle: stalls make times longer, nothing makes them shorter."""
    return sorted(times)[(len(times) - 1) // 2]
