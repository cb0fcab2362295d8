"""Resizes the pools as the autoscaler or an operator decides; chooses which instances to remove; records the change.

    sizes ──all of them checked──▶ one pool after the other, one resize at a time ──▶ a Change for each
                                       └─ a later pool is refused: the earlier ones get their old sizes back

Instances that lose least are removed first: those that are not ready, then those with the fewest requests, then those
with the least KV. The removed instances drain, so no request is lost (docs/operations.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from router.autoscaler.actuator import Actuator, ActuatorError
from router.pools.instance import UpstreamInstance
from router.pools.instance_info import Role
from router.pools.pool import Pools

_log = logging.getLogger(__name__)

MIN_SIZES: Mapping[Role, int] = {"prefill": 0, "decode": 1}
"""Without prefill instances the decode instances prefill; without decode instances no request is served."""
MAX_SIZE = 64
_MAX_RECENT = 32

Cause = Literal["autoscaler", "operator"]


class SizeRefused(ActuatorError):
    """A size that no pool of that role may have; the message names the allowed range."""


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

    def __init__(self, actuator: Actuator, pools: Pools) -> None:
        self._actuator = actuator
        self._pools = pools
        self.recent: deque[Change] = deque(maxlen=_MAX_RECENT)
        """The last resizes by this router."""
        self.last_changes: dict[Role, Change] = {}
        """The last one of each pool."""
        self._one_at_a_time = asyncio.Lock()

    async def sizes(self) -> Mapping[Role, int]:
        """The desired size of each pool. Raises ActuatorError."""
        return await self._actuator.sizes()

    async def resize(
        self, sizes: Mapping[Role, int], *, cause: Cause, reason: str, expected: Mapping[Role, int] | None = None
    ) -> list[Change]:
        """Begins to give each pool its size; one Change for each, in the order of `sizes`.

        All begin or none does. A pool that has its size already is left alone, and its Change is not recorded.
        `expected` are the sizes that the decision assumed: a pool that has another one meanwhile keeps it.
        Raises SizeRefused before anything has begun, else ActuatorError.
        """
        for role, size in sizes.items():
            check_size(role, size)
        async with self._one_at_a_time:
            before = await self._actuator.sizes()
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

    async def _apply(self, changes: list[Change]) -> None:
        begun: list[Change] = []
        try:
            for change in changes:
                num_removed = max(change.previous_size - change.size, 0)
                victims = least_loaded(self._pools.by_role[change.role].instances, num_removed)
                await self._actuator.resize(change.role, change.size, victims)
                begun.append(change)
        except ActuatorError:
            for change in begun:
                await self._actuator.resize(change.role, change.previous_size, ())
            raise
        for change in changes:
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


def check_size(role: Role, size: int) -> None:
    """Raises SizeRefused for a size that no pool of `role` may have."""
    if not MIN_SIZES[role] <= size <= MAX_SIZE:
        raise SizeRefused(f"{role} must be between {MIN_SIZES[role]} and {MAX_SIZE}, is {size}")


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
    load = view.load
    num_requests = load.num_waiting + load.num_running + load.num_loading + view.num_unreported - view.num_ended
    return (view.out is None, num_requests, max(view.info.num_blocks - load.free_blocks, 0))
