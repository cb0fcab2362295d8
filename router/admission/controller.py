"""The admission controller: admits what the pools can carry, queues a bounded rest, and rejects what exceeds both.

    instance_available ─▶ held while there is no decode instance, at most instance_wait_s, before its validation

    admit ─▶ in flight ──────────────────────────────▶ over (its charge is removed, on every path)
       │        ▲ prefilled, or its first token is overdue: its prompt no longer counts
       │        └──its slot goes to a tenant with less──▶ paused ──its turn──▶ in flight
       └▶ waiting ──its turn──▶ in flight
             ├──cancelled, aborted, disconnected──▶ out of the queue at once
             └──queue_timeout_s, or displaced by a higher priority──▶ RESOURCE_EXHAUSTED ◀──not begun in time──in flight

fair_queue.py decides the order, capacity.py what there is room for, slots.py which streams pause for others. A request
is rejected immediately when its predicted wait exceeds the limit, with a hint when to retry. docs/admission.md explains
the constants.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

from router.admission.capacity import Capacity, Charge, ExternalLoadEstimator, Limits, Usage, limits_of
from router.admission.fair_queue import Entry, Excess, FairQueue, ServiceRate
from router.admission.settings import AdmissionSettings
from router.admission.slots import TenantShares, Ticket, TooLate
from router.request.generation_request import GenerationRequest
from serving.errors import Overloaded, ServiceError, Unavailable
from serving.histogram import Histogram

_LENGTH_WEIGHT = 1 / 32
_NUM_LATEST = 64
"""Lengths that are remembered, for each power of two of `max_tokens`."""
_REFRESH_S = 0.02
"""How old a snapshot of the pools may be."""
_POLL_S = 0.05
"""How often the pools are checked while requests wait."""
_PATIENCE_S = 0.1
"""How long a request waits before streams pause for it: where many end, it gets a slot without."""
_OPTIMISM = 0.8
"""The part of the time limit that a predicted wait may fill: predictions err, and a wait that ends in a rejection is
worst."""
_STAY_WEIGHT = 1 / 32
_JITTER = 0.5
"""Retry hints are increased by up to this part at random, so that rejected requests do not come back together."""
_MOST_S = 1.0
"""That passes between two readings of the clock: what is longer was a halt, as of a container or a paused machine."""
REASONS = ("queue_full", "wait_too_long", "deadline", "queue_timeout", "displaced", "quota", "no_instance", "late")


class Rejected(Overloaded):
    """By admission, for one of `REASONS`."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None) -> None:
        super().__init__(message, retry_after_s)
        self.reason = reason


