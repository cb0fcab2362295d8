"""Restarts the processes of a local stack and makes them follow the desired state of its pools.

    desired ──started──▶ starting ──ready──▶ running ──exits──▶ restarted after 0.5 s, 1 s, 2 s … 8 s
                            │                   └──more than 5 times within a minute──▶ StackFailed
                            └──cannot start, or exits more than 5 times──▶ dropped: its pool stays one smaller
    any of them ──no longer desired: SIGTERM──▶ leaving ──exits──▶ gone: files, name and cores are free

A start that fails counts as an exit. A leaving instance drains by its own rules (docs/operations.md), is not restarted,
and is killed only long after the end of its drain.
"""

from __future__ import annotations

import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from serving.lifecycle import EXIT_CANNOT_START
from tandem.client.credentials import ROUTER
from tandem.local_stack.process import ManagedProcess
from tandem.local_stack.topology import LocalProcesses

FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 8.0
MAX_EXITS = 5
WINDOW_S = 60.0
_LEAVE_TIMEOUT_S = 660.0
"""Beyond the drain that an instance's settings give it: only a frozen one takes so long."""


class StackFailed(Exception):
    """The stack cannot start or continue. The message names the process, how it ended, and the end of its log."""


@dataclass(frozen=True, slots=True)
class StackEvent:
    """One change that the supervisor saw or made. `lines` are the end of the process's log, if it exited."""

    text: str
    lines: tuple[str, ...] = ()


@dataclass(slots=True)
class _Restarts:
    """Backoff and limit of one process's restarts; all times are of the monotonic clock."""

    exits_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_EXITS + 1))
    """The last ones: all that count."""
    due_s: float | None = None
    """Of the restart after the last exit; None once it is made."""

    def record_exit(self, now_s: float) -> float | None:
        """Seconds until the restart; None after more than 5 exits within a minute."""
        self.exits_s.append(now_s)
        num_recent = sum(now_s - exit_s < WINDOW_S for exit_s in self.exits_s)
        if num_recent > MAX_EXITS:
            return None
        backoff_s = min(FIRST_BACKOFF_S * 2.0 ** (num_recent - 1), _MAX_BACKOFF_S)
        self.due_s = now_s + backoff_s
        return backoff_s


class Supervisor:
    """Owned by LocalStack; used from one thread at a time."""

    def __init__(self, processes: LocalProcesses) -> None:
        self._processes = processes
        self._restarts: defaultdict[str, _Restarts] = defaultdict(_Restarts)
        self._starting: set[str] = set()
        self._leave_until_s: dict[str, float] = {}
        self._reported_starts_s: dict[str, float] = {}
        """By name, of the last process whose exit was an event."""
        self._version = processes.desired.snapshot.version

    def check(self) -> list[StackEvent]:
        """Checks every process once. Raises StackFailed when a required process exits too often."""
        now_s = time.monotonic()
        events = list(self._follow_desired_state(now_s))
        for process in list(self._processes.by_name.values()):
            if process.name in self._leave_until_s:
                events += self._check_leaving(process, now_s)
            elif not process.running:
                events += self._check_exited(process, now_s)
            elif process.name in self._starting and process.ready:
                self._starting.remove(process.name)
                ready_after_s = now_s - process.started_s
                events.append(StackEvent(f"{process.name} is ready after {ready_after_s:.1f} s"))
        return events

    def _follow_desired_state(self, now_s: float) -> Iterator[StackEvent]:
        snapshot, processes = self._processes.desired.snapshot, self._processes.by_name
        if snapshot.version == self._version:
            return
        self._version = snapshot.version
        for instance in snapshot.leaving:
            if instance.name not in processes:
                self._processes.desired.release(instance.name)  # it was never started
        staying = {ROUTER, *(instance.name for instance in snapshot.instances)}
        for name, process in processes.items():
            if name not in staying and name not in self._leave_until_s:
                self._restarts.pop(name, None)  # another process may get its name
                self._starting.discard(name)
                self._leave_until_s[name] = now_s + self._processes.drain_s + _LEAVE_TIMEOUT_S
                if process.running:
                    process.send_signal(signal.SIGTERM)
                    yield StackEvent(f"{name} is draining")
        for instance in snapshot.instances:
            if instance.name not in processes:
                self._starting.add(instance.name)
                if self._processes.start(self._processes.add(instance)):
                    yield StackEvent(f"{instance.name} started at {instance.address}")

    def _check_leaving(self, process: ManagedProcess, now_s: float) -> Iterator[StackEvent]:
        if process.running and now_s < self._leave_until_s[process.name]:
            return
        timed_out = process.running
        process.kill()  # its engine core may be left
        is_clean = process.exit_status == 0 or (process.exit_status == -signal.SIGTERM and process.ready_s is None)
        if timed_out:
            within_s = self._processes.drain_s + _LEAVE_TIMEOUT_S
            yield StackEvent(f"{process.name} did not exit within {within_s:g} s and was killed")
        elif is_clean or self._reported_starts_s.get(process.name) == process.started_s:
            yield StackEvent(f"{process.name} is gone")
        else:
            text = f"{process.name} is gone before the end of its drain: it {process.exit_text()}"
            yield StackEvent(text, tuple(process.last_lines()))
        del self._leave_until_s[process.name]
        self._reported_starts_s.pop(process.name, None)
        self._processes.remove(process)

    def _check_exited(self, process: ManagedProcess, now_s: float) -> Iterator[StackEvent]:
        restarts = self._restarts[process.name]
        if restarts.due_s is None:
            yield self._record_exit(process, now_s)
        elif now_s >= restarts.due_s:
            restarts.due_s = None
            if self._processes.start(process):
                yield StackEvent(f"{process.name} was restarted")

    def _record_exit(self, process: ManagedProcess, now_s: float) -> StackEvent:
        process.kill()  # its engine core may be left
        self._reported_starts_s[process.name] = process.started_s
        lines = tuple(process.last_lines())
        restarts = self._restarts[process.name]
        backoff_s = restarts.record_exit(now_s)
        is_hopeless = len(restarts.exits_s) > MAX_EXITS or process.exit_status == EXIT_CANNOT_START
        if process.name in self._starting and is_hopeless and self._processes.desired.drop(process.name):
            text = f"{process.name} {process.exit_text()} before it was ready; its pool continues without it"
            return StackEvent(text, lines)
        if backoff_s is None:
            raise StackFailed(exit_report(process, f"{MAX_EXITS + 1} times within {WINDOW_S:g} s; giving up"))
        return StackEvent(f"{process.name} {process.exit_text()}; restarting in {backoff_s:g} s", lines)


def exit_report(process: ManagedProcess, when: str) -> str:
    """How a process ended, with the end of its log."""
    return f"{process.name} {process.exit_text()} {when}\n{log_end(process)}"


def log_end(process: ManagedProcess) -> str:
    lines = process.last_lines()
    return "\n  ".join(["the end of its log:", *lines]) if lines else "its log is empty"
