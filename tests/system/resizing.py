"""A stack that is supervised while a test resizes it under load, and the checks after it."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from protos.tandem.v1 import instance_pb2, pools_pb2, pools_pb2_grpc
from tandem.local_stack.supervisor import StackEvent
from tests.grpc_calls import blocking_stub
from tests.lively import rig_settings
from tests.system.checker import private_files
from tests.system.rig import Rig
from tests.waiting import wait_until

WIRE_ROLES = {"prefill": instance_pb2.ROLE_PREFILL, "decode": instance_pb2.ROLE_DECODE}
ACCEPT_S = 0.3

_ORDERLY = re.compile(r"\S+ (started at \S+|is ready after .*|is draining|is gone)")


class ResizableStack:
    """A running rig with a thread that supervises its processes, and a stub of its router's admin listener."""

    def __init__(self, rig: Rig, stub: Any) -> None:
        self.rig = rig
        self.stub = stub
        self.events: list[StackEvent] = []

    def resize(self, **sizes: int) -> list[pools_pb2.PoolChange]:
        """Starts a resize; raises grpc.RpcError if it is rejected."""
        wanted = [pools_pb2.PoolSize(role=WIRE_ROLES[pool], size=size) for pool, size in sizes.items()]
        return list(self.stub.ResizePools(pools_pb2.ResizePoolsRequest(sizes=wanted), timeout=20).changes)

    def pools(self) -> pools_pb2.ListPoolsResponse:
        answer: pools_pb2.ListPoolsResponse = self.stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=20)
        return answer

    def wait_ready(self, **sizes: int) -> None:
        """Returns when these pools have so many instances, all ready, and the processes of removed ones are gone."""
        wait_until(lambda: self._has(sizes), f"the pools do not become {sizes}")

    def _has(self, sizes: dict[str, int]) -> bool:
        pools, members = self.pools(), list(self.rig.stack.processes)
        return all(
            [one.out for one in pools.instances if one.role == WIRE_ROLES[pool]] == [""] * size
            and sum(name.startswith(pool) for name in members) == size
            for pool, size in sizes.items()
        )

    def processes(self) -> dict[int, psutil.Process]:
        """Every process of the stack, by its id."""
        found = {}
        for member in list(self.rig.stack.processes.values()):
            server = psutil.Process(member.pid)
            found.update({process.pid: process for process in (server, *server.children(recursive=True))})
        return found

    def assert_nothing_is_left(self, pids: Iterable[int], addresses: Iterable[str]) -> None:
        """Of removed instances: no process of `pids`, no port of `addresses`, no file, no page of a single transfer."""
        members, folder = self.rig.stack.processes, self.rig.stack.folder
        mine = self.processes()
        left = [pid for pid in set(pids) - mine.keys() if psutil.pid_exists(pid)]
        assert not left, f"processes are left: {left}"
        for address in set(addresses) - set(self.rig.stack.instances.values()):
            host, port = address.split(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, f"{address} still accepts connections"
        assert {path.name for path in (folder / "ready").iterdir()} == members.keys()
        assert {path.stem for path in (folder / "logs").iterdir()} == members.keys()
        assert {path.name for path in (folder / "run").iterdir()} == members.keys()
        assert not private_files(self.rig.store_folder)

    @property
    def messages(self) -> list[str]:
        """The supervisor's events so far."""
        return [event.text for event in list(self.events)]

    @property
    def faults(self) -> list[str]:
        """Those of its events that are none of an orderly resize."""
        return [line for line in self.messages if not _ORDERLY.fullmatch(line)]


@contextmanager
def resizable(
    checkpoint: Path, *, faults: Mapping[str, str] | None = None, instance_args: Sequence[str] = (), **fields: Any
) -> Iterator[ResizableStack]:
    """A stack of 1 + 1, every request handed over, ready; supervised until the end of the `with`."""
    drain = ("--server-drain-accept-s", str(ACCEPT_S), "--server-drain-grace-s", "60", "--server-drain-move-s", "59")
    args = (*drain, *instance_args)
    rig = Rig(rig_settings(checkpoint, start_timeout_s=120.0, instance_args=args, **fields), faults=faults)
    rig.start()
    stop = threading.Event()
    broken: list[Exception] = []
    with grpc.insecure_channel(rig.stack.admin_address) as channel:
        stack = ResizableStack(rig, blocking_stub(pools_pb2_grpc.PoolsServiceStub, channel))

        def serve() -> None:
            try:
                rig.stack.serve(stop, stack.events.append)
            except Exception as error:
                broken.append(error)

        thread = threading.Thread(target=serve, name="supervisor")
        thread.start()
        try:
            yield stack
        finally:
            stop.set()
            thread.join(30)
            rig.stop()
    assert not broken, broken
