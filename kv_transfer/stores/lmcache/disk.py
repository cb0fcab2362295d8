"""Pages on a disk through LMCache's fs_native: the same files that an `lmcache server` with that adapter has.

    <path>/v1/pages/<model>@0x00000000@0@<hash>.data                        full blocks, shared by all instances
    <path>/v1/transfers/tails/<model>@0x00000000@0@<hash>@<transfer>.data   tails, removed by their owner
    …/.tmp-<random>@….data                                                  written and not renamed yet

    buffer:  free ─▶ lent ─▶ with a task ─▶ ended in time ─▶ free
                                  │ deadline
                                  ▼
                              abandoned ─▶ the task has ended at last ─▶ free

LMCache's client reads and writes, on threads of its own. Some of its answers are wrong: it reports a file that is too
long as a hit, hangs on a FIFO, and leaves a file that is there (a torn one, a link) unchanged when it should write, and
reports it as stored. So length and kind of a file are checked here before it is read, and a page is written under a
name of its own and renamed. LMCache's cap (`max_capacity_gb`) counts what one process has written since its start; the
sweeper counts the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import select
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from kv_transfer.page.format import Buffer
from kv_transfer.page.naming import PageKey
from kv_transfer.stores.base import BadValue, StoreError
from kv_transfer.stores.files import ABSENT, TEMP_PREFIX, Sweeper
from kv_transfer.stores.lmcache.store import LMCacheStore, ObjectName, import_lmcache

_MAX_ABANDONED = 4
_MAX_FREE = 16
_CLOSE_S = 1.0
_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENOENT, errno.ESTALE)
"""Errors that the client reports as text only."""
_log = logging.getLogger(__name__)

Outcome = bool | Exception


class LMCacheDisk(LMCacheStore):
    """Implements kv_transfer.stores.base.BlockStore."""

    def __init__(
        self,
        path: str | Path,
        *,
        capacity_bytes: int,
        num_workers: int = 2,
        timeout_s: float = 1.0,
        min_bytes_per_s: float = 50e6,
        **limits: float,
    ) -> None:
        """`limits` are the Sweeper's."""
        super().__init__(timeout_s=timeout_s, min_bytes_per_s=min_bytes_per_s)
        self.path = Path(path)
        try:
            self._pages = Folder(self.path / "v1" / "pages", num_workers)
            self._tails = Folder(self.path / "v1" / "transfers" / "tails", 1)
        except OSError as error:
            raise EngineError(f"lmcache path {os.fspath(path)!r}: {error.strerror}") from error
        self.sweeper = Sweeper(self.path, capacity_bytes=capacity_bytes, **limits)

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        name = ObjectName.of(key)
        folder, num_bytes = self._folder(name), sum(map(len, buffers))
        with folder.runner.lend(num_bytes) as task:
            offset = 0
            for part in buffers:
                memoryview(task.buffer)[offset : offset + len(part)] = memoryview(part).cast("B")
                offset += len(part)
            try:
                folder.write(name, task, self._limit_s(num_bytes))
            except FileNotFoundError:  # the folder was removed
                folder.make()
                folder.write(name, task, self._limit_s(num_bytes))
        self.sweeper.note_written(num_bytes)

    def delete(self, key: PageKey) -> None:
        name = ObjectName.of(key)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._folder(name).file(name))

    def close(self) -> None:
        self.sweeper.stop()
        self._pages.runner.close()
        self._tails.runner.close()

    @contextlib.contextmanager
    def _value(self, name: ObjectName, num_bytes: int) -> Iterator[memoryview | None]:
        folder = self._folder(name)
        if not folder.holds(name, num_bytes):
            yield None
            return
        with folder.runner.lend(num_bytes) as task:
            is_read = folder.read(name, task, self._limit_s(num_bytes))
            if not is_read and folder.holds(name, num_bytes):
                raise StoreError("read")
            yield memoryview(task.buffer) if is_read else None
        if is_read:
            folder.touch(name)

    def _exists(self, name: ObjectName, num_bytes: int) -> bool:
        folder = self._folder(name)
        if not folder.holds(name, num_bytes):
            return False
        folder.touch(name)
        return True

    def _folder(self, name: ObjectName) -> Folder:
        return self._tails if name.cache_salt else self._pages


