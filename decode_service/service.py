"""The gRPC servicer of the decode role: converts, and hands on to the role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from decode_service.metrics import Metrics
from decode_service.role import DecodeRole
from instance.convert import Limits, decode_choice
from instance.front import Parts, Role, RoleService
from instance.token_streams import TokenStreams
from protos.tandem.v1 import decode_pb2, instance_pb2
from serving.calls import Context
from serving.errors import invalid_argument
from serving.logging import set_request_id
from serving.open_calls import CONTROL
from serving.writer import Writer

SERVICE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]
POLICIES = {"StreamTokens": CONTROL}
MAX_STREAM_ID_CHARS = 128


class DecodeServicer:
    """Its calls share the token streams; `serving` calls it, one task a call."""

    def __init__(self, role: DecodeRole, limits: Limits) -> None:
        self._role = role
        self._limits = limits
        self._token_streams = TokenStreams()

    async def Decode(
        self,
        request: AsyncIterator[decode_pb2.DecodeRequest],
        context: Context,
        writer: Writer[decode_pb2.DecodeResponse],
    ) -> None:
        first = await anext(request, None)
        if first is None or first.WhichOneof("message") != "start":
            raise invalid_argument("start", "is missing", "start as the first message")
        choice, source = decode_choice(first.start, self._limits)
        set_request_id(choice.request_id)
        async with (
            self._token_streams.way_of(first.start, writer.write) as answer,
            aclosing(self._role.run(choice, source, request)) as responses,
        ):
            async for response in responses:
                await answer(response)

    async def StreamTokens(
        self,
        request: decode_pb2.StreamTokensRequest,
        context: Context,
        writer: Writer[decode_pb2.StreamTokensResponse],
    ) -> None:
        if not 0 < len(request.stream_id) <= MAX_STREAM_ID_CHARS:
            raise invalid_argument("stream_id", "is missing or too long", f"1 to {MAX_STREAM_ID_CHARS} characters")
        await self._token_streams.run(request.stream_id, writer.write)


def make(parts: Parts) -> RoleService:
    """The role around an engine."""
    metrics = Metrics()
    role = DecodeRole(parts.choices, metrics, parts.instance_epoch, parts.followers)
    return RoleService(SERVICE, DecodeServicer(role, parts.choices.limits), metrics, POLICIES)


ROLE = Role("decode", instance_pb2.ROLE_DECODE, make)
