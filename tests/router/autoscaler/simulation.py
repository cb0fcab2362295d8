"""Pools under load in virtual time: a queue that all instances of the decode pool share, beside an idle prefill pool.

Requests arrive at random (Poisson, from a seed), wait until an instance has a place, run for `SERVICE_S` on average
and leave. An instance that is asked for starts after `start_s`; one that is to go leaves what it runs to the others.
The owner of the instances is an `Actuator` with a lease for the leader, and can be set to fail.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc.aio

from router.autoscaler.loop import Autoscaler
from router.autoscaler.observation import PoolObservation
from router.autoscaler.resizer import ActuatorError, Resizer
from router.autoscaler.settings import AutoscalerSettings
from router.pools.discovery import StaticDiscovery
from router.pools.instance import State
from router.pools.instance_info import Role
from router.pools.pool import Pools
from router.pools.settings import PoolSettings
from tests.router.autoscaler.builders import NUM_SEQS, instance, pool, pool_of

SERVICE_S = 4.0
PER_INSTANCE = NUM_SEQS / SERVICE_S
"""Requests per second that an instance can serve."""
_TICK_S = 1.0

Load = Callable[[float], float]
"""Requests per second at a time."""


@dataclass
class Owner:
    """Desired sizes, and the lead. Its time is the event loop's."""

    of: dict[Role, int]
    resizes: list[tuple[float, Role, int]] = field(default_factory=list)
    failure: str | Exception | None = None
    num_asked: int = 0
    num_at_once: int = 0
    most_at_once: int = 0
    delay_s: float = 0.0
    holder: str | None = None
    until_s: float = -math.inf
    leads: list[str] = field(default_factory=list)
    pause: str | None = None
    lack: str | None = None
    """Why what is ordered cannot start."""
    full: Role | None = None
    """The one pool that `lack` is about; None: both."""
    refused: Role | None = None
    """No resize of this pool is possible."""

    async def sizes(self) -> Mapping[Role, int]:
        self._may_fail()
        return dict(self.of)

    async def resize(self, role: Role, size: int, victims: Sequence[str], *, previous_size: int) -> None:
        self._may_fail()
        if role == self.refused:
            raise ActuatorError(f"no memory for {size} instances")
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.num_at_once -= 1
        self.of[role] = size
        self.resizes.append((now(), role, size))

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        self._may_fail()
        if self.holder not in (None, holder) and now() < self.until_s:
            return False
        if self.holder != holder:
            self.leads.append(holder)
        self.holder, self.until_s = holder, now() + ttl_s
        return True

    async def no_room(self, role: Role) -> str | None:
        return self.lack if self.full in (None, role) else None

    def _may_fail(self) -> None:
        self.num_asked += 1
        if isinstance(self.failure, Exception):
            raise self.failure
        if self.failure is not None:
            raise ActuatorError(self.failure)


def now() -> float:
    return asyncio.get_running_loop().time()


class Simulation:
    """The decode pool of `owner`. `advance` moves it to the present; `observation` is what an observer would see."""

    def __init__(self, owner: Owner, load: Load, settings: AutoscalerSettings, *, start_s: float = 5.0, seed: int = 0):
        self.owner = owner
        self._load = load
        self._settings = settings
        self._start_s = start_s
        self._rng = random.Random(seed)
        self._up_since_s = [-math.inf] * owner.of["decode"]
        self._at_s = 0.0
        self.num_inside = 0
        self.blackout = False
        """Whether no report comes."""

    def advance(self) -> None:
        while self._at_s + _TICK_S <= now():
            self._at_s += _TICK_S
            self._follow_size()
            ready = sum(self._at_s >= up_s for up_s in self._up_since_s)
            running = min(self.num_inside, ready * NUM_SEQS)
            gone = sum(self._rng.random() < _TICK_S / SERVICE_S for _ in range(running))
            self.num_inside += self._poisson(self._load(self._at_s) * _TICK_S) - gone

    def observe(self, sizes: Mapping[Role, int]) -> dict[Role, PoolObservation]:
        self.advance()
        up_s = [now() - since_s for since_s in self._up_since_s if now() >= since_s]
        share, rest = divmod(self.num_inside, max(len(up_s), 1))
        instances = []
        for index, each_s in enumerate(up_s):
            num_here = share + (index < rest)
            running = min(num_here, NUM_SEQS)
            state: State = "lost" if self.blackout else "ready"
            waiting = num_here - running
            instances.append(
                instance(f"decode-{index}", state=state, up_s=each_s, num_running=running, num_waiting=waiting)
            )
        decode = pool(*instances, at_s=now(), size=sizes["decode"], policy=self._settings.decode)
        return {"prefill": pool_of(sizes["prefill"], role="prefill", at_s=now()), "decode": decode}

    def _follow_size(self) -> None:
        size = self.owner.of["decode"]
        while len(self._up_since_s) < size:
            self._up_since_s.append(self._at_s + self._start_s)
        del self._up_since_s[size:]

    def _poisson(self, mean: float) -> int:
        """Knuth's algorithm: how many uniform factors until their product falls below exp(-mean)."""
        limit, product, count = math.exp(-mean), self._rng.random(), 0
        while product > limit:
            product *= self._rng.random()
            count += 1
        return count


def resizer_of(owner: Owner) -> Resizer:
    """A real Resizer, over empty pools."""
    empty = StaticDiscovery([])
    return Resizer(owner, Pools(empty, empty, _undialled, PoolSettings()))


def autoscaler(
    owner: Owner,
    simulation: Simulation,
    settings: AutoscalerSettings,
    holder: str = "one",
    resizer: Resizer | None = None,
) -> Autoscaler:
    """The real loop, on the event loop's clock."""
    resizer = resizer or resizer_of(owner)
    return Autoscaler(resizer, simulation.observe, settings, holder=holder, clock=now)


def _undialled(address: str) -> grpc.aio.Channel:
    raise AssertionError(f"{address} is dialled, though the pools are empty")


async def simulate(
    load: Load, minutes: float, settings: AutoscalerSettings, *, size: int = 2, seed: int = 0, start_s: float = 5.0
) -> Owner:
    """So many minutes of `load`; what has been done to the pools."""
    owner = Owner({"prefill": 1, "decode": size})
    simulation = Simulation(owner, load, settings, start_s=start_s, seed=seed)
    running = asyncio.create_task(autoscaler(owner, simulation, settings).run())
    await asyncio.sleep(minutes * 60)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return owner


def reversals(owner: Owner, size: int) -> list[float]:
    """When the size of the decode pool, that began as `size`, began to move the other way."""
    times, last = [], 0
    for at_s, role, new_size in owner.resizes:
        if role != "decode":
            continue
        direction = 1 if new_size > size else -1
        if last and direction != last:
            times.append(at_s)
        size, last = new_size, direction
    return times
