"""The folder as a store: whole files or none, whatever happens to the disk; nothing hostile is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
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

from kv_transfer.page.naming import PageKey
from kv_transfer.stores import files
from kv_transfer.stores.base import BadValue
from kv_transfer.stores.files import TEMP_PREFIX, SharedStorage, Sweeper
from tests.files_below import files_below
from tests.kv_transfer.stores.contract import HEADER, PAGE, check_contract, check_header_first, key_of, read
from tests.waiting import Stopwatch


def path_of(store: SharedStorage, key: PageKey) -> Path:
    return store.path.joinpath(*key.parts)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedStorage]:
    store = SharedStorage(tmp_path / "store", capacity_bytes=1 << 30)
    yield store
    store.close()


def test_a_folder_keeps_the_contract_and_leaves_nothing(store: SharedStorage) -> None:
    check_contract(store)
    assert files_below(store.path) == []


def test_paths_are_hex_and_private_whatever_the_transfer_is_called(store: SharedStorage) -> None:
    key = key_of(1, transfer="../../etc/passwd\0/\n")
    store.put(key, (HEADER, PAGE))
    (path,) = files_below(store.path)
    assert set("".join(path.relative_to(store.path).parts)) <= set("0123456789abcdefvtransfers")
    assert path.stat().st_mode & 0o777 == 0o600
    folders = [folder for folder in path.parents if folder.is_relative_to(store.path)]
    assert len(folders) == 5
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    store.delete(key)
    assert not path.parent.exists()


def test_a_page_is_not_read_after_a_wrong_header(store: SharedStorage) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    assert not any(check_header_first(store, key_of(1)))


@pytest.mark.parametrize("num_bytes", [0, 100, 256, 4351, 4353])
def test_file_of_another_length_is_rejected(store: SharedStorage, num_bytes: int) -> None:
    store.put(key_of(1), (b"x" * num_bytes, b""))
    with pytest.raises(BadValue, match="size"):
        read(store, key_of(1))
    assert not store.contains(key_of(1), 4352)


def _symlink(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _dangling(path: Path, outside: Path) -> None:
    path.symlink_to(outside.with_name("nothing"))


def _fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [_symlink, _dangling, _fifo, _folder])
def test_what_is_not_a_regular_file_is_rejected_at_once(
    store: SharedStorage, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(HEADER + PAGE)
    path = path_of(store, key_of(1))
    path.parent.mkdir(parents=True)
    plant(path, outside)
    watch = Stopwatch()
    with pytest.raises(BadValue, match="not_a_file"):
        read(store, key_of(1))
    assert not store.contains(key_of(1), 4352)
    assert watch.s < 2.0
    store.put(key_of(1), (HEADER, PAGE))  # takes the place of what was planted there
    assert read(store, key_of(1)) == (HEADER, PAGE)
    assert outside.read_bytes() == HEADER + PAGE


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_folder_that_is_a_link_is_not_followed(store: SharedStorage, tmp_path: Path, depth: int) -> None:
    store.sweeper.stop()  # it would make v1 anew
    store.put(key_of(1), (HEADER, PAGE))
    folder = path_of(store, key_of(1)).parents[3 - depth]
    moved = tmp_path / "moved"
    folder.rename(moved)
    folder.symlink_to(moved)
    before = files_below(moved)
    with pytest.raises(OSError, match=r"symbolic|directory"):
        read(store, key_of(1))
    with pytest.raises(OSError, match=r"symbolic|directory"):
        store.put(key_of(1), (PAGE,))
    assert files_below(moved) == before


def test_readers_see_one_of_two_writers_whole(store: SharedStorage) -> None:
    key, stop, seen = key_of(1), threading.Event(), set()
    values = [bytes([letter]) * (256 + (1 << 20)) for letter in b"ab"]
    store.put(key, (values[0],))

    def write(value: bytes) -> None:
        while not stop.is_set():
            store.put(key, (value[:256], memoryview(value)[256:]))

    writers = [threading.Thread(target=write, args=(value,)) for value in values]
    for writer in writers:
        writer.start()
    watch, num_read = Stopwatch(), 0
    while (num_read < 200 or len(seen) < 2) and watch.s < 20:
        found = read(store, key, 1 << 20)
        seen.add(b"" if found is None else found[0] + found[1])
        num_read += 1
    stop.set()
    for writer in writers:
        writer.join()
    assert seen == set(values)
    assert len(files_below(store.path)) == 1


_FILL = """
import errno, resource, sys
from kv_transfer.stores.files import SharedStorage
from kv_transfer.page.naming import PageKey
store = SharedStorage(sys.argv[1], capacity_bytes=1 << 30)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    store.put(PageKey(bytes(32), bytes(32)), (b"header", bytes(3 << 20)))
except OSError as error:
    print(errno.errorcode[error.errno])
