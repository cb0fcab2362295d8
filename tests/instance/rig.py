"""One instance's server on a free port, with a scripted core and a channel to it, and a Decode call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from instance.server import InstanceServer, Role
from instance.settings import InstanceSettings, ListenSettings, ModelSection, TransferSection
from protos.tandem.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    instance_pb2_grpc,
    kv_transfer_pb2_grpc,
    prefill_pb2_grpc,
)
from serving.channel import open_channel
from serving.lifecycle import StopSignals
from tests.channels import PATIENT
from tests.instance.scripted_core import ScriptedCore
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder


class Rig:
    """The running server and the stubs of its services."""

    def __init__(
        self, server: InstanceServer, core: ScriptedCore, signals: StopSignals, channel: grpc.aio.Channel
    ) -> None:
        self.server, self.core, self.signals, self.channel = server, core, signals, channel
        self.instance = instance_pb2_grpc.InstanceServiceStub(channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(channel)
        self.transfer = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)


def model_folder(folder: Path) -> Path:
    """A folder with a tokenizer and no weights: enough with a scripted core."""
    folder.mkdir(exist_ok=True)
    return write_folder(folder, byte_level_backend(), BYTE_LEVEL_CONFIG)


def settings_of(folder: Path, **sections: Any) -> InstanceSettings:
    server = {"drain_accept_s": 0.0, "drain_grace_s": 2.0} | sections.pop("server", {})
    transfer = {"connector": "null"} | sections.pop("transfer", {})
    return InstanceSettings(
        model=ModelSection(folder=folder, name="demo"),
        server=ListenSettings(**server),
        transfer=TransferSection(**transfer),
        **sections,
    )


@asynccontextmanager
async def running(folder: Path, role: Role, **sections: Any) -> AsyncIterator[Rig]:
    """A server with a scripted core; stopped with the block, whatever the test has done to it."""
    core, signals = ScriptedCore(), StopSignals()
    server = await InstanceServer.start(settings_of(folder, **sections), role, signals, engine=core.engine())
    try:
        async with open_channel(server.address, PATIENT) as channel:
            yield Rig(server, core, signals, channel)
    finally:
        await server.stop()


def instance_request(request_id: str = "r1", **fields: Any) -> common_pb2.InstanceRequest:
    """A small valid request: ten prompt ids, greedy."""
    sampling = {"temperature": 0.0, "seed": 7, "max_tokens": 32} | fields.pop("sampling", {})
    fields = {"prompt_token_ids": list(range(10, 20))} | fields
    return common_pb2.InstanceRequest(request_id=request_id, sampling=common_pb2.SamplingParams(**sampling), **fields)


async def read_all(call: Any) -> list[Any]:
    """Every answer of a call that is not read yet."""
    responses = []
    async with asyncio.timeout(20):
        while (response := await call.read()) is not grpc.aio.EOF:
            responses.append(response)
    return responses


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The error that a call is answered with; fails the test if there is none."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call)
    return caught.value


class Decoding:
    """One Decode call, message by message."""

    def __init__(self, rig: Rig) -> None:
        self.call = rig.decode.Decode()

    async def start(self, prefill: Rig | None = None, *, address: str | None = None, **fields: Any) -> None:
        message = decode_pb2.DecodeStart(request=instance_request(**fields))
        if prefill is not None:
            source = decode_pb2.TransferSource(
                transfer_id="t1",
                address=address or prefill.server.address,
                instance_epoch=prefill.server.instance_epoch,
                reservation_s=5.0,
            )
            message.transfer.CopyFrom(source)
        await self.call.write(decode_pb2.DecodeRequest(start=message))

    async def seed(self, *ids: int) -> None:
        await self.call.write(decode_pb2.DecodeRequest(seed=decode_pb2.DecodeSeed(token_ids=ids)))

    async def next(self) -> decode_pb2.DecodeResponse:
        async with asyncio.timeout(20):
            response = await self.call.read()
        assert isinstance(response, decode_pb2.DecodeResponse), await self.call.code()
        return response

    async def rest(self) -> list[decode_pb2.DecodeResponse]:
        return await read_all(self.call)
