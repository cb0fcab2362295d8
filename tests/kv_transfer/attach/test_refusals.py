"""Whom a holder refuses, and with which words."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc
import grpc.aio
import msgspec
import pytest

from engine.identity import ModelIdentity
from engine.messages import TransferEvent
from kv_transfer.holder import POLICIES, SERVICE, HolderSettings, TransferHolder
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.server import Server
from serving.server_settings import ServerSettings
from tests.kv_transfer.attach.ends import EPOCH, IDENTITY, Holding, Reading, open_message
from tests.waiting import until


async def test_identity_mismatch_names_the_field_and_both_values(holding: Holding, stub: KvTransferServiceStub) -> None:
    holding.offer()
    fields = {**msgspec.structs.asdict(IDENTITY), "block_size": 32, "dtype": "bfloat16", "fingerprint": ""}
    reading = Reading(stub, identity=ModelIdentity(**fields))
    await reading.task
    assert (reading.failure or "").startswith("FAILED_PRECONDITION")
    assert "dtype: 'float32' here, 'bfloat16' at the reader" in (reading.failure or "")
    assert "block_size: '16' here, '32' at the reader" in (reading.failure or "")
    await until(lambda: len(holding.leases) == 0)


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
