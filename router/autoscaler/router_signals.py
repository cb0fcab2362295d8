"""What the requests of each router show of the pools: its recent latencies and its queue, and those of its peers.

    discovered ──asked every interval_s──▶ answers ⇄ silent (no answer for three intervals, or none yet)
        ▲           └─ its answer has this router's id ──▶ self: not asked again, and not counted twice
        └── discovered again ◀── gone from the discovery: forgotten

A silent router counts as a router. Its queue is unknown: it makes no pool grow, and no pool shrinks until it answers or
is gone.

A quantile of several routers is that of their samples together, so routers exchange samples, those that are equal
within 2 % as one: the quantile is off by as much, and a window of thousands takes a few hundred values.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Self

import grpc
import grpc.aio

from protos.tandem.v1 import instance_pb2, signals_pb2, signals_pb2_grpc
from router.autoscaler.settings import AutoscalerSettings, SignalSettings
from router.picking.placement import Plan
from router.pools.discovery import ServiceDiscovery, follow
from router.pools.instance_info import ROLES, WIRE_ROLES, Role
from serving.settings import parse_address

_log = logging.getLogger(__name__)
_SILENT_INTERVALS = 3
_MAX_SAMPLES = 4096
"""Enough for any quantile; the newest are kept."""
_EQUAL = math.log(1.02)
"""Latencies whose logarithms differ by less are sent as one."""


class LatencySample(NamedTuple):
    """One latency, or several that are equal."""

    seconds: float
    weight: float = 1.0
    num_requests: int = 1


def weighted_quantile(samples: Iterable[tuple[float, float]], fraction: float) -> float:
    """The least value that `fraction` of the weight does not exceed; of at least one (value, weight)."""
    by_value = sorted(samples)
    cumulative = [*accumulate(weight for _, weight in by_value)]
    return by_value[bisect_left(cumulative, fraction * cumulative[-1])][0]


def quantile(samples: Iterable[LatencySample], fraction: float, min_requests: int) -> float | None:
    """As `weighted_quantile`; None with fewer than `min_requests`, which is at least 1."""
    known = list(samples)
    if sum(sample.num_requests for sample in known) < min_requests:
        return None
    return weighted_quantile(((sample.seconds, sample.weight) for sample in known), fraction)


def summarised(samples: Iterable[LatencySample]) -> list[LatencySample]:
    """Those that are equal within 2 % as one, at their weighted mean."""
    alike: dict[int, LatencySample] = {}
    for sample in samples:
        key = math.floor(math.log(max(sample.seconds, 1e-6)) / _EQUAL)
        known = alike.get(key, LatencySample(0.0, 0.0, 0))
        weight = known.weight + sample.weight
        mean_s = (known.seconds * known.weight + sample.seconds * sample.weight) / weight if weight else sample.seconds
        alike[key] = LatencySample(mean_s, weight, known.num_requests + sample.num_requests)
    return list(alike.values())


class Window:
    """Weighted samples of the last `length_s` seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._samples: deque[tuple[float, LatencySample]] = deque(maxlen=_MAX_SAMPLES)

    def add(self, at_s: float, seconds: float, weight: float = 1.0) -> None:
        """One sample. `at_s` never falls."""
        self._samples.append((at_s, LatencySample(seconds, weight)))

    def samples(self, now_s: float) -> list[LatencySample]:
        while self._samples and now_s - self._samples[0][0] > self._length_s:
            self._samples.popleft()
        return [sample for _, sample in self._samples]


