"""Who there is to be in the pools of a local stack: what was wanted last, apart from what runs.

    free name ──resize up──▶ seated ──resize down──▶ leaving, told to nobody ──vacated: its process is gone──▶ free name

Whoever resizes changes the roster, at once and from any thread; the owner of the processes follows it in its own time
(local_stack.py). So a pool that is told to grow while an instance still leaves it gets new ones beside that, and one
that is told two sizes in a row has the second.
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


class SizeRefused(ValueError):
    """A pool cannot have that size; the message says which it may have."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One instance that there is to be."""

    name: str
    """prefill-0, decode-1 …"""
    role: Role
    address: str
    """host:port"""


@dataclass(frozen=True, slots=True)
class Seating:
    """Everybody at one moment."""

    version: int
    """Grows with every change."""
    seats: tuple[Seat, ...]
    leaving: tuple[Seat, ...] = ()
    """Those that were told to go and may still be there."""

    def pool(self, role: Role) -> list[Seat]:
        """Those of one role, the oldest first."""
        return [seat for seat in self.seats if seat.role == role]


NewAddress = Callable[[Collection[str]], str]
"""host:port at which nobody listens, and none of the given ones."""


class Roster:
    """Safe to use from every thread."""

    def __init__(self, seats: Sequence[Seat], new_address: NewAddress, *, needs_prefill: bool = False) -> None:
        """`needs_prefill`: the stack serves nothing without a prefill instance."""
        self._min_sizes: dict[Role, int] = {"prefill": int(needs_prefill), "decode": 1}
        self._new_address = new_address
        self._changed = threading.Condition()
        self._seating = Seating(1, tuple(seats))

    @property
    def seating(self) -> Seating:
        """Who there is to be now."""
        return self._seating

    def resize(self, role: Role, size: int, victims: Sequence[str] = ()) -> int:
        """Gives a pool `size` seats; returns how many it had. Raises SizeRefused.

        `victims` are addresses of those that go first, in this order; unknown ones are passed over. When they are not
        enough, the youngest go.
        """
        self.check(role, size)
        with self._changed:
            pool = self._seating.pool(role)
            if size > len(pool):
                self._seat(role, size - len(pool))
            elif size < len(pool):
                self._unseat(_first_to_go(pool, victims)[: len(pool) - size])
            return len(pool)

    def check(self, role: Role, size: int) -> None:
        """Raises SizeRefused for a size that the pool may not have."""
        if not self._min_sizes[role] <= size <= MAX_SIZE:
            why = ", since every request is handed over" if role == "prefill" and self._min_sizes[role] else ""
            raise SizeRefused(
                f"the {role} pool of this stack has {self._min_sizes[role]}..{MAX_SIZE} instances{why}; not {size}"
            )

    def give_up(self, name: str) -> bool:
        """That one cannot be had: its pool is one smaller than was wanted. False if the pool must not be smaller."""
        with self._changed:
            seat = next((seat for seat in self._seating.seats if seat.name == name), None)
            if seat is None:
                return True  # a resize has just taken it away
            if len(self._seating.pool(seat.role)) <= self._min_sizes[seat.role]:
                return False
            self._unseat([seat])
            return True

    def vacate(self, name: str) -> None:
        """The process of one that was told to leave is gone: its name and its address are free."""
        with self._changed:
            leaving = tuple(seat for seat in self._seating.leaving if seat.name != name)
            self._seating = replace(self._seating, leaving=leaving)

    def wait(self, version: int, *, unless: Callable[[], bool]) -> Seating | None:
        """The seating, as soon as it is another one than that of `version`; None when `unless` holds before that.

        That is looked at when the seating changes and at every `wake`.
        """
        with self._changed:
            self._changed.wait_for(lambda: unless() or self._seating.version != version)
            return None if unless() else self._seating

    def wake(self) -> None:
        """Whoever waits looks again."""
        with self._changed:
            self._changed.notify_all()

    def _seat(self, role: Role, count: int) -> None:
        known = (*self._seating.seats, *self._seating.leaving)
        names, addresses = {seat.name for seat in known}, {seat.address for seat in known}
        free_names = (name for number in itertools.count() if (name := f"{role}-{number}") not in names)
        newcomers = []
        for name in itertools.islice(free_names, count):
            newcomers.append(Seat(name, role, self._new_address(addresses)))
            addresses.add(newcomers[-1].address)
        self._change((*self._seating.seats, *newcomers), self._seating.leaving)

    def _unseat(self, seats: Sequence[Seat]) -> None:
        staying = tuple(seat for seat in self._seating.seats if seat not in seats)
        self._change(staying, (*self._seating.leaving, *seats))

    def _change(self, seats: tuple[Seat, ...], leaving: tuple[Seat, ...]) -> None:
        self._seating = Seating(self._seating.version + 1, seats, leaving)
        self._changed.notify_all()


def _first_to_go(pool: list[Seat], victims: Sequence[str]) -> list[Seat]:
    """The whole pool, in the order in which they go."""
    order = {address: index for index, address in reversed(list(enumerate(victims)))}
    youngest_first = pool[::-1]
    return sorted(youngest_first, key=lambda seat: order.get(seat.address, len(victims)))
