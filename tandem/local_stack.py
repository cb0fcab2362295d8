"""A whole Tandem on this machine: a router and its pools as child processes. `tandem up` and the fault rig run on it.

    LocalStack(settings) ─start()─▶ all members started at once ─▶ all ready ─serve()─▶ looked after ─stop()─▶ gone
                                          │
                        a member ends: StackFailed with the end of its log

How it looks after them is told in supervision.py. Its pools may be resized while it runs: `resize` says who there is to
be (roster.py), from any thread, and the processes follow at the next look. The routers of the stack ask for that over a
socket (stack_service.py).

What the stack has lies in one private folder that goes with it: secret, ready files, sockets, logs, shared store.
The members end with this process, whatever ends it (serving/lifetime). But for `resize`, the object belongs to one
thread at a time.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from serving.lifetime import ParentBond
from tandem import running
from tandem.credentials import TLS_FOLDER, Credentials, of_stack
from tandem.crew import ROUTER, Crew
from tandem.member import Member, stop_all
from tandem.roster import Role
from tandem.running import RunningStack, StackFolder
from tandem.stack_settings import StackSettings
from tandem.supervision import StackEvent, StackFailed, Supervisor, ended, log_of

if TYPE_CHECKING:
    from tandem.stack_service import StackServer

_POLL_S = 0.01
_LOOK_EVERY_S = 0.05
_SERVING_WITHIN_S = 10.0
STOP_GRACE_S = 1.0

Progress = Callable[[str], None]


class LocalStack:
    """Members by name: router, prefill-0 …, decode-0 …. `env` and the failpoints in it are per member name."""

    def __init__(self, settings: StackSettings, *, env: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.settings = settings
        self._env = {name: dict(variables) for name, variables in (env or {}).items()}
        self._folder: StackFolder | None = None
        self._bond: ParentBond | None = None
        self._crew: Crew | None = None
        self._supervisor: Supervisor | None = None
        self._service: StackServer | None = None
        self._announced: RunningStack | None = None
        self._state_file: Path | None = None

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
    def members(self) -> dict[str, Member]:
        """Everybody whose process runs or is to run again, those that leave included; router first."""
        return {} if self._crew is None else self._crew.members

    @property
    def instances(self) -> dict[str, str]:
        """Name → host:port of every prefill and decode instance that there is to be; not of those that leave."""
        return {} if self._crew is None else {seat.name: seat.address for seat in self._crew.roster.seating.seats}

    @property
    def credentials(self) -> Credentials:
        """Those of the stack's owner, for the router, its admin listener and the instances."""
        return of_stack(self.folder)

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self.members[ROUTER].spec.address

    @property
    def admin_address(self) -> str:
        """host:port at which the router answers `tandem pools`; empty before the start."""
        return "" if self._crew is None else self._crew.admin_address

    @property
    def http_address(self) -> str | None:
        """host:port at which the router speaks OpenAI's HTTP API; None: it does not, or has not started."""
        return None if self._crew is None else self._crew.http_address

    def start(self, progress: Progress = lambda line: None) -> None:
        """Starts all members at once and returns when all are ready; raises StackFailed and leaves nothing behind."""
        running.sweep()
        self._folder = StackFolder()
        self._bond = ParentBond()
        try:
            self._prepare_folder()
            self._crew = Crew(self.settings, self.folder, self._bond, self._env)
            for member in self.members.values():
                self._crew.start(member)
            self._supervisor = Supervisor(self._crew)
            self._serve_routers(self._crew)
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
                    raise StackFailed(ended(member, "before it was ready"))
            waiting = still_waiting
            if waiting and time.monotonic() > deadline_s:
                names_left = ", ".join(member.name for member in waiting)
                raise StackFailed(
                    f"not ready within {self.settings.start_timeout_s:g} s: {names_left}\n{log_of(waiting[0])}"
                )
            time.sleep(_POLL_S)

    def _wait_serving(self) -> None:
        """Returns when the router has found its instances."""
        # Imported late: gRPC takes a while, and the members start meanwhile.
        from tandem.health import ROUTER_SERVICE, wait_serving

        if not wait_serving(self.address, ROUTER_SERVICE, _SERVING_WITHIN_S, credentials=self.credentials):
            raise StackFailed(
                f"the router did not find its instances within {_SERVING_WITHIN_S:g} s\n{log_of(self.members[ROUTER])}"
            )

    def resize(self, role: Role, size: int, victims: Sequence[str] = ()) -> int:
        """Gives a pool another number of instances, from any thread; returns how many it was to have before.

        It has begun when this returns and goes on while somebody calls `serve` or `supervise`. `victims` are addresses
        of those that go first, in this order. A newcomer gets the KV memory of every other instance, and cores of its
        own if some are free (topology.py). Raises SizeRefused for a size that the pool may not have, or that the free
        memory does not allow.
        """
        assert self._crew is not None, "the stack has not started"
        return self._crew.resize(role, size, victims)

    def supervise(self) -> list[StackEvent]:
        """One look at the members, to be called every so often: starts again those that have ended, starts and drains
        those that a resize has brought or sent away.

        Raises StackFailed when a member that the stack needs ends more than five times within a minute.
        """
        assert self._supervisor is not None, "the stack has not started"
        events = self._supervisor.look()
        if self._announced is not None and self._announced.instances != self.instances:
            self._announce(replace(self._announced, instances=self.instances))
        return events

    def serve(self, stop: threading.Event, tell: Callable[[StackEvent], None]) -> None:
        """Supervises until `stop` is set. Raises what `supervise` raises."""
        while not stop.wait(_LOOK_EVERY_S):
            for event in self.supervise():
                tell(event)

    def kill(self, name: str) -> None:
        """Ends a member at once, as a crash would, with all its processes."""
        self.members[name].kill()

    def restart(self, name: str, *, env: Mapping[str, str] | None = None) -> None:
        """Starts an ended member again at its address, `env` laid over its environment. Does not wait for it."""
        assert self._crew is not None, "the stack has not started"
        member = self.members[name]
        if env is not None:
            member.spec = member.spec.with_env({**member.spec.env, **env})
        self._crew.start(member)

    def announce(self) -> None:
        """Lets `tandem generate` and its like on this machine find the stack, now and when its pools have changed."""
        self._announce(
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
            self._state_file = self._announced = None
        stop_all(list(self.members.values()), STOP_GRACE_S)
        if self._service is not None:
            self._service.stop()
            self._service = None
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
        if self.settings.tls:
            from tandem.private_ca import write_stack_files

            write_stack_files(self.folder / TLS_FOLDER, self.settings.host)

    def _serve_routers(self, crew: Crew) -> None:
        """Answers the stack's routers from now on."""
        # Imported late, as above.
        from tandem.stack_service import StackServer

        self._service = StackServer(crew.stack_address, crew.roster, crew.resize)

    def _announce(self, stack: RunningStack) -> None:
        self._announced = stack
        self._state_file = running.announce(stack)
