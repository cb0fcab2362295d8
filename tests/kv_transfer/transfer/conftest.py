"""A transfer server behind a real gRPC server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from kv_transfer.transfer import client
from kv_transfer.transfer.server import POLICIES, SERVICE
from protos.tandem.v1.kv_transfer_pb2_grpc import KvTransferServiceStub
from serving.server import Server, ServerSettings
from tests.kv_transfer.transfer.endpoints import NEVER_S, SETTINGS, ServerEndpoint


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def server_end(stack: AsyncExitStack, request: pytest.FixtureRequest) -> ServerEndpoint:
    """Its parameter, if a test gives one, is the settings that differ from those with which nothing expires."""
    return ServerEndpoint(replace(SETTINGS, **getattr(request, "param", {})))


@pytest.fixture
async def stub(
    server_end: ServerEndpoint, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> KvTransferServiceStub:
    monkeypatch.setattr(client, "_RELEASE_S", NEVER_S)  # or a release that is held up is sent a second time
    server = Server(ServerSettings())
    await server.register(SERVICE, server_end.server, POLICIES)
    port = await server.start()
    stack.push_async_callback(server.stop)
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    return KvTransferServiceStub(channel)
