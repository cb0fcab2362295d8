"""Compiled kernels run on torch's threads: same count, every task once, from any Python thread."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numba import cfunc

from engine.attention.compilation import SIGNATURE
from engine.attention.openmp import launcher
from engine.attention.simd import INT64, next_task, pointer


@pytest.fixture(scope="module")
def count_tasks() -> int:
    """Address of a kernel that adds one to element i for every task i drawn: counter, number of tasks, int64 array."""

    @cfunc(SIGNATURE)
    def kernel(a):  # type: ignore[no-untyped-def]
        counts = pointer(a[2], INT64)
        while True:
            task = next_task(a)
            if task >= a[1]:
                break
            counts[task] = counts[task] + 1

    _KEPT.append(kernel)
    return int(kernel.address)


_KEPT: list[object] = []  # the compiled code lives as long as this


def _run(address: int, num_threads: int, num_tasks: int) -> torch.Tensor:
    counts = torch.zeros(num_tasks, dtype=torch.int64)
    arguments = (ctypes.c_int64 * 3)(0, num_tasks, counts.data_ptr())
    launcher(address)(num_threads, ctypes.addressof(arguments))
    return counts


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_is_drawn_once(count_tasks: int, num_threads: int) -> None:
    assert torch.equal(_run(count_tasks, num_threads, 10_000), torch.ones(10_000, dtype=torch.int64))


def test_launches_from_several_python_threads_do_not_disturb_each_other(count_tasks: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: _run(count_tasks, 2, 2_000), range(40)))
    assert all(torch.equal(counts, torch.ones(2_000, dtype=torch.int64)) for counts in results)
