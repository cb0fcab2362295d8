"""Waits for LMCache's asynchronous tasks with a deadline, and keeps memory that a late one may still write to.

    buffer:  free ─▶ lent ─▶ with a task ─▶ ended in time ─▶ free
                                  │ deadline
                                  ▼
                              abandoned ─▶ the task has ended at last ─▶ free

LMCache has no way to take a task back: what was handed to one is its own until it has ended, whatever the caller does
meanwhile. So tasks never see KV memory, only buffers of ours, and an abandoned buffer is kept, not freed, not lent.
Above a cap of abandoned tasks nothing more is begun (`stuck`) until one of them ends: a dead disk costs a few pages of
memory and no more.

One thread waits for ends. LMCache's own `close` waits for its workers, the fs client's while it holds the GIL: with a
worker stuck in a dead disk the whole process would stand still. A driver with open tasks is therefore never closed nor
freed, and its threads end with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from kv_transfer.page import Buffer
from kv_transfer.store import StoreError

_MAX_ABANDONED = 4
_MAX_FREE = 16
_CLOSE_S = 1.0
_log = logging.getLogger(__name__)

Outcome = bool | Exception


class Driver(Protocol):
    """What begins LMCache's tasks and knows which have ended. `ended` is called under the runner's lock."""

    def fds(self) -> list[int]:
        """Readable once a task has ended."""
        ...

    def ended(self) -> Iterable[tuple[Hashable, Outcome]]:
        """The tasks that have ended since the last call."""
        ...

    def close(self) -> None:
        """No task is open any more."""
        ...


class Task:
    """One task and its buffer. Fields belong to the runner's lock."""

    __slots__ = ("buffer", "is_abandoned", "outcome", "signal")

    def __init__(self, buffer: bytearray) -> None:
        self.buffer = buffer
        self.signal = threading.Event()
        self.outcome: Outcome = False
        self.is_abandoned = False


class TaskRunner:
    """See the module. Owns the driver, the buffers and one thread. Thread-safe."""

    def __init__(self, driver: Driver, name: str) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._tasks: dict[Hashable, Task] = {}
        self._free: list[bytearray] = []
        self._num_abandoned = 0
        self._is_closed = False
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    @property
    def num_abandoned(self) -> int:
        """Tasks whose deadline has passed and that have not ended."""
        return self._num_abandoned

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

    def run(self, task: Task, submit: Callable[[], Hashable], timeout_s: float) -> bool:
        """Begin and wait. Raises what the task ended with, or StoreError: timeout, stuck, closed."""
        task.signal.clear()
        with self._lock:
            if self._is_closed:
                raise StoreError("closed")
            if self._num_abandoned >= _MAX_ABANDONED:
                raise StoreError("stuck")
            self._tasks[submit()] = task
        if not task.signal.wait(timeout_s):
            with self._lock:
                if not task.signal.is_set():
                    task.is_abandoned = True
                    self._num_abandoned += 1
                    raise StoreError("timeout")
        if isinstance(task.outcome, Exception):
            raise task.outcome
        return task.outcome

    def close(self) -> None:
        """End the thread, and the driver unless it has open tasks. Bounded."""
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
            for kept in (self._driver, self._tasks):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            return
        self._driver.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)

    def _watch(self) -> None:
        poller = select.poll()
        for descriptor in (self._stop_reader, *self._driver.fds()):
            poller.register(descriptor, select.POLLIN)
        while not self._is_closed:
            poller.poll()
            try:
                with self._lock:
                    for ticket, outcome in self._driver.ended():
                        self._end(ticket, outcome)
            except Exception:  # without this thread no task would ever end
                _log.exception("LMCache does not say which tasks have ended")
                time.sleep(_CLOSE_S / 10)

    def _end(self, ticket: Hashable, outcome: Outcome) -> None:
        task = self._tasks.pop(ticket, None)
        if task is None:
            return
        task.outcome = outcome
        task.signal.set()
        if task.is_abandoned:
            self._num_abandoned -= 1
            self._keep(task.buffer)

    def _keep(self, buffer: bytearray) -> None:
        if len(self._free) >= _MAX_FREE:
            self._free.pop(0)
        self._free.append(buffer)


def gather(buffer: bytearray, parts: Sequence[Buffer]) -> None:
    """The parts, one after another, into a buffer of their size."""
    target, offset = memoryview(buffer), 0
    for part in parts:
        target[offset : offset + len(part)] = memoryview(part).cast("B")
        offset += len(part)


def scatter(source: Buffer, parts: Sequence[Buffer], check: Callable[[], None]) -> None:
    """The other way; `check` runs once the first part is full."""
    view, offset = memoryview(source), 0
    for index, part in enumerate(parts):
        memoryview(part).cast("B")[:] = view[offset : offset + len(part)]
        offset += len(part)
        if index == 0:
            check()
