"""A local stack with a second router beside its own: a client of both is served while one of them restarts."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from serving.lifecycle import ParentBond
from tandem.client.channel import ROUTER_SERVICE
from tandem.client.health import READY, health, wait_serving
from tandem.local_stack.process import ManagedProcess
from tandem.local_stack.topology import free_ports
from tests.engine_under_test import PATIENCE
from tests.system.rig import Rig

HANG_S = 120.0 * PATIENCE
"""For steps that take seconds on a quiet machine."""


class TwoRouters:
    """The members of `rig` and a router-1 of the same flags. A context manager around a rig that has started."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._bond = ParentBond()
        first = rig.stack.processes["router"].spec
        port, admin_port = free_ports(2, rig.stack.settings.host)
        address = f"{rig.stack.settings.host}:{port}"
        ready_file = first.ready_file.with_name("router-1")
        changed = {
            first.address: address,
            rig.stack.admin_address: f"127.0.0.1:{admin_port}",
            str(first.ready_file): str(ready_file),
        }
        argv = [changed.get(argument, argument) for argument in first.argv]
        log_file = first.log_file.with_name("router-1.log")
        second = replace(
            first, name="router-1", argv=tuple(argv), address=address, ready_file=ready_file, log_file=log_file
        )
        self.processes: dict[str, ManagedProcess] = {**rig.stack.processes, "router-1": ManagedProcess(second)}

    def __enter__(self) -> Self:
        router = self.processes["router-1"]
        router.start(self._bond)
        try:
            is_serving = wait_serving(router.spec.address, ROUTER_SERVICE, HANG_S)
            assert is_serving, "\n  ".join([f"router-1 {router.exit_text()}", *router.last_lines()])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.processes["router-1"].kill()
        self._bond.close()

    @property
    def routers(self) -> list[ManagedProcess]:
        return [self.processes["router"], self.processes["router-1"]]

    def drain(self, names: Sequence[str]) -> dict[str, float]:
        """SIGTERM to all members at once; returns how long each took to end, in seconds. Each has to end with 0."""
        begun_s = time.monotonic()
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        took_s: dict[str, float] = {}
        while len(took_s) < len(names):
            for name in set(names) - took_s.keys():
                member = self.processes[name]
                if not member.running:
                    took_s[name] = time.monotonic() - begun_s
                    assert member.exit_status == 0, "\n  ".join(
                        [f"{name} {member.exit_text()}", *member.last_lines(30)]
                    )
            assert time.monotonic() - begun_s < HANG_S, f"did not end: {set(names) - took_s.keys()}"
            time.sleep(0.01)
        return took_s

    def start_again(self, names: Sequence[str]) -> None:
        """Starts ended members; returns when every router serves and has reported every one of the instances ready."""
        num_before = {name: self._num_ready_reports(name) for name in names}
        for name in names:
            if name in self.rig.stack.processes:
                self.rig.stack.restart(name)
            else:
                self.processes[name].start(self._bond)
        deadline_s = time.monotonic() + HANG_S
        for name in names:
            while not self._is_back(name, num_before[name]):
                member = self.processes[name]
                assert member.running, "\n  ".join([f"{name} {member.exit_text()}", *member.last_lines(30)])
                assert time.monotonic() < deadline_s, f"{name} is not back"
                time.sleep(0.05)

    def phases(self, name: str) -> list[str]:
        """The phases of its drains, by a member's log."""
        lines = self.processes[name].spec.log_file.read_text().splitlines()
        return [line.partition("draining: ")[2] for line in lines if "draining: " in line]

    def log_of_routers(self) -> str:
        return "\n".join(router.spec.log_file.read_text() for router in self.routers)

    def _num_ready_reports(self, name: str) -> dict[str, int]:
        line = f"is ready address={self.processes[name].spec.address}"
        return {router.name: router.spec.log_file.read_text().count(line) for router in self.routers}

    def _is_back(self, name: str, num_before: Mapping[str, int]) -> bool:
        if name.startswith("router"):
            return health(self.processes[name].spec.address, ROUTER_SERVICE) == READY
        return all(count > num_before[router] for router, count in self._num_ready_reports(name).items())
