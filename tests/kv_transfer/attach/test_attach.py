"""Both ends of the attach stream over a real server on loopback: every end of a transfer reaches the other side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from engine.messages import KVProgress, TransferEvent
from kv_transfer.holder import POLICIES, SERVICE, HolderSettings, TransferHolder
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.server import Server
from serving.server_settings import ServerSettings
from tests.kv_transfer.attach.ends import EPOCH, IDENTITY, LEASE_S, SETTINGS, Holding, Reading, open_message
from tests.waiting import until


async def test_reader_follows_a_transfer_from_offer_to_release(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    reading = Reading(stub, num_local_blocks=1)
    await until(lambda: reading.told == [KVProgress("r", 0)])
    for num_ready in (2, 5):
        holding.ready(num_ready)
        await until(lambda: reading.told[-1] == KVProgress("r", num_ready))  # noqa: B023
    holding.complete(5, 83)
    await until(lambda: reading.told[-1] == KVProgress("r", 5, num_tokens=83))
    assert len(holding.leases) == 1
    reading.loaded.set_result(True)
    await reading.task
    await until(lambda: len(holding.leases) == 0)
    assert holding.actions()[0] == "attach"
    assert holding.actions().count("release") == 1
    assert len(reading.told) == 4
    await until(lambda: holding.holder.num_attached == 0)
    assert holding.holder.num_held == 0


async def test_reader_may_attach_before_the_offer(holding: Holding, stub: KvTransferServiceStub) -> None:
    reading = Reading(stub)
    await until(lambda: holding.holder.num_attached == 1)
    assert reading.told == []
    holding.offer()
    holding.ready(1)
    holding.complete(3, 50)
    await until(lambda: reading.told and reading.told[-1].num_tokens == 50)
    assert reading.told[-1].num_ready_blocks == 3
    reading.loaded.set_result(True)
    await reading.task


async def test_offer_that_never_comes_is_not_waited_for_for_ever(holding: Holding, stub: KvTransferServiceStub) -> None:
    reading = Reading(stub)
    await reading.task
    assert (reading.failure or "").startswith("NOT_FOUND: no transfer 't' within 0.5 s")
    assert holding.actions() == ["release"], "should the offer come after all, nobody waits for it"
    assert holding.holder.num_attached == 0


async def test_lease_lives_as_long_as_its_reader_and_waits_for_news_together(
    holding: Holding, stub: KvTransferServiceStub
) -> None:
    holding.offer()
    reading = Reading(stub)
    started = time.monotonic()
    while time.monotonic() - started < 3 * LEASE_S:
        await asyncio.sleep(0.05)
        holding.step()
    assert len(holding.leases) == 1
    assert not reading.task.done(), "a holder with nothing to tell is not a dead holder"
    assert holding.actions().count("renew") >= 6
    assert len(reading.told) == 1
    reading.loaded.set_result(True)
    await reading.task


async def test_frozen_reader_loses_its_lease_and_is_told(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    call = stub.Attach()
    await call.write(pb.AttachRequest(open=open_message()))
    assert (await call.read()).WhichOneof("event") == "attached"
    started = time.monotonic()
    while len(holding.leases):
        holding.step()
        await asyncio.sleep(0.01)
    assert LEASE_S * 0.9 < time.monotonic() - started < LEASE_S + 1.0
    events: list[str | None] = []
    while isinstance(response := await call.read(), pb.AttachResponse):
        events.append(response.WhichOneof("event"))
    assert events[-1] == "failed"
    assert await call.code() is grpc.StatusCode.OK


async def test_broken_stream_leaves_the_lease_to_run_out(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    call = stub.Attach()
    await call.write(pb.AttachRequest(open=open_message()))
    await call.read()
    call.cancel()
    await until(lambda: holding.holder.num_attached == 0)
    assert "release" not in holding.actions()
    assert len(holding.leases) == 1
    await asyncio.sleep(LEASE_S)
    holding.step()
    assert len(holding.leases) == 0


async def test_cancelled_reader_releases_within_a_second(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    reading = Reading(stub)
    await until(lambda: reading.told)
    started = time.monotonic()
    reading.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading.task
    assert time.monotonic() - started < 1.9
    assert holding.actions()[-1] == "release"
    await until(lambda: len(holding.leases) == 0)


async def test_frozen_holder_is_given_up_after_a_lease(stack: AsyncExitStack) -> None:
    class Frozen(TransferHolder):
        async def _tell(self, held: object, listener: object) -> AsyncIterator[pb.AttachResponse]:  # type: ignore[override]
            await asyncio.sleep(60)
            yield pb.AttachResponse()

        async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
            await asyncio.sleep(60)
            return pb.ReleaseResponse()

    holder = Frozen(identity=IDENTITY, instance_epoch=EPOCH, send=lambda command: None, settings=SETTINGS)
    server = Server(ServerSettings())
    await server.register(SERVICE, holder, POLICIES)
    port = await server.start()
    stack.push_async_callback(server.stop)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    holder.on_event(TransferEvent("t", 0))
    started = time.monotonic()
    reading = Reading(KvTransferServiceStub(channel))
    await until(lambda: reading.failure)
    assert LEASE_S * 0.9 < time.monotonic() - started < LEASE_S + 1.0
    assert reading.failure == f"no word from the holder for {LEASE_S:g} s"
    await reading.task
    assert time.monotonic() - started < LEASE_S + 2.5, "the release is bounded too"


async def test_holder_that_is_not_there_is_a_failure_and_not_an_error() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        reading = Reading(KvTransferServiceStub(channel))
        await reading.task
    assert (reading.failure or "").startswith("UNAVAILABLE")


async def test_failed_production_reaches_the_reader(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    reading = Reading(stub)
    await until(lambda: reading.told)
    holding.ready(2)
    holding.leases.fail("t", "the request ended: abort", now=time.monotonic())
    holding.step()
    await reading.task
    assert reading.failure == "the holder failed: the request ended: abort"
    assert [progress.num_ready_blocks for progress in reading.told] in ([0, 2, 2], [0, 0])


async def test_transfer_that_failed_before_the_attach_says_why(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    holding.leases.fail("t", "store_enospc", now=time.monotonic())
    holding.step()
    reading = Reading(stub)
    await reading.task
    assert reading.failure == "the holder failed: store_enospc"


async def test_dead_core_ends_every_transfer(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    attached, waiting = Reading(stub), Reading(stub, transfer_id="not offered yet")
    await until(lambda: attached.told and holding.holder.num_attached == 2)
    holding.holder.fail_all("the engine core has ended")
    await asyncio.gather(attached.task, waiting.task)
    assert attached.failure == waiting.failure == "the holder failed: the engine core has ended"


async def test_release_is_idempotent_and_remembered(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    assert (await stub.Release(pb.ReleaseRequest(transfer_id="t"))).was_held
    assert not (await stub.Release(pb.ReleaseRequest(transfer_id="t"))).was_held
    # STEP a release that comes before the offer
    assert not (await stub.Release(pb.ReleaseRequest(transfer_id="early"))).was_held
    reading = Reading(stub, transfer_id="early")
    await reading.task
    assert "NOT_FOUND" in (reading.failure or "")
    holding.offer("early")
    assert len(holding.leases) == 0


async def test_reader_whose_core_needs_nothing_just_releases(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    reading = Reading(stub)
    reading.loaded.set_result(True)
    await reading.task
    assert holding.actions() == ["release"]
    assert reading.told == []


async def test_core_that_gives_up_before_the_offer_releases_at_once(
    holding: Holding, stub: KvTransferServiceStub
) -> None:
    reading = Reading(stub)
    await until(lambda: holding.holder.num_attached == 1)
    started = time.monotonic()
    reading.loaded.set_result(False)
    await reading.task
    assert time.monotonic() - started < 0.9
    assert holding.actions() == ["release"]


async def test_ended_transfers_are_forgotten(holding: Holding, stub: KvTransferServiceStub) -> None:
    now = 0.0
    holder = TransferHolder(
        identity=IDENTITY,
        instance_epoch=EPOCH,
        send=lambda command: None,
        settings=HolderSettings(forget_s=10.0, max_ended=5),
        clock=lambda: now,
    )
    for number in range(20):
        holder.on_event(TransferEvent(f"t{number}", 0))
        holder.on_event(TransferEvent(f"t{number}", 0, ended="released"))
    assert len(holder._held) == 5
    now = 10.0
    holder.on_event(TransferEvent("last", 0))
    assert set(holder._held) == {"last"}
