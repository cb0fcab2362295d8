"""Start and end of a service's process: it ends with its parent, and stops on signals.

**Ends with its parent**, even when that gets SIGKILL. The parent makes one `ParentBond` and starts children with its
environment and file descriptor; each child first calls `bind_to_parent()`. Two mechanisms, since each has a gap: the
kernel's death signal (Linux; it also ends a child whose interpreter hangs, but fires when the *thread* that started the
child ends, so only for the main thread), and a pipe whose write end only the parent holds (everywhere, any thread).

**Stops on signals.** The first SIGTERM or SIGINT drains, or limits a drain that a call has begun; the second stops now.
The exit status of a stopped process says whether that cut off any work, not how often it was signalled: a second signal
to an idle process cuts off nothing.

Imports nothing but the standard library: a service calls `end_on_sigterm` before its imports that take seconds.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

EXIT_STOPPED = 0  # stopped on request; nothing was cut off
EXIT_FAILED = 1  # ended by itself: the engine core died, the machine lacked something for the start, or a bug
EXIT_CANNOT_START = 2  # unusable settings, model or address. A restart does not help.
EXIT_CUT_OFF = 3  # stopped on request; awaited calls or KV were cut off, after the grace period or by a second signal
EXIT_TERMINATED = 128 + signal.SIGTERM  # stopped while it still imported; as a shell reports an end by the signal

_PARENT_PID = "TANDEM_PARENT_PID"
_PARENT_FD = "TANDEM_PARENT_FD"
_PR_SET_PDEATHSIG = 1
_PARENT_GONE_STATUS = 43

_log = logging.getLogger(__name__)


def end_on_sigterm() -> None:
    """Ends a process that is PID 1 of its container at SIGTERM, until it has `stop_signals`; does nothing where it is
    not PID 1. Linux ignores SIGTERM where PID 1 has no handler, and other processes end by it. So a container that is
    stopped while Python imports would run until SIGKILL."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))


class ParentBond:
    """The parent's end: one for all children. Closing it, or the parent's death, ends every child.

    subprocess.Popen(argv, env={**os.environ, **bond.environment()}, pass_fds=bond.pass_fds)
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()  # both are closed on exec, except through pass_fds

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._read_fd,)

    def environment(self) -> dict[str, str]:
        """The variables for a child that the calling thread starts."""
        variables = {_PARENT_FD: str(self._read_fd)}
        if threading.current_thread() is threading.main_thread():
            variables[_PARENT_PID] = str(os.getpid())
        return variables

    def close(self) -> None:
        for descriptor in (self._read_fd, self._write_fd):
            os.close(descriptor)


def bind_to_parent() -> bool:
    """The child's end: this process ends with its parent. Returns whether the parent made a bond. Removes the
    variables, so that a grandchild does not use the descriptor's number."""
    pid, descriptor = os.environ.pop(_PARENT_PID, None), os.environ.pop(_PARENT_FD, None)
    if pid is not None:
        die_with_parent(int(pid))
    if descriptor is not None:
        threading.Thread(target=_exit_at_eof, args=(int(descriptor),), name="parent-watch", daemon=True).start()
    return pid is not None or descriptor is not None


def die_with_parent(parent_pid: int) -> None:
    """Requests SIGKILL from the kernel when the thread that started this process ends. Does nothing outside Linux."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _log.warning("no death signal from the kernel: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent_pid:  # the parent died before the request
        os._exit(_PARENT_GONE_STATUS)


def _exit_at_eof(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(_PARENT_GONE_STATUS)


def watch_children_without_threads() -> None:
    """As Python 3.12 does by itself. Python 3.11 starts a thread for each child, after the child: where none can start,
    the child is left alone. Does nothing where the kernel has no descriptors of processes. Call it on the main thread's
    running loop."""
    if sys.version_info >= (3, 12):
        return
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return
    watcher = asyncio.PidfdChildWatcher()
    watcher.attach_loop(asyncio.get_running_loop())
    asyncio.set_child_watcher(watcher)


def freeze_heap() -> None:
    """Exempts current objects from garbage collection, which stopped the event loop of a router for 84 ms."""
    gc.collect()
    gc.freeze()


def raise_open_files_limit() -> None:
    """Raises the soft limit on open files (often 1024; each connection is one) to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # an unlimited hard limit is rejected where the kernel has its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def announce_ready(line: str, ready_file: Path | None) -> None:
    """Writes `line` to `ready_file` in one step, so that no reader sees a part of it, and then prints it."""
    if ready_file is not None:
        temporary = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
        temporary.write_text(line)
        temporary.replace(ready_file)
    sys.stdout.write(line)
    sys.stdout.flush()


class StopSignals:
    """Set by signals: `drain` and `signalled` by the first, `now` by the second. A call may set `drain` as well, and is
    no signal."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.signalled = asyncio.Event()

    def request_stop(self) -> None:
        self.drain.set()
        if self.signalled.is_set():
            self.now.set()
        self.signalled.set()


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Directs SIGTERM and SIGINT of this process to the yielded object. Call it on the main thread's running loop."""
    loop = asyncio.get_running_loop()
    signals = StopSignals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.request_stop)
    try:
        yield signals
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class Stoppable(Protocol):
    """What `serve_until_stopped` ends: a Server, or a composition root's object around one."""

    async def drain(self) -> bool:
        """Ends it without losing work; False if work was cut off after the grace period."""

    async def stop(self) -> bool:
        """Ends it now; False if work was cut off. Idempotent, with the same result."""


async def serve_until_stopped(service: Stoppable, signals: StopSignals) -> bool:
    """Waits for a signal, drains, and stops now at the second; returns whether no work was cut off."""
    await signals.drain.wait()
    draining = asyncio.create_task(service.drain())
    second_signal = asyncio.create_task(signals.now.wait())
    try:
        await asyncio.wait({draining, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            return draining.result()
        _log.warning("second signal: stopping now")
        draining.cancel()
        await asyncio.wait({draining})
        return await service.stop()
    finally:
        second_signal.cancel()
        if not draining.done():
            draining.cancel()
