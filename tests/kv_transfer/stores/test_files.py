"""The folder as a store: whole files or none, whatever happens to the disk; nothing hostile is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kv_transfer.page.format import PageKey
from kv_transfer.stores.base import BadValue
from kv_transfer.stores.files import SharedStorage
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
from kv_transfer.page.format import PageKey
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
