"""A connection that is old takes no new call, so that clients dial again; what runs on it is never cut off."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2 as pb
from serving.calls import Context
from serving.server_settings import ServerSettings, server_options
from tests.serving.conftest import Rigs, Scripted

AGE_S = 0.3


class Named(Scripted):
    """Remembers by which connection each Abort came."""

    def __init__(self) -> None:
        super().__init__()
        self.peers: list[str] = []

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self.peers.append(context.peer())
        return await super().Abort(request, context)


async def test_a_stream_survives_its_connections_age_and_new_calls_dial_again(rigs: Rigs) -> None:
    servicer = Named()
    rig = await rigs.start(servicer, max_connection_age_s=AGE_S)
    running = await rig.waiting_call()
    async with asyncio.timeout(20):
        while len(set(servicer.peers)) < 3:  # the stream's own connection, and two more
            await rig.stub.Abort(pb.AbortRequest())
            await asyncio.sleep(0.01)
    assert servicer.num_running == 1
    servicer.go.set()
    assert (await running.read()).model == "went on"
    assert await running.read() is grpc.aio.EOF
    assert await running.code() is grpc.StatusCode.OK


async def test_a_grace_ends_what_runs_on(rigs: Rigs) -> None:
    rig = await rigs.start(max_connection_age_s=AGE_S, max_connection_age_grace_s=AGE_S)
    running = await rig.waiting_call()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(20):
            await running.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_connections_do_not_age_unless_asked(rigs: Rigs) -> None:
    options = dict(server_options(ServerSettings()))
    assert not [name for name in options if "max_connection_age" in name]
    options = dict(server_options(ServerSettings(max_connection_age_s=1.5, max_connection_age_grace_s=0.0001)))
    assert options["grpc.max_connection_age_ms"] == 1500
    assert options["grpc.max_connection_age_grace_ms"] == 1
