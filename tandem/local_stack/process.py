"""One process of a local stack.

    spec ─start()─▶ starting ─ready file─▶ ready ─stop_all() | kill() | exit─▶ ended ─start()─▶ …

Each process leads a session of its own: Ctrl-C in a terminal reaches only the owner, which then stops the processes,
and one signal to the group ends a service together with its engine core. The workers of a router (`--workers`) lead
sessions of their own: they end with it by the kernel's death signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.machine import START_UP
from serving.lifecycle import ParentBond

_TAIL_BYTES = 16_384
MAX_LOG_BYTES = 64 << 20
"""Of the log of one process, which is then cut to its newest half."""
_BETWEEN_SIGNALS_S = 0.05


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A command line and its files. `env` extends this process's environment."""

    name: str
    """router, prefill-0, decode-1 …"""
    argv: tuple[str, ...]
    address: str
    """host:port that it listens on, known before the start, so that all processes can start at once."""
    ready_file: Path
    log_file: Path
    run_folder: Path
    """For its sockets and temporary files."""
    env: Mapping[str, str] = field(default_factory=dict)


class ManagedProcess:
    """The process of a spec, and its successors after restarts. Owned by one LocalStack, used from one thread, but
    for `ready`."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.started_s = 0.0
        self.ready_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start_error: OSError | None = None
        self._group_is_gone = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """Of the current process, or the last one."""
        assert self._process is not None, f"{self.name} has no process"
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs, before the first start and after one that failed; negative for a signal."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        process = self._process  # read once: a start on another thread may change it
        return process is not None and process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it wrote its ready file and still runs."""
        if self.ready_s is None and self.running and self.spec.ready_file.exists():
            self.ready_s = time.monotonic()
        return self.ready_s is not None and self.running

    def start(self, bond: ParentBond) -> bool:
        """Starts the process in an empty run folder. It ends with `bond`; its output is appended to the log file.

        False: the start failed, as at a limit on processes. It counts as an exit, and `exit_text` says why.
        """
        assert not self.running, f"{self.name} runs already"
        self.ready_s = self._process = self._start_error = None
        self._group_is_gone = False
        self.started_s = time.monotonic()
        try:
            self._process = self._new_process(bond)
        except OSError as error:
            self._start_error = error
        return self._process is not None

    def _new_process(self, bond: ParentBond) -> subprocess.Popen[bytes]:
        self.spec.ready_file.unlink(missing_ok=True)
        shutil.rmtree(self.spec.run_folder, ignore_errors=True)  # a process that was killed leaves its files there
        self.spec.run_folder.mkdir(mode=0o700)
        with self.spec.log_file.open("ab") as log:
            return subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **bond.environment(), **self.spec.env},
                pass_fds=bond.pass_fds,
                start_new_session=True,
            )

    def send_signal(self, signum: int) -> None:
        """Signals the service process alone, not its group."""
        if self._process is not None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Kills the whole process group and waits until it is gone. Idempotent.

        A group is signalled once: afterwards its number may belong to another program.
        """
        if self._process is None or self._group_is_gone:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)  # also after the end of its leader
        self._process.wait()
        self._group_is_gone = True

    def remove_files(self) -> None:
        for file in (self.spec.ready_file, self.spec.log_file):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.spec.run_folder, ignore_errors=True)

    def exit_text(self) -> str:
        """How it ended, for messages."""
        if self._start_error is not None:
            return f"could not be started ({self._start_error})"
        status = self.exit_status
        if status is None:
            return "is still running"
        return f"was killed by {_signal_name(-status)}" if status < 0 else f"exited with status {status}"

    def start_up_texts(self) -> list[str]:
        """What it logged about its start, the last ones."""
        return [text for line in self.last_lines(50) if (text := _message(line).partition(START_UP)[2])]

    def bound_log(self) -> None:
        """Cuts a log above MAX_LOG_BYTES to its newest lines. Raises OSError.

        The process, which appends, goes on meanwhile: a line that it writes just before the cut is lost, and one that
        it writes just behind the cut stands first.
        """
        if self.spec.log_file.stat().st_size <= MAX_LOG_BYTES:
            return
        with self.spec.log_file.open("ab+", buffering=0) as log:
            log.seek(-(MAX_LOG_BYTES // 2) - 1, os.SEEK_END)  # with the end of the line before
            newest = log.read()
            log.truncate(0)
            log.write(memoryview(newest)[newest.find(b"\n") + 1 :])

    def last_lines(self, count: int = 15) -> list[str]:
        try:
            with self.spec.log_file.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _message(line: str) -> str:
    """Of a line of a log, in either format, with or without what stands before it."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(line)["message"])
    return line


def stop_all(processes: list[ManagedProcess], grace_s: float) -> None:
    """Sends all processes SIGTERM, and kills those that still run after `grace_s`. Returns when all are gone;
    workers of a router that was killed may end a moment later.

    A service drains at the first SIGTERM and stops at the second; the pause keeps the two from merging into one.
    """
    deadline_s = time.monotonic() + grace_s
    for _ in range(2):
        for process in processes:
            if process.running:
                process.send_signal(signal.SIGTERM)
        time.sleep(_BETWEEN_SIGNALS_S)
    while any(process.running for process in processes) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for process in processes:
        process.kill()
