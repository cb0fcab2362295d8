"""The signals of a pool (docs/autoscaling.md lists them), and the size that all of them together demand.

Each is treated as a load that is spread over the instances, so that one instance more or fewer changes each one's part:

    grow to    the largest of ceil(load on the warm instances / target)          this many bring every signal to target
    shrink to  the largest of ceil(load on all instances / (margin * target))    this many carry it with room left

With load = signal * instances the first is the utilisation rule of Kubernetes' HorizontalPodAutoscaler. The second is
the N/(N-1) rule: the remaining instances take over the load of the removed ones, and must stay below target, or the
pool grows again at once. A latency is a load only while requests wait for the pool or share it: otherwise more
instances would not shorten it, nor fewer lengthen it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from router.autoscaler.observation import PoolObservation
from router.autoscaler.settings import PoolPolicy

_ROUNDING = 1e-9
"""Of a sum of floats: 3.0000000001 instances are three."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One load of the pool, per instance."""

    name: str
    unit: str
    value: float
    """Mean of the warm instances."""
    target: float
    warm_load: float
    """Sum over the warm instances."""
    load: float | None
    """Sum over all instances; None: unknown."""

    @property
    def ratio(self) -> float:
        return self.value / self.target

    @property
    def num_wanted(self) -> int:
        """Instances that bring it to its target."""
        return _ceil(self.warm_load / self.target)

    def num_enough(self, margin: float) -> int | None:
        """Instances that carry it within `margin` of its target; None: unknown."""
        return None if self.load is None else _ceil(self.load / (margin * self.target))

    def describe(self, num_instances: int) -> str:
        """Its value, its target, and its value with `num_instances`."""
        load = self.warm_load if self.load is None else self.load
        then = "" if num_instances <= 0 else f", would be {load / num_instances:.3g} with {num_instances}"
        return f"{self.name} {self.value:.3g}{self.unit} (target {self.target:.3g}{self.unit}{then})"


@dataclass(frozen=True, slots=True)
class Demand:
    """The sizes that one observation demands."""

    num_wanted: int
    """Fewer are too few."""
    wanted_by: Signal
    """The signal that is furthest above its target, or nearest to it."""
    num_enough: int | None
    """More are too many; None: unknown, and then the pool does not shrink."""
    enough_for: str
    """The signal that needs this many, or what is unknown."""


def demand_of(observation: PoolObservation, policy: PoolPolicy) -> Demand:
    """What an observation without a problem demands; unbounded. Never falls when a load rises."""
    signals = tuple(signals_of(observation, policy))
    wanted_by = max(signals, key=lambda signal: signal.ratio)
    num_wanted = max(signal.num_wanted for signal in signals)
    num_enough, enough_for = _num_enough(observation, signals, policy.scale_in_margin)
    return Demand(num_wanted, wanted_by, num_enough, enough_for)


def signals_of(observation: PoolObservation, policy: PoolPolicy) -> Iterator[Signal]:
    warm, others, num_warm = observation.warm, observation.others, len(observation.warm)
    for name, unit, target, amount in (
        ("load", "", policy.target_score, attrgetter("score")),
        ("KV use", "", policy.target_kv_use, attrgetter("kv_use")),
        ("waiting tokens", " s", policy.target_waiting_s, attrgetter("waiting_s")),
    ):
        yield _summed(name, unit, target, [*map(amount, warm)], [*map(amount, others)])
    if observation.queue.delay_s is None:
        yield Signal("queue delay", " s", 0.0, policy.target_queue_delay_s, 0.0, None)
    else:
        yield _shared("queue delay", observation.queue.delay_s, policy.target_queue_delay_s, num_warm)
    if observation.latency_s is not None and policy.objective_s is not None and is_shared(observation):
        name = "TTFT" if observation.role == "prefill" else "ITL"
        yield _shared(name, observation.latency_s, policy.objective_s, num_warm)


def is_shared(observation: PoolObservation) -> bool:
    """Whether more instances would shorten a latency: requests wait for this pool, or share its decode steps."""
    if observation.queue.num_queued or any(load.num_waiting for load in observation.warm):
        return True
    return observation.role == "decode" and sum(load.num_running for load in observation.warm) > len(observation.warm)


def _num_enough(observation: PoolObservation, signals: Iterable[Signal], margin: float) -> tuple[int | None, str]:
    if observation.num_silent:
        return None, f"{observation.num_silent} instances are silent, and their load is unknown"
    if observation.num_silent_routers:
        return None, f"{observation.num_silent_routers} routers do not answer, and their queues are unknown"
    numbers = [(signal.num_enough(margin), signal) for signal in signals]
    if unknown := next((signal for number, signal in numbers if number is None), None):
        return None, f"the {unknown.name} of the pool is unknown"
    number, signal = max(
        ((number, signal) for number, signal in numbers if number is not None),
        key=lambda pair: (pair[0], pair[1].ratio),
    )
    return number, signal.describe(number)


def _summed(
    name: str, unit: str, target: float, warm: Sequence[float | None], others: Sequence[float | None]
) -> Signal:
    """Of what the instances report; the sum over all is unknown if one amount is."""
    known = [amount for amount in warm if amount is not None]
    all_known = [amount for amount in (*warm, *others) if amount is not None]
    load = sum(all_known) if len(all_known) == len(warm) + len(others) else None
    return Signal(name, unit, sum(known) / len(warm), target, sum(known), load)


def _shared(name: str, seconds: float, target_s: float, num_warm: int) -> Signal:
    """Of the whole pool, as if each instance had a part in it."""
    load = seconds * num_warm
    return Signal(name, " s", seconds, target_s, load, load)


def _ceil(num_instances: float) -> int:
    return math.ceil(num_instances - _ROUNDING)