store.put(PageKey(bytes(32), b"1" * 32), (b"header", b"page"))
"""


def test_full_disk_leaves_no_part_of_a_file_behind(store: SharedStorage) -> None:
    # RLIMIT_FSIZE behaves like a full disk: a part is written first, and then comes the error. It is a process's own.
    command = [sys.executable, "-c", _FILL, os.fspath(store.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.strip() == "EFBIG"
    assert [path.name for path in files_below(store.path)] == [(b"1" * 32).hex()]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root; test_full_disk covers the code path without it")
def test_full_file_system_leaves_no_part_of_a_file_behind(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("no right to mount here; test_full_disk covers the code path without it")
    try:
        store = SharedStorage(disk / "store", capacity_bytes=1 << 30)
        with pytest.raises(OSError, match="No space left"):
            store.put(key_of(1), (HEADER, bytes(3 << 20)))
        assert files_below(store.path) == []
        store.put(key_of(1), (HEADER, PAGE))
        assert read(store, key_of(1)) == (HEADER, PAGE)
        store.close()
    finally:
        subprocess.run(["umount", disk], check=True)


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
    store = open_store(tmp_path, scan_interval_s=1e3)
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
    store = open_store(tmp_path)
    store.close()
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
    store = open_store(tmp_path)
    store.close()
    store.sweeper.note_full()
    files = store.sweeper._files

    def scanned() -> Iterator[Any]:
        store.put(key_of(1), (HEADER, PAGE))
        return files()

    monkeypatch.setattr(store.sweeper, "_files", scanned)
    assert store.sweeper.sweep()
    assert read(store, key_of(1)) == (HEADER, PAGE)


@pytest.mark.parametrize("is_header_read", [False, True])
def test_a_file_that_cannot_be_read_is_damaged_and_a_stale_one_is_missing(
    store: SharedStorage, monkeypatch: pytest.MonkeyPatch, is_header_read: bool
) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    preadv, number_of_error = os.preadv, errno.EIO

    def failing(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if is_header_read and offset == 0:
            return preadv(descriptor, views, offset)
        raise OSError(number_of_error, os.strerror(number_of_error))

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(BadValue, match="unreadable"):
        read(store, key_of(1))
    number_of_error = errno.ESTALE
    assert read(store, key_of(1)) is None
    number_of_error = errno.ETIMEDOUT
    with pytest.raises(TimeoutError):
        read(store, key_of(1))


def test_too_few_descriptors_is_an_error_and_leaks_none(store: SharedStorage) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    num_before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_before + 4, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                open_files.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            read(store, key_of(1))
        with pytest.raises(OSError, match="Too many open files"):
            store.put(key_of(2), (HEADER, PAGE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in open_files:
            os.close(descriptor)
    assert read(store, key_of(1)) == (HEADER, PAGE)
    deadline = time.monotonic() + 20.0  # the sweep has a descriptor of its own now and then
    while len(os.listdir("/proc/self/fd")) > num_before:
        assert time.monotonic() < deadline, "a descriptor stays open"
        time.sleep(0.01)


def test_a_folder_that_vanishes_is_made_again(store: SharedStorage) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    subprocess.run(["rm", "-rf", store.path / "v1"], check=True)
    assert read(store, key_of(1)) is None
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)


# The folder stays within its size and loses orphans, with several instances at once.

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


def test_the_folder_itself_is_made_again_where_it_is_deleted(
    store: SharedStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    for number in range(2):
        store.path.rename(tmp_path / f"gone-{number}")
        # STEP its pages are missing, which is no failure of the store
        assert read(store, key_of(1)) is None
        assert not store.contains(key_of(1), len(HEADER) + len(PAGE))
        store.delete(key_of(1))
        # STEP the next page is kept
        store.put(key_of(2), (HEADER, PAGE))
        store.put(key_of(3), (HEADER, PAGE))
        assert read(store, key_of(2)) == (HEADER, PAGE)
    store.path.rename(tmp_path / "gone")
    store.sweeper.sweep()
    assert store.path.is_dir()
    logged = [
        record.getMessage() for record in caplog.records if "was removed; it is made again" in record.getMessage()
    ]
    assert len(logged) == 3, "once for each time that it was deleted"


def test_several_instances_keep_one_folder_within_its_size(tmp_path: Path) -> None:
    stores = [open_store(tmp_path, num_values=20, scan_interval_s=0.05) for _ in range(3)]
    for number in range(90):
        stores[number % 3].put(key_of(number), (HEADER, PAGE))
    wait(lambda: len(files_below(tmp_path)) <= 20)
    for store in stores:
        store.close()
    assert len(files_below(tmp_path)) >= 10, "no more is removed than needed"


def test_least_recently_used_pages_are_removed_first_and_lookups_count_as_use(tmp_path: Path) -> None:
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
    store.close()  # its own thread would count files too
    store.sweeper.sweep()
    assert len(files_below(tmp_path)) == 3
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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_link_that_is_planted_during_a_sweep_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    store = open_store(tmp_path / "store", num_values=1)
    store.close()
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
    store = open_store(tmp_path)
    store.close()
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
