"""Compiled kernels run on torch's threads: same count, every task once, from any Python thread."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from numba import cfunc

from engine.attention.compilation import SIGNATURE
from engine.attention.openmp import Launch, LaunchProgram, launcher, recording
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
    launcher(address)(num_threads, arguments)
    return counts


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_task_is_drawn_once(count_tasks: int, num_threads: int) -> None:
    assert torch.equal(_run(count_tasks, num_threads, 10_000), torch.ones(10_000, dtype=torch.int64))


def test_launches_from_several_python_threads_do_not_disturb_each_other(count_tasks: int) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: _run(count_tasks, 2, 2_000), range(40)))
    assert all(torch.equal(counts, torch.ones(2_000, dtype=torch.int64)) for counts in results)


@pytest.fixture(scope="module")
def mix_reversed() -> int:
    """Address of a kernel whose tasks take longer and longer, and read what another task of the launch before has
    written, the first one that of its last: counter, number of tasks, int64 source, int64 target."""

    @cfunc(SIGNATURE)
    def kernel(a):  # type: ignore[no-untyped-def]
        source, target = pointer(a[2], INT64), pointer(a[3], INT64)
        while True:
            task = next_task(a)
            if task >= a[1]:
                break
            number = source[a[1] - 1 - task]
            for _ in range(10_000 * (task + 1)):
                number = 3 * number + task
            target[task] = number

    _KEPT.append(kernel)
    return int(kernel.address)


@pytest.mark.parametrize("threads", [[1, 1, 1], [3, 1, 2], [2, 3, 3, 1, 1, 3], [2]])
def test_a_program_runs_its_launches_in_order_and_again(mix_reversed: int, threads: list[int]) -> None:
    def launch_all(numbers: torch.Tensor, threads: list[int]) -> None:
        for index, num_threads in enumerate(threads):
            source, target = numbers[index % 2], numbers[1 - index % 2]
            arguments = (ctypes.c_int64 * 4)(0, len(source), source.data_ptr(), target.data_ptr())
            launcher(mix_reversed)(num_threads, arguments)

    numbers, expected = torch.arange(14).view(2, 7), torch.arange(14).view(2, 7)
    launches: list[Launch] = []
    with recording(launches):
        launch_all(numbers, threads)
    assert torch.equal(numbers, expected), "a recorded launch does not run"
    program = LaunchProgram(launches)
    for _ in range(25):
        program.run()
        launch_all(expected, [1] * len(threads))
        assert torch.equal(numbers, expected)


def test_another_threads_launches_are_not_recorded(count_tasks: int) -> None:
    launches: list[Launch] = []
    with recording(launches), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(_run, count_tasks, 1, 50).result(), torch.ones(50, dtype=torch.int64))
    assert not launches
