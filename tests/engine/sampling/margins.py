"""Sampled tokens with the margin by which they were chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.sampling import sampler
from engine.sampling.params import SamplingParams


def sampling_row(
    *, seed: int = 0, choice: int = 0, position: int = 0, forbidden_ids: tuple[int, ...] = (), **params: Any
) -> sampler.SamplingRow:
    return sampler.SamplingRow(SamplingParams(**params), seed, choice, position, forbidden_ids)


def sample_with_margin(logits: Tensor, rows: Sequence[sampler.SamplingRow]) -> list[tuple[int, float]]:
    """`sample` with each token's margin, so that a test may excuse a different token in a near-tie.

    Sampled rows: the distance, as a probability, from the uniform to the nearer end of the token's interval that has a
    neighbour. Greedy rows: best logit minus second best. Infinite if only one token was possible. Tokens just outside a
    filter's edge do not count.
    """
    tokens = sampler.sample(logits, rows)
    logits = sampler._without_forbidden(logits, rows)
    _, best_logits = sampler._best(logits)
    margins = []
    for token, row, row_logits, best_logit in zip(tokens, rows, logits, best_logits, strict=True):
        if row.params.is_greedy:
            top = row_logits.topk(min(2, row_logits.shape[0])).values.tolist()
            margins.append(top[0] - top[1] if len(top) == 2 else math.inf)
            continue
        cdf, point = sampler._cdf(row_logits, best_logit, row), sampler._uniform_of(row)
        low, high, total = float(cdf[token - 1]) if token else 0.0, float(cdf[token]), float(cdf[-1])
        below = point - low / total if low > 0.0 else math.inf
        above = high / total - point if high < total else math.inf
        margins.append(min(below, above))
    return list(zip(tokens, margins, strict=True))
