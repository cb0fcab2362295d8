"""A request's admission, and the slot that it holds while it is in flight.

Ticket    waiting ──its turn──▶ in flight ──over──▶ gone
             ▲                     │
             └──gave its slot──────┘

Slot      held ──take: the calls that use it end──▶ taken ──give──▶ held
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from router.admission.capacity import Charge
from serving.errors import Overloaded

_MIN_PACED = 8
"""Output tokens of each choice before the pace predicts the end: a stall among fewer would count too much."""


class TooLate(Overloaded):
    """Admitted, but no instance has begun the prompt in time."""


class SlotUser(Protocol):
    """A call to an instance that runs in a slot."""

    def slot_taken(self) -> None:
        """The slot goes to another request: the call ends now."""


class Slot:
    """A request's place among those that run; all its choices share it. Belongs to one event loop."""

    def __init__(self) -> None:
        self._held = asyncio.Event()
        self._held.set()
        self._users: set[SlotUser] = set()

    @property
    def is_held(self) -> bool:
        return self._held.is_set()

    def add(self, user: SlotUser) -> None:
        """A call begins; without the slot it ends at once."""
        self._users.add(user)
        if not self.is_held:
            user.slot_taken()

    def remove(self, user: SlotUser) -> None:
        """The call is over. Idempotent."""
        self._users.discard(user)

    def take(self) -> None:
        self._held.clear()
        for user in list(self._users):
            user.slot_taken()

    def give(self) -> None:
        self._held.set()

    async def wait_held(self) -> None:
        await self._held.wait()


@dataclass(slots=True, eq=False)
class Ticket:
    """One request. Its owner sets `num_emitted`."""

    charge: Charge
    max_tokens: int
    num_emitted: Callable[[], int] = lambda: 0
    """Output tokens so far, of all choices."""
    slot: Slot = field(default_factory=Slot)
    waiting_since_s: float = 0.0
    in_flight: bool = False
    prefilled: bool = False
    prefill_s: float = 0.0
    """How long it was in flight until its first token."""
    started_s: float = 0.0
    """When it was in flight last."""
    served_s: float = 0.0
    """How long it was in flight before that."""
    num_emitted_before: int = 0
    """Output tokens of that time."""
    turn: asyncio.Future[None] | None = None
    """Done when the request is in flight, or displaced."""
    displaced: Overloaded | None = None
    """Its error, once it is out of the queue for one of higher priority."""

    def start(self, now_s: float) -> None:
        self.in_flight, self.started_s = True, now_s
        self.slot.give()
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)

    def pause(self, now_s: float) -> None:
        """Gives its slot. Its emitted tokens stay emitted."""
        self.served_s, self.in_flight, self.waiting_since_s = self.in_flight_s(now_s), False, now_s
        self.num_emitted_before = self.num_emitted()
        self.slot.take()

    def in_flight_s(self, now_s: float) -> float:
        """Seconds in flight so far, pauses left out."""
        return self.served_s + (now_s - self.started_s if self.in_flight else 0.0)

    def may_pause(self, now_s: float, after_s: float) -> bool:
        """Whether it has run for `after_s` and got on since it was started."""
        has_run = self.prefilled and now_s - self.started_s >= after_s
        return has_run and self.num_emitted() > self.num_emitted_before

    def remaining_s(self, now_s: float) -> float | None:
        """Expected seconds to its end, at its own pace since its first token; None until that is known.

        By the expected length, but at least as much as there is already, within its max_tokens: a stream that runs
        up to the expected length is probably one of the longer ones.
        """
        if (num_emitted := self.num_emitted()) < _MIN_PACED * self.charge.num_sequences:
            return None
        num_allowed = self.max_tokens * self.charge.num_sequences - num_emitted
        num_remaining = min(max(self.charge.num_output_tokens - num_emitted, num_emitted), num_allowed)
        return num_remaining * (self.in_flight_s(now_s) - self.prefill_s) / num_emitted
