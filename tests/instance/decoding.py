"""One Decode call, message by message."""

from __future__ import annotations

import asyncio
from typing import Any

from protos.tandem.v1 import decode_pb2
from tests.instance.rig import Rig, instance_request, read_all


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
