"""A store in a folder: one file per page, on a local disk or on a volume that many pods mount.

    <path>/v1/<space>/<first byte of hash>/<hash>             full blocks, shared by requests
    <path>/v1/<space>/transfers/<SHA-256 of transfer>/<hash>  tails, removed by their owner

A page is written under a temporary name in its own folder and renamed: readers see all of it or nothing. Nothing is
synced to disk, for a torn page fails its digest. Below `path` no symbolic link is followed, and only regular files of
the right length are read: another writer to the folder can cost time, not more.

One thread per instance, neither the step loop's nor an I/O thread, keeps the folder within its capacity:

    start ─▶ scan ─▶ wait (written past the capacity | disk full | scan_interval_s) ─▶ scan ─▶ …
               └─ still above the capacity, disk was full, or failed ─▶ pause ─▶ wait

A scan visits every file. It removes unfinished writes, what a dead instance left of its transfers, folders that stay
empty, as those of an earlier model, and, above the capacity, full blocks in the order of their last use. Where a write
finds the disk or a quota full, a tenth of the folder's bytes goes in the same order. Instances that share a folder do
not communicate: each estimates the size as that of its last scan plus its own writes since, so what the others write
within one interval can exceed the capacity. They remove the same oldest files, and a file that is already gone is no
error. Ages are measured by the file system's own clock (a probe file's mtime), because instances' clocks differ. Pages
of the future, which a clock that was set back leaves, count as the oldest.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import secrets
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.base import BadValue, NotWritable, StoreError, UnreadableValue, rest_of
from kv_transfer.stores.connector import StoreConnector, StoreOptions
from kv_transfer.transfer.connector import parse_options, start_thread

TEMP_PREFIX = ".tmp-"
_LOW_WATER = 0.9
_MAX_SKEW_NS = 60 * 10**9
"""Between the clocks of hosts, where each sets the times of its own files: a page is not of the future for that."""
_PAUSE_S = 1.0
"""After a scan that did not succeed: each write would make the next one due."""
_DEPTH = 3
"""Of the deepest folder with pages below v1. The walk is recursive: a deeper chain could exceed the limit of Python."""
_log = logging.getLogger(__name__)
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO in a page's place would block.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
ABSENT = (errno.ENOENT, errno.ESTALE)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)  # a link; a socket


class SharedStorage:
    """Implements kv_transfer.stores.base.BlockStore; see the module."""

    name = "shared_storage"

    def __init__(self, path: str | Path, *, capacity_bytes: int, saves: bool = True, **limits: float) -> None:
        """`limits` are the Sweeper's, which sweeps where this store `saves`."""
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            remedy = f"; {NotWritable.remedy}" if error.errno in _NOT_WRITABLE else ""
            raise EngineError(f"{self.name} path {os.fspath(path)!r}: {error.strerror}{remedy}") from error
        self.sweeper = Sweeper(self.path, capacity_bytes=capacity_bytes, is_on=saves, **limits)

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        try:
            self._write(key, buffers)
        except OSError as error:
            if error.errno in _DISK_FULL:
                self.sweeper.note_full()
            if error.errno in _NOT_WRITABLE:
                raise NotWritable(error.errno, error.strerror, os.fspath(self.path)) from error
            raise
        self.sweeper.note_written(sum(len(buffer) for buffer in buffers))

    def _write(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        folders, name = self.place(key)
        with _opened(self.path, folders, create=True) as folder:
            assert folder is not None
            temporary = f"{TEMP_PREFIX}{secrets.token_hex(8)}"
            descriptor = os.open(temporary, _WRITE_FLAGS, 0o600, dir_fd=folder)
            try:
                try:
                    _write_all(descriptor, buffers)
                finally:
                    os.close(descriptor)  # may raise too: a network file system reports a full disk here
                self.sweeper.note_room()
                try:
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except IsADirectoryError:
                    _move_aside(name, folder)
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        folders, name = self.place(key)
        with _opened(self.path, folders) as folder:
            if folder is None:
                return False
            try:
                descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
            except OSError as error:
                if error.errno in ABSENT:
                    return False
                if error.errno in _NOT_A_FILE:
                    raise BadValue("not_a_file") from error
                raise
        try:
            _read_page(descriptor, buffers, check)
            with contextlib.suppress(OSError):  # a read-only volume can be read
                os.utime(descriptor)
        except OSError as error:
            if error.errno in ABSENT:
                return False
            if error.errno == errno.EIO:  # a bad sector: lookups would find the page for ever if it were kept
                raise UnreadableValue("unreadable") from error
            raise
        finally:
            os.close(descriptor)
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        folders, name = self.place(key)
        with _opened(self.path, folders) as folder:
            if folder is None:
                return False
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno in ABSENT:
                    return False
                raise
            if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
                return False
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=folder, follow_symlinks=False)
        return True

    def delete(self, key: PageKey) -> None:
        folders, name = self.place(key)
        with _opened(self.path, folders) as folder:
            if folder is None:
                return
            try:
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
            except IsADirectoryError:
                _move_aside(name, folder)
        if key.scope:
            _remove_if_empty(self.path, folders)

    def close(self) -> None:
        self.sweeper.stop()

    @staticmethod
    def place(key: PageKey) -> tuple[Sequence[str], str]:
        """Folders below `path`, and a file in the last one. Each transfer has a folder of its own for its tail."""
        return key.parts[:-1], key.parts[-1]


