"""A store in a folder: one file per page, for a laptop's disk and for a volume that many pods mount.

    <path>/v1/<fingerprint>/<first byte of hash>/<hash>             full blocks, shared by everybody
    <path>/v1/<fingerprint>/transfers/<SHA-256 of transfer>/<hash>  tails, removed by their owner

A page is written under a temporary name in its own folder and renamed: readers see all of it or nothing. Nothing is
synced to disk, for a torn page fails its digest. Below `path` no symbolic link is followed, and what is not a regular
file of the right length is not read: whoever may write to the folder can cost us time, not more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from engine.errors import EngineError
from kv_transfer.page import Buffer
from kv_transfer.store import BadValue, PageKey, StoreError
from kv_transfer.sweep import TEMP_PREFIX, Sweeper

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO that somebody put there would wait for ever.
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ABSENT = (errno.ENOENT, errno.ESTALE)
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO)  # a link; a socket


class SharedStorage:
    """See the module. Implements kv_transfer.store.BlockStore; starts one thread, which sweeps."""

    name = "shared_storage"

    def __init__(
        self,
        path: str | Path,
        *,
        capacity_bytes: int,
        scan_interval_s: float = 60.0,
        temp_max_age_s: float = 3600.0,
        tail_max_age_s: float = 3600.0,
    ) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"shared_storage path {os.fspath(path)!r}: {error.strerror}") from error
        self.sweeper = Sweeper(
            self.path,
            capacity_bytes=capacity_bytes,
            scan_interval_s=scan_interval_s,
            temp_max_age_s=temp_max_age_s,
            tail_max_age_s=tail_max_age_s,
        )
        self.sweeper.start()

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        *folders, name = key.parts
        num_bytes = sum(len(buffer) for buffer in buffers)
        with self._folder(folders, create=True) as folder:
            assert folder is not None
            temporary = f"{TEMP_PREFIX}{secrets.token_hex(8)}"
            descriptor = os.open(temporary, _WRITE_FLAGS, 0o600, dir_fd=folder)
            try:
                try:
                    _write_all(descriptor, buffers)
                finally:
                    os.close(descriptor)  # may raise as well: a network file system reports a full disk here
                try:
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
                except IsADirectoryError:
                    _put_aside(name, folder)
                    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        self.sweeper.note_written(num_bytes)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        *folders, name = key.parts
        with self._folder(folders) as folder:
            if folder is None:
                return False
            try:
                descriptor = os.open(name, _READ_FLAGS, dir_fd=folder)
            except OSError as error:
                if error.errno in _ABSENT:
                    return False
                if error.errno in _NOT_A_FILE:
                    raise BadValue("not_a_file") from error
                raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadValue("not_a_file")
            if status.st_size != sum(len(buffer) for buffer in buffers):
                raise BadValue("size")
            head, *rest = buffers
            _read_all(descriptor, [head], 0)
            check()
            _read_all(descriptor, rest, len(head))
            with contextlib.suppress(OSError):  # a read-only volume can be read all the same
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        *folders, name = key.parts
        with self._folder(folders) as folder:
            if folder is None:
                return False
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno in _ABSENT:
                    return False
                raise
            if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
                return False
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=folder, follow_symlinks=False)
        return True

    def delete(self, key: PageKey) -> None:
        *folders, name = key.parts
        with self._folder(folders) as folder:
            if folder is None:
                return
            try:
                os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                pass
            except IsADirectoryError:
                _put_aside(name, folder)
        if key.scope:
            with self._folder(folders[:-1]) as folder, contextlib.suppress(OSError):
                if folder is not None:
                    os.rmdir(folders[-1], dir_fd=folder)

    def close(self) -> None:
        self.sweeper.stop()

    @contextlib.contextmanager
    def _folder(self, parts: Sequence[str], *, create: bool = False) -> Iterator[int | None]:
        """A descriptor of the folder; None: it is not there. Opened one part at a time, so that no link is followed."""
        descriptor: int | None = None
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for part in parts:
                inner = _open_folder(part, descriptor, create=create)
                os.close(descriptor)
                descriptor = inner
                if descriptor is None:
                    break
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _open_folder(name: str, parent: int, *, create: bool) -> int | None:
    try:
        return os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    if not create:
        return None
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    return os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)


def _put_aside(name: str, folder: int) -> None:
    """A folder in a page's place is somebody's mistake or mischief: it goes out of the way, whatever is in it."""
    os.rename(name, f"{TEMP_PREFIX}{secrets.token_hex(8)}", src_dir_fd=folder, dst_dir_fd=folder)


def _write_all(descriptor: int, buffers: Sequence[Buffer]) -> None:
    """A full disk may take a part first and refuse the rest after it."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        num_written = os.writev(descriptor, views)
        if num_written == 0:
            raise StoreError("short_write")
        views = _after(views, num_written)


def _read_all(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while views:
        num_read = os.preadv(descriptor, views, offset)
        if num_read == 0:
            raise BadValue("truncated")  # by somebody, since its length was looked at
        offset += num_read
        views = _after(views, num_read)


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `views` past the first `num_bytes`."""
    while views and num_bytes >= len(views[0]):
        num_bytes -= len(views[0])
        views = views[1:]
    return [views[0][num_bytes:], *views[1:]] if views else []
