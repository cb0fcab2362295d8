"""Gives the pools other sizes. The autoscaler or an operator decides; this chooses who goes, and remembers the change.

    sizes ──checked, all of them──▶ one pool after the other, one resize at a time ──▶ a Change for each
                                        └─ a later pool is refused: the earlier ones get their old sizes back

Who goes first is who loses least by it: an instance that is not ready, then the one with the fewest requests, then the
one with the least KV. Nothing is lost by those that go either: they drain (docs/operations.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from router.autoscaler.actuator import Actuator, ActuatorError
from router.pools.instances import Role
from router.pools.member import Member
from router.pools.pool import Pool, Pools

_log = logging.getLogger(__name__)

MIN_SIZES: Mapping[Role, int] = {"prefill": 0, "decode": 1}
"""Without a prefill pool the decode instances prefill; without a decode pool nothing is served."""
MAX_SIZE = 64

Cause = Literal["autoscaler", "operator"]


class SizeRefused(ActuatorError):
    """A size that no pool of that role may have; the message tells the allowed range."""


@dataclass(frozen=True, slots=True)
class Change:
    """One pool has been told to have another size."""

    role: Role
    previous_size: int
    size: int
    cause: Cause
    reason: str
    """In words, for people."""
    at_s: float
    """time.monotonic() of this process."""


class Resizer:
    """One per router, on its event loop. Everybody who resizes goes through it."""

    def __init__(self, actuator: Actuator, pools: Pools) -> None:
        self._actuator = actuator
        self._pools: dict[Role, Pool] = {"prefill": pools.prefill, "decode": pools.decode}
        self._last: dict[Role, Change] = {}
        self._one_at_a_time = asyncio.Lock()

    async def sizes(self) -> Mapping[Role, int]:
        """How many instances each pool was last told to have. Raises ActuatorError."""
        return await self._actuator.sizes()

    async def resize(
        self, sizes: Mapping[Role, int], *, cause: Cause, reason: str, expected: Mapping[Role, int] | None = None
    ) -> list[Change]:
        """Begins to give each pool its size; one Change for each, in the order of `sizes`.

        All begin or none does. A pool that has its size already is left alone, and its Change is not remembered.
        `expected` are the sizes for which that was decided: a pool that has another one meanwhile keeps it.
        Raises SizeRefused before anything has begun, else ActuatorError.
        """
        for role, size in sizes.items():
            check_size(role, size)
        async with self._one_at_a_time:
            before = await self._actuator.sizes()
            if unknown := [role for role in sizes if role not in before]:
                raise ActuatorError(f"nobody can resize the {' and the '.join(unknown)} pool")
            for role, size in (expected or {}).items():
                if before[role] != size:
                    raise ActuatorError(f"the {role} pool was told meanwhile to have {before[role]}, not {size}")
            changes = [
                Change(role, before[role], size, cause, reason, time.monotonic()) for role, size in sizes.items()
            ]
            await self._apply([change for change in changes if change.size != change.previous_size])
        return changes

    def last_change(self, role: Role) -> Change | None:
        """The last resize of that pool by this router; None when there was none."""
        return self._last.get(role)

    async def _apply(self, changes: list[Change]) -> None:
        begun: list[Change] = []
        try:
            for change in changes:
                num_to_go = max(change.previous_size - change.size, 0)
                victims = least_loaded(self._pools[change.role].members, num_to_go)
                await self._actuator.resize(change.role, change.size, victims)
                begun.append(change)
        except ActuatorError:
            for change in begun:
                await self._actuator.resize(change.role, change.previous_size, ())
            raise
        for change in changes:
            self._last[change.role] = change
            _log.info(
                "%s pool: %d → %d instances, by the %s: %s",
                change.role,
                change.previous_size,
                change.size,
                change.cause,
                change.reason,
            )


def check_size(role: Role, size: int) -> None:
    """Raises SizeRefused for a size that no pool of `role` may have."""
    if not MIN_SIZES[role] <= size <= MAX_SIZE:
        raise SizeRefused(f"a {role} pool of {size} instances cannot be; allowed: {MIN_SIZES[role]}..{MAX_SIZE}")


def least_loaded(members: tuple[Member, ...], count: int) -> list[str]:
    """Addresses of at most `count` members that would lose least by going, the first one least; those that leave
    already are none of them. Among equals it is the last one by name."""
    staying = [member for member in members if member.state != "leaving"]
    staying.sort(key=lambda member: (member.info.instance_id if member.info else "", member.address), reverse=True)
    return [member.address for member in sorted(staying, key=_loss)[:count]]


def _loss(member: Member) -> tuple[bool, int, int]:
    """What would be lost, comparable: readiness, requests, blocks of KV."""
    view = member.view()
    if view is None:
        return (False, 0, 0)
    load = view.load
    num_requests = load.num_waiting + load.num_running + load.num_loading + view.num_unreported - view.num_ended
    return (view.out is None, num_requests, max(view.info.num_blocks - load.free_blocks, 0))
