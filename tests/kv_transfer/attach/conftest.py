"""A holder behind a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from kv_transfer.holder import POLICIES, SERVICE
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.server import Server
from serving.server_settings import ServerSettings
from tests.kv_transfer.attach.ends import Holding


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
