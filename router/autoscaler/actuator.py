"""Who can change the size of a pool: the seam between the decision and whatever owns the instances' processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from router.pools.instances import Role


class ActuatorError(Exception):
    """The owner of the instances cannot be reached or has refused; the message says which, for people."""


class Actuator(Protocol):
    """One per router. Every method may take seconds, and raises ActuatorError."""

    async def sizes(self) -> Mapping[Role, int]:
        """How many instances each pool was last told to have. A role that is absent cannot be resized."""
        ...

    async def resize(self, role: Role, size: int, victims: Sequence[str]) -> None:
        """Begins to start or to drain instances until the pool has `size`.

        `victims` are the addresses of those that go first, in this order; nothing that runs there is lost.
        """
        ...

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` is the one router that scales, for `ttl_s` seconds from now on."""
        ...
