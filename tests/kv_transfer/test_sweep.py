"""The folder stays within its size and loses what nobody owns, with several instances at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer.shared_storage import SharedStorage
from kv_transfer.sweep import TEMP_PREFIX
from tests.files_below import files_below
from tests.kv_transfer.test_shared_storage import HEADER, PAGE, key_of, path_of, read

VALUE_BYTES = len(HEADER) + len(PAGE)


def open_store(path: Path, *, num_values: int = 1000, **settings: float) -> SharedStorage:
    return SharedStorage(path, capacity_bytes=num_values * VALUE_BYTES, **settings)


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_several_instances_keep_one_folder_within_its_size(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, num_values=20, scan_interval_s=0.05) for _ in range(3)]
    for number in range(90):
        stores[number % 3].put(key_of(number), (HEADER, PAGE))
    wait(lambda: len(files_below(tmp_path)) <= 20)
    for store in stores:
        store.close()
    assert len(files_below(tmp_path)) >= 10, "no more goes than has to"


def test_least_recently_used_pages_go_first_and_use_is_reading_or_asking(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_values=10)
    for number in range(10):
        store.put(key_of(number), (HEADER, PAGE))
        age(path_of(store, key_of(number)), 1000 - number)
    assert read(store, key_of(0)) is not None
    assert store.contains(key_of(1), VALUE_BYTES)
    store.put(key_of(10), (HEADER, PAGE))
    wait(lambda: len(files_below(tmp_path)) <= 9)
    store.close()
    left = {number for number in range(11) if path_of(store, key_of(number)).exists()}
    assert left == {0, 1, *range(4, 11)}


def test_orphans_go_and_what_is_in_use_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path, temp_max_age_s=100.0, tail_max_age_s=50.0)
    for number, transfer in ((1, ""), (2, "old"), (3, "new")):
        store.put(key_of(number, transfer=transfer), (HEADER, PAGE))
    folder = path_of(store, key_of(1)).parent
    old, new = folder / f"{TEMP_PREFIX}old", folder / f"{TEMP_PREFIX}new"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    age(old, 200)
    age(path_of(store, key_of(1)), 200)  # old, but a full block is nobody's to miss: only the capacity makes it go
    age(path_of(store, key_of(2, transfer="old")), 200)
    report = store.sweeper.sweep()
    store.close()
    assert (report.num_evicted, report.num_files) == (0, 3)
    assert not old.exists()
    assert new.exists()
    assert not path_of(store, key_of(2, transfer="old")).parent.exists()
    assert path_of(store, key_of(3, transfer="new")).exists()
    assert path_of(store, key_of(1)).exists()


def test_start_sweeps_what_a_dead_instance_left(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.put(key_of(1, transfer="dead"), (HEADER, PAGE))
    first.close()
    age(path_of(first, key_of(1, transfer="dead")), 1e5)
    second = open_store(tmp_path)
    wait(lambda: not files_below(tmp_path))
    second.close()


def test_sweep_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{TEMP_PREFIX}x").write_bytes(b"mine")
    age(outside / f"{TEMP_PREFIX}x", 1e6)
    store = open_store(tmp_path / "store")
    store.put(key_of(1), (HEADER, PAGE))
    (tmp_path / "store" / "v1" / "link").symlink_to(outside)
    (path_of(store, key_of(1)).parent / f"{TEMP_PREFIX}link").symlink_to(outside / f"{TEMP_PREFIX}x")
    store.sweeper.sweep()
    store.close()
    assert (outside / f"{TEMP_PREFIX}x").exists()


def test_a_wrong_wall_clock_sweeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, tail_max_age_s=50.0)
    store.put(key_of(1, transfer="t"), (HEADER, PAGE))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    assert store.sweeper.sweep().num_orphans == 0
    store.close()
