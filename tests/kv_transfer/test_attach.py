"""Both ends of the attach stream over a real server on loopback: every end of a transfer reaches the other side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import msgspec
import pytest

from engine.identity import ModelIdentity
from engine.messages import KVProgress, LeaseCommand, TransferEvent
from kv_transfer.attach import TransferReader, follow_transfer
from kv_transfer.holder import POLICIES, SERVICE, HolderSettings, TransferHolder
from kv_transfer.leases import LeaseTable
from kv_transfer.wire import identity_to_proto
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.server import Server, ServerSettings

EPOCH = "epoch-1"
LEASE_S = 0.6
IDENTITY = ModelIdentity(
    weights_digest="w" * 64,
    config_digest="c" * 64,
    tokenizer_digest="t" * 64,
    dtype="float32",
    block_size=16,
    layout_version=1,
    layout_digest="l" * 64,
)
SETTINGS = HolderSettings(lease_s=LEASE_S, attach_wait_s=0.5, forget_s=30.0)


class Holding:
    """An instance that holds KV: the holder under test, a server, and a core that is a lease table and nothing more."""

    def __init__(self) -> None:
        self.leases = LeaseTable()
        self.commands: list[LeaseCommand] = []
        self.holder = TransferHolder(identity=IDENTITY, instance_epoch=EPOCH, send=self._send, settings=SETTINGS)

    def offer(self, transfer_id: str = "t") -> None:
        if self.leases.offer(transfer_id, lease_s=LEASE_S, now=time.monotonic()):
            self.holder.on_event(TransferEvent(transfer_id, 0))
        self.step()

    def ready(self, num_ready_blocks: int, transfer_id: str = "t") -> None:
        self.holder.on_event(TransferEvent(transfer_id, num_ready_blocks))

    def complete(self, num_ready_blocks: int, num_tokens: int, transfer_id: str = "t") -> None:
        self.holder.on_event(TransferEvent(transfer_id, num_ready_blocks, num_tokens=num_tokens))

    def step(self) -> None:
        """What the core does every now and then."""
        self.leases.expire(time.monotonic())
        for ended in self.leases.take_ended():
            self.holder.on_event(TransferEvent(ended.transfer_id, 0, ended=ended.ended, reason=ended.reason))

    def actions(self, transfer_id: str = "t") -> list[str]:
        return [command.action for command in self.commands if command.transfer_id == transfer_id]

    def _send(self, command: LeaseCommand) -> None:
        self.commands.append(command)
        now = time.monotonic()
        match command.action:
            case "attach":
                self.leases.attach(command.transfer_id, lease_s=command.lease_s, now=now)
            case "renew":
                self.leases.renew(command.transfer_id, lease_s=command.lease_s, now=now)
            case "release":
                self.leases.release(command.transfer_id, now=now)
        asyncio.get_running_loop().call_soon(self.step)


class Reading:
    """An instance that reads: the client under test and what it told its core."""

    def __init__(self, stub: KvTransferServiceStub, **fields: object) -> None:
        reader = TransferReader(
            **{  # type: ignore[arg-type]
                "request_id": "r",
                "transfer_id": "t",
                "instance_epoch": EPOCH,
                "num_local_blocks": 0,
                "lease_s": LEASE_S,
                "attach_timeout_s": 2.0,
                **{name: value for name, value in fields.items() if name != "identity"},
            }
        )
        identity = fields.get("identity", IDENTITY)
        assert isinstance(identity, ModelIdentity)
        self.told: list[KVProgress] = []
        self.loaded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            follow_transfer(stub, reader, identity=identity, on_progress=self.told.append, loaded=self.loaded)
        )

    @property
    def failure(self) -> str | None:
        return self.told[-1].failed if self.told else None


async def until(condition: Callable[[], object], timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def holding(stack: AsyncExitStack) -> Holding:
    return Holding()


@pytest.fixture
async def stub(holding: Holding, stack: AsyncExitStack) -> KvTransferServiceStub:
    server = Server(ServerSettings())
    await server.register(SERVICE, holding.holder, POLICIES)
    port = await server.start()
    stack.push_async_callback(server.stop)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    return KvTransferServiceStub(channel)


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


async def test_identity_mismatch_names_the_field_and_both_values(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    fields = {**msgspec.structs.asdict(IDENTITY), "block_size": 32, "dtype": "bfloat16", "fingerprint": ""}
    reading = Reading(stub, identity=ModelIdentity(**fields))
    await reading.task
    assert (reading.failure or "").startswith("FAILED_PRECONDITION")
    assert "dtype: 'float32' here, 'bfloat16' at the reader" in (reading.failure or "")
    assert "block_size: '16' here, '32' at the reader" in (reading.failure or "")
    await until(lambda: len(holding.leases) == 0)


def open_message(**fields: object) -> pb.AttachOpen:
    defaults = {
        "transfer_id": "t",
        "instance_epoch": EPOCH,
        "identity": identity_to_proto(IDENTITY),
        "min_protocol_version": 1,
        "max_protocol_version": 1,
    }
    return pb.AttachOpen(**{**defaults, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"instance_epoch": "epoch-0"}, grpc.StatusCode.NOT_FOUND, "another process"),
        ({"min_protocol_version": 2, "max_protocol_version": 3}, grpc.StatusCode.FAILED_PRECONDITION, "2..3"),
        ({"min_protocol_version": 3, "max_protocol_version": 0}, grpc.StatusCode.FAILED_PRECONDITION, "1..1"),
        ({"transfer_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "transfer_id"),
        ({"transfer_id": "x" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "257"),
        ({"transfer_id": "unknown"}, grpc.StatusCode.NOT_FOUND, "unknown"),
    ],
)
async def test_wrong_opening_is_refused_with_its_reason(
    holding: Holding, stub: KvTransferServiceStub, fields: dict[str, object], code: grpc.StatusCode, text: str
) -> None:
    holding.offer()
    call = stub.Attach()
    await call.write(pb.AttachRequest(open=open_message(**fields)))
    with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
        await call.read()
    assert caught.value.code() is code
    assert "attach" not in holding.actions()


@pytest.mark.parametrize(
    "message",
    [
        pb.AttachRequest(renew=pb.AttachRenew(lease_s=float("nan"))),
        pb.AttachRequest(renew=pb.AttachRenew(lease_s=-1.0)),
        pb.AttachRequest(open=pb.AttachOpen()),
        pb.AttachRequest(),
    ],
)
async def test_wrong_word_after_the_opening_is_refused(
    holding: Holding, stub: KvTransferServiceStub, message: pb.AttachRequest
) -> None:
    holding.offer()
    call = stub.Attach()
    await call.write(pb.AttachRequest(open=open_message()))
    await call.read()
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


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


async def test_too_many_readers_are_refused(stack: AsyncExitStack) -> None:
    settings = HolderSettings(max_attached=1)
    holder = TransferHolder(identity=IDENTITY, instance_epoch=EPOCH, send=lambda command: None, settings=settings)
    server = Server(ServerSettings())
    await server.register(SERVICE, holder, POLICIES)
    port = await server.start()
    stack.push_async_callback(server.stop)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    stub = KvTransferServiceStub(channel)
    holder.on_event(TransferEvent("t", 0))
    first = stub.Attach()
    await first.write(pb.AttachRequest(open=open_message()))
    await first.read()
    second = stub.Attach()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
