"""A stack that is looked after while a test resizes it under load, and what must hold of it afterwards."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil

from protos.tandem.v1 import instance_pb2, pools_pb2, pools_pb2_grpc
from tandem.supervision import StackEvent
from tests.faults.checker import private_files
from tests.faults.rig import Rig
from tests.lively import rig_settings
from tests.waiting import wait_until

WIRE_ROLES = {"prefill": instance_pb2.ROLE_PREFILL, "decode": instance_pb2.ROLE_DECODE}
ACCEPT_S = 0.3
PATIENT = ("--pools-beat-timeout-s", "20", "--pools-core-silence-timeout-s", "20")
"""For the router: on a machine whose cores are taken by processes that start, silence says nothing."""


class ResizableStack:
    """A running rig with a thread that looks after its members, and a stub of its router's admin listener."""

    def __init__(self, rig: Rig, stub: Any) -> None:
        self.rig = rig
        self.stub = stub
        self.events: list[StackEvent] = []

    def resize(self, **sizes: int) -> list[pools_pb2.PoolChange]:
        """Begins it; raises grpc.RpcError where it is refused."""
        wanted = [pools_pb2.PoolSize(role=WIRE_ROLES[pool], size=size) for pool, size in sizes.items()]
        return list(self.stub.ResizePools(pools_pb2.ResizePoolsRequest(sizes=wanted), timeout=20).changes)

    def pools(self) -> pools_pb2.ListPoolsResponse:
        answer: pools_pb2.ListPoolsResponse = self.stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=20)
        return answer

    def wait_ready(self, **sizes: int) -> None:
        """Returns when so many are ready, everybody in these pools is, and those who left are gone as processes."""
        wait_until(lambda: self._has(sizes), f"the pools do not become {sizes}")

    def _has(self, sizes: dict[str, int]) -> bool:
        pools, members = self.pools(), list(self.rig.stack.members)
        return all(
            [one.out for one in pools.instances if one.role == WIRE_ROLES[pool]] == [""] * size
            and sum(name.startswith(pool) for name in members) == size
            for pool, size in sizes.items()
        )

    def processes(self) -> dict[int, psutil.Process]:
        """Of every member and what it has started."""
        found = {}
        for member in list(self.rig.stack.members.values()):
            front = psutil.Process(member.pid)
            found.update({process.pid: process for process in (front, *front.children(recursive=True))})
        return found

    def assert_nothing_is_left(self, pids: Iterable[int], addresses: Iterable[str]) -> None:
        """Of those that went: no process of `pids`, no port of `addresses`, no file; nothing of single transfers."""
        members, folder = self.rig.stack.members, self.rig.stack.folder
        mine = self.processes()
        left = [pid for pid in set(pids) - mine.keys() if psutil.pid_exists(pid)]
        assert not left, f"processes are left: {left}"
        for address in set(addresses) - set(self.rig.stack.instances.values()):
            host, port = address.split(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, f"somebody still listens at {address}"
        assert {path.name for path in (folder / "ready").iterdir()} == members.keys()
        assert {path.stem for path in (folder / "logs").iterdir()} == members.keys()
        assert {path.name for path in (folder / "run").iterdir()} == members.keys()
        assert not private_files(self.rig.stack.store_folder)

    @property
    def told(self) -> list[str]:
        """What the owner of the processes has told so far."""
        return [event.what for event in list(self.events)]


@contextmanager
def resizable(checkpoint: Path, *, faults: Mapping[str, str] | None = None, **fields: Any) -> Iterator[ResizableStack]:
    """A stack of 1 + 1, every request handed over, ready; looked after until the end of the `with`."""
    drain = ("--server-drain-accept-s", str(ACCEPT_S), "--server-drain-grace-s", "60", "--server-drain-move-s", "59")
    settings = rig_settings(checkpoint, start_timeout_s=120.0, **fields)
    told = replace(
        settings, instance_args=(*settings.instance_args, *drain), router_args=(*PATIENT, *settings.router_args)
    )
    rig = Rig(told, faults=faults)
    rig.start()
    stop = threading.Event()
    broken: list[Exception] = []
    with grpc.insecure_channel(rig.stack.admin_address) as channel:
        stack = ResizableStack(rig, pools_pb2_grpc.PoolsServiceStub(channel))

        def serve() -> None:
            try:
                rig.stack.serve(stop, stack.events.append)
            except Exception as error:
                broken.append(error)

        thread = threading.Thread(target=serve, name="owner")
        thread.start()
        try:
            yield stack
        finally:
            stop.set()
            thread.join(30)
            rig.stop()
    assert not broken, broken
