"""Who goes next when not all can: fair between flows, by priority and then by arrival within one.

    push ─▶ queued ──start──▶ in service ──finish──▶ gone
              └──remove──▶ gone

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a flow's tag is the virtual time at which its next entry
may start. The backlogged flow with the smallest tag goes next, virtual time moves to that tag, and the flow's tag moves
on by cost / weight. A flow that comes back starts at the virtual time: idleness earns nothing, and what others took
meanwhile is not held against them. A cost is charged by estimate at the start and corrected at the finish, as in the
virtual token counter (Sheng et al., OSDI 2024): nobody gains by being underestimated.

Pure: no clock and no waiting. A flow is forgotten when it holds nothing and owes nothing, all of them when the house is
empty; beyond `max_flows` newcomers share one flow, so that strangers cost bounded memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.admission.service_rate import ServiceRate

T = TypeVar("T")

OTHERS = "*"
"""The flow of newcomers that cannot be told apart any more."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a flow is entitled to: its part relative to the others', and bounds on what it has in service."""

    weight: float = 1.0
    max_entries: int | None = None
    max_cost: float | None = None

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"weight is {self.weight}, must be positive")


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One item in the queue or in service. Made by `push`."""

    item: T
    flow: str
    cost: float
    priority: int


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    name: str
    share: Share
    tag: float
    lines: dict[int, dict[Entry[T], None]] = field(default_factory=dict)
    """Queued entries by priority; none is empty."""
    num_queued: int = 0
    queued_cost: float = 0.0
    num_in_service: int = 0
    cost_in_service: float = 0.0
    rate: ServiceRate = field(default_factory=ServiceRate)

    def head(self) -> Entry[T]:
        return next(iter(self.lines[max(self.lines)]))

    def may_start(self) -> bool:
        """Whether the head is within the flow's own bounds; the only one in service always is."""
        share = self.share
        if not self.num_in_service:
            return True
        if share.max_entries is not None and self.num_in_service >= share.max_entries:
            return False
        return share.max_cost is None or self.cost_in_service + self.head().cost <= share.max_cost


