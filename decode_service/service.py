"""The gRPC servicer of the decode role: converts, and hands on to the role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from decode_service.metrics import Metrics
from decode_service.role import DecodeRole
from instance.convert import Limits, decode_choice
from instance.front import Parts, Role, RoleService
from protos.tandem.v1 import decode_pb2, instance_pb2
from serving.calls import Context
from serving.errors import invalid_argument
from serving.logging import set_request_id

SERVICE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"]


class DecodeServicer:
    """Stateless; `serving` calls it, one generator a call."""

    def __init__(self, role: DecodeRole, limits: Limits) -> None:
        self._role = role
        self._limits = limits

    async def Decode(
        self, request: AsyncIterator[decode_pb2.DecodeRequest], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        first = await anext(request, None)
        if first is None or first.WhichOneof("message") != "start":
            raise invalid_argument("start", "is missing", "start as the first message")
        choice, source = decode_choice(first.start, self._limits)
        set_request_id(choice.request_id)
        async with aclosing(self._role.run(choice, source, request)) as responses:
            async for response in responses:
                yield response


def make(parts: Parts) -> RoleService:
    """The role around an engine."""
    metrics = Metrics()
    role = DecodeRole(parts.choices, metrics, parts.instance_epoch, parts.followers)
    return RoleService(SERVICE, DecodeServicer(role, parts.choices.limits), metrics)


ROLE = Role("decode", instance_pb2.ROLE_DECODE, make)
