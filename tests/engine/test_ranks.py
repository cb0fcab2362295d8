"""Exchanges between ranks: sums in the order of the ranks, columns on the first, hidden states from stage to stage, and
no wait for a rank that ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest
import torch

from engine.partition import Parallelism
from engine.ranks import (
    SLOT_BYTES,
    DistributedRanks,
    DistributedStages,
    ProcessGroup,
    RankLost,
    SharedMemoryRanks,
    SocketStages,
    close_all,
    connect_all,
)
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
    (first, _), (ours, theirs) = group_of(2)
    close_all([theirs])
    with pytest.raises(RankLost):
        first.sum(torch.ones(2))
    close_all([ours])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_go_from_stage_to_stage(dtype: torch.dtype) -> None:
    """Also such that are larger than the system's buffers, and one after the other before the first is taken."""
    shapes = [(1, 3), (2, 64), (700, 513)]
    all_ends = connect_all(Parallelism(1, 3))
    stages = [SocketStages(ends.before, ends.after) for ends in all_ends]
    sent = [of_rank(0, *shape).to(dtype) for shape in shapes]

    def send_on(stage: int) -> list[torch.Tensor]:
        received = [stages[stage].receive(*shape, dtype) for shape in shapes] if stage else sent
        for x in received if stage < 2 else ():
            stages[stage].send(x)
        return received

    with ThreadPoolExecutor(3) as threads:
        for received in threads.map(send_on, range(3)):
            assert all(torch.equal(one, x) for one, x in zip(received, sent, strict=True))
    close_all(all_ends)


def test_a_stage_that_ends_is_noticed_at_once() -> None:
    """By the one that waits for it, and by the one that sends to it, even in the middle of a tensor."""
    all_ends = connect_all(Parallelism(1, 3))
    first, _, last = (SocketStages(ends.before, ends.after) for ends in all_ends)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(first.send, torch.zeros(1 << 20))
        close_all(all_ends[1:2])
        with pytest.raises(RankLost, match="stage after this one has ended"):
            sending.result()
    with pytest.raises(RankLost, match="stage before this one has ended"):
        last.receive(1, 3, torch.float32)
    close_all(all_ends)


@pytest.fixture
def three_groups() -> list[ProcessGroup]:
    """The ends of three ranks in torch.distributed."""
    fd = os.memfd_create("groups")  # it stays open, as in `MultiprocessExecutor`
    return [ProcessGroup("stage 0", fd, rank, 3, torch.device("cpu"), lambda: None) for rank in range(3)]


def on_threads(groups: list[ProcessGroup], compute: Callable[[ProcessGroup], list[torch.Tensor]]) -> list[torch.Tensor]:
    """What `compute` returns on each."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return [tensor for tensors in threads.map(compute, groups) for tensor in tensors]


def test_ranks_without_shared_memory_exchange_the_same(three_groups: list[ProcessGroup]) -> None:
    """By gloo; torch has no NCCL without a GPU."""
    whole, bounds = of_rank(0, 5, 103), [103 * rank // 3 for rank in range(4)]

    def compute(group: ProcessGroup) -> list[torch.Tensor]:
        rank, ranks = group.rank, DistributedRanks(group)
        part = whole[:, bounds[rank] : bounds[rank + 1]]
        return [ranks.sum(of_rank(rank, 7, 33).bfloat16().T), ranks.columns(part, 103)]

    sums_and_columns = on_threads(three_groups, compute)
    expected = sum((of_rank(rank, 7, 33).bfloat16().T.double() for rank in range(3)), torch.zeros(33, 7).double())
    for total in sums_and_columns[::2]:
        torch.testing.assert_close(total.double(), expected, atol=0.05, rtol=0)
    assert torch.equal(sums_and_columns[1], whole)
    assert torch.equal(sums_and_columns[5], whole[:, bounds[2] :])


def test_hidden_states_go_on_without_shared_memory_until_a_rank_ends(three_groups: list[ProcessGroup]) -> None:
    sent = of_rank(0, 700, 513).bfloat16()

    def compute(group: ProcessGroup) -> list[torch.Tensor]:
        stages = DistributedStages(group, 1)
        x = stages.receive(700, 513, torch.bfloat16) if group.rank else sent
        if group.rank < 2:
            stages.send(x)
        return [x]

    assert all(torch.equal(x, sent) for x in on_threads(three_groups, compute))
    waiting, ended, _ = three_groups
    ended._backend = None
    three_groups.clear()
    with pytest.raises(RankLost, match="another rank has ended"):
        DistributedRanks(waiting).sum(sent)


def test_a_rank_that_has_ended_before_it_connects_is_not_waited_for(three_groups: list[ProcessGroup]) -> None:
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise RankLost("rank 1 ended")

    waiting = replace(three_groups[0], check=check)
    with ThreadPoolExecutor(1) as threads:
        sum_ = threads.submit(DistributedRanks(waiting).sum, torch.ones(2))
        assert not wait([sum_], timeout=0.1).done
        lost.set()
        with pytest.raises(RankLost, match="rank 1 ended"):
            sum_.result()


def test_no_memory_for_an_exchange_is_not_the_end_of_another_rank(three_groups: list[ProcessGroup]) -> None:
    def start(backend: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    group = three_groups[0]
    group._backend = object()  # connected
    with pytest.raises(torch.OutOfMemoryError):
        group.run(start)
