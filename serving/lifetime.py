"""How a service's process begins and ends: bound to its parent, stopped by signals.

**Bound to its parent.** A stack on one machine must leave no process behind, not even when the parent is killed with
SIGKILL. The parent makes one `ParentBond` and starts children with its environment and file descriptor; each child
calls `bind_to_parent()` first of all. Two mechanisms, since each has a gap: the kernel's death signal (Linux; it also
ends a child whose interpreter hangs, but fires when the *thread* that started the child ends, so it is asked for only
when that is the main thread), and a pipe whose write end only the parent holds (everywhere, from any thread).

**Stopped by signals.** The first SIGTERM or SIGINT drains, the second stops now. The exit status of a process that was
told to end says whether anything was lost by it, not how hurried it was: a second signal to an idle process is no loss.
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
from typing import Protocol

EXIT_STOPPED = 0
"""Told to end, and nothing was cut off."""
EXIT_FAILED = 1
"""Ended by itself: the engine core is dead, or a fault of ours."""
EXIT_CANNOT_START = 2
"""What it was told cannot be served: settings, model, address. Starting it again does not help."""
EXIT_CUT_OFF = 3
"""Told to end, and calls or KV that somebody waited for were cut off: the grace was over, or a second signal came."""

_PARENT_PID = "TANDEM_PARENT_PID"
_PARENT_FD = "TANDEM_PARENT_FD"
_PR_SET_PDEATHSIG = 1
_PARENT_GONE_STATUS = 43

_log = logging.getLogger(__name__)


class ParentBond:
    """The parent's half: one for all children. Closing it, or dying in whatever way, ends every child.

    subprocess.Popen(argv, env={**os.environ, **bond.environment()}, pass_fds=bond.pass_fds)
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()  # both are closed on exec: only pass_fds hands one on

    @property
    def pass_fds(self) -> tuple[int, ...]:
        return (self._read_fd,)

    def environment(self) -> dict[str, str]:
        """The variables for a child that the calling thread starts next."""
        variables = {_PARENT_FD: str(self._read_fd)}
        if threading.current_thread() is threading.main_thread():
            variables[_PARENT_PID] = str(os.getpid())
        return variables

    def close(self) -> None:
        """Ends the children that are left."""
        for descriptor in (self._read_fd, self._write_fd):
            os.close(descriptor)


def bind_to_parent() -> bool:
    """The child's half: this process ends when its parent does. Returns whether there was a bond to take.

    The variables are removed, so that a grandchild does not take the descriptor's number for its own parent's.
    """
    pid, descriptor = os.environ.pop(_PARENT_PID, None), os.environ.pop(_PARENT_FD, None)
    if pid is not None:
        die_with_parent(int(pid))
    if descriptor is not None:
        threading.Thread(target=_exit_at_eof, args=(int(descriptor),), name="parent-watch", daemon=True).start()
    return pid is not None or descriptor is not None


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL when the thread that started this process ends. Does nothing outside Linux."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _log.warning("no death signal from the kernel: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent_pid:  # it died before the kernel was asked
        os._exit(_PARENT_GONE_STATUS)


def _exit_at_eof(descriptor: int) -> None:
    while os.read(descriptor, 1):
        pass
    os._exit(_PARENT_GONE_STATUS)


def leave_in_memory() -> None:
    """What there is now stays to the end. Python's garbage collector would look through all of it now and then, and no
    token be sent meanwhile (84 ms were seen in a router)."""
    gc.collect()
    gc.freeze()


def allow_open_files() -> None:
    """Takes as many open files as the system grants: each connection is one, and what many systems begin with is a
    limit for people (1024), not for servers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # "as many as you like" is refused where the kernel has a limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class StopSignals:
    """Set by signals: `drain` by the first, `now` by the second."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request_stop(self) -> None:
        """What a signal does; a test or an admin call may do the same."""
        (self.now if self.drain.is_set() else self.drain).set()


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """SIGTERM and SIGINT of this process go to the yielded object; call it on the running loop of the main thread."""
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
    """What `serve_until_stopped` can end: a Server, or a composition root's own object around one."""

    async def drain(self) -> bool:
        """Ends it without losing anything; False if something was cut off when the grace was over."""
        ...

    async def stop(self) -> bool:
        """Ends it now; False if something was cut off. Idempotent, and its word stays the same."""
        ...


async def serve_until_stopped(service: Stoppable, signals: StopSignals) -> bool:
    """Waits for a signal, drains, and stops now at the second; returns whether nothing was cut off."""
    await signals.drain.wait()
    draining = asyncio.create_task(service.drain())
    hurried = asyncio.create_task(signals.now.wait())
    try:
        await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            return draining.result()
        _log.warning("second signal: stopping now")
        draining.cancel()
        await asyncio.wait({draining})
        return await service.stop()
    finally:
        hurried.cancel()
        if not draining.done():
            draining.cancel()
