"""The desired instances of a local stack's pools, apart from the processes that run.

    free name ──resize up──▶ desired ──resize down──▶ leaving (unknown to routers) ──process gone──▶ free name

`resize` changes the desired state at once and from any thread; the supervisor makes the processes follow. So a pool can
grow while an instance still leaves it, and of two resizes in a row the second one holds.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
MAX_SIZE = 64
"""Of one pool on one machine."""


class InvalidSize(ValueError):
    """A pool cannot have that size, or has been resized meanwhile; the message says which are allowed, or its size."""


@dataclass(frozen=True, slots=True)
class DesiredInstance:
    name: str
    """prefill-0, decode-1 …"""
    role: Role
    address: str
    """host:port"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    version: int
    """Grows with every change."""
    instances: tuple[DesiredInstance, ...]
    leaving: tuple[DesiredInstance, ...] = ()
    """Removed instances whose processes may still run."""

    def pool(self, role: Role) -> list[DesiredInstance]:
        """The instances of one role, oldest first."""
        return [instance for instance in self.instances if instance.role == role]


NewAddress = Callable[[Collection[str]], str]
"""A free host:port other than the given ones."""


class DesiredState:
    """Thread-safe."""

    def __init__(
        self,
        instances: Sequence[DesiredInstance],
        new_address: NewAddress,
        *,
        needs_prefill: bool = False,
        has_connector: bool = True,
    ) -> None:
        """`needs_prefill`: the stack serves nothing without a prefill instance. `has_connector`: KV can be handed
        over."""
        self._min_sizes: dict[Role, int] = {"prefill": int(needs_prefill), "decode": 1}
        self._has_connector = has_connector
        self._new_address = new_address
        self._changed = threading.Condition()
        self.snapshot = Snapshot(1, tuple(instances))

    def resize(self, role: Role, size: int, victims: Sequence[str] = (), previous_size: int | None = None) -> int:
        """Sets the size of a pool; returns the previous one. Raises InvalidSize.

        `victims` are addresses of instances to remove first, in this order; unknown ones are ignored. If they are too
        few, the youngest instances follow. `previous_size` is what the caller assumes, if anything: a pool that has
        another size by now, and not `size`, keeps it.
        """
        self.check_size(role, size)
        with self._changed:
            pool = self.snapshot.pool(role)
            if previous_size not in (None, len(pool)) and size != len(pool):
                raise InvalidSize(
                    f"the {role} pool was resized from {previous_size} to {len(pool)} meanwhile, and keeps that size"
                )
            if size > len(pool):
                self._add(role, size - len(pool))
            elif size < len(pool):
                self._remove(_removal_order(pool, victims)[: len(pool) - size])
            return len(pool)

    def check_size(self, role: Role, size: int) -> None:
        """Raises InvalidSize for a size that is not allowed."""
        if role == "prefill" and size > 0 and not self._has_connector:
            raise InvalidSize(
                f"prefill must be 0, not {size}: with --engine vllm and --prefill 0 the instances have no connector; "
                "start the stack with --prefill 1"
            )
        if not self._min_sizes[role] <= size <= MAX_SIZE:
            why = " with disaggregation 'always'" if role == "prefill" and self._min_sizes[role] else ""
            raise InvalidSize(f"{role} must be between {self._min_sizes[role]} and {MAX_SIZE}{why}, not {size}")

    def drop(self, name: str) -> bool:
        """Removes an instance that cannot start. False if its pool already has its minimum size."""
        with self._changed:
            instance = next((one for one in self.snapshot.instances if one.name == name), None)
            if instance is None:
                return True  # a concurrent resize removed it
            if len(self.snapshot.pool(instance.role)) <= self._min_sizes[instance.role]:
                return False
            self._remove([instance])
            return True

    def release(self, name: str) -> None:
        """Frees name and address of a leaving instance whose process is gone."""
        with self._changed:
            leaving = tuple(instance for instance in self.snapshot.leaving if instance.name != name)
            self.snapshot = replace(self.snapshot, leaving=leaving)

    def wait(self, version: int, *, unless: Callable[[], bool]) -> Snapshot | None:
        """Waits for a snapshot other than that of `version`; None as soon as `unless` holds.

        `unless` is evaluated after every change and every `notify`.
        """
        with self._changed:
            self._changed.wait_for(lambda: unless() or self.snapshot.version != version)
            return None if unless() else self.snapshot

    def notify(self) -> None:
        """Makes every `wait` evaluate its condition again."""
        with self._changed:
            self._changed.notify_all()

    def _add(self, role: Role, count: int) -> None:
        known = (*self.snapshot.instances, *self.snapshot.leaving)
        names, addresses = {instance.name for instance in known}, {instance.address for instance in known}
        free_names = (name for number in itertools.count() if (name := f"{role}-{number}") not in names)
        added = []
        for name in itertools.islice(free_names, count):
            added.append(DesiredInstance(name, role, self._new_address(addresses)))
            addresses.add(added[-1].address)
        self._publish((*self.snapshot.instances, *added), self.snapshot.leaving)

    def _remove(self, removed: Sequence[DesiredInstance]) -> None:
        staying = tuple(instance for instance in self.snapshot.instances if instance not in removed)
        self._publish(staying, (*self.snapshot.leaving, *removed))

    def _publish(self, instances: tuple[DesiredInstance, ...], leaving: tuple[DesiredInstance, ...]) -> None:
        self.snapshot = Snapshot(self.snapshot.version + 1, instances, leaving)
        self._changed.notify_all()


def _removal_order(pool: list[DesiredInstance], victims: Sequence[str]) -> list[DesiredInstance]:
    """The whole pool, in the order of removal."""
    order = {address: index for index, address in reversed(list(enumerate(victims)))}
    youngest_first = pool[::-1]
    return sorted(youngest_first, key=lambda instance: order.get(instance.address, len(victims)))
