"""The minimal relay of token streams on grpc.aio, the baseline of the router's cost.

Generated stubs, one call in and one call out, every message forwarded unchanged. Nothing is checked, counted,
bounded, traced or retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from protos.tandem.v1 import generation_pb2, generation_pb2_grpc


class BareRelay(generation_pb2_grpc.GenerationServiceServicer):
    """The servicer: a generator over a call."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for response in self._stub.Generate(request):
            yield response


def run(ready: Connection, source: str) -> None:
    """The process: sends its address through `ready` and relays the streams of `source` until it is killed."""
    asyncio.run(_serve(ready, source))


async def _serve(ready: Connection, source: str) -> None:
    async with grpc.aio.insecure_channel(source) as channel:
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(BareRelay(channel), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.send(f"127.0.0.1:{port}")
        await server.wait_for_termination()
