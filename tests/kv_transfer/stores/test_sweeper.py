"""The folder stays within its size and loses orphans, with several instances at once and on a disk that is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.stores import files
from kv_transfer.stores.files import TEMP_PREFIX, SharedStorage, Sweeper
from tests.files_below import files_below
from tests.kv_transfer.stores.contract import HEADER, PAGE, key_of, read
from tests.kv_transfer.stores.test_files import path_of

VALUE_BYTES = len(HEADER) + len(PAGE)


def open_store(path: Path, *, num_values: int = 1000, **settings: Any) -> SharedStorage:
    return SharedStorage(path, capacity_bytes=num_values * VALUE_BYTES, **settings)


def open_scanned(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> SharedStorage:
    """Its thread's first scan has ended: what is written now is found whole by the next one."""
    ended = threading.Event()
    sweep = Sweeper.sweep

    def first_sweep(sweeper: Sweeper) -> bool:
        is_within = sweep(sweeper)
        ended.set()
        return is_within

    with monkeypatch.context() as patched:
        patched.setattr(Sweeper, "sweep", first_sweep)
        store = open_store(path, **settings)
        assert ended.wait(60.0)
    return store


def silent(store: SharedStorage) -> SharedStorage:
    """Without its thread, which would scan too."""
    store.close()
    assert store.sweeper._thread is not None
    store.sweeper._thread.join()
    return store


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("number_of_error", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_smaller_than_the_capacity_loses_its_oldest_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number_of_error: int
) -> None:
    writev = os.writev

    def limited(descriptor: int, views: Sequence[memoryview]) -> int:
        if len(files_below(tmp_path)) > 10:  # with the one that is being written
            raise OSError(number_of_error, os.strerror(number_of_error))
        return writev(descriptor, views)

    monkeypatch.setattr(os, "writev", limited)
    store = open_scanned(tmp_path, monkeypatch, scan_interval_s=1e3)
    store.put(key_of(0, transfer="running"), (HEADER, PAGE))
    age(path_of(store, key_of(0, transfer="running")), 2000)
    for number in range(1, 10):
        store.put(key_of(number), (HEADER, PAGE))
        age(path_of(store, key_of(number)), 1000 - number)
    with pytest.raises(OSError, match=os.strerror(number_of_error)):
        store.put(key_of(10), (HEADER, PAGE))
    wait(lambda: not path_of(store, key_of(1)).exists())
    store.put(key_of(10), (HEADER, PAGE))
    store.close()
    assert path_of(store, key_of(0, transfer="running")).exists()
    assert [number for number in range(1, 11) if path_of(store, key_of(number)).exists()] == list(range(2, 11))


