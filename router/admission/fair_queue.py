"""A fair queue: fair between flows, by priority and then by arrival within one flow.

    push ─▶ queued ──start──▶ in service ──finish──▶ gone
              │ ▲───requeue───────┘
              └──remove──▶ gone

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a flow's tag is the virtual time at which its next entry
may start. The backlogged flow with the smallest tag is next, virtual time moves to that tag, and the flow's tag moves
on by cost / weight. A flow that comes back starts at the virtual time: idleness earns no credit, and others' service
meanwhile costs none. An entry is charged its estimated cost at the start, corrected at the finish, as in the
virtual token counter (Sheng et al., OSDI 2024), so that underestimation gains nothing. An entry that is queued again
goes before the new ones of its flow, and each start is charged: its work begins again.

Pure: it reads no clock and never waits. A flow is forgotten when it holds nothing and owes nothing; all are forgotten
when the queue is empty. Beyond `max_flows` new flows share one, so that unknown names cost bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from router.admission.settings import TenantSettings

_DECAY_S = 20.0
_MIN_NUM_SERVED = 3.0
_MIN_WAITING_S = 0.5
_GUESS_S = 4.0


@dataclass(slots=True)
class ServiceRate:
    """The rate at which a queue is served while it is backlogged, from which waits are predicted. Times are arguments.

    Only time in which something waited counts, and only what was served in that time: the rate of an underloaded
    system says nothing about a saturated one. Old observations decay, over time of waiting.
    """

    _at_s: float = 0.0
    _waiting: bool = False
    _waiting_s: float = 0.0
    _cost: float = 0.0
    _num_served: float = 0.0

    def observe(self, now_s: float, *, waiting: bool, cost: float = 0.0) -> None:
        """An entry was served (`cost` over 0), added or removed; `waiting`: whether entries wait from now on."""
        if self._waiting:
            elapsed_s = max(now_s - self._at_s, 0.0)
            kept = math.exp(-elapsed_s / _DECAY_S)
            self._waiting_s = self._waiting_s * kept + elapsed_s
            self._cost = self._cost * kept + cost
            self._num_served = self._num_served * kept + (cost > 0)
        self._at_s, self._waiting = now_s, waiting

    def per_s(self, guess_per_s: float | None = None) -> float | None:
        """Cost per second. A guess has the weight of four observed seconds; None without guess and observations."""
        if guess_per_s is not None:
            return (self._cost + guess_per_s * _GUESS_S) / (self._waiting_s + _GUESS_S)
        if self._num_served < _MIN_NUM_SERVED or self._waiting_s < _MIN_WAITING_S:
            return None
        return self._cost / self._waiting_s

    def reset(self) -> None:
        """What serves has changed."""
        self._waiting_s = self._cost = self._num_served = 0.0


T = TypeVar("T")

OVERFLOW_FLOW = "*"
"""The flow that new flows share when `max_flows` are tracked."""


class Excess(NamedTuple):
    """By how much entries exceed the limits of their flow."""

    num_entries: int
    cost: float


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One item in the queue or in service. Made by `push`."""

    item: T
    flow: str
    cost: float
    priority: int
    has_run: bool = False

    @property
    def rank(self) -> tuple[bool, int]:
        """The place in its flow: the highest first."""
        return self.has_run, self.priority


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    name: str
    share: TenantSettings
    tag: float
    lines: dict[tuple[bool, int], dict[Entry[T], None]] = field(default_factory=dict)
    """Queued entries by rank; none is empty."""
    num_queued: int = 0
    queued_cost: float = 0.0
    num_in_service: int = 0
    cost_in_service: float = 0.0
    rate: ServiceRate = field(default_factory=ServiceRate)

    def head(self) -> Entry[T]:
        return next(iter(self.lines[max(self.lines)]))

    def may_start(self) -> bool:
        """Whether the head is within the flow's own limits."""
        return self.excess(self.head().cost) is None

    def startable_cost(self) -> float:
        """The part of the queued cost that the flow's own limits leave room for."""
        share, cost = self.share, self.queued_cost
        if not self.may_start():
            return 0.0
        if share.max_requests is not None:
            cost *= min((share.max_requests - self.num_in_service) / self.num_queued, 1.0)
        if share.max_tokens is not None:
            cost = min(cost, max(share.max_tokens - self.cost_in_service, self.head().cost))
        return cost

    def excess(self, cost: float, num_ahead: int = 0, cost_ahead: float = 0.0) -> Excess | None:
        """Of the flow's own limits, when an entry and those ahead of it are in service too; a single entry has none."""
        share, num_before = self.share, self.num_in_service + num_ahead
        if not num_before:
            return None
        num_entries = num_before + 1 - share.max_requests if share.max_requests is not None else 0
        all_cost = self.cost_in_service + cost_ahead + cost
        excess = Excess(max(num_entries, 0), max(all_cost - share.max_tokens, 0) if share.max_tokens is not None else 0)
        return excess if any(excess) else None

    def cost_ahead(self, entry: Entry[T]) -> float:
        """Of the queued entries before one that is pushed now with its rank."""
        behind = sum(other.cost for rank, line in self.lines.items() if rank < entry.rank for other in line)
        return self.queued_cost - behind - entry.cost


