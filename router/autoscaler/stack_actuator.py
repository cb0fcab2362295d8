"""Resizes the pools of a local stack: asks the owner of its processes, which is `tandem up`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import grpc
import grpc.aio

from protos.tandem.v1 import instance_pb2, stack_pb2, stack_pb2_grpc
from router.autoscaler.actuator import ActuatorError
from router.pools.instances import Role

_TIMEOUT_S = 5.0
"""The owner looks after its processes at least every tenth of a second; one that is silent for so long is stuck."""
_ROLES: dict[Role, instance_pb2.Role.ValueType] = {
    "prefill": instance_pb2.ROLE_PREFILL,
    "decode": instance_pb2.ROLE_DECODE,
}


class StackActuator:
    """An Actuator over a channel to the stack's socket, which somebody else closes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = stack_pb2_grpc.StackServiceStub(channel)

    async def sizes(self) -> Mapping[Role, int]:
        """What the owner's first word about its pools says. Raises ActuatorError."""
        call = self._stub.WatchStack(stack_pb2.WatchStackRequest(), timeout=_TIMEOUT_S)
        try:
            told = await call.read()
        except grpc.aio.AioRpcError as error:
            raise _refused(error) from error
        finally:
            call.cancel()
        if not isinstance(told, stack_pb2.WatchStackResponse):
            raise ActuatorError("the owner of the local stack is about to end")
        wanted = {pool.role: pool.size for pool in told.pools}
        return {role: wanted[value] for role, value in _ROLES.items() if value in wanted}

    async def resize(self, role: Role, size: int, victims: Sequence[str]) -> None:
        """Returns when the owner has begun. Raises ActuatorError with its words if it refuses."""
        request = stack_pb2.ResizePoolRequest(role=_ROLES[role], size=size, victims=victims)
        try:
            await self._stub.ResizePool(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _refused(error) from error

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` leads for `ttl_s` from now on, by the owner's clock. Raises ActuatorError."""
        request = stack_pb2.TakeLeadRequest(holder=holder, ttl_s=ttl_s)
        try:
            answer = await self._stub.TakeLead(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _refused(error) from error
        return answer.granted


def _refused(error: grpc.aio.AioRpcError) -> ActuatorError:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return ActuatorError(f"the owner of the local stack does not answer ({error.code().name})")
    return ActuatorError(error.details() or error.code().name)