@contextlib.contextmanager
def _opened(path: Path, parts: Sequence[str], *, create: bool = False) -> Iterator[int | None]:
    """A descriptor of the folder below `path`; None: there is none. Opened one part at a time, so that no link is
    followed."""
    descriptor: int | None = None
    try:
        descriptor = _open_root(path, create=create)
        for part in parts:
            if descriptor is None:
                break
            inner = _open_folder(part, descriptor, create=create)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_root(path: Path, *, create: bool) -> int | None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        if not create:
            return None
        _make_again(path)
        return os.open(path, flags)


def _make_again(path: Path) -> None:
    """The store's folder was removed while it is in use: its pages are gone, and are computed like any others."""
    with contextlib.suppress(FileExistsError):  # another thread or instance was first
        path.mkdir(mode=0o700, parents=True)
        _log.warning("the KV folder %s was removed; it is made again, and its pages are computed again", path)


def _open_folder(name: str, parent: int, *, create: bool) -> int | None:
    try:
        return os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    except OSError as error:
        if error.errno not in ABSENT:
            raise
    if not create:
        return None
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)


def _remove_if_empty(path: Path, folders: Sequence[str]) -> None:
    with contextlib.suppress(OSError), _opened(path, folders[:-1]) as folder:
        if folder is not None:
            os.rmdir(folders[-1], dir_fd=folder)


def _move_aside(name: str, folder: int) -> None:
    """Rename a folder that is in a page's place, with its content."""
    os.rename(name, f"{TEMP_PREFIX}{secrets.token_hex(8)}", src_dir_fd=folder, dst_dir_fd=folder)


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """In parts where needed: a disk may become full in the middle."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        num_written = os.writev(descriptor, views)
        if num_written == 0:
            raise StoreError("short_write")
        views = rest_of(views, num_written)


def _read_page(descriptor: int, buffers: Sequence[Buffer], check: Callable[[], None]) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise BadValue("not_a_file")
    if status.st_size != sum(len(buffer) for buffer in buffers):
        raise BadValue("size")
    head, *rest = buffers
    _read_all(descriptor, [head], 0)
    check()
    _read_all(descriptor, rest, len(head))


def _read_all(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        num_read = os.preadv(descriptor, views, offset)
        if num_read == 0:
            raise BadValue("truncated")  # since its length was compared
        offset += num_read
        views = rest_of(views, num_read)


@dataclass(frozen=True, slots=True)
class _File:
    used_ns: int
    num_bytes: int
    folders: tuple[str, ...]
    """Below the store's path."""
    name: str
    is_temp: bool
    is_tail: bool
    is_folder: bool = False  # an empty one, which a writer makes again


