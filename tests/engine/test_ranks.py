"""Exchanges between ranks: sums in the order of the ranks, columns on the first, and no wait for a rank that ended."""

from __future__ import annotations

import pytest
import torch

from engine.ranks import SLOT_BYTES, RankLost, SharedMemoryRanks
from tests.engine.rank_threads import group_of, on_all_ranks


def of_rank(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_in_the_order_of_the_ranks(dtype: torch.dtype) -> None:
    """Also of tensors that are larger than a slot, and of every size after another."""
    shapes = [(1, 3), (700, 513), (2, 64)]
    assert 700 * 513 * dtype.itemsize > SLOT_BYTES or dtype == torch.bfloat16

    def compute(rank: int, ranks: SharedMemoryRanks) -> list[torch.Tensor]:
        return [ranks.sum(of_rank(rank, *shape).to(dtype)) for shape in shapes]

    for results in on_all_ranks(3, compute):
        for shape, result in zip(shapes, results, strict=True):
            first, second, third = (of_rank(rank, *shape).to(dtype) for rank in range(3))
            assert torch.equal(result, (first + second) + third)


def test_columns_of_all_ranks_are_side_by_side_on_the_first() -> None:
    whole = of_rank(0, 5, 100_003)  # three parts of different sizes, in several pieces
    bounds = [100_003 * rank // 3 for rank in range(4)]

    def compute(rank: int, ranks: SharedMemoryRanks) -> torch.Tensor:
        return ranks.columns(whole[:, bounds[rank] : bounds[rank + 1]].contiguous(), 100_003)

    results = on_all_ranks(3, compute)
    assert torch.equal(results[0], whole)
    assert torch.equal(results[2], whole[:, bounds[2] :])


def test_a_rank_that_ends_is_noticed_at_once() -> None:
    (first, _), peers = group_of(2)
    peers[1][0].close()
    with pytest.raises(RankLost):
        first.sum(torch.ones(2))
    peers[0][1].close()
