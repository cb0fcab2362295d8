"""Real stacks that a test can stop at named places: processes, sockets and files as in production, faults on demand.

A failpoint that parks looks for a file `<handshake file>.<name>.go` and continues when it is there. The rig lets every
failpoint of its list park, and creates all the go files before the start: nothing stops. A test *arms* one by removing
its file, waits for the line that reports a process there, injects its fault, and releases it. So one stack serves many
tests, and each first proves that its fault really happened.

    free ──arm──▶ armed ──a process reaches it: one line in the handshake file──▶ parked ──release──▶ free
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from protos.tandem.v1 import instance_pb2, instance_pb2_grpc
from tandem.client.channel import open_blocking_channel
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.stack import LocalStack
from tests.grpc_calls import blocking_stub
from tests.process_logs import exceptions_in
from tests.waiting import wait_until

ARRIVAL_TIMEOUT_S = 30.0
REPORT_TIMEOUT_S = 60.0
LOOK_TIMEOUT_S = 2.0
"""For a report of an instance that may be silent."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A process has reached a failpoint and is stopped there."""

    name: str
    hit: int
    pid: int


class Failpoint:
    """One named place in one member, armed for the length of a `with`. Made by Rig.armed."""

    def __init__(self, member: str, name: str, file: Path) -> None:
        self.member = member
        self.name = name
        self._file = file
        self._go = Path(f"{file}.{name}.go")
        self._offset = 0

    def arm(self) -> None:
        """From now on processes stop here. Arm while none passes: one that does may count and yet continue."""
        self._offset = self._file.stat().st_size if self._file.exists() else 0
        self._go.unlink(missing_ok=True)
        time.sleep(0.02)  # a process that saw the file a moment ago is past it now

    def release(self) -> None:
        self._go.touch()

    def hold(self) -> None:
        """After a release: from now on processes stop here again. Those that passed meanwhile count as arrived."""
        self._go.unlink(missing_ok=True)

    def wait(self, timeout_s: float = ARRIVAL_TIMEOUT_S) -> Arrival:
        """The first arrival since it was armed; AssertionError if there is none: then the test proves nothing."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if arrivals := self._arrivals():
                return arrivals[0]
            time.sleep(0.005)
        raise AssertionError(f"no request reached the failpoint {self.name} of {self.member} within {timeout_s:g} s")

    @property
    def reached(self) -> bool:
        """Whether a process has reached it since it was armed."""
        return bool(self._arrivals())

    @property
    def num_arrivals(self) -> int:
        """How often processes have reached it since it was armed, including those that continued at once."""
        return len(self._arrivals())

    def _arrivals(self) -> list[Arrival]:
        if not self._file.exists():
            return []
        found = []
        with self._file.open() as file:
            file.seek(self._offset)
            lines = file.read().rpartition("\n")[0].splitlines()  # whole ones: a process may be writing the last
        for line in lines:
            word, name, hit, pid = line.split()
            assert word == "FAILPOINT", line
            if name == self.name:
                found.append(Arrival(name, int(hit), int(pid.removeprefix("pid="))))
        return found


class Rig:
    """A LocalStack with failpoints: `failpoints` are names per member, `faults` whole specs (`store.write=fail@3`)."""

    def __init__(
        self,
        settings: StackSettings,
        *,
        failpoints: Mapping[str, Sequence[str]] | None = None,
        faults: Mapping[str, str] | None = None,
        env: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._handshakes = Path(tempfile.mkdtemp(prefix="tandem-rig-"))
        self._failpoints = {member: tuple(names) for member, names in (failpoints or {}).items()}
        environment = {member: dict(variables) for member, variables in (env or {}).items()}
        for member in {*self._failpoints, *(faults or {})}:
            names = self._failpoints.get(member, ())
            specs = [f"{name}=park" for name in names] + [(faults or {}).get(member, "")]
            environment.setdefault(member, {}).update(
                TANDEM_ENABLE_FAILPOINTS="1",
                TANDEM_FAILPOINTS=";".join(filter(None, specs)),
                TANDEM_FAILPOINT_FILE=str(self._handshakes / member),
            )
            for name in names:
                self._failpoint(member, name).release()
        self.stack = LocalStack(settings, env=environment)

    @property
    def address(self) -> str:
        return self.stack.address

    @property
    def store_folder(self) -> Path:
        """The pages of the shared_storage connector, and of lmcache on disk."""
        return self.stack.folder / "store"

    def start(self) -> None:
        """Returns when the stack serves; leaves nothing behind if it cannot."""
        try:
            self.stack.start()
        except BaseException:
            shutil.rmtree(self._handshakes, ignore_errors=True)
            raise

    def stop(self) -> None:
        """Ends the stack; raises AssertionError if a process had ended by itself, with the end of its log."""
        ended = [
            member for member in self.stack.processes.values() if member.exit_status not in (None, -signal.SIGKILL)
        ]
        problems = ["\n  ".join([f"{member.name} {member.exit_text()}", *member.last_lines()]) for member in ended]
        self.stack.stop()
        shutil.rmtree(self._handshakes, ignore_errors=True)
        assert not problems, "\n".join(problems)

    @contextmanager
    def armed(self, member: str, name: str) -> Iterator[Failpoint]:
        """The failpoint, armed; released at the end of the `with`."""
        assert name in self._failpoints.get(member, ()), f"this rig's {member} has no failpoint {name}"
        failpoint = self._failpoint(member, name)
        failpoint.arm()
        try:
            yield failpoint
        finally:
            failpoint.release()

    def kill(self, *members: str) -> None:
        """SIGKILL to members and their engine cores, as when the machine fails; to all before the first is waited for,
        or its requests go to the next one and die there too, like those that break instances."""
        processes = [self.stack.processes[member] for member in members]
        for process in processes:
            if process.running:
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.kill()

    @contextmanager
    def frozen(self, member: str) -> Iterator[None]:
        """SIGSTOP to a member and its engine core; SIGCONT at the end of the `with`."""
        group = self.stack.processes[member].pid
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(group, signal.SIGCONT)

    def restart(self, member: str) -> None:
        """Starts a dead instance again and waits until the router reports it ready."""
        self.stack.restart(member)
        self.stack.wait_ready(member)
        wait_until(lambda: self.is_ready(member), f"the router does not report {member} ready", ARRIVAL_TIMEOUT_S)

    def is_ready(self, member: str) -> bool:
        """Whether the router's last report of this instance says ready, and means the process that runs now."""
        if not self.stack.processes[member].ready:
            return False  # a channel to a closed port costs much more than this look
        try:
            epoch = self.load(member, LOOK_TIMEOUT_S).instance_epoch
        except grpc.RpcError:
            return False
        log = self.stack.processes["router"].spec.log_file.read_text().splitlines()
        reports = (line for line in reversed(log) if f" address={self.stack.instances[member]} epoch=" in line)
        return (last := next(reports, None)) is not None and " is ready " in last and f" epoch={epoch}" in last

    def router_warnings(self) -> str:
        """Warnings and errors of the router so far: why KV was computed again, which calls failed."""
        lines = self.stack.processes["router"].spec.log_file.read_text().splitlines()
        return "\n".join(line for line in lines if " WARNING " in line or " ERROR " in line)

    def logged_exceptions(self) -> Counter[str]:
        """The number of exceptions in the log of each process so far (tests/process_logs.py)."""
        logs = {name: process.spec.log_file.read_text() for name, process in self.stack.processes.items()}
        return Counter({name: len(exceptions_in(log)) for name, log in logs.items()})

    def load(self, member: str, timeout_s: float = REPORT_TIMEOUT_S) -> instance_pb2.WatchLoadResponse:
        """The next load report of an instance; raises grpc.RpcError where none comes within `timeout_s`."""
        with ExitStack() as streams:
            return next(self._watch(self.stack.instances[member], streams, timeout_s))

    def loads(self) -> dict[str, instance_pb2.WatchLoadResponse]:
        """The next load report of every instance that answers."""
        reports = {}
        for name in self.stack.instances:
            try:
                reports[name] = self.load(name)
            except grpc.RpcError:
                if self.stack.processes[name].running:
                    raise
        return reports

    def new_loads(self) -> dict[str, instance_pb2.WatchLoadResponse]:
        """Of every instance that answers, a load report that was made after this call."""
        found = {}
        with ExitStack() as streams:
            watched = {name: self._watch(address, streams) for name, address in self.stack.instances.items()}
            for name, reports in watched.items():
                try:
                    old = next(reports)
                    found[name] = next(report for report in reports if report.sequence > old.sequence)
                except grpc.RpcError:
                    if self.stack.processes[name].running:
                        raise
        return found

    def _watch(
        self, address: str, streams: ExitStack, timeout_s: float = REPORT_TIMEOUT_S
    ) -> Iterator[instance_pb2.WatchLoadResponse]:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        channel = streams.enter_context(open_blocking_channel(address, options, self.stack.credentials))
        stub = blocking_stub(instance_pb2_grpc.InstanceServiceStub, channel)
        call: Any = stub.WatchLoad(instance_pb2.WatchLoadRequest(), timeout=timeout_s)
        streams.callback(call.cancel)
        return call

    def _failpoint(self, member: str, name: str) -> Failpoint:
        return Failpoint(member, name, self._handshakes / member)
