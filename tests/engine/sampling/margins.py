"""A draw by torch operations, as a reference; and sampled tokens with the margin by which they were chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
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
        cdf, point = cdf_of(row_logits, best_logit, row), sampler._uniform_of(row)
        low, high, total = float(cdf[token - 1]) if token else 0.0, float(cdf[token]), float(cdf[-1])
        below = point - low / total if low > 0.0 else math.inf
        above = high / total - point if high < total else math.inf
        margins.append(min(below, above))
    return list(zip(tokens, margins, strict=True))


def cdf_of(logits: Tensor, best_logit: float, row: sampler.SamplingRow) -> Tensor:
    """Running sums of unnormalised weights [vocab]; the best token's weight is 1, so the total is positive."""
    weights = logits.double().sub_(best_logit).div_(row.params.temperature).exp_()
    return _filtered(weights, row.params).cumsum(dim=0)


def inverted(cdf: Tensor, point: float) -> Tensor:
    """First id whose running sum exceeds point * total; a tensor, to avoid a synchronisation.

    It exists: point <= 1 - 2^-53 keeps the rounded product below the total. Its weight is positive, since the sum
    before it does not exceed the product.
    """
    return torch.searchsorted(cdf, point * cdf[-1:], right=True)


def _filtered(weights: Tensor, params: SamplingParams) -> Tensor:
    """`weights` [vocab] (the best is 1.0) with zeros for tokens that min_p, top_k and top_p exclude."""
    if params.min_p > 0.0:
        weights = weights * (weights >= params.min_p)
    descending: Tensor | None = None
    if 0 < params.top_k < len(weights):
        descending = weights.topk(params.top_k).values
        weights = _keep_largest(weights, params.top_k, edge=descending[-1])
    if params.top_p < 1.0:
        descending = weights.sort(descending=True).values if descending is None else descending
        sums = descending.cumsum(dim=0)
        count = (sums < params.top_p * sums[-1]).sum() + 1
        weights = _keep_largest(weights, count, edge=descending[count - 1])
    return weights


def _keep_largest(weights: Tensor, count: int | Tensor, *, edge: Tensor) -> Tensor:
    """Zero all but the `count` largest of `weights`, of which `edge` is the smallest; lowest ids among equals."""
    kept = weights >= edge
    if kept.sum() > count:
        above, ties = weights > edge, weights == edge
        kept = above | (ties & (ties.cumsum(0) <= count - above.sum()))
    return weights * kept
