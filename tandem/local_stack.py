"""A whole Tandem on this machine: a router and its pools as child processes. `tandem up` and the fault rig run on it.

    LocalStack(settings) ─start()─▶ all members started at once ─▶ all ready ─stop()─▶ nothing left
                                          │                            │
                        a member ends: StackFailed        a member ends: supervise() restarts it,
                        with the end of its log           0.5 s, 1 s, 2 s … later; too often: StackFailed

What the stack has lies in one private folder that goes with it: secret, ready files, sockets, logs, shared store.
The members end with this process, whatever ends it (serving/lifetime). The object belongs to the main thread.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from serving.lifetime import ParentBond
from tandem import running
from tandem.machine import free_ports
from tandem.member import Member, stop_all
from tandem.running import RunningStack, StackFolder
from tandem.stack_settings import StackSettings
from tandem.topology import admin_address, member_specs

_POLL_S = 0.01
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 8.0
_MAX_ENDS = 5
_WITHIN_S = 60.0
_SERVING_WITHIN_S = 10.0
STOP_GRACE_S = 1.0

Progress = Callable[[str], None]


class StackFailed(Exception):
    """The stack cannot start or go on. The message names the member, how it ended, and the end of its log."""


@dataclass(frozen=True, slots=True)
class StackEvent:
    """Something that `supervise` saw or did. `lines` are the last ones of the member's log, if it ended."""

    member: str
    what: str
    lines: tuple[str, ...] = ()


