"""Changes the size of a pool: the seam between the decision and the owner of the instances, and the local stack's side.

A KubernetesActuator (router/kubernetes/actuator.py) does the same for a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import stack_pb2, stack_pb2_grpc
from router.pools.discovery import StackDiscovery
from router.pools.instance_info import WIRE_ROLES, Role
from serving.channel import open_channel

_TIMEOUT_S = 5.0
"""The owner checks its processes at least every tenth of a second; one that is silent for so long is stuck."""


class ActuatorError(Exception):
    """The owner of the instances is unavailable or has refused; the message says which."""


class Actuator(Protocol):
    """One per router. Every method may take seconds, and raises ActuatorError."""

    async def sizes(self) -> Mapping[Role, int]:
        """The desired size of each pool. A role that is absent cannot be resized."""
        ...

    async def resize(self, role: Role, size: int, victims: Sequence[str]) -> None:
        """Begins to start or to drain instances until the pool has `size`.

        `victims` are the addresses of the instances to remove first, in this order; their requests are not lost.
        """
        ...

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` is the one router that scales, for `ttl_s` seconds from now on."""
        ...

    @property
    def pause(self) -> str | None:
        """Why an operator lets no pool be resized automatically, as of the last `take_lead`; None: they may be."""
        ...

    async def no_room(self, role: Role) -> str | None:
        """Why instances that are ordered cannot start, so that more orders would not help; None: not known."""
        ...


class StackLink:
    """The router's connection to the owner of a local stack: its Actuator, and the discovery of its instances."""

    pause: str | None = None
    """Processes of one machine are paused by `autoscaler.enabled`, and always have room."""

    def __init__(self, address: str) -> None:
        """`address` is unix:/PATH of the stack's socket, which need not exist yet. Made on the event loop."""
        self._channel = open_channel(address)
        self._stub = stack_pb2_grpc.StackServiceStub(self._channel)

    def discovery(self, role: Role) -> StackDiscovery:
        return StackDiscovery(self._channel, role)

    async def close(self) -> None:
        """Cancels the calls that are open."""
        await self._channel.close()

    async def sizes(self) -> Mapping[Role, int]:
        """From the first message of the owner's watch."""
        call = self._stub.WatchStack(stack_pb2.WatchStackRequest(), timeout=_TIMEOUT_S)
        try:
            with _owners_errors():
                answer = await call.read()
        finally:
            call.cancel()
        if not isinstance(answer, stack_pb2.WatchStackResponse):
            raise ActuatorError("the owner of the local stack is about to end")
        desired = {pool.role: pool.size for pool in answer.pools}
        return {role: desired[value] for role, value in WIRE_ROLES.items() if value in desired}

    async def resize(self, role: Role, size: int, victims: Sequence[str]) -> None:
        """Returns when the owner has begun."""
        request = stack_pb2.ResizePoolRequest(role=WIRE_ROLES[role], size=size, victims=victims)
        with _owners_errors():
            await self._stub.ResizePool(request, timeout=_TIMEOUT_S)

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` leads for `ttl_s` from now on, by the owner's clock."""
        request = stack_pb2.TakeLeadRequest(holder=holder, ttl_s=ttl_s)
        with _owners_errors():
            answer = await self._stub.TakeLead(request, timeout=_TIMEOUT_S)
        return answer.granted

    async def no_room(self, role: Role) -> str | None:
        return None


@contextmanager
def _owners_errors() -> Iterator[None]:
    """A refusal becomes an ActuatorError with the owner's message, and so does a channel that is closed meanwhile:
    grpc cancels its calls, not the task that waits for them."""
    try:
        yield
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        raise ActuatorError("the router is about to end") from None
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise ActuatorError(f"the owner of the local stack does not answer ({error.code().name})") from error
        raise ActuatorError(error.details() or error.code().name) from error
