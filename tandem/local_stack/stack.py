"""A complete Tandem on this machine: a router and its pools as child processes. `tandem up` and the fault tests run it.

    LocalStack(settings) ─start()─▶ all processes started at once ─▶ all ready ─serve()─▶ supervised ─stop()─▶ gone
                                          │
                        a process exits: StackFailed with the end of its log

supervisor.py restarts processes and follows the desired state of the pools (desired_state.py), which `resize` changes
from any thread. The routers read and change it over a socket (server.py).

The stack's files lie in one private folder that is deleted with it: secret, ready files, sockets, logs, shared store.
The processes end with this one, however it ends (serving/lifecycle.py). All but `resize` is for one thread at a time.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from kv_transfer.secret import ensure_secret
from serving.lifecycle import ParentBond
from tandem.client import registry
from tandem.client.credentials import API_KEY_FILE, ROUTER, TLS_FOLDER, Credentials, stack_credentials
from tandem.client.registry import RunningStack, StackFolder
from tandem.local_stack.desired_state import Role
from tandem.local_stack.process import ManagedProcess, stop_all
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.supervisor import StackEvent, StackFailed, Supervisor, exit_report, log_end
from tandem.local_stack.topology import TOKENS_FILE, LocalProcesses

_POLL_S = 0.01
_CHECK_INTERVAL_S = 0.05
_LOOK_INTERVAL_S = 0.2
"""Between two looks into the logs of processes that start."""
_ANNOUNCED_LOOK_S = 1.0
"""Between two looks at the state file."""
_SERVING_TIMEOUT_S = 60.0
_SERVING_LOOK_S = 5.0
"""How long the router is asked before the processes are looked at again."""
STOP_GRACE_S = 1.0

Progress = Callable[[str], None]


class StartCancelled(Exception):
    """The stack was to stop before it was ready."""


def _check_running(processes: Iterable[ManagedProcess]) -> None:
    """Raises StackFailed for one that has exited, also if it was ready before; but not for a drained instance, which
    `serve` starts again."""
    for process in processes:
        was_ready = process.ready_s is not None
        is_drained = was_ready and process.name != ROUTER and process.exit_status == 0
        if not process.running and not is_drained:
            raise StackFailed(exit_report(process, f"before {'the stack' if was_ready else 'it'} was ready"))


class LocalStack:
    """Processes by name: router, prefill-0 …, decode-0 …. `env` and the failpoints in it are per process name."""

    def __init__(self, settings: StackSettings, *, env: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.settings = settings
        self._env = {name: dict(variables) for name, variables in (env or {}).items()}
        self._cleanup = ExitStack()
        self._folder: Path | None = None
        self._processes: LocalProcesses | None = None
        self._supervisor: Supervisor | None = None
        self._announced: RunningStack | None = None
        self._state_files: set[Path] = set()
        self._next_look_s = 0.0
        self._stop_starting: threading.Event | None = None
        self.is_stopping = False
        """Or it has stopped: nothing may interrupt that."""

    @property
    def folder(self) -> Path:
        """The private folder; only while the stack runs."""
        assert self._folder is not None, "the stack has not started"
        return self._folder

    @property
    def processes(self) -> dict[str, ManagedProcess]:
        """Every process that runs or will run again, leaving ones too; the router first."""
        return {} if self._processes is None else self._processes.by_name

    @property
    def instances(self) -> dict[str, str]:
        """Name → host:port of every desired prefill and decode instance; not of leaving ones."""
        return {instance.name: instance.address for instance in self._started.desired.snapshot.instances}

    @property
    def credentials(self) -> Credentials:
        """The operator's, for the router, its admin listener and the instances."""
        return stack_credentials(self.folder)

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self.processes[ROUTER].spec.address

    @property
    def admin_address(self) -> str:
        """host:port of the router's admin listener."""
        return self._started.admin_address

    @property
    def http_address(self) -> str | None:
        """host:port of the router's OpenAI HTTP API; None: disabled."""
        return self._started.http_address

    @property
    def _started(self) -> LocalProcesses:
        assert self._processes is not None, "the stack has not started"
        return self._processes

    def start(self, progress: Progress = lambda line: None, stop: threading.Event | None = None) -> None:
        """Starts all processes at once; returns when all are ready.

        Raises StackFailed, StartCancelled once `stop` is set, ValueError for invalid `instance_args`, or OSError, as of
        a full disk; leaves nothing behind.
        """
        self._stop_starting, self.is_stopping = stop, False
        registry.sweep()
        folder = StackFolder()
        self._cleanup.callback(folder.remove)
        self._folder = folder.path
        try:
            bond = ParentBond()
            self._cleanup.callback(bond.close)
            after_processes = self._cleanup.enter_context(ExitStack())
            self._cleanup.callback(lambda: stop_all(list(self.processes.values()), STOP_GRACE_S))
            self._prepare_folder()
            # Another stack that starts would choose the same ports by the seed: they are free until processes listen.
            settings = self.settings if folder.is_alone else replace(self.settings, port_seed=None)
            self._processes = LocalProcesses(settings, self.folder, bond, self._env)
            for process in self.processes.values():
                self._processes.start(process)
            if self.settings.instance_args:
                _ = self._processes.drain_s  # now, while a file that they name has what the instances started with
            self._supervisor = Supervisor(self._processes)
            # Imported late: gRPC takes a while, and the processes start meanwhile.
            from tandem.local_stack.server import StackServer

            server = StackServer(
                self._processes.stack_address,
                self._processes.desired,
                self._processes.resize,
                num_router_workers=self.settings.router_workers,
            )
            after_processes.callback(server.stop)
            self.wait_ready(progress=progress)
            self._wait_serving()
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, *names: str, progress: Progress = lambda line: None) -> None:
        """Waits until the named processes, or all, are ready; raises StackFailed if one exits or takes too long."""
        waiting = processes = [self.processes[name] for name in names or self.processes]
        deadline_s = time.monotonic() + self.settings.start_timeout_s
        next_look_s, shown = 0.0, set[str]()
        while waiting:
            if time.monotonic() >= next_look_s:
                next_look_s = time.monotonic() + _LOOK_INTERVAL_S
                for text in (text for process in waiting for text in process.start_up_texts()):
                    if text not in shown:  # several of them may say the same
                        shown.add(text)
                        progress(text)
            _check_running(processes)
            still_waiting = []
            for process in waiting:
                if process.ready:
                    progress(f"{process.name} is ready after {time.monotonic() - process.started_s:.1f} s")
                else:
                    still_waiting.append(process)
            waiting = still_waiting
            if waiting and time.monotonic() > deadline_s:
                late = ", ".join(process.name for process in waiting)
                raise StackFailed(
                    f"not ready within {self.settings.start_timeout_s:g} s: {late}\n{log_end(waiting[0])}"
                )
            self._pause()

    def _wait_serving(self) -> None:
        """Waits until the router serves and every instance may be picked; raises StackFailed if one exits meanwhile."""
        from tandem.client.channel import ROUTER_SERVICE
        from tandem.client.health import wait_serving

        deadline_s = time.monotonic() + _SERVING_TIMEOUT_S
        is_serving, missing = False, "the router is not ready"
        while True:
            _check_running(self.processes.values())
            is_serving = is_serving or wait_serving(
                self.address, ROUTER_SERVICE, _SERVING_LOOK_S, credentials=self.credentials
            )
            if is_serving and not (missing := self._instances_out()):
                return
            if time.monotonic() >= deadline_s:
                raise StackFailed(
                    f"the router did not find its instances within {_SERVING_TIMEOUT_S:g} s: {missing}\n"
                    f"{log_end(self.processes[ROUTER])}"
                )
            self._pause()

    def _pause(self) -> None:
        if self._stop_starting is not None and self._stop_starting.is_set():
            raise StartCancelled
        time.sleep(_POLL_S)

    def _instances_out(self) -> str:
        """The instances that the router does not pick, and why; nothing if it answers to operators' tokens only.

        Not those that drain, or that `serve` is yet to start.
        """
        import grpc

        from tandem.client.health import instances_out

        running = {process.spec.address for process in self.processes.values() if process.running}
        try:
            out = instances_out(self.admin_address, credentials=self.credentials)
            return ", ".join(
                f"{address} is {why}" for address, why in out.items() if address in running and why != "draining"
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return ""
            return f"its admin listener does not answer at {self.admin_address} ({error.code().name})"

    def resize(self, role: Role, size: int, victims: Sequence[str] = ()) -> int:
        """Sets the desired size of a pool, from any thread; returns the previous one.

        The processes follow in `serve` or `supervise`. `victims` are addresses of instances to remove first, in this
        order. Raises InvalidSize for a size that is not allowed, or for which there is not enough memory.
        """
        return self._started.resize(role, size, victims)

    def supervise(self) -> list[StackEvent]:
        """Checks the processes once, to be called regularly: restarts, starts and drains them, and bounds their logs.

        Raises StackFailed when a required process exits more than five times within a minute.
        """
        assert self._supervisor is not None, "the stack has not started"
        events = self._supervisor.check()
        for process in self.processes.values():
            with suppress(OSError):  # as where a user has removed the log
                process.bound_log()
        with suppress(OSError):  # as on a full disk: a later check repeats it
            self._keep_announced()
        return events

    def _keep_announced(self) -> None:
        """Writes the state file again if the instances have changed, or if it is gone: systemd deletes the runtime
        directory when its user logs out. Raises OSError."""
        if self._announced is None:
            return
        announced = replace(self._announced, instances=self.instances)
        if announced == self._announced:
            if time.monotonic() < self._next_look_s:
                return
            self._next_look_s = time.monotonic() + _ANNOUNCED_LOOK_S
            if registry.state_file(announced).exists():
                return
        self._state_files.add(registry.announce(announced))
        self._announced = announced

    def _withdraw(self) -> None:
        while self._state_files:
            self._state_files.pop().unlink(missing_ok=True)

    def serve(self, stop: threading.Event, on_event: Callable[[StackEvent], None]) -> None:
        """Supervises until `stop` is set. Raises what `supervise` raises."""
        while not stop.wait(_CHECK_INTERVAL_S):
            for event in self.supervise():
                on_event(event)

    def restart(self, name: str) -> None:
        """Restarts a process that has ended, at its address. Does not wait."""
        self._started.start(self.processes[name])

    def announce(self) -> None:
        """Lets the commands on this machine find the stack; `supervise` keeps the state file there and up to date.
        Raises OSError."""
        self._announced = RunningStack(
            address=self.address,
            folder=str(self.folder),
            pid=os.getpid(),
            model=self.settings.model_name,
            instances=self.instances,
            started_s=time.time(),
            admin_address=self.admin_address,
            model_folder=str(self.settings.model),
            http_address=self.http_address or "",
            router_workers=self.settings.router_workers,
        )
        self._cleanup.callback(self._withdraw)
        self._state_files.add(registry.announce(self._announced))

    def stop(self) -> None:
        """Ends every process and removes the folder and the state file. Idempotent."""
        self.is_stopping = True
        self._announced = self._folder = None
        self._cleanup.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _prepare_folder(self) -> None:
        for name in ("logs", "ready", "run", "store"):
            (self.folder / name).mkdir(mode=0o700)
        ensure_secret(self.folder / "kv_secret")
        if (key := self.settings.api_key) is not None:
            (self.folder / API_KEY_FILE).write_text(key)  # only this user may enter the folder
            (self.folder / TOKENS_FILE).write_text(f"client: {hashlib.sha256(key.encode()).hexdigest()}\n")
        if self.settings.tls:
            from tandem.local_stack.pki import write_stack_files

            write_stack_files(self.folder / TLS_FOLDER, self.settings.host)
