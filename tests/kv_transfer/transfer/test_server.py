"""Readers that the transfer server rejects, and with which errors."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc
import grpc.aio
import msgspec
import pytest

from engine.core.messages import TransferEvent
from engine.identity import ModelIdentity
from kv_transfer.transfer.server import POLICIES, SERVICE, TransferServer, TransferServerSettings
from protos.tandem.v1 import kv_transfer_pb2 as pb
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.server import Server, ServerSettings
from tests.kv_transfer.transfer.endpoints import EPOCH, IDENTITY, ClientEndpoint, ServerEndpoint, open_message
from tests.waiting import until


async def test_identity_mismatch_names_the_field_and_both_values(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    server_end.offer()
    fields = {**msgspec.structs.asdict(IDENTITY), "block_size": 32, "dtype": "bfloat16", "fingerprint": ""}
    client = ClientEndpoint(stub, identity=ModelIdentity(**fields))
    await client.task
    assert (client.failure or "").startswith("FAILED_PRECONDITION")
    assert "dtype: 'float32' here, 'bfloat16' at the reader" in (client.failure or "")
    assert "block_size: '16' here, '32' at the reader" in (client.failure or "")
    await until(lambda: len(server_end.leases) == 0)


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"instance_epoch": "epoch-0"}, grpc.StatusCode.NOT_FOUND, "another process"),
        ({"min_protocol_version": 2, "max_protocol_version": 3}, grpc.StatusCode.FAILED_PRECONDITION, "2..3"),
        ({"min_protocol_version": 3, "max_protocol_version": 0}, grpc.StatusCode.FAILED_PRECONDITION, "1..1"),
        ({"transfer_id": ""}, grpc.StatusCode.INVALID_ARGUMENT, "transfer_id"),
        ({"transfer_id": "x" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "257"),
    ],
)
async def test_wrong_open_is_rejected_with_its_reason(
    server_end: ServerEndpoint, stub: KvTransferServiceStub, fields: dict[str, object], code: grpc.StatusCode, text: str
) -> None:
    await assert_rejected(server_end, stub, open_message(**fields), code, text)


@pytest.mark.parametrize("server_end", [{"attach_wait_s": 1.5}], indirect=True)
async def test_unknown_transfer_is_rejected_by_its_name(
    server_end: ServerEndpoint, stub: KvTransferServiceStub
) -> None:
    opening = open_message(transfer_id="unknown")
    await assert_rejected(server_end, stub, opening, grpc.StatusCode.NOT_FOUND, "unknown")


async def assert_rejected(
    server_end: ServerEndpoint,
    stub: KvTransferServiceStub,
    opening: pb.AttachOpen,
    code: grpc.StatusCode,
    text: str,
) -> None:
    server_end.offer()
    call = stub.Attach()
    await call.write(pb.AttachRequest(open=opening))
    with pytest.raises(grpc.aio.AioRpcError, match=text) as caught:
        await call.read()
    assert caught.value.code() is code
    assert "attach" not in server_end.actions()


@pytest.mark.parametrize(
    "message",
    [
        pb.AttachRequest(renew=pb.AttachRenew(lease_s=float("nan"))),
        pb.AttachRequest(renew=pb.AttachRenew(lease_s=-1.0)),
        pb.AttachRequest(open=pb.AttachOpen()),
        pb.AttachRequest(),
    ],
)
async def test_wrong_message_after_open_is_rejected(
    server_end: ServerEndpoint, stub: KvTransferServiceStub, message: pb.AttachRequest
) -> None:
    server_end.offer()
    call = stub.Attach()
    await call.write(pb.AttachRequest(open=open_message()))
    await call.read()
    await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_too_many_readers_are_rejected(stack: AsyncExitStack) -> None:
    settings = TransferServerSettings(max_attached=1)
    transfer_server = TransferServer(
        identity=IDENTITY, instance_epoch=EPOCH, send_command=lambda command: None, settings=settings
    )
    server = Server(ServerSettings())
    await server.register(SERVICE, transfer_server, POLICIES)
    port = await server.start()
    stack.push_async_callback(server.stop)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    stub = KvTransferServiceStub(channel)
    transfer_server.on_event(TransferEvent("t", 0))
    first = stub.Attach()
    await first.write(pb.AttachRequest(open=open_message()))
    await first.read()
    second = stub.Attach()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await second.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    first.cancel()
