"""Other sizes, and the pools watched: what operators ask of a router whose pools belong to somebody, or to nobody."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from protos.tandem.v1 import pools_pb2
from tests.router.conftest import Run
from tests.router.pools.owned import WIRE_ROLES, owned
from tests.router.pools.test_pools_service import failure, operator
from tests.router.rig import TIMEOUT_S


async def test_sizes_and_who_wanted_them_are_told(run: Run) -> None:
    async with owned(run) as stack:
        prefill, decode = (await stack.listed()).pools
        assert [pool.role for pool in (prefill, decode)] == [WIRE_ROLES["prefill"], WIRE_ROLES["decode"]]
        assert (prefill.num_ready, prefill.size, decode.num_ready, decode.size) == (1, 1, 2, 2)
        assert not decode.HasField("last_change")
        assert not decode.HasField("autoscaler")
        # STEP: an operator resizes both
        changes = (await stack.resize(decode=4, prefill=0)).changes
        assert [(change.previous_size, change.size) for change in changes] == [(2, 4), (1, 0)], "in the order asked for"
        await stack.until_ready(prefill=0, decode=4)
        prefill, decode = (await stack.listed()).pools
        assert (prefill.num_ready, prefill.size, decode.num_ready, decode.size) == (0, 0, 4, 4)
        assert (decode.last_change.previous_size, decode.last_change.cause) == (2, "operator")
        assert 0 <= decode.last_change.age_s < TIMEOUT_S


async def test_the_autoscaler_tells_what_it_thinks(run: Run) -> None:
    autoscaler = {
        "enabled": True,
        "interval_s": 0.05,
        "prefill": {"min_size": 1, "max_size": 1},
        "decode": {"min_size": 2, "max_size": 3},
    }
    async with owned(run, autoscaler=autoscaler) as stack, asyncio.timeout(TIMEOUT_S):
        while not (status := (await stack.listed()).pools[1].autoscaler).leads:
            await asyncio.sleep(0.01)
        assert (status.min_size, status.max_size) == (2, 3)
        assert status.reason


@pytest.mark.parametrize(
    ("sizes", "hint"),
    [
        ([], "is empty"),
        ([("decode", 0)], "1..64"),
        ([("decode", 65)], "1..64"),
        ([("prefill", -1)], "0..64"),
        ([("decode", 3), ("decode", 3)], "names the decode pool twice"),
        ([("nobody", 3)], "ROLE_PREFILL, ROLE_DECODE"),
    ],
)
async def test_sizes_that_cannot_be_are_refused(run: Run, sizes: list[tuple[str, int]], hint: str) -> None:
    async with owned(run) as stack:
        wanted = [pools_pb2.PoolSize(role=WIRE_ROLES.get(pool, 0), size=size) for pool, size in sizes]
        error = await failure(stack.stub.ResizePools(pools_pb2.ResizePoolsRequest(sizes=wanted), timeout=TIMEOUT_S))
        assert error.code().name == "INVALID_ARGUMENT"
        assert hint in (error.details() or "")
        assert stack.decode_names() == ["decode-0", "decode-1"]


async def test_who_owns_no_processes_is_told_by_whom_pools_are_resized(run: Run) -> None:
    async with operator(run) as (_, stub):
        wanted = [pools_pb2.PoolSize(role=WIRE_ROLES["decode"], size=2)]
        error = await failure(stub.ResizePools(pools_pb2.ResizePoolsRequest(sizes=wanted), timeout=TIMEOUT_S))
        assert error.code().name == "FAILED_PRECONDITION"
        assert "this router was not told who owns its instances' processes" in (error.details() or "")
        assert "--stack" in (error.details() or "")
        listed = await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        assert [pool.num_ready for pool in listed.pools] == [1, 1]
        assert not any(pool.HasField("size") for pool in listed.pools)


async def test_a_watch_tells_of_instances_that_come_and_go(run: Run) -> None:
    async with owned(run, num_decode=1) as stack, asyncio.timeout(TIMEOUT_S):
        watch = stack.stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=0.1))

        async def seen(count: int) -> None:
            async for answer in watch:
                if sum(not one.out for one in answer.pools.instances if one.role == WIRE_ROLES["decode"]) == count:
                    return

        await seen(1)
        await stack.resize(decode=3)
        await seen(3)
        await stack.resize(decode=1)
        await seen(1)
        watch.cancel()


@pytest.mark.parametrize("interval_s", [-1.0, 0.05, 61.0, float("nan"), float("inf")])
async def test_an_interval_that_cannot_be_is_refused(run: Run, interval_s: float) -> None:
    async with operator(run) as (_, stub):
        error = await failure(stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=interval_s)).read())
        assert error.code().name == "INVALID_ARGUMENT"
        assert "0.1..60 seconds" in (error.details() or "")


async def test_a_watch_ends_with_the_router_and_not_as_a_failure(run: Run) -> None:
    async with operator(run) as (rig, stub), asyncio.timeout(TIMEOUT_S):
        watch = stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=60))
        await watch.read()
        draining = asyncio.ensure_future(rig.app.drain())
        assert await watch.read() is grpc.aio.EOF
        assert (await watch.code()) is grpc.StatusCode.OK
        await draining