class FairQueue(Generic[T]):
    """The queue. Whoever owns it decides when there is room, asks for the `head` and starts it."""

    def __init__(self, share_of: Callable[[str], Share], max_flows: int) -> None:
        self._share_of = share_of
        self._max_flows = max_flows
        self._flows: dict[str, _Flow[T]] = {}
        self._backlogged: dict[str, _Flow[T]] = {}
        self._now = 0.0  # virtual time
        self.num_queued = 0
        self.queued_cost = 0.0
        self.num_in_service = 0

    @property
    def num_flows(self) -> int:
        """Flows that are remembered."""
        return len(self._flows)

    @property
    def num_backlogged(self) -> int:
        """Flows that have something queued."""
        return len(self._backlogged)

    def queued_in(self, flow: str) -> tuple[int, float]:
        """How many entries a flow has queued, and their cost."""
        known = self._backlogged.get(flow)
        return (known.num_queued, known.queued_cost) if known is not None else (0, 0.0)

    def push(self, flow: str, item: T, *, cost: float, priority: int) -> Entry[T]:
        """Queues `item` behind those of its flow with the same or a higher priority."""
        known = self._flow(flow)
        entry = Entry(item, known.name, cost, priority)
        self._backlogged[known.name] = known
        known.lines.setdefault(priority, {})[entry] = None
        known.num_queued += 1
        known.queued_cost += cost
        self.num_queued += 1
        self.queued_cost += cost
        return entry

    def stays(self, entry: Entry[T], now_s: float) -> None:
        """It was not started as soon as it was pushed: from now on its flow waits."""
        self._flows[entry.flow].rate.observe(now_s, waiting=True)

    def remove(self, entry: Entry[T], now_s: float) -> None:
        """Takes a queued entry out."""
        flow = self._take_out(entry)
        flow.rate.observe(now_s, waiting=flow.num_queued > 0)
        self._forget_if_idle(flow)

    def head(self) -> Entry[T] | None:
        """The one to start next; None if nobody is queued or everybody who is has all that its share allows."""
        flow = min((flow for flow in self._backlogged.values() if flow.may_start()), key=_tag, default=None)
        return flow.head() if flow is not None else None

    def start(self, entry: Entry[T], now_s: float) -> None:
        """Moves a queued entry into service and charges its flow."""
        flow = self._take_out(entry)
        self._now = max(self._now, flow.tag)  # whoever was idle, or held back by its own bounds, has earned nothing
        flow.tag = self._now + entry.cost / flow.share.weight
        flow.num_in_service += 1
        flow.cost_in_service += entry.cost
        self.num_in_service += 1
        flow.rate.observe(now_s, waiting=flow.num_queued > 0, cost=entry.cost)

    def finish(self, entry: Entry[T], actual_cost: float) -> None:
        """Takes an entry out of service; its flow is charged what it really cost."""
        flow = self._flows[entry.flow]
        flow.num_in_service -= 1
        flow.cost_in_service -= entry.cost
        self.num_in_service -= 1
        flow.tag += (actual_cost - entry.cost) / flow.share.weight
        self._forget_if_idle(flow)

    def last(self, flow: str) -> Entry[T] | None:
        """The entry of a flow that would start last."""
        known = self._backlogged.get(flow)
        return next(reversed(known.lines[min(known.lines)])) if known is not None else None

    def predicted_wait_s(self, entry: Entry[T], rate_per_s: float | None) -> float | None:
        """Seconds until an entry that has just been pushed starts; None if nobody knows.

        By the rate at which its flow was served while it waited. Before much of that has been seen, by the part of
        `rate_per_s`, the rate at which all are served, that the others are likely to leave it.
        """
        flow = self._backlogged[entry.flow]
        behind = sum(other.cost for priority, line in flow.lines.items() if priority < entry.priority for other in line)
        ahead = flow.queued_cost - behind - entry.cost
        rate = flow.rate.per_s(self._likely_part(flow) * rate_per_s if rate_per_s is not None else None)
        return ahead / rate if rate else None

    def forget_rates(self) -> None:
        """What serves has changed."""
        for flow in self._flows.values():
            flow.rate.forget()

    def _likely_part(self, flow: _Flow[T]) -> float:
        """The part of all service that a backlogged flow can count on: its weight's part of what those leave who have
        nothing queued, at least its part among all."""
        everybody = sum(other.share.weight for other in self._flows.values())
        backlogged = sum(other.share.weight for other in self._backlogged.values())
        in_service = sum(other.cost_in_service for other in self._flows.values())
        of_backlogged = sum(other.cost_in_service for other in self._backlogged.values())
        left = of_backlogged / in_service if in_service else 1.0
        return max(flow.share.weight / everybody, left * flow.share.weight / backlogged)

    def _take_out(self, entry: Entry[T]) -> _Flow[T]:
        flow = self._flows[entry.flow]
        line = flow.lines[entry.priority]
        del line[entry]
        if not line:
            del flow.lines[entry.priority]
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
        if len(self._flows) >= self._max_flows and name != OTHERS:
            idle = (flow for flow in self._flows.values() if not flow.num_queued and not flow.num_in_service)
            if (least := min(idle, key=_tag, default=None)) is None:
                return self._flow(OTHERS)
            del self._flows[least.name]
        flow: _Flow[T] = _Flow(name, self._share_of(name), self._now)
        self._flows[name] = flow
        return flow

    def _forget_if_idle(self, flow: _Flow[T]) -> None:
        if not self.num_queued and not self.num_in_service:
            self._flows.clear()
            self._now = self.queued_cost = 0.0
        elif not flow.num_queued and not flow.num_in_service and flow.tag <= self._now:
            del self._flows[flow.name]


def _tag(flow: _Flow[T]) -> float:
    return flow.tag
