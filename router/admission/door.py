"""What the router takes on: as much as the pools can carry, a bounded queue for the rest, a refusal at once beyond it.

    admit ─▶ in flight ──────────────────────────────▶ over (everything is given back, on every path)
       │        ▲ prefilled: its prompt counts no more
       └▶ waiting ──its turn──▶ in flight
             ├──cancelled, aborted, its client gone──▶ out of the queue at once
             └──queue_timeout_s, or displaced by a higher priority──▶ RESOURCE_EXHAUSTED

Who waits goes by fair_queue.py, what there is room for by capacity.py and budget.py. Whoever would wait longer than he
may is told so at once, with the time at which it is worth coming again. docs/admission.md says why the numbers are what
they are.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.admission.budget import Budget, Charge
from router.admission.capacity import Capacity, ForeignLoad, Limits, limits_of
from router.admission.fair_queue import Entry, FairQueue
from router.admission.output_lengths import OutputLengths
from router.admission.service_rate import ServiceRate
from router.admission.tenants import share_of
from router.config import AdmissionSettings
from router.request import GenerationRequest
from serving.errors import Overloaded, ServiceError, Unavailable
from serving.metrics import LatencyHistogram

_LOOK_S = 0.02
"""How old a look at the pools may be."""
_LOOK_AGAIN_S = 0.05
"""How soon the pools are looked at again while somebody waits."""
_OPTIMISM = 0.8
"""The part of the time limit that a predicted wait may fill: predictions err, and nothing is worse than to wait in
vain."""
_STAY_WEIGHT = 1 / 32
_JITTER = 0.5
"""Hints are spread over this part of themselves, upwards, lest all who were refused come again together."""


@dataclass(slots=True, eq=False)
class Place:
    """A request's place, waiting or in flight. `num_output_tokens` is for its holder to set before he leaves."""

    charge: Charge
    max_tokens: int
    num_output_tokens: int = 0
    in_flight: bool = False
    prefilled: bool = False
    started_s: float = 0.0
    turn: asyncio.Future[None] | None = None
    """Done when it is in flight, or displaced."""
    displaced: Overloaded | None = None