class RunningClock:
    """Monotonic seconds without halts of this process, so that waits, stays and rates are of its own doing. To be read
    several times a second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._running_s = 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        self._running_s += min(now_s - self._read_s, _MOST_S)
        self._read_s = now_s
        return self._running_s


class OutputLengths:
    """Predicts a choice's output length: the mean of those that have ended, then of the last ones.

    `max_tokens` is no estimate: most clients leave it at what the context allows and stop far earlier, and reserving
    for the worst case would leave half the capacity unused. Means are separate for each power of two of `max_tokens`.
    """

    def __init__(self, initial: int) -> None:
        self._initial = float(initial)
        self._observed: dict[int, tuple[int, float]] = {}  # number and mean, by the bit length of max_tokens
        self._latest: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=_NUM_LATEST))

    def expected(self, max_tokens: int) -> int:
        """Output tokens to expect of a choice that may have `max_tokens`: 1..max_tokens."""
        _, mean = self._observed.get(max_tokens.bit_length(), (0, self._initial))
        return max(1, min(max_tokens, round(mean)))

    def short(self, max_tokens: int) -> int | None:
        """Output tokens that nine of the last ten such choices exceeded; None: none has ended."""
        latest = sorted(self._latest.get(max_tokens.bit_length(), ()))
        return max(1, min(max_tokens, latest[len(latest) // 10])) if latest else None

    def observe(self, max_tokens: int, num_tokens: int) -> None:
        """A choice with this `max_tokens` has ended after `num_tokens`."""
        self._latest[max_tokens.bit_length()].append(num_tokens)
        num_before, mean = self._observed.get(max_tokens.bit_length(), (0, 0.0))
        weight = max(_LENGTH_WEIGHT, 1 / (num_before + 1))
        self._observed[max_tokens.bit_length()] = num_before + 1, mean + weight * (num_tokens - mean)


@dataclass(eq=False)
class AdmissionController:
    """Every request of the router passes it. Belongs to one event loop; its counters may be read from any thread."""

    settings: AdmissionSettings
    capacity: Callable[[], Capacity] = lambda: Capacity(num_instances=1)
    num_routers: Callable[[], int] | None = None
    """Routers that share the capacity; None: `settings.num_routers`."""
    ttft_s: float = math.inf
    """The objective of requests: prompts that miss it are computed last, and delay no other."""
    rng: random.Random = field(default_factory=random.Random)
    clock: Callable[[], float] = field(default_factory=RunningClock)

    def __post_init__(self) -> None:
        self.lengths = OutputLengths(self.settings.expected_tokens)
        self._rate = ServiceRate()
        self._mean_stay_s: float | None = None
        self._external = ExternalLoadEstimator()
        self._capacity = Capacity()
        self._refreshed_s = float("-inf")
        self._poll: asyncio.TimerHandle | None = None
        self.limits = Limits()
        self._slots = Limits()
        """Without the choices that wait at the instances: what pauses, or has paused, gets or leaves a real slot."""
        self.in_use = Usage()
        self._prompts: dict[Ticket, float] = {}
        """The requests in flight whose prompts count, and when their first token is overdue."""
        self._shares = TenantShares(self.settings)
        self.queue = FairQueue[Ticket](self.settings.share_of, self.settings.max_tenants)
        """The requests that wait, in flows of their tenants; costs are tokens, prompt and expected output."""
        self.num_paused = 0
        """Times that a stream gave its slot to another tenant."""
        self.num_held = 0
        """Requests that wait for the first decode instance, not validated yet: that needs an instance's limits."""
        self._busy_s = -math.inf
        """When there was a request last."""
        self.num_rejected: Counter[str] = Counter()
        """By one of `REASONS`."""
        self.wait_s = Histogram()
        """Of the admitted requests; most of them do not wait."""

    @property
    def rate_per_s(self) -> float | None:
        """Tokens per second that begin while requests wait. Until enough of them are observed, the tokens in flight by
        how long a request stays (Little's law). None: no request has ended yet."""
        return self._rate.per_s(self.in_use.num_tokens / self._mean_stay_s if self._mean_stay_s else None)

    @property
    def num_queued(self) -> int:
        return self.queue.num_queued + self.num_held

    @property
    def idle_s(self) -> float:
        """Seconds since the last request was over; 0 while there is one, infinite before the first."""
        return 0.0 if self.in_use.num_requests or self.num_queued else self.clock() - self._busy_s

    async def instance_available(self) -> bool:
        """Returns as soon as there is a decode instance, and after `instance_wait_s` without one: False then. The
        request goes on all the same: one that is only silent may serve it. Raises Overloaded if `max_queued` requests
        wait for one already."""
        self.refresh()
        if self._capacity.num_instances or not self.settings.instance_wait_s:
            return True
        if self.num_held >= self.settings.max_queued:
            self.num_rejected["queue_full"] += 1
            waiting = f"{self.num_held} requests wait already for the first decode instance, the most allowed"
            raise Overloaded(f"the router is full: {waiting}", self._jittered(self.settings.max_retry_after_s))
        self.num_held += 1
        try:
            async with asyncio.timeout(self.settings.instance_wait_s):
                while not self._capacity.num_instances:
                    await asyncio.sleep(_POLL_S)
                    self.refresh()
        except TimeoutError:
            pass
        finally:
            self.num_held -= 1
            self._busy_s = self.clock()
        return bool(self._capacity.num_instances)

    def no_instance_came(self) -> None:
        """A request for which `instance_available` returned False has ended without one."""
        self.num_rejected["no_instance"] += 1

    @asynccontextmanager
    async def admit(
        self, request: GenerationRequest, has_new_room: Callable[[], Awaitable[bool]] | None = None
    ) -> AsyncIterator[Ticket]:
        """Inside, `request` may run. Waits for its turn, at most `queue_timeout_s`; raises Overloaded, with a hint when
        to retry, as soon as it is known that the turn will not come in time. Before that it waits for `has_new_room`,
        where given: True: there may be room now, so the request tries again."""
        async with AsyncExitStack() as stack:
            while True:
                try:
                    ticket = await stack.enter_async_context(self._admitted(request))
                    break
                except Rejected as error:
                    if error.retry_after_s is None or has_new_room is None or not await has_new_room():
                        self.num_rejected[error.reason] += 1
                        raise
            yield ticket

    @asynccontextmanager
    async def _admitted(self, request: GenerationRequest) -> AsyncIterator[Ticket]:
        """Raises Rejected: before it yields, `admit` counts it; after that (`late`) it is counted here."""
        self.refresh()
        expected = self.lengths.expected(request.max_tokens)
        ticket = Ticket(Charge.of(request, expected, self._capacity.block_size), request.num_tokens_left)
        self._check_quota(request.tenant, ticket.charge)
        ticket.waiting_since_s = entered_s = self.clock()
        entry = self.queue.push(request.tenant, ticket, cost=ticket.charge.num_tokens, priority=request.priority)
        try:
            self._start_those_with_room(entry)
            if not ticket.in_flight:
                self.queue.wait_begins(entry, entered_s)
                self._make_room_in_queue(entry)
                self._check_predicted_wait(entry, request.remaining_s)
                await self._wait_turn(entry)
            self.wait_s.observe(self.clock() - entered_s)
            yield ticket
        except TooLate as error:
            self.num_rejected["late"] += 1
            raise self._rejection("late", error.message) from None
        finally:
            self._leave(entry)

    def prefilled(self, ticket: Ticket) -> None:
        """The request has its first token: its prompt delays no other request any more. Idempotent."""
        if ticket.in_flight and not ticket.prefilled:
            ticket.prefilled, ticket.prefill_s = True, ticket.in_flight_s(self.clock())
            self._leave_prompt_out(ticket)
            self._start_those_with_room()

    # Capacity

    def refresh(self) -> None:
        """Takes a snapshot of the pools if the last one is too old. To be called several times a second, also while no
        request comes or ends: the load of other routers is that of a whole second."""
        now_s = self.clock()
        if now_s - self._refreshed_s < _REFRESH_S:
            return
        if self._capacity.puts_late_last:
            for ticket in [ticket for ticket, due_s in self._prompts.items() if due_s <= now_s]:
                self._leave_prompt_out(ticket)
        before, self._capacity, self._refreshed_s = self._capacity, self.capacity(), now_s
        if before.num_instances != self._capacity.num_instances:
            self._rate.reset()
            self.queue.reset_rates()
        external = self._external.observe(self._capacity, self.in_use, now_s, self.idle_s)
        num_routers = self.settings.num_routers if self.num_routers is None else self.num_routers()
        self.limits = limits_of(self._capacity, external, self.settings, num_routers)
        num_slots = self.limits.num_sequences / max(1.0, self.settings.sequence_fraction)
        self._slots = replace(self.limits, num_sequences=num_slots)

    # Admission

    def _start_those_with_room(self, newcomer: Entry[Ticket] | None = None) -> None:
        """Starts queued requests in order while there is room. While no instance is ready, they go on waiting; a
        newcomer is admitted, and so are paused streams: their errors are decided elsewhere."""
        self.refresh()
        if not self._capacity.num_instances:
            if newcomer is not None:
                self._start(newcomer)
            while (paused := next((head for head in self.queue.heads() if head.has_run), None)) is not None:
                self._start(paused)
        else:
            has_paused = False  # then the slots that it has left over were not free either
            while (found := self._next()) is not None:
                entry, is_free = found
                has_paused = has_paused or not is_free
                self._start(entry, had_free_slot=not has_paused)
        self._rate.observe(self.clock(), waiting=self.queue.head() is not None)
        if self.queue.num_queued and self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(_POLL_S, self._poll_pools)

    def _next(self) -> tuple[Entry[Ticket], bool] | None:
        """The next request that has room; if the first has none, one of the tenant that has least and may take it. With
        it whether its slot is free, and no stream pauses for it."""
        if (head := self.queue.head()) is None:
            return None
        limits, claim = self._slots if head.has_run else self.limits, head
        fits = self.in_use.exceeded_limit(head.item.charge, limits) is None
        if not fits:
            claim = min(self.queue.heads(), key=lambda entry: self._shares.part(entry.flow, self.limits))
        if yielding := self._shares.yielding_to(claim.flow, claim.item.charge, self.in_use, self._slots, self.clock()):
            return (claim, False) if self._pause(yielding, claim) else None
        return (claim, True) if fits else None

    def _pause(self, yielding: list[Entry[Ticket]], claim: Entry[Ticket]) -> bool:
        """Pauses streams if `claim` has waited for so long that no slot seems to become free by itself."""
        now_s = self.clock()
        if now_s - claim.item.waiting_since_s < _PATIENCE_S:
            return False
        for entry in yielding:
            self.in_use.remove(entry.item.charge)
            self._shares.remove(entry)
            self.queue.requeue(entry, now_s)
            self.num_paused += 1
            entry.item.pause(now_s)
        return True

    def _poll_pools(self) -> None:
        self._poll = None
        self._start_those_with_room()

    def _start(self, entry: Entry[Ticket], had_free_slot: bool = True) -> None:
        ticket, now_s = entry.item, self.clock()
        self.queue.start(entry, now_s)
        self._rate.observe(now_s, waiting=self.queue.num_queued > 0, cost=0.0 if entry.has_run else entry.cost)
        self.in_use.add(ticket.charge)
        if ticket.prefilled:
            self.in_use.prefilled(ticket.charge)
        else:
            self._prompts[ticket] = ticket.waiting_since_s + self.ttft_s
        ticket.start(now_s)
        self._shares.add(entry, had_free_slot=had_free_slot)

    def _leave_prompt_out(self, ticket: Ticket) -> None:
        """The prompt of a request in flight is computed, or overdue."""
        if self._prompts.pop(ticket, None) is not None:
            self.in_use.prefilled(ticket.charge)

    def _leave(self, entry: Entry[Ticket]) -> None:
        ticket, self._busy_s = entry.item, self.clock()
        if not ticket.in_flight:
            if ticket.displaced is None:
                self.queue.remove(entry, self.clock())
        else:
            self.prefilled(ticket)
            self.in_use.remove(ticket.charge)
            self._shares.remove(entry, ended_s=self.clock())
            if ticket.num_emitted():
                self._learn(ticket)
            ticket.in_flight = False
            num_unexpected = ticket.num_emitted() - ticket.charge.num_output_tokens  # may be negative
            self.queue.finish(entry, ticket.charge.num_tokens + num_unexpected)
        self._start_those_with_room()

    def _learn(self, ticket: Ticket) -> None:
        self.lengths.observe(ticket.max_tokens, round(ticket.num_emitted() / ticket.charge.num_sequences))
        stay_s = ticket.in_flight_s(self.clock())
        mean_s = stay_s if self._mean_stay_s is None else self._mean_stay_s
        self._mean_stay_s = mean_s + _STAY_WEIGHT * (stay_s - mean_s)

    async def _wait_turn(self, entry: Entry[Ticket]) -> None:
        ticket = entry.item
        ticket.turn = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self.settings.queue_timeout_s):
                await ticket.turn
        except TimeoutError:
            if not ticket.in_flight and ticket.displaced is None:
                raise self._timed_out(entry) from None
        if ticket.displaced is not None:
            raise ticket.displaced

    # Rejection

    def _check_quota(self, tenant: str, charge: Charge) -> None:
        quota = self.settings.share_of(tenant).max_tokens
        if quota is not None and charge.num_tokens > quota:
            raise Rejected("quota", f"{charge.num_tokens} tokens exceed this tenant's limit of {quota}", None)

    def _make_room_in_queue(self, entry: Entry[Ticket]) -> None:
        """If the queue is too long, rejects the newcomer, or the last request of lower priority of the same tenant."""
        settings = self.settings
        num_queued, queued_cost = self.queue.queued_in(entry.flow)
        part = settings.max_queued_tokens / max(self.queue.num_backlogged, 1)
        too_many = num_queued > settings.max_queued
        is_alone = self.queue.num_queued == 1 and settings.max_queued_tokens > 0
        is_short = is_alone or self.queue.queued_cost <= settings.max_queued_tokens
        if not too_many and (is_short or queued_cost <= part):
            return
        last = self.queue.last(entry.flow)
        if last is None or last.priority >= entry.priority or last.item.turn is None:
            if too_many:
                problem = f"{num_queued - 1} requests wait already, the most allowed"
            else:
                while_others = " while others wait" if settings.max_queued_tokens else ""
                problem = f"{queued_cost:.0f} tokens would wait, {part:.0f} are allowed{while_others}"
            raise self._rejection("queue_full", problem, entry)
        last.item.displaced = self._rejection("displaced", "requests of higher priority fill the queue", last)
        self.queue.remove(last, self.clock())
        if not last.item.turn.done():  # else it has just been cancelled, and leaves by itself
            last.item.turn.set_result(None)

    def _check_predicted_wait(self, entry: Entry[Ticket], remaining_s: float | None) -> None:
        wait_s = self._predicted_wait_s(entry)
        if wait_s is None:
            return
        limit_s = _OPTIMISM * self.settings.queue_timeout_s
        if wait_s > limit_s:
            raise self._rejection("wait_too_long", f"the wait would be {wait_s:.1f} s, {limit_s:g} at most", entry)
        if remaining_s is not None and wait_s > remaining_s:
            raise self._rejection("deadline", f"the wait would be {wait_s:.1f} s, past the request's deadline", entry)

    def _predicted_wait_s(self, entry: Entry[Ticket]) -> float | None:
        """Until those before it in its tenant's queue have started, and at least until its tenant has a turn."""
        ahead_s = self.queue.predicted_wait_s(entry, self.rate_per_s)
        turn_s = self._next_turn_s(entry)
        return max(ahead_s or 0.0, turn_s) if turn_s else ahead_s

    def _next_turn_s(self, entry: Entry[Ticket]) -> float:
        """Until a request ends: of its own tenant, if that one is at its own limits, alone or with those ahead, or if
        several of its streams have paused and others take what they free. A single paused stream soon goes on. Below
        these limits 0 if prompts are in its way, or slots that its tenant may take for it and those ahead of it."""
        tenant, num_ahead, own_s = entry.flow, self.queue.num_ahead(entry), 0.0
        if excess := self.queue.excess_behind(entry):
            own_s = self._shares.next_end_s(excess, self.clock(), of=tenant)
        if not self.queue.may_start(tenant):
            return own_s
        claimed = entry.item.charge.times(num_ahead + 1)
        is_behind_prompts = self.in_use.num_prefill_tokens >= self.limits.num_prefill_tokens
        if is_behind_prompts or self._shares.yielding_to(tenant, claimed, self.in_use, self._slots, math.inf):
            return own_s
        is_above_share = self.queue.num_returned(tenant) > 1
        needed = Excess(num_ahead + 1, 0)
        return max(own_s, self._shares.next_end_s(needed, self.clock(), of=tenant if is_above_share else None))

    def _timed_out(self, entry: Entry[Ticket]) -> ServiceError:
        if not self._capacity.num_instances:
            self.num_rejected["no_instance"] += 1
            return Unavailable("no decode instance is available")
        return self._rejection("queue_timeout", f"no room within {self.settings.queue_timeout_s:g} s", entry)

    def _rejection(self, reason: str, problem: str, entry: Entry[Ticket] | None = None) -> Rejected:
        """The error, with the predicted wait of `entry` as the retry hint, if it waits here."""
        wait_s = (self._predicted_wait_s(entry) if entry is not None else None) or 0.0
        hint_s = min(max(wait_s, self.settings.retry_after_s), self.settings.max_retry_after_s)
        return Rejected(reason, f"the router is full: {problem}", self._jittered(hint_s))

    def _jittered(self, hint_s: float) -> float:
        return hint_s * self.rng.uniform(1.0, 1.0 + _JITTER)
