"""Log-probabilities of tokens and of the best candidates, from the raw logits as in vLLM's default mode: before biases,
penalties and temperature.

A row's values are the same alone or in a batch. Among equal logits the lower id comes first, in ranks and candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.messages import TokenLogprob
from engine.scheduling.request import Request
from engine.scheduling.scheduler_output import ScheduledRequest

_ROWS = 64
"""Positions that are computed at the same time. The logits of a whole chunk would take a gigabyte, and the candidates
of a thousand streams three: 20 bytes and more for each entry of the vocabulary."""


def token_logprobs(
    rows: Sequence[Tensor] | Tensor, token_ids: Sequence[int], nums: Sequence[int]
) -> list[list[TokenLogprob]]:
    """For each of `rows` (float32 [vocab]): its token, then the others of the `num` best: num or num + 1 entries."""
    if rows[0].device.type == "cpu":
        # numpy with a partition takes 0.6 ms per row of 152 k, torch's sort 10.
        return [_of_row(row.numpy(), *what) for row, *what in zip(rows, token_ids, nums, strict=True)]
    return _in_pieces(rows, token_ids, nums)


def _in_pieces(
    rows: Sequence[Tensor] | Tensor, token_ids: Sequence[int], nums: Sequence[int]
) -> list[list[TokenLogprob]]:
    found: list[list[TokenLogprob]] = []
    for first in range(0, len(rows), _ROWS):
        few = slice(first, first + _ROWS)
        logits = rows[few] if isinstance(rows, Tensor) else torch.stack([*rows[few]])
        found += _of_rows(logits, token_ids[few], nums[few])
    return found


def _of_row(row: npt.NDArray[np.float32], token_id: int, num: int) -> list[TokenLogprob]:
    weights = row - row.max()
    np.exp(weights, out=weights)
    log_total = math.log(weights.sum(dtype=np.float64)) + float(row.max())
    logit = row[token_id]
    rank = 1 + int(np.count_nonzero(row > logit) + np.count_nonzero(row[:token_id] == logit))
    candidates = _best_ids(row, num)
    found = [(token_id, rank), *((int(one), place) for place, one in enumerate(candidates, 1) if one != token_id)]
    return [TokenLogprob(one, float(row[one]) - log_total, place) for one, place in found]


def _best_ids(row: npt.NDArray[np.float32], num: int) -> npt.NDArray[Any]:
    """The ids of the `num` largest, best first, the lower id first among equals."""
    num = min(num, len(row))
    if num == 0:
        return np.zeros(0, np.int64)
    edge = np.partition(row, len(row) - num)[len(row) - num]
    above = np.flatnonzero(row > edge)
    ids = np.concatenate([above, np.flatnonzero(row == edge)[: num - len(above)]])
    order: npt.NDArray[Any] = np.lexsort((ids, -row[ids]))
    return np.take(ids, order)


def _of_rows(logits: Tensor, token_ids: Sequence[int], nums: Sequence[int]) -> list[list[TokenLogprob]]:
    """At once, for devices where every operation costs a launch."""
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    drawn = logits.gather(1, tokens)
    is_before = torch.arange(logits.shape[1], device=logits.device) < tokens
    ranks = 1 + ((logits > drawn) | ((logits == drawn) & is_before)).sum(dim=1)
    log_totals = logits.double().logsumexp(dim=1, keepdim=True)
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    num = max(nums)
    best_ids = ids[:, :num].tolist()
    best = (values[:, :num].double() - log_totals).tolist()
    own = (drawn.double() - log_totals).squeeze(1).tolist()
    result = []
    for row, (token_id, rank) in enumerate(zip(token_ids, ranks.tolist(), strict=True)):
        others = zip(best_ids[row][: nums[row]], best[row][: nums[row]], strict=True)
        entries = [TokenLogprob(one, value, place) for place, (one, value) in enumerate(others, 1) if one != token_id]
        result.append([TokenLogprob(token_id, own[row], rank), *entries])
    return result


Positions = list[list[TokenLogprob]]


class PromptLogprobs:
    """Log-probabilities of prompt tokens, collected while prompts are computed. Owned by the model runner.

        first share ─▶ collecting, share by share ─▶ returned with the first token | dropped with the request

    Every prompt position must be computed, so such a request uses neither the prefix cache nor a connector until then;
    a preemption starts the collection again.

    `compute_logits`: a step's hidden states and rows of them -> [rows, vocab].
    """

    def __init__(self, compute_logits: Callable[[Tensor, npt.NDArray[np.int64]], Tensor]) -> None:
        self._compute_logits = compute_logits
        self._collected: WeakKeyDictionary[Request, Positions] = WeakKeyDictionary()

    def collect(self, shares: Sequence[ScheduledRequest], hidden: Tensor) -> dict[str, Positions]:
        """Take a step's `hidden` [tokens, hidden_size]. Returns those that are complete, by request id: one entry per
        prompt token, empty for the first, which is not predicted."""
        complete = {}
        end = 0
        for share in shares:
            first, end = end, end + share.num_tokens + len(share.draft)
            if share.request.needs_prompt_logprobs:
                positions = self._add(share, hidden, first)
                if share.samples:
                    complete[share.request.request_id] = positions
                    del self._collected[share.request]
        return complete

    def _add(self, share: ScheduledRequest, hidden: Tensor, first_row: int) -> Positions:
        request, num = share.request, share.request.spec.params.prompt_logprobs or 0
        if share.start == 0:
            self._collected[request] = [[]]
        positions = self._collected[request]
        targets = request.spec.prompt_token_ids[share.start + 1 : share.start + share.num_tokens + 1]
        for first in range(0, len(targets), _ROWS):
            wanted = targets[first : first + _ROWS]
            logits = self._compute_logits(hidden, np.arange(first_row + first, first_row + first + len(wanted)))
            positions += token_logprobs(logits, wanted, [num] * len(wanted))
        return positions