class Admission:
    """The router's one door. Belongs to one event loop; its public counters are read from anywhere."""

    def __init__(
        self,
        settings: AdmissionSettings,
        look: Callable[[], Capacity] = lambda: Capacity(num_instances=1),
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._look = look
        self._rng = rng or random.Random()
        self._clock = clock
        self._queue = FairQueue[Place](lambda tenant: share_of(tenant, settings), settings.max_tenants)
        self._lengths = OutputLengths(settings.expected_tokens)
        self._rate = ServiceRate()
        self._stay_s: float | None = None
        self._foreign = ForeignLoad()
        self._capacity = Capacity()
        self._looked_s = float("-inf")
        self._tick: asyncio.TimerHandle | None = None
        self.limits = Limits()
        """What may be in flight now."""
        self.held = Budget()
        """What is in flight."""
        self.num_admitted = 0
        self.num_abandoned = 0
        """Left the queue by themselves: cancelled, aborted, disconnected, past their deadline."""
        self.num_refused: Counter[str] = Counter()
        """By reason: queue_full, wait_too_long, deadline, queue_timeout, displaced, quota, no_instance."""
        self.wait_s = LatencyHistogram()
        """How long those who were let in had waited; most of them not at all."""

    @property
    def rate_per_s(self) -> float | None:
        """Tokens per second that begin while somebody waits. Before much of that has been seen, those in flight by how
        long a request stays (Little's law). None: nothing has ended yet."""
        return self._rate.per_s(self.held.num_tokens / self._stay_s if self._stay_s else None)

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return self.held.num_requests

    @property
    def num_tokens(self) -> int:
        """Prompt and expected output tokens of the requests in flight, every choice counted."""
        return self.held.num_tokens

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return self._queue.num_queued

    @property
    def num_queued_tokens(self) -> float:
        """Prompt and expected output tokens of the requests that wait."""
        return self._queue.queued_cost

    @property
    def num_tenants(self) -> int:
        """Tenants that are remembered: those with something here, or in debt to the others."""
        return self._queue.num_flows

    @property
    def num_waiting_tenants(self) -> int:
        """Tenants of whom something waits."""
        return self._queue.num_backlogged

    @asynccontextmanager
    async def admit(self, request: GenerationRequest) -> AsyncIterator[Place]:
        """Inside, `request` may run. Waits for its turn for `queue_timeout_s` at the most; raises Overloaded, with a
        hint when to come again, as soon as it is known that the turn will not come in time."""
        self._refresh()
        expected = self._lengths.expected(request.max_tokens)
        place = Place(Charge.of(request, expected, self._capacity.block_size), request.max_tokens)
        self._check_quota(request.tenant, place.charge)
        entered_s = self._clock()
        entry = self._queue.push(request.tenant, place, cost=place.charge.num_tokens, priority=request.priority)
        try:
            self._start_those_with_room(entry)
            if not place.in_flight:
                self._queue.stays(entry, entered_s)
                self._make_room_in_queue(entry)
                self._refuse_the_hopeless(entry, request.deadline_s)
                await self._turn(entry)
            self.wait_s.observe(self._clock() - entered_s)
            yield place
        finally:
            self._leave(entry)

    def prefilled(self, place: Place) -> None:
        """The first token is there: the prompt is no more work ahead of anybody. Idempotent."""
        if place.in_flight and not place.prefilled:
            place.prefilled = True
            self.held.prefilled(place.charge)
            self._start_those_with_room()

    # Capacity

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < _LOOK_S:
            return
        before, self._capacity, self._looked_s = self._capacity, self._look(), now_s
        if before.num_instances != self._capacity.num_instances:
            self._rate.forget()
            self._queue.forget_rates()
        foreign = self._foreign.observe(self._capacity, self.held.num_sequences, self.held.num_blocks, now_s)
        self.limits = limits_of(self._capacity, foreign, self._settings)

    # Who goes in

    def _start_those_with_room(self, newcomer: Entry[Place] | None = None) -> None:
        """Lets in whoever's turn it is while there is room. While no instance is ready, who waits goes on waiting and a
        newcomer passes: what to tell him is not decided here."""
        self._refresh()
        if not self._capacity.num_instances:
            if newcomer is not None:
                self._start(newcomer)
        else:
            while (entry := self._queue.head()) is not None and self.held.lack(entry.item.charge, self.limits) is None:
                self._start(entry)
        self._rate.observe(self._clock(), waiting=self._queue.head() is not None)
        if self._queue.num_queued and self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._tick = None
        self._start_those_with_room()

    def _start(self, entry: Entry[Place]) -> None:
        place, now_s = entry.item, self._clock()
        self._queue.start(entry, now_s)
        self._rate.observe(now_s, waiting=self._queue.num_queued > 0, cost=entry.cost)
        self.held.take(place.charge)
        self.num_admitted += 1
        place.in_flight, place.started_s = True, now_s
        if place.turn is not None and not place.turn.done():
            place.turn.set_result(None)

    def _leave(self, entry: Entry[Place]) -> None:
        place = entry.item
        if not place.in_flight:
            self._queue.remove(entry, self._clock())
        else:
            self.prefilled(place)
            place.in_flight = False
            self.held.give_back(place.charge)
            if place.num_output_tokens:
                self._lengths.observe(place.max_tokens, round(place.num_output_tokens / place.charge.num_sequences))
                stay_s = self._clock() - place.started_s
                self._stay_s = stay_s if self._stay_s is None else self._stay_s + _STAY_WEIGHT * (stay_s - self._stay_s)
            self._queue.finish(entry, place.charge.num_tokens + self._unexpected(place))
        self._start_those_with_room()

    def _unexpected(self, place: Place) -> int:
        """Output tokens beyond what the place was charged for, or below."""
        charged = place.charge.num_tokens - place.charge.num_sequences * place.charge.num_prefill_tokens
        return place.num_output_tokens - charged

    async def _turn(self, entry: Entry[Place]) -> None:
        place = entry.item
        place.turn = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                await place.turn
        except TimeoutError:
            if not place.in_flight:
                raise self._timed_out(entry) from None
        except asyncio.CancelledError:
            self.num_abandoned += not place.in_flight
            raise
        if place.displaced is not None:
            raise place.displaced

    # Who does not

    def _check_quota(self, tenant: str, charge: Charge) -> None:
        quota = share_of(tenant, self._settings).max_cost
        if quota is not None and charge.num_tokens > quota:
            self.num_refused["quota"] += 1
            raise Overloaded(f"{charge.num_tokens} tokens are more than this tenant may ever have, {quota:.0f}", None)

    def _make_room_in_queue(self, entry: Entry[Place]) -> None:
        """Refuses the newcomer that makes the queue too long, or the last of lower priority of the same tenant."""
        settings = self._settings
        num_queued, queued_cost = self._queue.queued_in(entry.flow)
        part = settings.max_queued_tokens / max(self._queue.num_backlogged, 1)
        too_many = num_queued > settings.max_queued
        if not too_many and (self._queue.queued_cost <= settings.max_queued_tokens or queued_cost <= part):
            return
        last = self._queue.last(entry.flow)
        if last is None or last.priority >= entry.priority or last.item.turn is None or last.item.turn.done():
            what = f"{num_queued - 1} requests" if too_many else f"{queued_cost - entry.cost:.0f} tokens"
            raise self._refusal("queue_full", f"{what} wait already, the most allowed", entry)
        last.item.displaced = self._refusal("displaced", "requests of higher priority fill the queue", last)
        last.item.turn.set_result(None)

    def _refuse_the_hopeless(self, entry: Entry[Place], deadline_s: float | None) -> None:
        wait_s = self._queue.predicted_wait_s(entry, self.rate_per_s)
        if wait_s is None:
            return
        limit_s = self._settings.queue_timeout_s
        if wait_s > _OPTIMISM * limit_s:
            raise self._refusal("wait_too_long", f"the wait would be {wait_s:.1f} s, {limit_s:g} at most", entry)
        if deadline_s is not None and wait_s > deadline_s - self._clock():
            raise self._refusal("deadline", f"the wait would be {wait_s:.1f} s, past the request's deadline", entry)

    def _timed_out(self, entry: Entry[Place]) -> ServiceError:
        if not self._capacity.num_instances:
            self.num_refused["no_instance"] += 1
            return Unavailable("no decode instance is available")
        return self._refusal("queue_timeout", f"no room within {self._settings.queue_timeout_s:g} s", entry)

    def _refusal(self, reason: str, problem: str, entry: Entry[Place]) -> Overloaded:
        """The answer with an honest hint: when those are served who wait now."""
        self.num_refused[reason] += 1
        wait_s = self._queue.predicted_wait_s(entry, self.rate_per_s) or 0.0
        hint_s = min(max(wait_s, self._settings.retry_after_s), self._settings.max_retry_after_s)
        return Overloaded(f"the router is full: {problem}", hint_s * self._rng.uniform(1.0, 1.0 + _JITTER))
