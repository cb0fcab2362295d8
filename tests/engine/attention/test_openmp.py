"""Compiled kernels run on torch's threads: same count, every task once, from any Python thread."""

from __future__ import annotations

import ctypes
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from numba import cfunc

from engine.attention import openmp
from engine.attention.compilation import SIGNATURE
from engine.attention.openmp import Launch, LaunchProgram, launcher, num_threads_for, recording
from engine.attention.simd import INT64, next_task, pointer
from engine.models.linear import PanelLinear


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


def test_other_python_threads_run_beside_a_kernel_of_one_thread() -> None:
    most = 1 << 32  # some 20 s, if the counter is left to the kernel

    @cfunc(SIGNATURE)
    def kernel(a):  # type: ignore[no-untyped-def]
        num_drawn = 0
        while next_task(a) < a[1]:
            num_drawn += 1
        a[2] = num_drawn

    arguments = (ctypes.c_int64 * 3)(0, most, 0)

    def end_it() -> None:
        while not arguments[0]:
            time.sleep(0.001)
        arguments[0] = most

    other = threading.Thread(target=end_it)
    other.start()
    launcher(int(kernel.address))(1, arguments)
    other.join()
    assert arguments[2] < most


def test_only_short_work_keeps_the_gil_where_torch_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert num_threads_for(100) is None
    assert num_threads_for(1 << 20) == 1
    layer = PanelLinear(torch.zeros(512, 256), None)  # of any processor: nothing is multiplied
    launches: list[int | None] = []
    monkeypatch.setattr(layer, "_launch", lambda num_threads, _: launches.append(num_threads))
    layer(torch.zeros(8, 256))
    assert launches == [1]


def test_a_runtime_in_a_folder_with_a_space_is_found(tmp_path: Path) -> None:
    (loaded, *_) = openmp._openmp_libraries()
    copy = tmp_path / "my programs" / loaded.name
    copy.parent.mkdir()
    shutil.copy(loaded, copy)
    ctypes.CDLL(str(copy))
    assert copy in openmp._openmp_libraries()


def test_of_the_loaded_runtimes_torchs_own_is_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others are in an environment with torch in its name."""
    (loaded, *_) = openmp._openmp_libraries()
    copies = [tmp_path / folder / "lib" / loaded.name for folder in ("envs/torch", "torch")]
    for copy in copies:
        copy.parent.mkdir(parents=True)
        shutil.copy(loaded, copy)
        ctypes.CDLL(str(copy))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    assert openmp._openmp_libraries()[0] == copies[1]
