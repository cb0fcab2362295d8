"""Both ends of the attach stream over a real server on loopback: every end of a transfer reaches the other side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from engine.core.messages import KVProgress, TransferEvent
from kv_transfer.transfer.server import POLICIES, SERVICE, TransferServer, TransferServerSettings
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.server import Server, ServerSettings
from tests.grpc_calls import next_message
from tests.kv_transfer.transfer.endpoints import (
    EPOCH,
    IDENTITY,
    SETTINGS,
    ClientEndpoint,
    ServerEndpoint,
    open_message,
)
from tests.waiting import Stopwatch, until

LEASE_S = 0.6


async def test_reader_follows_a_transfer_from_offer_to_release(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    client = ClientEndpoint(stub, num_local_blocks=1)
    await until(lambda: client.progress == [KVProgress("r", 0)])
    for num_ready in (2, 5):
        server_end.ready(num_ready)
        await until(lambda: client.progress[-1] == KVProgress("r", num_ready))  # noqa: B023
    server_end.complete(5, 83)
    await until(lambda: client.progress[-1] == KVProgress("r", 5, num_tokens=83))
    assert len(server_end.leases) == 1
    client.loaded.set_result(True)
    await client.task
    await until(lambda: len(server_end.leases) == 0)
    assert server_end.actions()[0] == "attach"
    assert server_end.actions().count("release") == 1
    assert len(client.progress) == 4
    await until(lambda: server_end.server.num_attached == 0)
    assert server_end.server.num_transfers == 0


async def test_reader_may_attach_before_the_offer(server_end: ServerEndpoint, stub: KvTransferServiceStub) -> None:
    client = ClientEndpoint(stub)
    await until(lambda: server_end.server.num_attached == 1)
    assert client.progress == []
    server_end.offer()
    server_end.ready(1)
    server_end.complete(3, 50)
    await until(lambda: client.progress and client.progress[-1].num_tokens == 50)
    assert client.progress[-1].num_ready_blocks == 3
    client.loaded.set_result(True)
    await client.task


@pytest.mark.parametrize("server_end", [{"attach_wait_s": 1.5}], indirect=True)
async def test_waiting_for_an_offer_is_bounded(server_end: ServerEndpoint, stub: KvTransferServiceStub) -> None:
    client = ClientEndpoint(stub)
    await client.task
    assert client.failure == "NOT_FOUND: no transfer 't' within 1.5 s"
    assert server_end.actions() == ["release"], "an offer that comes later has no reader"
    assert server_end.server.num_attached == 0


@pytest.mark.parametrize("server_end", [{"lease_s": 5.0}], indirect=True)
async def test_lease_is_renewed_while_reader_and_producer_have_nothing_to_report(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    client = ClientEndpoint(stub, lease_s=server_end.lease_s)
    started = time.monotonic()
    while time.monotonic() - started < 1.4 * server_end.lease_s:
        await asyncio.sleep(0.05)
        server_end.step()
    assert len(server_end.leases) == 1
    assert not client.task.done(), "a producer with nothing to report is not dead"
    assert server_end.actions().count("renew") >= 2
    assert len(client.progress) == 1
    client.loaded.set_result(True)
    await client.task


@pytest.mark.parametrize("server_end", [{"lease_s": 9.0}], indirect=True)
async def test_reader_with_a_shorter_lease_waits_for_the_producers_next_report(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    client = ClientEndpoint(stub, lease_s=0.3)
    await until(lambda: client.task.done() or server_end.actions().count("renew") > 5)
    assert client.failure is None, "the producer reports every third of its own lease"
    client.loaded.set_result(True)
    await client.task


@pytest.mark.parametrize("server_end", [{"lease_s": LEASE_S}], indirect=True)
async def test_frozen_reader_loses_its_lease_and_is_notified(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    call, started = stub.Attach(), time.monotonic()
    await call.write(pb.AttachRequest(open=open_message()))
    assert (await next_message(call)).WhichOneof("event") == "attached"
    watch = Stopwatch()
    while len(server_end.leases):
        server_end.step()
        await asyncio.sleep(0.01)
    assert time.monotonic() - started > LEASE_S
    assert watch.s < LEASE_S + 1.0
    events: list[str | None] = []
    while isinstance(response := await call.read(), pb.AttachResponse):
        events.append(response.WhichOneof("event"))
    assert events[-1] == "failed"
    assert await call.code() is grpc.StatusCode.OK


async def test_broken_stream_leaves_the_lease_to_run_out(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    call = stub.Attach()
    await call.write(pb.AttachRequest(open=open_message()))
    await call.read()
    call.cancel()
    await until(lambda: server_end.server.num_attached == 0)
    assert "release" not in server_end.actions()
    assert len(server_end.leases) == 1
    server_end.step(after_s=server_end.lease_s)
    assert len(server_end.leases) == 0


async def test_cancelled_reader_releases_within_a_second(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    client = ClientEndpoint(stub)
    await until(lambda: client.progress)
    watch = Stopwatch()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert watch.s < 1.9
    assert server_end.actions()[-1] == "release"
    await until(lambda: len(server_end.leases) == 0)


async def test_frozen_producer_is_given_up_after_a_lease(stack: AsyncExitStack) -> None:
    class Frozen(TransferServer):
        async def _progress(self, held: object, listener: object) -> AsyncIterator[pb.AttachResponse]:
            await asyncio.sleep(60)
            yield pb.AttachResponse()

        async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseResponse:
            await asyncio.sleep(60)
            return pb.ReleaseResponse()

    transfer_server = Frozen(
        identity=IDENTITY,
        instance_epoch=EPOCH,
        send_command=lambda command: None,
        settings=replace(SETTINGS, lease_s=LEASE_S),
    )
    server = Server(ServerSettings())
    await server.register(SERVICE, transfer_server, POLICIES)
    port = await server.start()
    stack.push_async_callback(server.stop)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    transfer_server.on_event(TransferEvent("t", 0))
    started, watch = time.monotonic(), Stopwatch()
    client = ClientEndpoint(KvTransferServiceStub(channel))
    await until(lambda: client.failure)
    assert time.monotonic() - started > LEASE_S * 0.9
    assert watch.s < LEASE_S + 1.0
    assert client.failure == f"no message from the producer for {LEASE_S:g} s"
    await client.task
    assert watch.s < LEASE_S + 2.5, "the release is bounded too"


async def test_unreachable_producer_is_a_failure_and_no_exception() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        client = ClientEndpoint(KvTransferServiceStub(channel))
        await client.task
    assert (client.failure or "").startswith("UNAVAILABLE")


async def test_failed_production_reaches_the_reader(server_end: ServerEndpoint, stub: KvTransferServiceStub) -> None:
    server_end.offer()
    client = ClientEndpoint(stub)
    await until(lambda: client.progress)
    server_end.ready(2)
    server_end.leases.fail("t", "the request ended: abort", now=time.monotonic())
    server_end.step()
    await client.task
    assert client.failure == "the producer failed: the request ended: abort"
    assert [progress.num_ready_blocks for progress in client.progress] in ([0, 2, 2], [0, 0])


async def test_transfer_that_failed_before_the_attach_says_why(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    server_end.leases.fail("t", "store_enospc", now=time.monotonic())
    server_end.step()
    client = ClientEndpoint(stub)
    await client.task
    assert client.failure == "the producer failed: store_enospc"


async def test_dead_core_ends_every_transfer(server_end: ServerEndpoint, stub: KvTransferServiceStub) -> None:
    server_end.offer()
    attached, waiting = ClientEndpoint(stub), ClientEndpoint(stub, transfer_id="not offered yet")
    await until(lambda: attached.progress and server_end.server.num_attached == 2)
    for transfer_id in ("t", "not offered yet"):
        failed = TransferEvent(transfer_id, 0, ended="failed", reason="the engine core has ended")
        server_end.server.on_event(failed)
    await asyncio.gather(attached.task, waiting.task)
    assert attached.failure == waiting.failure == "the producer failed: the engine core has ended"


async def test_release_is_idempotent_and_remembered(server_end: ServerEndpoint, stub: KvTransferServiceStub) -> None:
    server_end.offer()
    assert (await stub.Release(pb.ReleaseRequest(transfer_id="t"))).was_held
    assert not (await stub.Release(pb.ReleaseRequest(transfer_id="t"))).was_held
    # STEP a release that comes before the offer
    assert not (await stub.Release(pb.ReleaseRequest(transfer_id="early"))).was_held
    client = ClientEndpoint(stub, transfer_id="early")
    await client.task
    assert "NOT_FOUND" in (client.failure or "")
    server_end.offer("early")
    assert len(server_end.leases) == 0


async def test_reader_whose_core_needs_nothing_just_releases(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    client = ClientEndpoint(stub)
    client.loaded.set_result(True)
    await client.task
    assert server_end.actions() == ["release"]
    assert client.progress == []


async def test_core_that_gives_up_before_the_offer_releases_at_once(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    client = ClientEndpoint(stub)
    await until(lambda: server_end.server.num_attached == 1)
    watch = Stopwatch()
    client.loaded.set_result(False)
    await client.task
    assert watch.s < 0.9
    assert server_end.actions() == ["release"]


async def test_ended_transfers_are_forgotten(server_end: ServerEndpoint, stub: KvTransferServiceStub) -> None:
    now = 0.0
    transfer_server = TransferServer(
        identity=IDENTITY,
        instance_epoch=EPOCH,
        send_command=lambda command: None,
        settings=TransferServerSettings(forget_s=10.0, max_ended=5),
        clock=lambda: now,
    )
    for number in range(20):
        transfer_server.on_event(TransferEvent(f"t{number}", 0))
        transfer_server.on_event(TransferEvent(f"t{number}", 0, ended="released"))
    assert len(transfer_server._transfers) == 5
    now = 10.0
    transfer_server.on_event(TransferEvent("last", 0))
    assert set(transfer_server._transfers) == {"last"}