@pytest.mark.parametrize("has_room_for_a_probe", [True, False])
def test_failures_of_one_full_disk_remove_a_tenth_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_room_for_a_probe: bool
) -> None:
    store = silent(open_store(tmp_path))
    for number in range(20):
        store.put(key_of(number), (HEADER, PAGE))

    def no_room(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not has_room_for_a_probe:
        monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    for _ in range(3):
        store.sweeper.note_full()
    assert not store.sweeper.sweep(), "the next scan pauses"
    assert store.sweeper.sweep()
    assert len(files_below(tmp_path)) == 18
    store.sweeper.note_full()
    store.put(key_of(20), (HEADER, PAGE))  # there is room again
    assert store.sweeper.sweep()
    assert len(files_below(tmp_path)) == 19
    assert [record.getMessage() for record in caplog.records if "is full, with" in record.getMessage()] != []


def test_a_page_that_is_written_while_a_full_disk_is_scanned_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = silent(open_store(tmp_path))
    store.sweeper.note_full()
    files = store.sweeper._files

    def scanned() -> Iterator[Any]:
        store.put(key_of(1), (HEADER, PAGE))
        return files()

    monkeypatch.setattr(store.sweeper, "_files", scanned)
    assert store.sweeper.sweep()
    assert read(store, key_of(1)) == (HEADER, PAGE)


@pytest.mark.parametrize("step", ["_now_ns", "_evict"])
def test_a_disk_that_is_found_full_while_a_scan_runs_is_swept_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The files that the scan has listed, here none, may be older than the failure."""
    store = silent(open_store(tmp_path))
    go_on = getattr(store.sweeper, step)

    def fill(*arguments: object, **options: object) -> object:
        for number in range(20):
            store.put(key_of(number), (HEADER, PAGE))
        store.sweeper.note_full()
        return go_on(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(store.sweeper, step, fill)
        store.sweeper.sweep()
    assert len(files_below(tmp_path)) == 20
    store.sweeper.sweep()
    assert len(files_below(tmp_path)) == 18


def test_a_disk_that_was_full_once_and_had_nothing_to_remove_loses_nothing_later(tmp_path: Path) -> None:
    store = silent(open_store(tmp_path))
    store.sweeper.note_full()
    assert not store.sweeper.sweep()
    other = open_store(tmp_path)
    for number in range(20):
        other.put(key_of(number), (HEADER, PAGE))
    other.close()
    assert store.sweeper.sweep()
    assert len(files_below(tmp_path)) == 20


def test_several_instances_keep_one_folder_within_its_size(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, num_values=20, scan_interval_s=0.05) for _ in range(3)]
    for number in range(90):
        stores[number % 3].put(key_of(number), (HEADER, PAGE))
    wait(lambda: len(files_below(tmp_path)) <= 20)
    for store in stores:
        store.close()
    assert len(files_below(tmp_path)) >= 10, "no more is removed than needed"


def test_least_recently_used_pages_are_removed_first_and_lookups_count_as_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_scanned(tmp_path, monkeypatch, num_values=10)
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


def test_scans_pause_while_what_is_above_the_capacity_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_s = 0.2
    began: list[float] = []
    sweep = Sweeper.sweep

    def counted_sweep(sweeper: Sweeper) -> bool:
        began.append(time.monotonic())
        return sweep(sweeper)

    monkeypatch.setattr(Sweeper, "sweep", counted_sweep)
    monkeypatch.setattr(files, "_PAUSE_S", pause_s)
    store = open_store(tmp_path, num_values=1)
    store.put(key_of(0, transfer="running"), (HEADER, 2 * PAGE))
    while len(began) < 4:
        store.put(key_of(1), (HEADER, PAGE))
        time.sleep(0.002)
    store.close()
    pauses = [after - before for before, after in pairwise(began[1:])]  # the first scan may have found nothing
    assert min(pauses) > 0.9 * pause_s


def test_orphans_are_removed_and_what_is_in_use_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path, temp_max_age_s=100.0, tail_max_age_s=50.0)
    for number, transfer in ((1, ""), (2, "old"), (3, "new")):
        store.put(key_of(number, transfer=transfer), (HEADER, PAGE))
    folder = path_of(store, key_of(1)).parent
    old, new = folder / f"{TEMP_PREFIX}old", folder / f"{TEMP_PREFIX}new"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    age(old, 200)
    age(path_of(store, key_of(1)), 200)  # old, but a full block is removed for the capacity alone
    age(path_of(store, key_of(2, transfer="old")), 200)
    silent(store)
    store.sweeper.sweep()
    assert len(files_below(tmp_path)) == 3
    assert not old.exists()
    assert new.exists()
    assert not path_of(store, key_of(2, transfer="old")).parent.exists()
    assert path_of(store, key_of(3, transfer="new")).exists()
    assert path_of(store, key_of(1)).exists()


def test_folders_that_stay_empty_are_removed(tmp_path: Path) -> None:
    """Each model that was ever served leaves hundreds, through which every scan walks."""
    store = silent(open_store(tmp_path, temp_max_age_s=100.0))
    for number in (1, 2, 3):
        store.put(key_of(number), (HEADER, PAGE))
    emptied, just_emptied, used = (path_of(store, key_of(number)).parent for number in (1, 2, 3))
    assert len({emptied, just_emptied, used}) == 3
    for number in (1, 2):
        path_of(store, key_of(number)).unlink()
    age(emptied, 200)
    age(used, 200)
    store.sweeper.sweep()
    assert [folder.exists() for folder in (emptied, just_emptied, used)] == [False, True, True]
    store.put(key_of(1), (HEADER, PAGE))
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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_link_that_is_planted_during_a_sweep_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    store = silent(open_store(tmp_path / "store", num_values=1))
    for number in range(3):
        store.put(key_of(number), (HEADER, PAGE))
    store.put(key_of(4, transfer="dead"), (HEADER, PAGE))
    age(path_of(store, key_of(4, transfer="dead")), 1e5)
    found = list(store.sweeper._files())
    folder = path_of(store, key_of(0)).parents[3 - depth]
    folder.rename(tmp_path / "outside")
    folder.symlink_to(tmp_path / "outside")
    before = files_below(tmp_path / "outside")
    monkeypatch.setattr(store.sweeper, "_files", lambda: iter(found))
    store.sweeper.sweep()
    assert before
    assert files_below(tmp_path / "outside") == before
    assert path_of(store, key_of(4, transfer="dead")).parent.exists() == (depth < 3)


def test_a_deep_chain_of_folders_ends_no_sweep(tmp_path: Path) -> None:
    store = silent(open_store(tmp_path))
    store.put(key_of(1, transfer="dead"), (HEADER, PAGE))
    age(path_of(store, key_of(1, transfer="dead")), 1e5)
    chain = tmp_path / "v1" / "chain"
    chain.mkdir()
    for _ in range(sys.getrecursionlimit()):  # from below: the whole path would be too long for the system
        above = tmp_path / "above"
        above.mkdir()
        chain.rename(above / "chain")
        above.rename(chain)
    try:
        store.sweeper.sweep()
    finally:
        subprocess.run(["rm", "-rf", chain], check=True)  # pytest's own removal is recursive, too
    assert not path_of(store, key_of(1, transfer="dead")).exists()


def test_a_wrong_wall_clock_sweeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, tail_max_age_s=50.0)
    store.put(key_of(1, transfer="t"), (HEADER, PAGE))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    store.sweeper.sweep()
    assert path_of(store, key_of(1, transfer="t")).exists()
    store.close()


def test_pages_of_the_future_are_removed_first(tmp_path: Path) -> None:
    """As after the clock was set back: they have not been used since."""
    store = silent(open_store(tmp_path, num_values=10))
    for number in range(9):
        store.put(key_of(number), (HEADER, PAGE))
        age(path_of(store, key_of(number)), -7200 - number)
    store.put(key_of(9), (HEADER, PAGE))
    store.put(key_of(10), (HEADER, PAGE))
    age(path_of(store, key_of(10)), -20)  # of a host whose clock is ahead
    assert store.sweeper.sweep()
    assert [number for number in range(11) if path_of(store, key_of(number)).exists()] == [*range(2, 11)]


def test_orphans_of_the_future_are_removed(tmp_path: Path) -> None:
    store = silent(open_store(tmp_path, temp_max_age_s=100.0, tail_max_age_s=100.0))
    far, near = key_of(1, transfer="far"), key_of(2, transfer="near")
    for key, ahead_s in ((far, 7200), (near, 20)):
        store.put(key, (HEADER, PAGE))
        age(path_of(store, key), -ahead_s)
    unfinished = path_of(store, near).parent / f"{TEMP_PREFIX}far"
    unfinished.write_bytes(b"half")
    age(unfinished, -7200)
    store.sweeper.sweep()
    assert files_below(tmp_path) == [path_of(store, near)]
