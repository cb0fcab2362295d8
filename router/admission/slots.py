"""The slots of requests in flight: what each tenant has of them, and whose streams pause so that others get theirs.

Ticket    waiting ──its turn──▶ in flight ──over──▶ gone
             ▲                     │
             └──gave its slot──────┘

Slot      held ──take: the calls that use it end──▶ taken ──give──▶ held

Max-min fairness over the limits: a tenant's part is the largest of its parts of each limit (Ghodsi et al., Dominant
Resource Fairness, NSDI 2011), divided by its weight. A request may take the slots of another tenant's streams as long
as that tenant keeps at least the part that the request's own tenant then has. So two tenants never take slots from each
other in turn, and where every tenant has the same part nothing pauses.

`TenantShares` decides; the controller applies it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from router.admission.capacity import Charge, Limits, Usage
from router.admission.fair_queue import Entry, Excess
from router.admission.settings import AdmissionSettings
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


@dataclass(slots=True, eq=False)
class _Holding:
    """One tenant's requests in flight."""

    weight: float
    usage: Usage = field(default_factory=Usage)
    streams: dict[Entry[Ticket], None] = field(default_factory=dict)
    """In the order in which they were started."""
    last_end_s: float | None = None
    """When one ended by itself."""
    last_start_s: float = -math.inf
    last_free_start_s: float = -math.inf
    """Into a slot that no stream had to give."""

    def part(self, limits: Limits) -> float:
        return self.usage.part_of(limits) / self.weight


_Reducible = tuple[_Holding, Iterator[Entry[Ticket]]]


class TenantShares:
    """The requests in flight by tenant. Of `max_tenants` without any, the last end is known, until all are idle."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._holdings: dict[str, _Holding] = {}

    def add(self, entry: Entry[Ticket], *, had_free_slot: bool = True) -> None:
        """The request is started; without a free slot after a pause of another."""
        if (holding := self._holdings.get(entry.flow)) is None:
            holding = self._holdings[entry.flow] = _Holding(self._settings.share_of(entry.flow).weight)
        holding.usage.add(entry.item.charge)
        holding.streams[entry] = None
        holding.last_start_s = entry.item.started_s
        if had_free_slot:
            holding.last_free_start_s = entry.item.started_s

    def remove(self, entry: Entry[Ticket], ended_s: float | None = None) -> None:
        """`ended_s`: when the request ended; None: it was paused."""
        holding = self._holdings[entry.flow]
        holding.usage.prefilled(entry.item.charge)
        holding.usage.remove(entry.item.charge)
        del holding.streams[entry]
        holding.last_end_s = ended_s if ended_s is not None else holding.last_end_s
        if not any(one.streams for one in self._holdings.values()):
            self._holdings.clear()
        elif not holding.streams and len(self._holdings) > self._settings.max_tenants:
            del self._holdings[entry.flow]

    def part(self, tenant: str, limits: Limits) -> float:
        """The tenant's part of the limits, by its weight."""
        return holding.part(limits) if (holding := self._holdings.get(tenant)) is not None else 0.0

    def yielding_to(
        self, tenant: str, charge: Charge, in_use: Usage, limits: Limits, now_s: float
    ) -> list[Entry[Ticket]]:
        """The streams whose slots make `charge` fit `limits`, the longest running of the tenant with the largest part
        first. Empty if it fits already, or if there are not enough."""
        if in_use.exceeded_limit(charge, limits) is None or in_use.num_prefill_tokens >= limits.num_prefill_tokens:
            return []  # it fits, or what runs is not in its way
        part = self._part_with(tenant, charge, limits)
        parts = [(one.part(limits), one) for name, one in self._holdings.items() if one.streams and name != tenant]
        largest = [(-its, index) for index, (its, _) in enumerate(parts) if its > part]
        heapq.heapify(largest)
        left, yielding, reduced = replace(in_use), list[Entry[Ticket]](), dict[int, _Reducible]()
        while left.exceeded_limit(charge, limits) is not None:
            if not largest:
                return []
            _, index = largest[0]
            if index not in reduced:
                reduced[index] = self._reducible(parts[index][1], now_s)
            holding, pausable = reduced[index]
            if (entry := next(pausable, None)) is not None:
                holding.usage.remove(entry.item.charge)
            if entry is None or (its := holding.part(limits)) < part:
                heapq.heappop(largest)
            else:
                heapq.heapreplace(largest, (-its, index))
                left.remove(entry.item.charge)
                yielding.append(entry)
        return yielding

    def next_end_s(self, needed: Excess, now_s: float, *, of: str | None) -> float:
        """Expected seconds until so many requests with so many tokens have ended, of one tenant or of all. Once one has
        ended, simply the time since then, or since the last start, before which a slot was free (of all: without those
        after a pause): after a silence as long a one is expected. 0: nothing is known."""
        holdings = [holding for tenant, holding in self._holdings.items() if of in (None, tenant)]
        if ends_s := [holding.last_end_s for holding in holdings if holding.last_end_s is not None]:
            starts_s = (one.last_free_start_s if of is None else one.last_start_s for one in holdings)
            return now_s - max([*ends_s, *starts_s])
        entries = (entry for holding in holdings for entry in holding.streams)
        remaining = ((entry.item.remaining_s(now_s), entry.cost) for entry in entries)
        known = sorted((end_s, cost) for end_s, cost in remaining if end_s is not None)
        costs = itertools.accumulate(cost for _, cost in known)
        enough = (
            end_s
            for number, ((end_s, _), cost) in enumerate(zip(known, costs, strict=True), 1)
            if number >= needed.num_entries and cost >= needed.cost
        )
        return next(enough, known[-1][0] if known else 0.0)

    def _reducible(self, holding: _Holding, now_s: float) -> _Reducible:
        """A copy of `holding` to take streams from, and the streams that may pause."""
        pausable = (entry for entry in holding.streams if entry.item.may_pause(now_s, self._settings.yield_after_s))
        return replace(holding, usage=replace(holding.usage)), pausable

    def _part_with(self, tenant: str, charge: Charge, limits: Limits) -> float:
        """The tenant's part if it gets `charge` too."""
        holding = self._holdings.get(tenant)
        usage = replace(holding.usage) if holding is not None else Usage()
        usage.add(charge)
        return usage.part_of(limits) / self._settings.share_of(tenant).weight
