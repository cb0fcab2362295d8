"""A container's limits bound cores and memory, not the node's size."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from engine import machine
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.machine import (
    available_bytes,
    cpu_quota,
    file_system,
    openmp_waiting,
    physical_cores,
    place_process,
    second_level_bytes,
    set_num_threads,
    usable_cores,
    useful_threads,
)


@pytest.mark.parametrize(("cpu_max", "cores"), [("200000 100000", 2.0), ("150000 100000", 1.5), ("max 100000", None)])
def test_the_quota_is_in_cores(tmp_path: Path, cpu_max: str, cores: float | None) -> None:
    (tmp_path / "cpu.max").write_text(f"{cpu_max}\n")
    assert cpu_quota(tmp_path) == cores


def test_outside_of_a_container_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert useful_threads(tmp_path) == len(usable_cores())
    assert available_bytes(tmp_path) > 0


def test_threads_are_no_more_than_cores_and_no_fewer_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: list(range(64)))
    for quota, threads in (("150000", 2), ("10000", 1), ("6400000", 64), ("12800000", 64)):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert useful_threads(tmp_path) == threads


@pytest.mark.parametrize(
    ("size", "sharing", "num_bytes"),
    [("2048K", "1", 2 << 20), ("1024K", "00000001,00000001", 512 << 10), ("32M", "f", 512 << 10), ("", "1", 512 << 10)],
)
def test_a_core_has_its_share_of_the_second_level(tmp_path: Path, size: str, sharing: str, num_bytes: int) -> None:
    cache = tmp_path / f"cpu{usable_cores()[0]}" / "cache" / "index2"
    cache.mkdir(parents=True)
    (cache / "size").write_text(f"{size}\n")
    (cache / "shared_cpu_map").write_text(f"{sharing}\n")
    assert second_level_bytes(tmp_path) == num_bytes
    assert second_level_bytes(tmp_path / "none") == 512 << 10


def test_memory_is_what_the_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_bytes(tmp_path) == 600_000
    (tmp_path / "memory.current").write_text("1400000\n")
    assert available_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert 600_000 < available_bytes(tmp_path) <= psutil.virtual_memory().total


def test_what_the_container_has_read_of_files_is_available(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("990000\n")
    counters = "anon 200000\nfile 790000\nshmem 90000\ninactive_file 600000\nactive_file 100000\n"
    (tmp_path / "memory.stat").write_text(counters)
    assert available_bytes(tmp_path) == 710_000
    (tmp_path / "memory.current").write_text("650000\n")
    assert available_bytes(tmp_path) == 1_000_000, "read a moment later, but no more than the limit"


@pytest.mark.parametrize("core", [1 << 16, -1, 1 << 40])
def test_cores_that_there_are_not_are_named_with_those_that_there_are(core: int) -> None:
    before = usable_cores()
    with pytest.raises(
        EngineError, match=rf"cpu_cores: \[{core}\] cannot be used: .*; this process runs on \[{before[0]}"
    ):
        place_process(EngineConfig(model="m", cpu_cores=(core,)), 0)
    assert usable_cores() == before


def test_the_number_of_threads_follows_the_quota_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("engine.machine.useful_threads", lambda: 1)
    try:
        assert set_num_threads(2) == 2
        assert set_num_threads(None) == 1
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert set_num_threads(None) == 2
    finally:
        torch.set_num_threads(before)


def test_hyperthreads_of_a_core_are_found_together(tmp_path: Path) -> None:
    for core, siblings in enumerate(("0,4", "1,5", "2-3", "2-3", "0,4", "1,5", "6", "")):
        (tmp_path / f"cpu{core}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    assert physical_cores(range(9), tmp_path) == [(0, 4), (1, 5), (2, 3), (6,), (7,), (8,)]
    assert physical_cores([1, 2, 4], tmp_path) == [(1,), (2,), (4,)], "only those that may be used"


@pytest.mark.parametrize(
    ("cpu_max", "cores", "policy"),
    [
        ("max", [0, 1], "active"),
        ("max", [], "passive"),
        ("300000", [0, 1], "passive"),
        ("400000", [0, 1], "active"),
        ("400000", [], "passive"),
    ],
)
def test_openmp_threads_spin_on_dedicated_cores_that_no_cpu_limit_throttles(
    cpu_max: str, cores: list[int], policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: [0, 1, 2, 3])
    (tmp_path / "cpu.max").write_text(f"{cpu_max} 100000\n")
    variables = openmp_waiting(cores, tmp_path)
    assert variables["OMP_WAIT_POLICY"] == policy
    assert ("GOMP_SPINCOUNT" in variables) == (policy == "active")


def test_a_folders_file_system_is_the_one_mounted_nearest() -> None:
    assert file_system(Path("/proc")) == file_system(Path("/proc/self/fd")) == "proc"