class Sweeper:
    """Owns the sweeping thread of one instance, which begins with a scan."""

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        is_on: bool = True,
        scan_interval_s: float = 60.0,
        temp_max_age_s: float = 3600.0,
        tail_max_age_s: float = 3600.0,
    ) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._scan_interval_s = scan_interval_s
        self._temp_max_age_ns = int(temp_max_age_s * 1e9)
        self._tail_max_age_ns = int(tail_max_age_s * 1e9)
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._is_full = False
        """A write has found no room on the disk since the last scan."""
        self._has_warned = False
        self._due = threading.Event()
        self._stopping = threading.Event()
        self._thread = start_thread(self._run, "kv-sweep") if is_on else None

    def stop(self) -> None:
        """End the thread. Waits a second for a scan in progress, which ends with the process if it takes longer."""
        self._stopping.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def note_written(self, num_bytes: int) -> None:
        """This instance has written `num_bytes`. From any thread."""
        with self._lock:
            self._num_bytes += num_bytes
            due = self._num_bytes > self._capacity_bytes
        if due:
            self._due.set()

    def note_full(self) -> None:
        """A write of this instance found the disk, or its quota, full. From any thread."""
        with self._lock:
            self._is_full = True
        self._due.set()

    def note_room(self) -> None:
        """A write of this instance has found room, and its page is not visible yet: a scan that finds it knows. From
        any thread."""
        with self._lock:
            self._is_full = False

    def sweep(self) -> bool:
        """One scan; whether the folder is within its capacity now, and was not found full. Raises OSError where it
        cannot be written to."""
        with self._lock:
            written_before, was_full = self._num_bytes, self._is_full
        self._make_folder()
        files = [*self._files()]
        now_ns = self._now_ns()  # after all of them: what is later than this is of another clock
        kept: list[_File] = []
        for file in files:
            if self._is_left_over(file, now_ns):
                self._remove(file)
            else:
                kept.append(file)
        found_bytes = sum(file.num_bytes for file in kept)
        with self._lock:
            is_full = self._is_full
        num_bytes = self._evict(kept, found_bytes, now_ns, is_full=is_full)
        with self._lock:
            self._num_bytes += num_bytes - written_before
            if was_full or num_bytes < found_bytes:  # else its list of files may be older than the failure
                self._is_full = False  # failures since are no reason to remove more; if it still is, a write says so
        return num_bytes <= self._capacity_bytes and not is_full

    def _is_left_over(self, file: _File, now_ns: int | None) -> bool:
        if now_ns is None or not (file.is_temp or file.is_tail):
            return False
        # Of the future, too: such a file gets no older before the clock has made up what it was set back.
        return abs(now_ns - file.used_ns) > (self._temp_max_age_ns if file.is_temp else self._tail_max_age_ns)

    def _evict(self, files: list[_File], num_bytes: int, now_ns: int | None, *, is_full: bool) -> int:
        """Remove the least recently used of them where it is needed. Takes their bytes, and returns what is left."""
        if not is_full and num_bytes <= self._capacity_bytes:
            return num_bytes
        if num_bytes <= self._capacity_bytes:
            self._warn_full(num_bytes)
        target = _LOW_WATER * min(num_bytes, self._capacity_bytes)
        latest_ns = math.inf if now_ns is None else now_ns + _MAX_SKEW_NS
        evictable = (file for file in files if not file.is_temp and not file.is_tail)
        # Since the clock was set back, those of the future have not been used, or they would have its present time.
        for file in sorted(evictable, key=lambda file: (file.used_ns <= latest_ns, file.used_ns)):
            if num_bytes <= target:
                break
            if self._remove(file):
                num_bytes -= file.num_bytes
        return num_bytes

    def _run(self) -> None:
        warned = False
        while not self._stopping.is_set():
            self._due.clear()
            try:
                is_within = self.sweep()
                warned = False
            except OSError as error:
                if not warned:
                    _log.warning("cannot sweep the KV folder: %s", error.strerror)
                is_within, warned = False, True
            if not is_within:
                self._stopping.wait(_PAUSE_S)
            self._due.wait(self._scan_interval_s)

    def _warn_full(self, num_bytes: int) -> None:
        if not self._has_warned:
            _log.warning(
                "the disk of the KV folder %s is full, with %d bytes of pages; capacity_bytes is %d: the least recently"
                " used pages are removed whenever a write finds it full",
                self._path,
                num_bytes,
                self._capacity_bytes,
            )
        self._has_warned = True

    def _files(self) -> Iterator[_File]:
        """Regular files below v1, as deep as pages lie; no link is followed."""
        root = self._path / "v1"
        for folder, subfolders, names, descriptor in os.fwalk(root, follow_symlinks=False):
            folders = Path(folder).relative_to(self._path).parts
            if len(folders) >= _DEPTH and not (subfolders or names):
                yield _File(os.fstat(descriptor).st_mtime_ns, 0, folders[:-1], folders[-1], True, False, is_folder=True)
            if len(folders) > _DEPTH:
                subfolders.clear()
            is_tail = folders[-2:-1] == ("transfers",)
            for name in names:
                try:
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    is_temp = name.startswith(TEMP_PREFIX)
                    yield _File(status.st_mtime_ns, status.st_size, folders, name, is_temp, is_tail)

    def _remove(self, file: _File) -> bool:
        """Whether it is gone now. False: it was used since the scan, or cannot be removed. Its folders are opened
        again: another writer may have put a link in the place of one."""
        try:
            with _opened(self._path, file.folders) as folder:
                if folder is None:
                    return True
                if os.stat(file.name, dir_fd=folder, follow_symlinks=False).st_mtime_ns != file.used_ns:
                    return False
                (os.rmdir if file.is_folder else os.unlink)(file.name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        if file.is_tail:
            _remove_if_empty(self._path, file.folders)
        return True

    def _make_folder(self) -> Path:
        folder = self._path / "v1"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError:
            _make_again(self._path)
            folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _now_ns(self) -> int | None:
        """Time by the clock of the file system; None: it has no room for another file."""
        try:
            with tempfile.TemporaryFile(dir=self._make_folder(), prefix=TEMP_PREFIX) as probe:
                return os.fstat(probe.fileno()).st_mtime_ns
        except OSError as error:
            if error.errno in _DISK_FULL:
                return None
            raise


class SharedStorageOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    """The folder, the same one for all instances; made if there is none."""
    capacity_bytes: int = 16 << 30
    """Bytes of pages, of all instances together, above which the least recently used are removed."""
    scan_interval_s: float = 60.0
    """How often the folder is scanned for pages and leftovers of other instances, seconds."""
    temp_max_age_s: float = 3600.0
    """Age at which an unfinished write is removed, or a folder that stays empty, seconds."""
    tail_max_age_s: float = 3600.0
    """Age at which a transfer's own page is removed if its owner has not done it, seconds; longer than any lease."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tail_max_age_s < self.max_lease_s:
            raise ValueError(f"tail_max_age_s is {self.tail_max_age_s}; it must not be less than max_lease_s")


class SharedStorageConnector(StoreConnector):
    """Pages as files in a folder that all instances mount, and that outlives them."""

    def __init__(self, *, wake: Callable[[], None], **options: Any) -> None:
        parsed = parse_options(SharedStorageOptions, "shared_storage", options)
        store = SharedStorage(
            parsed.path,
            capacity_bytes=parsed.capacity_bytes,
            saves=parsed.save,
            scan_interval_s=parsed.scan_interval_s,
            temp_max_age_s=parsed.temp_max_age_s,
            tail_max_age_s=parsed.tail_max_age_s,
        )
        super().__init__(store, parsed, wake=wake)
