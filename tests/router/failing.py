"""Builders of failing pools, the status that a client gets then, and a client that does not read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2, generation_pb2_grpc
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.rig import Rig, request_of


def decodes(*behaviours: Behaviour) -> list[FakeInstance]:
    """One decode instance for each."""
    return [FakeInstance("decode", f"decode-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


def prefills(*behaviours: Behaviour) -> list[FakeInstance]:
    """One prefill instance for each."""
    return [FakeInstance("prefill", f"prefill-{i}", behaviour=behaviour) for i, behaviour in enumerate(behaviours)]


def busy(**fields: object) -> Behaviour:
    """An instance that is only taken when the other has failed."""
    return Behaviour(num_running=9, **fields)  # type: ignore[arg-type]


async def status_of(rig: Rig, **fields: Any) -> grpc.aio.AioRpcError:
    """The error that a request ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.generate(**fields)
    return raised.value


@asynccontextmanager
async def deaf_client(
    rig: Rig, request: generation_pb2.GenerateRequest | None = None
) -> AsyncIterator[grpc.aio.UnaryStreamCall[Any, Any]]:
    """A call whose client does not read, by default of more tokens than the connection's windows let through."""
    windows = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(rig.app.address, options=windows) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        yield stub.Generate(request or request_of(request_id="deaf", max_tokens=3900))