class FairQueue(Generic[T]):
    """The queue. Its owner decides when there is room, gets the `head` and starts it. A flow is a tenant, an entry a
    request, whose cost is in tokens."""

    def __init__(self, share_of: Callable[[str], TenantSettings], max_flows: int) -> None:
        self._share_of = share_of
        self._max_flows = max_flows
        self._flows: dict[str, _Flow[T]] = {}
        self._backlogged: dict[str, _Flow[T]] = {}
        self._virtual_time = 0.0
        self.num_queued = 0
        self.queued_cost = 0.0
        self.num_in_service = 0

    @property
    def startable_cost(self) -> float:
        """The queued cost without what exceeds the flows' own limits."""
        return sum(flow.startable_cost() for flow in self._backlogged.values())

    @property
    def num_backlogged(self) -> int:
        """Flows with queued entries."""
        return len(self._backlogged)

    def queued_in(self, flow: str) -> tuple[int, float]:
        """How many entries a flow has queued, and their cost."""
        known = self._backlogged.get(flow)
        return (known.num_queued, known.queued_cost) if known is not None else (0, 0.0)

    def push(self, flow: str, item: T, *, cost: float, priority: int) -> Entry[T]:
        """Queues `item` behind those of its flow with the same or a higher priority."""
        known = self._flow(flow)
        entry = Entry(item, known.name, cost, priority)
        self._put(entry, known)
        return entry

    def requeue(self, entry: Entry[T], now_s: float) -> None:
        """Moves an entry in service back into the queue, before those of its flow that have not run."""
        flow = self._flows[entry.flow]
        flow.num_in_service -= 1
        flow.cost_in_service -= entry.cost
        self.num_in_service -= 1
        entry.has_run = True
        self._put(entry, flow)
        flow.rate.observe(now_s, waiting=True)

    def wait_begins(self, entry: Entry[T], now_s: float) -> None:
        """The entry was not started when it was pushed: from now on its flow waits."""
        self._flows[entry.flow].rate.observe(now_s, waiting=True)

    def remove(self, entry: Entry[T], now_s: float) -> None:
        flow = self._take_out(entry)
        flow.rate.observe(now_s, waiting=flow.num_queued > 0)
        self._forget_if_idle(flow)

    def head(self) -> Entry[T] | None:
        """The entry to start next; None if none is queued or every backlogged flow is at its own limits."""
        flow = min(self._startable(), key=attrgetter("tag"), default=None)
        return flow.head() if flow is not None else None

    def heads(self) -> list[Entry[T]]:
        """The next entry of each backlogged flow that is not at its own limits."""
        return [flow.head() for flow in self._startable()]

    def start(self, entry: Entry[T], now_s: float) -> None:
        """Moves a queued entry into service and charges its flow."""
        flow = self._take_out(entry)
        self._virtual_time = max(self._virtual_time, flow.tag)  # a flow that was idle or at its limits has no credit
        flow.tag = self._virtual_time + entry.cost / flow.share.weight
        flow.num_in_service += 1
        flow.cost_in_service += entry.cost
        self.num_in_service += 1
        flow.rate.observe(now_s, waiting=flow.num_queued > 0, cost=0.0 if entry.has_run else entry.cost)

    def finish(self, entry: Entry[T], actual_cost: float) -> None:
        """Takes an entry out of service; its flow is charged the actual cost."""
        flow = self._flows[entry.flow]
        flow.num_in_service -= 1
        flow.cost_in_service -= entry.cost
        self.num_in_service -= 1
        flow.tag += (actual_cost - entry.cost) / flow.share.weight
        self._forget_if_idle(flow)

    def may_start(self, flow: str) -> bool:
        """Whether a backlogged flow is within its own limits with its next entry."""
        return self._backlogged[flow].may_start()

    def excess_behind(self, entry: Entry[T]) -> Excess | None:
        """Of its flow's own limits, when an entry that is pushed now with its rank and those ahead of it have started,
        and none has ended: what must end before it starts. None: it is within them."""
        flow = self._backlogged[entry.flow]
        return flow.excess(entry.cost, self.num_ahead(entry), flow.cost_ahead(entry))

    def num_returned(self, flow: str) -> int:
        """Queued entries of a backlogged flow that have run."""
        return sum(len(line) for (has_run, _), line in self._backlogged[flow].lines.items() if has_run)

    def last(self, flow: str) -> Entry[T] | None:
        """The entry of a flow that would start last."""
        known = self._backlogged.get(flow)
        return next(reversed(known.lines[min(known.lines)])) if known is not None else None

    def num_ahead(self, entry: Entry[T]) -> int:
        """How many entries of its flow come before one that is pushed now with its rank."""
        lines = self._backlogged[entry.flow].lines
        return sum(len(line) for rank, line in lines.items() if rank >= entry.rank) - 1

    def predicted_wait_s(self, entry: Entry[T], rate_per_s: float | None) -> float | None:
        """Seconds until an entry that is pushed now with its rank starts; None if unknown.

        By the rate at which its flow was served while it waited. Until enough of that is observed, by the part of
        `rate_per_s`, the rate at which all flows are served, that the others are likely to leave it.
        """
        flow = self._backlogged[entry.flow]
        ahead = flow.cost_ahead(entry)
        rate = flow.rate.per_s(self._likely_part(flow) * rate_per_s if rate_per_s is not None else None)
        return ahead / rate if rate else None

    def reset_rates(self) -> None:
        """What serves has changed."""
        for flow in self._flows.values():
            flow.rate.reset()

    def _likely_part(self, flow: _Flow[T]) -> float:
        """The part of all service that a backlogged flow can expect: its weight's part of what the flows without queue
        leave, at least its part among all."""
        all_weights = sum(other.share.weight for other in self._flows.values())
        backlogged = sum(other.share.weight for other in self._backlogged.values())
        in_service = sum(other.cost_in_service for other in self._flows.values())
        of_backlogged = sum(other.cost_in_service for other in self._backlogged.values())
        left = of_backlogged / in_service if in_service else 1.0
        return max(flow.share.weight / all_weights, left * flow.share.weight / backlogged)

    def _startable(self) -> Iterator[_Flow[T]]:
        return (flow for flow in self._backlogged.values() if flow.may_start())

    def _put(self, entry: Entry[T], flow: _Flow[T]) -> None:
        self._backlogged[flow.name] = flow
        flow.lines.setdefault(entry.rank, {})[entry] = None
        flow.num_queued += 1
        flow.queued_cost += entry.cost
        self.num_queued += 1
        self.queued_cost += entry.cost

    def _take_out(self, entry: Entry[T]) -> _Flow[T]:
        flow = self._flows[entry.flow]
        line = flow.lines[entry.rank]
        del line[entry]
        if not line:
            del flow.lines[entry.rank]
        flow.num_queued -= 1
        flow.queued_cost -= entry.cost
        self.num_queued -= 1
        self.queued_cost -= entry.cost
        if not flow.num_queued:
            del self._backlogged[flow.name]
        return flow

    def _flow(self, name: str) -> _Flow[T]:
        if (known := self._flows.get(name)) is not None:
            return known
        if len(self._flows) >= self._max_flows and name != OVERFLOW_FLOW:
            idle = (flow for flow in self._flows.values() if not flow.num_queued and not flow.num_in_service)
            if (least := min(idle, key=attrgetter("tag"), default=None)) is None:
                return self._flow(OVERFLOW_FLOW)
            del self._flows[least.name]
        flow: _Flow[T] = _Flow(name, self._share_of(name), self._virtual_time)
        self._flows[name] = flow
        return flow

    def _forget_if_idle(self, flow: _Flow[T]) -> None:
        if not self.num_queued and not self.num_in_service:
            self._flows.clear()
            self._virtual_time = self.queued_cost = 0.0
        elif not flow.num_queued and not flow.num_in_service and flow.tag <= self._virtual_time:
            del self._flows[flow.name]
