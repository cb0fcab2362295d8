"""What a pool's load asks for: each signal against its target, and the size that all of them want.

Every signal is a load that is spread over the instances, so that one instance more or fewer changes each one's part:

    grow to    the largest of ceil(load on the warm instances / target)          so many bring every signal to target
    shrink to  the largest of ceil(load on all instances / (margin * target))    so many carry it with room left

With load = signal * instances the first is the utilisation rule of Kubernetes' HorizontalPodAutoscaler. The second is
the N/(N-1) rule: what goes is taken over by those who stay, and they must not be at target then, or the pool grows
again at once. A latency is no load: it counts as one only while something waits for this pool, or shares it; else more
instances would not shorten it, nor fewer lengthen it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from router.autoscaler.observation import PoolObservation
from router.autoscaler.policy import PoolPolicy

_ROUNDING = 1e-9
"""Of a sum of floats: 3.0000000001 instances are three."""


Amounts = Sequence[float | None]
"""One per instance; None: it is not known."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One load of the pool, in units of what one instance has of it."""

    name: str
    unit: str
    value: float
    """Each warm instance's, in the mean."""
    target: float
    warm_load: float
    """Summed over the warm instances."""
    load: float | None
    """Summed over all instances; None: not known."""

    @property
    def ratio(self) -> float:
        """Times its target."""
        return self.value / self.target

    @property
    def num_wanted(self) -> int:
        """Instances that bring it to its target."""
        return _ceil(self.warm_load / self.target)

    def num_enough(self, margin: float) -> int | None:
        """Instances that carry it within `margin` of its target; None: not known."""
        return None if self.load is None else _ceil(self.load / (margin * self.target))

    def among(self, num_instances: int) -> str:
        """In words: what it is, is to be, and would be if so many carried it."""
        load = self.warm_load if self.load is None else self.load
        then = "" if num_instances <= 0 else f", would be {load / num_instances:.3g} with {num_instances}"
        return f"{self.name} {self.value:.3g}{self.unit} (target {self.target:.3g}{self.unit}{then})"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one look asks for."""

    num_wanted: int
    """Fewer are too few."""
    wanted_by: Signal
    ratio: float
    """Of the signal that is furthest above its target, or nearest to it."""
    num_enough: int | None
    """More are too many; None: not known, and then there are not."""
    enough_for: str
    """The signal that needs so many, or what is not known; in words."""


def demand_of(look: PoolObservation, policy: PoolPolicy) -> Demand:
    """What `look`, which has no problem, asks for; unbounded. Never falls when a load rises."""
    signals = tuple(signals_of(look, policy))
    wanted_by = max(signals, key=lambda signal: signal.ratio)
    num_wanted = max(signal.num_wanted for signal in signals)
    num_enough, enough_for = _enough(look, signals, policy.scale_in_margin)
    return Demand(num_wanted, wanted_by, wanted_by.ratio, num_enough, enough_for)


def signals_of(look: PoolObservation, policy: PoolPolicy) -> Iterator[Signal]:
    """Every signal of a look that has no problem."""
    warm, others, num_warm = look.warm, look.others, len(look.warm)
    for name, unit, target, amount in (
        ("load", "", policy.target_score, attrgetter("score")),
        ("KV use", "", policy.target_kv_use, attrgetter("kv_use")),
        ("waiting tokens", " s", policy.target_waiting_s, attrgetter("waiting_s")),
    ):
        yield _summed(name, unit, target, [*map(amount, warm)], [*map(amount, others)])
    if look.door.delay_s is None:
        yield Signal("queue delay", " s", 0.0, policy.target_queue_delay_s, 0.0, None)
    else:
        yield _shared("queue delay", look.door.delay_s, policy.target_queue_delay_s, num_warm)
    if look.latency_s is not None and policy.objective_s is not None and is_shared(look):
        name = "TTFT" if look.role == "prefill" else "ITL"
        yield _shared(name, look.latency_s, policy.objective_s, num_warm)


def is_shared(look: PoolObservation) -> bool:
    """Whether more instances would shorten a latency: requests wait for this pool, or share its decode steps."""
    if look.door.num_queued or any(load.num_waiting for load in look.warm):
        return True
    return look.role == "decode" and sum(load.num_running for load in look.warm) > len(look.warm)


def _enough(look: PoolObservation, signals: Iterable[Signal], margin: float) -> tuple[int | None, str]:
    if look.num_silent:
        return None, f"{look.num_silent} instances are silent, and what they carry is not known"
    numbers = [(signal.num_enough(margin), signal) for signal in signals]
    if unknown := next((signal for number, signal in numbers if number is None), None):
        return None, f"the {unknown.name} of the pool is not known yet"
    number, signal = max(
        ((number, signal) for number, signal in numbers if number is not None),
        key=lambda pair: (pair[0], pair[1].ratio),
    )
    return number, signal.among(number)


def _summed(name: str, unit: str, target: float, warm: Amounts, others: Amounts) -> Signal:
    """Of what the warm instances and the others tell; what one of them does not know nobody does."""
    known = [amount for amount in warm if amount is not None]
    whole = [amount for amount in (*warm, *others) if amount is not None]
    load = sum(whole) if len(whole) == len(warm) + len(others) else None
    return Signal(name, unit, sum(known) / len(warm), target, sum(known), load)


def _shared(name: str, seconds: float, target_s: float, num_warm: int) -> Signal:
    """Of the whole pool, as if each instance had its part in it."""
    load = seconds * num_warm
    return Signal(name, " s", seconds, target_s, load, load)


def _ceil(num_instances: float) -> int:
    return math.ceil(num_instances - _ROUNDING)