class LocalStack:
    """Members by name: router, prefill-0 …, decode-0 …. `env` and the failpoints in it are per member name."""

    def __init__(self, settings: StackSettings, *, env: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.settings = settings
        self.members: dict[str, Member] = {}
        self.admin_address = ""
        """host:port at which the router answers `tandem pools`; only while the stack runs."""
        self._env = {name: dict(variables) for name, variables in (env or {}).items()}
        self._folder: StackFolder | None = None
        self._bond: ParentBond | None = None
        self._state_file: Path | None = None
        self._ends: dict[str, deque[float]] = {}
        self._restart_at_s: dict[str, float] = {}

    @property
    def folder(self) -> Path:
        """The private folder; only while the stack runs."""
        assert self._folder is not None, "the stack has not started"
        return self._folder.path

    @property
    def store_folder(self) -> Path:
        """Where the shared_storage connector keeps pages."""
        return self.folder / "store"

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self.members["router"].spec.address

    @property
    def instances(self) -> dict[str, str]:
        """Name → host:port of every prefill and decode instance."""
        return {name: member.spec.address for name, member in self.members.items() if name != "router"}

    def start(self, progress: Progress = lambda line: None) -> None:
        """Starts all members at once and returns when all are ready; raises StackFailed and leaves nothing behind."""
        running.sweep()
        self._folder = StackFolder()
        self._bond = ParentBond()
        try:
            self._prepare_folder()
            num_instances = self.settings.num_prefill + self.settings.num_decode
            ports = free_ports(num_instances + 2, self.settings.host)
            if self.settings.port:
                ports[0] = self.settings.port
            self.admin_address = admin_address(ports)
            for spec in member_specs(self.settings, self.folder, ports):
                env = {**spec.env, **self._env.get(spec.name, {}), **self._env.get("*", {})}
                self.members[spec.name] = Member(spec.with_env(env))
            for member in self.members.values():
                member.start(self._bond)
            self.wait_ready(progress=progress)
            self._wait_serving()
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, *names: str, progress: Progress = lambda line: None) -> None:
        """Returns when the named members, or all, are ready; raises StackFailed if one ends or takes too long."""
        waiting = [self.members[name] for name in names or self.members]
        deadline_s = time.monotonic() + self.settings.start_timeout_s
        while waiting:
            still_waiting = []
            for member in waiting:
                if member.ready:
                    progress(f"{member.name} is ready after {time.monotonic() - member.started_s:.1f} s")
                elif member.running:
                    still_waiting.append(member)
                else:
                    raise StackFailed(_ended(member, "before it was ready"))
            waiting = still_waiting
            if waiting and time.monotonic() > deadline_s:
                names_left = ", ".join(member.name for member in waiting)
                raise StackFailed(
                    f"not ready within {self.settings.start_timeout_s:g} s: {names_left}\n{_log(waiting[0])}"
                )
            time.sleep(_POLL_S)

    def _wait_serving(self) -> None:
        """Returns when the router has found its instances."""
        # Imported late: gRPC takes a while, and the members start meanwhile.
        from tandem.health import ROUTER_SERVICE, wait_serving

        if not wait_serving(self.address, ROUTER_SERVICE, _SERVING_WITHIN_S):
            raise StackFailed(
                f"the router did not find its instances within {_SERVING_WITHIN_S:g} s\n{_log(self.members['router'])}"
            )

    def supervise(self) -> list[StackEvent]:
        """One look at the members, to be called every so often: notes ends, starts again what is due.

        Raises StackFailed when a member ends more than five times within a minute.
        """
        now_s = time.monotonic()
        events: list[StackEvent] = []
        for name, member in self.members.items():
            if member.running:
                continue
            if name not in self._restart_at_s:
                events.append(self._note_end(member, now_s))
            elif now_s >= self._restart_at_s[name]:
                del self._restart_at_s[name]
                self.restart(name)
                events.append(StackEvent(name, f"{name} was started again"))
        return events

    def kill(self, name: str) -> None:
        """Ends a member at once, as a crash would, with all its processes."""
        self.members[name].kill()

    def restart(self, name: str, *, env: Mapping[str, str] | None = None) -> None:
        """Starts an ended member again at its address, `env` laid over its environment. Does not wait for it."""
        assert self._bond is not None, "the stack has not started"
        member = self.members[name]
        if env is not None:
            member.spec = member.spec.with_env({**member.spec.env, **env})
        member.start(self._bond)

    def announce(self) -> None:
        """Lets `tandem generate` and its like on this machine find the stack."""
        self._state_file = running.announce(
            RunningStack(
                address=self.address,
                folder=str(self.folder),
                pid=os.getpid(),
                model=self.settings.model_name,
                instances=self.instances,
                started_s=time.time(),
                admin_address=self.admin_address,
            )
        )

    def stop(self) -> None:
        """Ends every member and removes the folder and the state file. Idempotent."""
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)
            self._state_file = None
        stop_all(list(self.members.values()), STOP_GRACE_S)
        if self._bond is not None:
            self._bond.close()
            self._bond = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare_folder(self) -> None:
        for name in ("logs", "ready", "run", "store"):
            (self.folder / name).mkdir(mode=0o700)
        secret = self.folder / "kv_secret"
        secret.touch(mode=0o600)
        secret.write_bytes(secrets.token_bytes(32))

    def _note_end(self, member: Member, now_s: float) -> StackEvent:
        member.kill()  # its engine core may be left
        ends = self._ends.setdefault(member.name, deque(maxlen=_MAX_ENDS + 1))
        ends.append(now_s)
        recent = [end_s for end_s in ends if now_s - end_s < _WITHIN_S]
        if len(recent) > _MAX_ENDS:
            raise StackFailed(_ended(member, f"{len(recent)} times within {_WITHIN_S:g} s; giving up"))
        backoff_s = min(_FIRST_BACKOFF_S * 2 ** (len(recent) - 1), _MAX_BACKOFF_S)
        self._restart_at_s[member.name] = now_s + backoff_s
        what = f"{member.name} {member.end()}; starting it again in {backoff_s:g} s"
        return StackEvent(member.name, what, tuple(member.last_lines()))


def _ended(member: Member, when: str) -> str:
    return f"{member.name} {member.end()} {when}\n{_log(member)}"


def _log(member: Member) -> str:
    lines = member.last_lines()
    return "\n  ".join(["the end of its log:", *lines]) if lines else "its log is empty"
