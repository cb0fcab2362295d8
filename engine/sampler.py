"""Choosing tokens: a pure function of the logits and of (seed, choice, absolute position).

Each draw takes one uniform number from a counter-based generator (no state to carry, save or replay) and inverts the
cumulative distribution over the vocabulary, in vocabulary order and float64. So a token does not depend on batch
mates, on preemption, on how many tokens a step verified, or on the instance that continues a stream: every row's
arithmetic is the same alone or in a batch.

Filters in vLLM's order: temperature, then min_p, top_k, top_p (over what top_k left). Where equal logits straddle a
filter's edge the lowest ids stay, so top_k=1 is the greedy choice; vLLM keeps all of them for top_k and unspecified
ones for top_p. Rows without filters are never sorted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import EngineError
from engine.sampling_params import GREEDY_BELOW

_MASK32 = 0xFFFFFFFF
_CHUNK_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
"""float64 weights held at once: on a CPU what its second-level cache holds (1 MiB), on a GPU 128 MiB."""


class NonFiniteLogits(EngineError):
    """Rows whose best logit is NaN or infinite (a broken model, or every token forbidden). No row was sampled."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        super().__init__(f"the best logit of row(s) {', '.join(map(str, rows[:8]))} is not finite")


@dataclass(slots=True, frozen=True)
class SamplingRow:
    """What one row of logits is sampled by. Values as `sampling_params.validate` lets them through."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    """Index in prompt + output of the token that is drawn."""
    forbidden_ids: tuple[int, ...] = ()
    """Tokens that may not be drawn here: EOS and stop tokens while min_tokens is not reached."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x32-10: four 32-bit words.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & _MASK32, (even >> 32) ^ c3 ^ k1, even & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, stream: int = 0) -> float:
    """The number in [0, 1), a multiple of 2^-53, that decides (seed, choice, position).

    Key: the seed's low and high word; counter: the position's low and high word, choice, stream; the result is the
    upper 53 bits of (second word, first word). Stream 0 draws tokens; others are free for what else a position needs.
    """
    counter = (position & _MASK32, position >> 32 & _MASK32, choice & _MASK32, stream)
    low, high, _, _ = philox4x32(counter, (seed & _MASK32, seed >> 32 & _MASK32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token id per row of `logits` [n, vocab] (float32, left as it is). Raises `NonFiniteLogits`."""
    logits = _without_forbidden(logits, rows)
    best, best_logits = _best(logits)
    sampled = [i for i, row in enumerate(rows) if not row.is_greedy]
    for chunk in _chunks(sampled, logits):
        cdf, uniforms = _cdf(logits, best_logits, rows, chunk)
        best[chunk] = _invert(cdf, uniforms)
    return best.tolist()


def sample_with_margin(logits: Tensor, rows: Sequence[SamplingRow]) -> list[tuple[int, float]]:
    """`sample`, each token with how far it was from being another one: a test may excuse a difference in a near-tie.

    Sampled rows: the distance, as a probability, from the uniform to the nearer end of the token's interval that has a
    neighbour. Greedy rows: best logit minus second best. Infinite when nothing else could be drawn. What lies just
    outside a filter's edge does not count.
    """
    tokens = sample(logits, rows)
    logits = _without_forbidden(logits, rows)
    _, best_logits = _best(logits)
    margins = []
    for i, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        if row.is_greedy:
            top = logits[i].topk(min(2, logits.shape[1])).values.tolist()
            margins.append(top[0] - top[1] if len(top) == 2 else math.inf)
            continue
        cdf, uniforms = _cdf(logits, best_logits, rows, [i])
        low, high, total = (cdf[0, max(token - 1, 0)].item() if token else 0.0), cdf[0, token].item(), cdf[0, -1].item()
        point = uniforms.item()
        below = point - low / total if low > 0.0 else math.inf
        above = high / total - point if high < total else math.inf
        margins.append(min(below, above))
    return list(zip(tokens, margins, strict=True))


def _without_forbidden(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sampling rows")
    if not any(row.forbidden_ids for row in rows):
        return logits
    logits = logits.clone()
    for i, row in enumerate(rows):
        if row.forbidden_ids:
            logits[i, list(row.forbidden_ids)] = -math.inf
    return logits


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the id of the best logit, the lowest among equals, and its value in float64."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised and takes the first of equals too: 8 us a row of 152 k, torch's 230 us.
        best = torch.from_numpy(np.argmax(logits.detach().numpy(), axis=-1))
    else:
        best = logits.argmax(dim=-1)
    values = logits.gather(1, best[:, None]).squeeze(1).double()
    if not bool((finite := values.isfinite()).all()):
        raise NonFiniteLogits(tuple((~finite).nonzero().flatten().tolist()))
    return best, values


def _chunks(indices: list[int], logits: Tensor) -> Iterator[list[int]]:
    num_rows = max(1, _CHUNK_ELEMENTS.get(logits.device.type, 2**17) // logits.shape[1])
    return (indices[i : i + num_rows] for i in range(0, len(indices), num_rows))


def _cdf(logits: Tensor, best_logits: Tensor, rows: Sequence[SamplingRow], chunk: list[int]) -> tuple[Tensor, Tensor]:
    """For the rows in `chunk`: running sums of unnormalised weights [len(chunk), vocab], and uniforms [len(chunk), 1].

    The best token's weight is exactly 1 before filtering, so no row sums to zero and min_p compares directly.
    """
    temperatures = torch.tensor([[rows[i].temperature] for i in chunk], dtype=torch.float64, device=logits.device)
    weights = logits[chunk].double().sub_(best_logits[chunk][:, None]).div_(temperatures).exp_()
    for j, i in enumerate(chunk):
        if rows[i].is_filtered:
            weights[j] = _filtered(weights[j], rows[i])
    points = [[uniform(rows[i].seed, rows[i].choice, rows[i].position)] for i in chunk]
    return weights.cumsum(dim=-1), torch.tensor(points, dtype=torch.float64, device=logits.device)


def _invert(cdf: Tensor, uniforms: Tensor) -> Tensor:
    """First id whose running sum exceeds uniform * total.

    It exists: uniform <= 1 - 2^-53 keeps the rounded product below the total. Its weight is positive, since the sum
    before it does not exceed the product.
    """
    return torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True).squeeze(1)


def _filtered(weights: Tensor, row: SamplingRow) -> Tensor:
    """`weights` [vocab] (best one 1.0) with zeros where min_p, top_k and top_p drop a token."""
    if row.min_p > 0.0:
        weights = weights.where(weights >= row.min_p, 0.0)
    descending: Tensor | None = None
    if 0 < row.top_k < weights.shape[0]:
        descending = weights.topk(row.top_k).values
        weights = _keep_largest(weights, row.top_k, edge=descending[-1:])
    if row.top_p < 1.0:
        descending = _sorted_descending(weights) if descending is None else descending
        sums = descending.cumsum(dim=0)
        count = (sums < row.top_p * sums[-1]).sum(dim=0, keepdim=True) + 1
        weights = _keep_largest(weights, count, edge=descending.gather(0, count - 1))
    return weights


def _sorted_descending(weights: Tensor) -> Tensor:
    if weights.device.type == "cpu":
        # numpy sorts 152 k float64 in 0.8 ms (AVX-512 or AVX2), torch in 10 ms.
        return torch.from_numpy(np.sort(weights.numpy())[::-1].copy())
    return weights.sort(descending=True).values


def _keep_largest(weights: Tensor, count: Tensor | int, *, edge: Tensor) -> Tensor:
    """Zero all but the `count` largest of `weights`, of which `edge` [1] is the smallest; lowest ids among equals.

    Shapes do not depend on data, so a GPU need not be waited for.
    """
    ties = weights == edge
    above = weights > edge
    kept_ties = ties & (ties.cumsum(dim=0) <= count - above.sum())
    return weights.where(above | kept_ties, 0.0)
