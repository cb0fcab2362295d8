"""A real server on a free port with a servicer that does what the request's text says, and channels to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2 as pb
from protos.tandem.v1.generation_pb2_grpc import GenerationServiceStub
from serving.channel import open_channel
from serving.errors import Overloaded, invalid_argument
from serving.interceptor import Context, remaining_s
from serving.limits import CONTROL
from serving.server import HealthSettings, Server, ServerSettings
from tests.channels import PATIENT
from tests.grpc_calls import next_message

SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


class Scripted:
    """A GenerationService whose Generate follows `request.text`."""

    def __init__(self) -> None:
        self.num_running = 0
        self.num_sent = 0
        self.go = asyncio.Event()
        self.limits_s: list[float | None] = []

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self.num_running += 1
        self.limits_s.append(remaining_s())
        try:
            match request.text:
                case "wait":
                    yield pb.GenerateResponse(model="started")
                    await self.go.wait()
                    yield pb.GenerateResponse(model="went on")
                case "flood":
                    while True:
                        yield pb.GenerateResponse(model="x" * 65536)
                        self.num_sent += 1
                case "broken":
                    raise RuntimeError("/secret/path is missing")
                case "cancelled inside":
                    raise asyncio.CancelledError
                case "full":
                    raise Overloaded("no room for the prompt", 1.5)
                case "quota":
                    raise Overloaded("the quota is used up", None)
                case "invalid":
                    raise invalid_argument("sampling.temperature", "nan is not finite", "0..2")
                case "wrong answer":
                    yield cast(Any, pb.AbortResponse())
                case _:
                    for _ in range(3):
                        yield pb.GenerateResponse(model="token")
        finally:
            self.num_running -= 1

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        return pb.AbortResponse(num_aborted=len(request.request_ids))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        await self.go.wait()
        return pb.GetModelInfoResponse(model="model")


class Rig:
    """One running server, its servicer and a stub."""

    def __init__(self, server: Server, servicer: Scripted, channel: grpc.aio.Channel) -> None:
        self.server, self.servicer, self.channel = server, servicer, channel
        self.stub = GenerationServiceStub(channel)

    async def generate(self, text: str, **call: Any) -> list[str]:
        return [response.model async for response in self.stub.Generate(pb.GenerateRequest(text=text), **call)]

    async def refusal(self, text: str, **call: Any) -> grpc.aio.AioRpcError:
        """The error that the server answers with; fails the test if it does not."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(text, **call)
        return caught.value

    async def waiting_call(self) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """A call that has its first message and waits for `go`."""
        call = self.stub.Generate(pb.GenerateRequest(text="wait"))
        assert (await next_message(call)).model == "started"
        return call


class Rigs:
    """Makes rigs and ends what they leave."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(
        self, servicer: Scripted | None = None, *, probes: HealthSettings | None = None, **settings: Any
    ) -> Rig:
        server = Server(ServerSettings(**{"drain_accept_s": 0.0, "drain_grace_s": 5.0} | settings), probes=probes)
        servicer = servicer or Scripted()
        await server.register(SERVICE, servicer, {"Abort": CONTROL})
        await server.start()
        self._stack.push_async_callback(server.stop)
        channel = await self.channel(server)
        return Rig(server, servicer, channel)

    async def channel(self, server: Server) -> grpc.aio.Channel:
        return await self._stack.enter_async_context(open_channel(server.address, PATIENT))


@pytest.fixture
async def rigs() -> AsyncIterator[Rigs]:
    async with AsyncExitStack() as stack:
        yield Rigs(stack)


def trailers_of(error: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    return {key: value for key, value in error.trailing_metadata() or ()}  # noqa: C416 - dict() misreads Metadata
