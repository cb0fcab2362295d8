"""The gRPC servicer of the prefill role: converts, and hands on to the role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from instance.convert import Limits, prefill_choice
from instance.front import Parts, Role, RoleService
from prefill_service.metrics import Metrics
from prefill_service.role import PrefillRole
from protos.tandem.v1 import instance_pb2, prefill_pb2
from serving.calls import Context
from serving.logging import set_request_id

SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"]


class PrefillServicer:
    """Stateless; `serving` calls it, one generator a call."""

    def __init__(self, role: PrefillRole, limits: Limits) -> None:
        self._role = role
        self._limits = limits

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        choice = prefill_choice(request, self._limits)
        set_request_id(choice.request_id)
        async with aclosing(self._role.run(choice)) as responses:
            async for response in responses:
                yield response


def make(parts: Parts) -> RoleService:
    """The role around an engine."""
    metrics = Metrics()
    role = PrefillRole(parts.choices, metrics, parts.instance_epoch)
    return RoleService(SERVICE, PrefillServicer(role, parts.choices.limits), metrics)


ROLE = Role("prefill", instance_pb2.ROLE_PREFILL, make)