class Folder:
    """One folder of LMCache's and the client for it."""

    def __init__(self, path: Path, num_workers: int) -> None:
        fs = import_lmcache("lmcache.lmcache_fs")
        self._path = path
        self.make()
        self.client = fs.LMCacheFSClient(str(path), num_workers, "", False, 0)
        self.runner = TaskRunner(self.client)

    def make(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self, name: ObjectName, task: Task, timeout_s: float) -> bool:
        """The file into the task's buffer; False: LMCache did not read it."""
        view = memoryview(task.buffer)
        return self.runner.run_task(task, lambda: self.client.submit_batch_get([name.native_key], [view]), timeout_s)

    def write(self, name: ObjectName, task: Task, timeout_s: float) -> None:
        """The task's buffer becomes the file, whatever lay there. A late end leaves a temporary file to the sweeper."""
        temporary = f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        view, native_key = memoryview(task.buffer), f"{temporary}@00000000@0@00"
        written = os.path.join(self._path, f"{temporary}@0x00000000@0@00.data")
        try:
            self.runner.run_task(task, lambda: self.client.submit_batch_set([native_key], [view]), timeout_s)
            os.rename(written, self.file(name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(written)
            raise

    def file(self, name: ObjectName) -> str:
        return os.path.join(self._path, name.file_name)

    def holds(self, name: ObjectName, num_bytes: int) -> bool:
        """Whether there is a file; raises BadValue if it must not be read."""
        try:
            status = os.lstat(self.file(name))
        except OSError as error:
            if error.errno in ABSENT:
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


@dataclass(slots=True, eq=False)
class Task:
    """One task and its buffer. Fields belong to the runner's lock."""

    buffer: bytearray
    signal: threading.Event = field(default_factory=threading.Event)
    outcome: Outcome = False
    is_abandoned: bool = False


class TaskRunner:
    """Waits for the client's tasks with a deadline. Owns the client, the buffers and one thread. Thread-safe.

    A task cannot be cancelled: the memory that it was given is its own until it has ended. So tasks get buffers of the
    runner, and an abandoned buffer is neither freed nor lent. Above a cap of abandoned tasks no task is begun (`stuck`)
    until one of them ends: a dead disk costs a few pages of memory and no more.

    LMCache's `close` waits for its workers while it holds the GIL: with a worker stuck in a dead disk the whole process
    would stand still. A client with open tasks is therefore never closed nor freed; its threads end with the process.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._tasks: dict[int, Task] = {}
        self._free: list[bytearray] = []
        self.num_abandoned = 0
        """Tasks whose deadline has passed and that have not ended."""
        self._is_closed = False
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="kv-lmcache-disk", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def lend(self, num_bytes: int) -> Iterator[Task]:
        """A buffer for as long as the block lasts, or its abandoned task."""
        with self._lock:
            fits = [index for index, buffer in enumerate(self._free) if len(buffer) == num_bytes]
            buffer = self._free.pop(fits[0]) if fits else None
        task = Task(bytearray(num_bytes) if buffer is None else buffer)
        try:
            yield task
        finally:
            with self._lock:
                if not task.is_abandoned:
                    self._keep(task.buffer)

    def run_task(self, task: Task, submit: Callable[[], int], timeout_s: float) -> bool:
        """Begins and waits. Raises what the task ended with, or StoreError: timeout, stuck, closed."""
        task.signal.clear()
        with self._lock:
            if self._is_closed:
                raise StoreError("closed")
            if self.num_abandoned >= _MAX_ABANDONED:
                raise StoreError("stuck")
            self._tasks[submit()] = task
        if not task.signal.wait(timeout_s):
            with self._lock:
                if not task.signal.is_set():
                    task.is_abandoned = True
                    self.num_abandoned += 1
                    raise StoreError("timeout")
        if isinstance(task.outcome, Exception):
            raise task.outcome
        return task.outcome

    def close(self) -> None:
        """Ends the thread, and the client unless it has open tasks. Bounded."""
        deadline = time.monotonic() + _CLOSE_S
        while self._tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._lock:
            self._is_closed = True
            num_open = len(self._tasks)
        os.write(self._stop_writer, b"x")
        self._thread.join(_CLOSE_S)
        if num_open or self._thread.is_alive():
            _log.warning(
                "LMCache still has %d tasks open: it and their buffers are kept until the process ends", num_open
            )
            # One reference too many, so that not even the end of the interpreter frees (and so joins) it.
            for kept in (self._client, self._tasks):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            return
        self._client.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)

    def _watch(self) -> None:
        poller = select.poll()
        for descriptor in (self._stop_reader, int(self._client.event_fd())):
            poller.register(descriptor, select.POLLIN)
        while not self._is_closed:
            poller.poll()
            try:
                with self._lock:
                    for task_id, is_done, error, found in self._client.drain_completions():
                        self._end(task_id, (not found or bool(found[0])) if is_done else _error_of(error))
            except Exception:  # without this thread no task would ever end
                _log.exception("LMCache does not report which tasks have ended")
                time.sleep(_CLOSE_S / 10)

    def _end(self, task_id: int, outcome: Outcome) -> None:
        task = self._tasks.pop(task_id, None)
        if task is None:
            return
        task.outcome = outcome
        task.signal.set()
        if task.is_abandoned:
            self.num_abandoned -= 1
            self._keep(task.buffer)

    def _keep(self, buffer: bytearray) -> None:
        if len(self._free) >= _MAX_FREE:
            self._free.pop(0)
        self._free.append(buffer)


def _error_of(text: str) -> Exception:
    for code in _ERRNOS:
        if os.strerror(code) in text:
            return OSError(code, os.strerror(code))
    return StoreError("write")
