"""Pages on a disk through LMCache's fs_native: the same files that an `lmcache server` with that adapter has.

    <path>/v1/pages/<model>@0x00000000@0@<hash>.data                        full blocks, shared by everybody
    <path>/v1/transfers/tails/<model>@0x00000000@0@<hash>@<transfer>.data   tails, removed by their owner
    …/.tmp-<random>@….data                                                  written and not renamed yet

LMCache's client reads and writes, on threads of its own. It is not asked what it answers wrongly: it takes a file that
is too long for a hit, hangs on a FIFO, and leaves what is there untouched when it should write (a torn file, a link)
and calls it stored. So length and kind of a file are looked at here, before it is read, and a page is written under a
name of its own and renamed. LMCache's cap (`max_capacity_gb`) counts what one process has written since its start; ours
is the sweeper's, which counts the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from kv_transfer.lmcache_names import ObjectName, import_lmcache
from kv_transfer.lmcache_tasks import Outcome, Task, TaskRunner, gather, scatter
from kv_transfer.page import Buffer
from kv_transfer.store import BadValue, PageKey, StoreError
from kv_transfer.sweep import TEMP_PREFIX, Sweeper

_ABSENT = (errno.ENOENT, errno.ESTALE)
_SAID = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENOENT, errno.ESTALE)
"""Errors that the client has only words for."""
_STALE_TEMP_S = 3600.0


class LMCacheDisk:
    """See the module. Implements kv_transfer.store.BlockStore."""

    name = "lmcache"

    def __init__(
        self,
        path: str | Path,
        *,
        capacity_bytes: int,
        num_workers: int = 2,
        timeout_s: float = 1.0,
        min_bytes_per_s: float = 50e6,
        scan_interval_s: float = 60.0,
        tail_max_age_s: float = 3600.0,
    ) -> None:
        self.path = Path(path)
        self._timeout_s = timeout_s
        self._min_bytes_per_s = min_bytes_per_s
        try:
            self._pages = _Folder(self.path / "v1" / "pages", num_workers)
            self._tails = _Folder(self.path / "v1" / "transfers" / "tails", 1)
        except OSError as error:
            raise EngineError(f"lmcache path {os.fspath(path)!r}: {error.strerror}") from error
        self.sweeper = Sweeper(
            self.path,
            capacity_bytes=capacity_bytes,
            scan_interval_s=scan_interval_s,
            temp_max_age_s=_STALE_TEMP_S,
            tail_max_age_s=tail_max_age_s,
        )
        self.sweeper.start()

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        folder, name = self._place(key)
        num_bytes = sum(len(buffer) for buffer in buffers)
        with folder.runner.lend(num_bytes) as task:
            gather(task.buffer, buffers)
            try:
                folder.write(name, task, self._limit_s(num_bytes))
            except FileNotFoundError:  # somebody has removed the folder
                folder.make()
                folder.write(name, task, self._limit_s(num_bytes))
        self.sweeper.note_written(num_bytes)

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        folder, name = self._place(key)
        num_bytes = sum(len(buffer) for buffer in buffers)
        if not folder.holds(name, num_bytes):
            return False
        with folder.runner.lend(num_bytes) as task:
            view = memoryview(task.buffer)
            if not folder.runner.run(
                task, lambda: folder.client.submit_batch_get([name.native_key], [view]), self._limit_s(num_bytes)
            ):
                if not folder.holds(name, num_bytes):
                    return False
                raise StoreError("read")
            scatter(view, buffers, check)
        folder.touch(name)
        return True

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        folder, name = self._place(key)
        try:
            held = folder.holds(name, num_bytes)
        except BadValue:
            return False
        if held:
            folder.touch(name)
        return held

    def delete(self, key: PageKey) -> None:
        folder, name = self._place(key)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder.file(name))

    def close(self) -> None:
        self.sweeper.stop()
        self._pages.close()
        self._tails.close()

    def _place(self, key: PageKey) -> tuple[_Folder, ObjectName]:
        return self._tails if key.scope else self._pages, ObjectName.of(key)

    def _limit_s(self, num_bytes: int) -> float:
        return self._timeout_s + num_bytes / self._min_bytes_per_s


class _Folder:
    """One folder of LMCache's and the client for it."""

    def __init__(self, path: Path, num_workers: int) -> None:
        fs = import_lmcache("lmcache.lmcache_fs")
        self._path = path
        self.make()
        self.client = fs.LMCacheFSClient(str(path), num_workers, "", False, 0)
        self.runner = TaskRunner(_FolderDriver(self.client), "kv-lmcache-disk")

    def make(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, name: ObjectName, task: Task, timeout_s: float) -> None:
        """The task's buffer becomes the file, whatever lay there. A late end leaves a temporary file to the sweeper."""
        temporary = f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        view, native_key = memoryview(task.buffer), f"{temporary}@00000000@0@00"
        written = os.path.join(self._path, f"{temporary}@0x00000000@0@00.data")
        try:
            self.runner.run(task, lambda: self.client.submit_batch_set([native_key], [view]), timeout_s)
            os.rename(written, self.file(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise

    def file(self, name: ObjectName) -> str:
        return os.path.join(self._path, name.file_name)

    def holds(self, name: ObjectName, num_bytes: int) -> bool:
        """Whether there is a file; raises BadValue if it is none that may be read."""
        try:
            status = os.lstat(self.file(name))
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            raise
        if not stat.S_ISREG(status.st_mode):
            raise BadValue("not_a_file")
        if status.st_size != num_bytes:
            raise BadValue("size")
        return True

    def touch(self, name: ObjectName) -> None:
        """It was used now."""
        with contextlib.suppress(OSError):
            os.utime(self.file(name), follow_symlinks=False)

    def close(self) -> None:
        self.runner.close()


class _FolderDriver:
    """Implements kv_transfer.lmcache_tasks.Driver over LMCache's fs client, with tasks of one page each."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def fds(self) -> list[int]:
        return [int(self._client.event_fd())]

    def ended(self) -> Iterator[tuple[int, Outcome]]:
        for ticket, ok, error, found in self._client.drain_completions():
            yield ticket, (bool(found[0]) if found else True) if ok else _error(error)

    def close(self) -> None:
        self._client.close()


def _error(words: str) -> Exception:
    for code in _SAID:
        if os.strerror(code) in words:
            return OSError(code, os.strerror(code))
    return StoreError("write")
