"""Resizes the pools as the autoscaler or an operator decides; chooses which instances to remove; records the change.

    sizes ──all of them checked──▶ one pool after the other, one resize at a time ──▶ a Change for each
                                       └─ a later pool is refused: the earlier one gets its old size back

Instances that lose least are removed first: those that are not ready, then those with the fewest requests, then those
with the least KV. The removed instances drain, so no request is lost (docs/operations.md).

The `Actuator` is the seam to the owner of the instances: a `StackLink` for a local stack, and for a cluster a
KubernetesActuator (router/kubernetes/actuator.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import grpc
import grpc.aio

from protos.tandem.v1 import stack_pb2, stack_pb2_grpc
from router.autoscaler.settings import MAX_SIZE
from router.pools.discovery import StackDiscovery
from router.pools.instance import UpstreamInstance
from router.pools.instance_info import WIRE_ROLES, Role
from router.pools.pool import Pools
from serving.channel import open_channel
from serving.waits import is_cancelling

_log = logging.getLogger(__name__)

_MAX_RECENT = 32
_OWNER_TIMEOUT_S = 5.0
"""The owner checks its processes at least every tenth of a second; one that is silent for so long is stuck."""
_ENDS = "the router is about to end"

Cause = Literal["autoscaler", "operator"]


class ActuatorError(Exception):
    """The owner of the instances is unavailable or has refused; the message says which."""


class SizeRefused(ActuatorError):
    """A size that no pool of that role may have; the message names the allowed range."""


class Actuator(Protocol):
    """One per router. Every method may take seconds, and raises ActuatorError."""

    async def sizes(self) -> Mapping[Role, int]:
        """The desired size of each pool. A role that is absent cannot be resized."""

    async def resize(self, role: Role, size: int, victims: Sequence[str], *, previous_size: int) -> None:
        """Begins to start or to drain instances until the pool has `size`.

        `victims` are the addresses of the instances to remove first, in this order; their requests are not lost.
        `previous_size` is what the decision assumed: an owner with other clients refuses if the pool has another one.
        """

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` is the one router that scales, for `ttl_s` seconds from now on."""

    @property
    def pause(self) -> str | None:
        """Why an operator lets no pool be resized automatically, as of the last `take_lead`; None: they may be."""

    async def no_room(self, role: Role) -> str | None:
        """Why instances that are ordered cannot start, so that more orders would not help; None: not known."""


@dataclass(frozen=True, slots=True)
class Change:
    """A resize of one pool that has begun."""

    role: Role
    previous_size: int
    size: int
    cause: Cause
    reason: str
    """Empty: an operator's, of which none is known."""
    at_s: float
    """time.monotonic() of this process."""


class Resizer:
    """One per router, on its event loop. Every resize goes through it."""

    def __init__(self, actuator: Actuator, pools: Pools, *, needs_prefill: bool = False) -> None:
        """`needs_prefill`: without prefill instances no request is served; else the decode instances prefill then."""
        self.actuator = actuator
        self._pools = pools
        self._min_sizes: Mapping[Role, int] = {"prefill": int(needs_prefill), "decode": 1}
        self.recent: deque[Change] = deque(maxlen=_MAX_RECENT)
        """The last resizes by this router."""
        self.last_changes: dict[Role, Change] = {}
        """The last one of each pool."""
        self._one_at_a_time = asyncio.Lock()

    async def resize(
        self, sizes: Mapping[Role, int], *, cause: Cause, reason: str, expected: Mapping[Role, int] | None = None
    ) -> list[Change]:
        """Begins to give each pool its size; one Change for each, in the order of `sizes`.

        All begin or none does; only if the owner fails for the way back too, a pool keeps its size, which is recorded
        and part of the error. A pool that has its size already is left alone, and its Change is not recorded.
        `expected` are the sizes that the decision assumed: a pool that has another one meanwhile keeps it.
        Raises SizeRefused before anything has begun, else ActuatorError.
        """
        for role, size in sizes.items():
            self._check_size(role, size)
        async with self._one_at_a_time:
            before = await self.actuator.sizes()
            if unknown := [role for role in sizes if role not in before]:
                raise ActuatorError(f"the {' and the '.join(unknown)} pool cannot be resized: it has no owner")
            for role, size in (expected or {}).items():
                if before[role] != size:
                    raise ActuatorError(f"the {role} pool has been resized to {before[role]} meanwhile, from {size}")
            changes = [
                Change(role, before[role], size, cause, reason, time.monotonic()) for role, size in sizes.items()
            ]
            await self._apply([change for change in changes if change.size != change.previous_size])
        return changes

    def _check_size(self, role: Role, size: int) -> None:
        least = self._min_sizes[role]
        if not least <= size <= MAX_SIZE:
            why = " with disaggregation 'always'" if role == "prefill" and least else ""
            raise SizeRefused(f"{role} must be between {least} and {MAX_SIZE}{why}, is {size}")

    async def _apply(self, changes: list[Change]) -> None:
        begun: list[Change] = []
        try:
            for change in changes:
                num_removed = max(change.previous_size - change.size, 0)
                victims = least_loaded(self._pools.by_role[change.role].processes, num_removed)
                await self.actuator.resize(change.role, change.size, victims, previous_size=change.previous_size)
                begun.append(change)
        except ActuatorError as refusal:
            for change in begun:
                try:
                    await self.actuator.resize(change.role, change.previous_size, (), previous_size=change.size)
                except ActuatorError as error:
                    self._record(change)
                    way_back = f"from {change.size} back to {change.previous_size}"
                    problem = f"{refusal}; the {change.role} pool could not be resized {way_back}: {error}"
                    raise ActuatorError(problem) from refusal
            raise
        for change in changes:
            self._record(change)

    def _record(self, change: Change) -> None:
        self.last_changes[change.role] = change
        self.recent.append(change)
        _log.info(
            "%s pool: %d → %d instances, by the %s%s",
            change.role,
            change.previous_size,
            change.size,
            change.cause,
            f": {change.reason}" if change.reason else "",
        )


