"""What each tenant has in flight, and whose streams pause so that a tenant with less gets its share.

Max-min fairness over the limits: a tenant's part is the largest of its parts of each limit (Ghodsi et al., Dominant
Resource Fairness, NSDI 2011), divided by its weight. A request may take the slots of another tenant's streams as long
as that tenant keeps at least the part that the request's own tenant then has. So two tenants never take slots from each
other in turn, and where every tenant has the same part nothing pauses.

It decides; the controller applies it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from router.admission.capacity import Charge, Limits, Usage
from router.admission.fair_queue import Entry, Excess
from router.admission.settings import TenantSettings
from router.admission.ticket import Ticket


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

    def __init__(self, share_of: Callable[[str], TenantSettings], *, yield_after_s: float, max_tenants: int) -> None:
        self._share_of = share_of
        self._yield_after_s = yield_after_s
        self._max_tenants = max_tenants
        self._holdings: dict[str, _Holding] = {}

    def add(self, entry: Entry[Ticket], *, had_free_slot: bool = True) -> None:
        """The request is started; without a free slot after a pause of another."""
        if (holding := self._holdings.get(entry.flow)) is None:
            holding = self._holdings[entry.flow] = _Holding(self._share_of(entry.flow).weight)
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
        elif not holding.streams and len(self._holdings) > self._max_tenants:
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
        parts = [(one.part(limits), one) for name, one in self._holdings.items() if name != tenant]
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
        pausable = (entry for entry in holding.streams if entry.item.may_pause(now_s, self._yield_after_s))
        return replace(holding, usage=replace(holding.usage)), pausable

    def _part_with(self, tenant: str, charge: Charge, limits: Limits) -> float:
        """The tenant's part if it gets `charge` too."""
        holding = self._holdings.get(tenant)
        usage = replace(holding.usage) if holding is not None else Usage()
        usage.add(charge)
        return usage.part_of(limits) / self._share_of(tenant).weight
