"""One process of a local stack.

    spec ─start()─▶ starting ─ready file─▶ ready ─stop() | kill() | its own end─▶ ended ─start()─▶ …

Each member leads a session of its own, so that Ctrl-C in a terminal reaches the owner alone, which then ends the
members in its own way, and so that one signal to the group ends a member together with its engine core.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from serving.lifetime import ParentBond

_TAIL_BYTES = 16_384
_BETWEEN_SIGNALS_S = 0.05


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """What to run. `env` is laid over this process's environment."""

    name: str
    """router, prefill-0, decode-1 …"""
    argv: tuple[str, ...]
    address: str
    """host:port that it listens on, known before it starts, so that all members can start at once."""
    ready_file: Path
    log_file: Path
    run_folder: Path
    """Where it puts its sockets and what else it needs while it runs."""
    env: Mapping[str, str] = field(default_factory=dict)

    def with_env(self, env: Mapping[str, str]) -> MemberSpec:
        """The same with another environment."""
        return replace(self, env=dict(env))


class Member:
    """A process made from a spec, and its successors after restarts. Owned by one LocalStack, used from one thread."""

    def __init__(self, spec: MemberSpec) -> None:
        self.spec = spec
        self.num_starts = 0
        self.started_s = 0.0
        self.ready_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._group_is_gone = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """Of the process that runs, or ran last."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs, or before it was started; negative for a signal."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self.exit_status is None

    @property
    def ready(self) -> bool:
        """Whether it has written its ready file and still runs."""
        if self.ready_s is None and self.running and self.spec.ready_file.exists():
            self.ready_s = time.monotonic()
        return self.ready_s is not None and self.running

    def start(self, bond: ParentBond) -> None:
        """Starts the process, which ends when `bond` does; its output is appended to the log file."""
        assert not self.running, f"{self.name} runs already"
        self.spec.ready_file.unlink(missing_ok=True)
        self.spec.run_folder.mkdir(mode=0o700, exist_ok=True)
        self.ready_s = None
        self._group_is_gone = False
        self.num_starts += 1
        self.started_s = time.monotonic()
        with self.spec.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **bond.environment(), **self.spec.env},
                pass_fds=bond.pass_fds,
                start_new_session=True,
            )

    def send(self, signum: int) -> None:
        """Sends a signal to the front alone."""
        if self._process is not None:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Ends the member with its whole group at once, and waits until it is gone. Idempotent.

        A group is signalled once: later its number may be somebody else's.
        """
        if self._process is None or self._group_is_gone:
            return
        _signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._group_is_gone = True

    def remove_files(self) -> None:
        """Deletes what is its own in the stack's folder, once it is gone for good."""
        for file in (self.spec.ready_file, self.spec.log_file):
            file.unlink(missing_ok=True)
        shutil.rmtree(self.spec.run_folder, ignore_errors=True)

    def end(self) -> str:
        """How it ended, for people."""
        status = self.exit_status
        if status is None:
            return "still runs"
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of its log."""
        try:
            with self.spec.log_file.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                return log.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []


def stop_all(members: list[Member], grace_s: float) -> None:
    """Tells all members to stop now, gives them `grace_s` together, then ends what is left. Returns when all are gone.

    A service drains at the first SIGTERM and stops at the second; the pause keeps the two from merging into one.
    """
    deadline_s = time.monotonic() + grace_s
    for _ in range(2):
        for member in members:
            if member.running:
                member.send(signal.SIGTERM)
        time.sleep(_BETWEEN_SIGNALS_S)
    while any(member.running for member in members) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for member in members:
        member.kill()


def _signal_group(leader_pid: int, signum: int) -> None:
    """Signals the group that `leader_pid` leads, also when the leader itself has ended and left others behind."""
    try:
        os.killpg(leader_pid, signum)
    except (ProcessLookupError, PermissionError):
        return  # nobody is left in it