def least_loaded(instances: tuple[UpstreamInstance, ...], count: int) -> list[str]:
    """Addresses of at most `count` instances to remove, the least loaded first, without those that are leaving already.
    Among equals it is the last one by name."""
    staying = [instance for instance in instances if instance.state != "leaving"]
    staying.sort(key=lambda one: (one.info.instance_id if one.info else "", one.address), reverse=True)
    return [instance.address for instance in sorted(staying, key=_loss)[:count]]


def _loss(instance: UpstreamInstance) -> tuple[bool, int, int]:
    """What removing it loses, comparable: readiness, requests, blocks of KV."""
    view = instance.view()
    if view is None:
        return (False, 0, 0)
    return (view.out is None, view.num_requests, max(view.info.num_blocks - view.load.free_blocks, 0))


class StackLink:
    """The router's connection to the owner of a local stack: its Actuator, and the discovery of its instances."""

    pause: str | None = None
    """Processes of one machine are paused by `autoscaler.enabled`."""

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
        with _owners_errors():
            call = self._stub.WatchStack(stack_pb2.WatchStackRequest(), timeout=_OWNER_TIMEOUT_S)
            try:
                answer = await call.read()
            finally:
                call.cancel()
        if not isinstance(answer, stack_pb2.WatchStackResponse):
            raise ActuatorError("the owner of the local stack is about to end")
        desired = {pool.role: pool.size for pool in answer.pools}
        return {role: desired[value] for role, value in WIRE_ROLES.items() if value in desired}

    async def resize(self, role: Role, size: int, victims: Sequence[str], *, previous_size: int) -> None:
        """Returns when the owner has begun."""
        request = stack_pb2.ResizePoolRequest(
            role=WIRE_ROLES[role], size=size, victims=victims, previous_size=previous_size
        )
        with _owners_errors():
            await self._stub.ResizePool(request, timeout=_OWNER_TIMEOUT_S)

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` leads for `ttl_s` from now on, by the owner's clock."""
        request = stack_pb2.TakeLeadRequest(holder=holder, ttl_s=ttl_s)
        with _owners_errors():
            answer = await self._stub.TakeLead(request, timeout=_OWNER_TIMEOUT_S)
        return answer.granted

    async def no_room(self, role: Role) -> str | None:
        return None


@contextmanager
def _owners_errors() -> Iterator[None]:
    """A refusal becomes an ActuatorError with the owner's message, and so does a channel that is closed, before or
    meanwhile: grpc cancels its calls, not the task that waits for them."""
    try:
        yield
    except asyncio.CancelledError:
        if is_cancelling():
            raise
        raise ActuatorError(_ENDS) from None
    except grpc.aio.UsageError:
        raise ActuatorError(_ENDS) from None
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise ActuatorError(f"the owner of the local stack does not answer ({error.code().name})") from error
        raise ActuatorError(error.details() or error.code().name) from error
