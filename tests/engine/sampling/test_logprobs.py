"""Log-probabilities and ranks against the definition, with Python's sort and math."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engine.core.messages import TokenLogprob
from engine.sampling import logprobs
from engine.sampling.logprobs import _in_pieces, _of_rows, token_logprobs


def slow_logprobs(row: list[float], token_id: int, num: int) -> list[TokenLogprob]:
    total = math.log(math.fsum(math.exp(x - max(row)) for x in row)) + max(row)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    entries = [TokenLogprob(i, row[i] - total, rank) for rank, i in enumerate(order, 1)]
    return [entries[order.index(token_id)], *(entry for entry in entries[:num] if entry.token_id != token_id)]


def assert_same(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert [(one.token_id, one.rank) for one in found] == [(one.token_id, one.rank) for one in expected]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=2e-6)


@pytest.mark.parametrize("way", [token_logprobs, _of_rows, _in_pieces], ids=["numpy", "all rows at once", "in pieces"])
@pytest.mark.parametrize("vocab", [1, 7, 300, 1500])
def test_candidates_ranks_and_values_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, way: object, vocab: int
) -> None:
    monkeypatch.setattr(logprobs, "_ROWS", 7)
    rng, generator = random.Random(vocab), torch.Generator().manual_seed(vocab)
    # Few distinct values, as bfloat16 logits have: ties at every edge
    logits = (torch.randn(20, vocab, generator=generator) * 8).round() / 2
    if vocab > 1:
        logits[0, vocab // 2] = -math.inf
    tokens = [rng.randrange(vocab) if i % 2 else int(logits[i].argmax()) for i in range(20)]
    nums = [(0, 1, 5, 20)[i % 4] for i in range(20)]
    found = way(logits, tokens, nums)  # type: ignore[operator]
    for entries, row, token_id, num in zip(found, logits.tolist(), tokens, nums, strict=True):
        assert_same(entries, slow_logprobs(row, token_id, num))


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(9, 40_003, generator=torch.Generator().manual_seed(0)) * 3
    tokens, nums = [i * 31 for i in range(9)], [5] * 9
    together = token_logprobs(logits, tokens, nums)
    assert together == [token_logprobs(logits[i : i + 1], tokens[i : i + 1], [5])[0] for i in range(9)]


def test_probabilities_of_everything_sum_to_one() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(0)) * 30
    [entries] = token_logprobs(logits, [3], [20])
    assert len(entries) == 20
    assert sum(math.exp(entry.logprob) for entry in entries) == pytest.approx(1.0)