class RecentLatencies:
    """TTFT and ITL of recent requests, at the quantile that must meet the objective. One per router.

    A request counts unless it has used an instance that was still warming up: what slows its first requests
    (compilation, empty caches) would only happen more often with more instances. Its TTFT counts with its first token;
    its ITL, the mean gap after that, with its end, once for each gap, so that the quantile is one of tokens.
    """

    def __init__(self, settings: AutoscalerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._windows = {role: Window(settings.latency_window_s) for role in WIRE_ROLES}

    def are_warm(self, plan: Plan) -> bool:
        """Whether the latencies of a request at the instances of `plan` count."""
        prefill = plan.prefill.up_s if plan.prefill is not None else math.inf
        return plan.decode.up_s >= self._settings.decode.warm_up_s and prefill >= self._settings.prefill.warm_up_s

    def first_token(self, ttft_s: float) -> None:
        self._windows["prefill"].add(self._clock(), ttft_s)

    def ended(self, itl_s: float, num_gaps: float) -> None:
        """A request is over; it had `num_gaps` gaps between tokens, of `itl_s` on average."""
        self._windows["decode"].add(self._clock(), itl_s, num_gaps)

    def samples(self, role: Role) -> list[LatencySample]:
        """TTFT for the prefill pool, ITL for the decode pool."""
        return self._windows[role].samples(self._clock())

    def of(self, role: Role, others: Sequence[RouterSignals] = ()) -> float | None:
        """TTFT for the prefill pool, ITL for the decode pool, of this router and the others together, in seconds; None:
        too few requests."""
        samples = [*self.samples(role), *(sample for other in others for sample in other.latencies.get(role, ()))]
        return quantile(samples, self._settings.latency_quantile, self._settings.min_samples)


class QueueSample(NamedTuple):
    """The requests that wait at routers for lack of one pool."""

    num_queued: int = 0
    delay_s: float | None = 0.0
    """How long a new request would wait; None: requests wait, and no request has ended yet from which to predict it."""


EMPTY_QUEUE = QueueSample()


def combined(queues: Iterable[QueueSample]) -> QueueSample:
    """The queues of several routers as one, whose delay is the average wait of its requests. A router without a queue
    does not hide that of another one."""
    waiting = [queue for queue in queues if queue.num_queued]
    known = [(queue.num_queued, queue.delay_s) for queue in waiting if queue.delay_s is not None]
    num_known = sum(number for number, _ in known)
    if not waiting:
        return EMPTY_QUEUE
    delay_s = sum(number * delay_s for number, delay_s in known) / num_known if known else None
    return QueueSample(sum(queue.num_queued for queue in waiting), delay_s)


@dataclass(frozen=True, slots=True)
class RouterSignals:
    """What the requests of one router show of the pools."""

    queue: QueueSample = EMPTY_QUEUE
    lacking: Role | None = None
    """The pool that the queue waits for; None: neither (`lacking_pool`)."""
    latencies: Mapping[Role, Sequence[LatencySample]] = field(default_factory=dict)
    idle_s: float = math.inf
    """Since the last request ended; 0 while there is one."""
    is_serving: bool = True

    def to_wire(self, router_id: str) -> signals_pb2.GetSignalsResponse:
        ttft, itl = (summarised(self.latencies.get(role, ())) for role in WIRE_ROLES)
        return signals_pb2.GetSignalsResponse(
            router_id=router_id,
            num_queued=self.queue.num_queued,
            queue_delay_s=self.queue.delay_s,
            lacking=WIRE_ROLES[self.lacking] if self.lacking is not None else instance_pb2.ROLE_UNSPECIFIED,
            ttft=[signals_pb2.LatencySample(**sample._asdict()) for sample in ttft],
            itl=[signals_pb2.LatencySample(**sample._asdict()) for sample in itl],
            idle_s=self.idle_s if self.idle_s < math.inf else None,
            not_serving=not self.is_serving,
        )

    @classmethod
    def from_wire(cls, message: signals_pb2.GetSignalsResponse) -> Self:
        delay_s = message.queue_delay_s if message.HasField("queue_delay_s") else None
        idle_s = message.idle_s if message.HasField("idle_s") else math.inf
        latencies = {
            role: [LatencySample(one.seconds, one.weight, one.num_requests) for one in samples]
            for role, samples in zip(WIRE_ROLES, (message.ttft, message.itl), strict=True)
        }
        queue, lacking = QueueSample(message.num_queued, delay_s), ROLES.get(message.lacking)
        return cls(queue, lacking, latencies, idle_s, is_serving=not message.not_serving)


@dataclass(slots=True, eq=False)
class _Peer:
    """One address of a router."""

    address: str
    channel: grpc.aio.Channel
    is_self: bool = False
    router_id: str = ""
    """Of the last answer, as `signals`."""
    signals: RouterSignals | None = None
    answered_s: float = -math.inf


@dataclass(slots=True, eq=False)
class Peers:
    """One per router, on its event loop."""

    router_id: str
    discovery: ServiceDiscovery
    dial: Callable[[str], grpc.aio.Channel]
    settings: SignalSettings
    _peers: dict[str, tuple[_Peer, asyncio.Task[None]]] = field(default_factory=dict)

    async def run(self) -> None:
        """Follows and asks the other routers until it is cancelled."""
        try:
            await follow(self.discovery, self._reconcile, "the addresses of the other routers")
            await asyncio.Event().wait()
        finally:
            asking = [task for _, task in self._peers.values()]
            self._reconcile(frozenset())
            await asyncio.gather(*asking, return_exceptions=True)

    @property
    def num_routers(self) -> int:
        """Routers of these pools, this one included. While an answer is missing, this one is taken for one of those
        that are discovered."""
        is_missing = all(peer.signals is not None and not peer.is_self for peer in self._known)
        return len(self._known) + is_missing

    @property
    def num_silent(self) -> int:
        return sum(map(self._is_silent, self._others))

    def signals(self) -> Sequence[RouterSignals]:
        """Of every other router that answers, as of its last answer."""
        return [peer.signals for peer in self._others if peer.signals is not None and not self._is_silent(peer)]

    @property
    def hosts(self) -> Sequence[tuple[str, RouterSignals | None]]:
        """Every host at which a router answers, and its signals; None: this router."""
        return [
            (parse_address(peer.address)[0], None if peer.is_self else peer.signals)
            for peer, _ in self._peers.values()
            if peer.is_self or not self._is_silent(peer)
        ]

    def _is_silent(self, peer: _Peer) -> bool:
        return time.monotonic() - peer.answered_s > _SILENT_INTERVALS * self.settings.interval_s

    @property
    def _known(self) -> Sequence[_Peer]:
        """Each router once, by an address at which it answers (IPv4 or IPv6). One that never did counts as a router."""
        found: dict[str, _Peer] = {}
        for peer, _ in self._peers.values():
            router = peer.router_id or peer.address
            found[router] = min(found.get(router, peer), peer, key=self._is_silent)
        return [*found.values()]

    @property
    def _others(self) -> Sequence[_Peer]:
        return [peer for peer in self._known if not peer.is_self]

    def _reconcile(self, addresses: frozenset[str]) -> None:
        for address in addresses - self._peers.keys():
            peer = _Peer(address, self.dial(address))
            self._peers[address] = (peer, asyncio.create_task(self._ask(peer), name=f"signals of {address}"))
        for address in self._peers.keys() - addresses:
            _, asking = self._peers.pop(address)
            asking.cancel()

    async def _ask(self, peer: _Peer) -> None:
        """Asks one router, until it turns out to be this one; then closes its channel."""
        async with peer.channel:
            stub = signals_pb2_grpc.SignalsServiceStub(peer.channel)
            interval_s, problem = self.settings.interval_s, ""
            while not peer.is_self:
                try:
                    answer = await stub.GetSignals(signals_pb2.GetSignalsRequest(), timeout=interval_s)
                except grpc.aio.AioRpcError as error:
                    if not problem:
                        _log.warning("the router at %s does not answer: %s", peer.address, error.details())
                    problem = error.code().name
                else:
                    peer.router_id, peer.is_self = answer.router_id, answer.router_id == self.router_id
                    peer.signals, peer.answered_s, problem = RouterSignals.from_wire(answer), time.monotonic(), ""
                await asyncio.sleep(interval_s)
