"""A router whose pools have an owner: fakes in place of instances, and the local stack's desired state and socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from protos.tandem.v1 import instance_pb2, pools_pb2, pools_pb2_grpc
from router.autoscaler.resizer import Resizer
from tandem.local_stack.desired_state import DesiredInstance, DesiredState
from tandem.local_stack.server import StackServer
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import Rig

TIMEOUT_S = 20.0
WIRE_ROLES = {"prefill": instance_pb2.ROLE_PREFILL, "decode": instance_pb2.ROLE_DECODE}


class Owned:
    """A router, its fakes, and the desired that says which of them are in the pools. `spares` are decode instances that
    run and are in no pool: a pool that grows gets them, the first one first."""

    def __init__(self, rig: Rig, desired: DesiredState, stub: Any, spares: list[FakeInstance], address: str) -> None:
        self.rig = rig
        self.desired = desired
        self.stub = stub
        self.spares = spares
        self.address = address
        assert rig.app.resizer is not None
        self.resizer: Resizer = rig.app.resizer

    async def until_ready(self, *, prefill: int = 1, decode: int) -> None:
        """Returns when the router sees exactly so many."""
        async with asyncio.timeout(TIMEOUT_S):
            pools = self.rig.app.pools
            while [(pool.num_ready(), len(pool.instances)) for pool in (pools.prefill, pools.decode)] != [
                (prefill, prefill),
                (decode, decode),
            ]:
                await asyncio.sleep(0.01)

    async def resize(self, **sizes: int) -> pools_pb2.ResizePoolsResponse:
        """As an operator asks for it."""
        wanted = [pools_pb2.PoolSize(role=WIRE_ROLES[pool], size=size) for pool, size in sizes.items()]
        answer: pools_pb2.ResizePoolsResponse = await self.stub.ResizePools(
            pools_pb2.ResizePoolsRequest(sizes=wanted), timeout=TIMEOUT_S
        )
        return answer

    async def listed(self) -> pools_pb2.ListPoolsResponse:
        answer: pools_pb2.ListPoolsResponse = await self.stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        return answer

    def decode_names(self) -> list[str]:
        """Of those that are in the decode pool, as the owner has it."""
        by_address = {fake.address: fake.name for fake in [*self.rig.decode, *self.spares]}
        return [by_address[instance.address] for instance in self.desired.snapshot.pool("decode")]


@asynccontextmanager
async def owned(run: Run, *, num_decode: int = 2, num_spares: int = 2, **sections: Any) -> AsyncIterator[Owned]:
    """One prefill and `num_decode` decode instances in the pools."""
    async with AsyncExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="t-", dir="/tmp"))
        address = f"unix:{Path(folder) / 'stack.sock'}"
        prefill = [FakeInstance("prefill", "prefill-0")]
        all_decode = [FakeInstance("decode", f"decode-{number}") for number in range(num_decode + num_spares)]
        decode, spares = all_decode[:num_decode], all_decode[num_decode:]
        for fake in [*prefill, *all_decode]:
            await cleanup.enter_async_context(fake)

        def next_spare(taken: Collection[str]) -> str:
            return next(fake.address for fake in spares if fake.address not in taken)

        instances = [DesiredInstance(fake.name, fake.role, fake.address) for fake in [*prefill, *decode]]
        desired = DesiredState(instances, next_spare)
        server = StackServer(address, desired, desired.resize)
        cleanup.push_async_callback(asyncio.to_thread, server.stop)
        pools = {"prefill": "", "decode": "", "stack": address}
        router = {"admin_listen": "127.0.0.1:0"}
        rig = await cleanup.enter_async_context(
            run(prefill=0, decode=0, router=router, **{**sections, "pools": {**pools, **sections.get("pools", {})}})
        )
        rig.prefill, rig.decode = prefill, decode
        assert rig.app.admin_address is not None
        channel = await cleanup.enter_async_context(grpc.aio.insecure_channel(rig.app.admin_address))
        found = Owned(rig, desired, pools_pb2_grpc.PoolsServiceStub(channel), spares, address)
        await found.until_ready(decode=num_decode)
        yield found
