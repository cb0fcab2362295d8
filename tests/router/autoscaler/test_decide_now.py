"""What one observation demands of an autoscaler outside; a whole loop of that: an HPA, a Deployment and its pods."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.autoscaler.decide import ScaleDecision, decide_now
from router.autoscaler.observation import InstanceSample, counts_of
from router.autoscaler.router_signals import QueueSample
from router.autoscaler.settings import DecodePolicy
from tests.router.autoscaler.builders import NUM_SEQS, instance, pool, starting

POLICY = DecodePolicy(max_size=16)
SYNC_S = 15
"""Seconds between two orders of an HPA."""
STABILIZATION_S = 300
"""An HPA shrinks to the largest size that was demanded in so many seconds."""
TOLERANCE = 0.1
DRAIN_S = 8
"""From an instance's readiness to the end of the one that it replaces."""

Load = Callable[[int], int]
"""Requests at a time in seconds."""


def decided(samples: Sequence[InstanceSample], min_ready_s: float = 0.0, **seen: Any) -> ScaleDecision:
    """`seen` as `pool` takes it."""
    policy = POLICY.model_copy(update={"min_ready_s": min_ready_s})
    counts = counts_of(samples, policy)
    return decide_now(pool(*samples, size=counts.num_ready, policy=policy, **seen), policy)


def running(*loads: int) -> list[InstanceSample]:
    return [instance(f"decode-{index}", num_running=load) for index, load in enumerate(loads)]


def young(*loads: int) -> list[InstanceSample]:
    """Warm, and of less than `minReadySeconds` of 40."""
    return [instance(f"young-{index}", up_s=20.0, num_running=load) for index, load in enumerate(loads)]


def lost(number: int) -> list[InstanceSample]:
    return [instance(f"lost-{index}", state="lost", report_age_s=20.0) for index in range(number)]


@pytest.mark.parametrize(
    ("samples", "size"),
    [
        (running(7), 1),
        ([*running(7), starting()], 1),  # of a rollout
        ([*running(9), starting()], 2),
        ([*running(9, 9), starting("a"), starting("b")], 3),  # 2.4 are wanted, and 3 enough
        ([*running(10, 10), starting("a"), starting("b")], 4),  # 2.7 are wanted, and 3.3 enough
        ([*running(7, 7), starting("a"), starting("b")], 2),
        ([*running(7), instance("new", up_s=1.0, num_running=0)], 1),  # whose predecessor may be about to drain
        ([*running(7, 7), instance("ejected", out="fails")], 3),
        ([*running(1, 1), instance("ending", state="draining")], 1),
    ],
)
def test_instances_that_start_count_as_far_as_a_growing_load_needs_them(
    samples: list[InstanceSample], size: int
) -> None:
    assert (decided(samples).new_size, decided(samples).hold) == (size, None)


@pytest.mark.parametrize(
    ("samples", "size"), [([*running(9), starting()], 1), (young(10), 1), ([*running(9), *young(9)], 1)]
)
def test_the_present_size_is_the_number_of_ready_instances_or_without_any_of_all(
    samples: list[InstanceSample], size: int
) -> None:
    assert decided(samples, 40, queue=QueueSample(num_queued=50, delay_s=1.0)).size == size


@pytest.mark.parametrize(
    ("samples", "size"),
    [
        ([*running(7), *lost(1)], None),
        ([*running(9), *lost(1)], 2),  # two are ordered, or one and that of a rollout
        ([*running(9), *lost(2)], None),  # one of three must not go
        ([*running(9, 9), *lost(1)], 3),
        ([*running(10, 10, 10, 10), *lost(1)], 6),
    ],
)
def test_while_an_instance_is_silent_the_size_grows_or_stays(samples: list[InstanceSample], size: int | None) -> None:
    decision = decided(samples)
    if size is None:
        assert decision.hold == "missing"
        assert "silent" in decision.reason
    else:
        assert (decision.new_size, decision.hold) == (size, None)


@pytest.mark.parametrize(
    ("samples", "bounds", "size"),
    [
        (running(*[10] * 14), {}, 19),
        (running(*[10] * 14), {"max_size": 16}, 16),
        (running(1, 1), {}, 1),
        (running(1, 1), {"min_size": 2}, 2),
    ],
)
def test_the_demanded_size_is_within_the_bounds_of_its_pool(
    samples: list[InstanceSample], bounds: dict[str, int], size: int
) -> None:
    policy = DecodePolicy(**{"max_size": 64} | bounds)
    decision = decide_now(pool(*samples, policy=policy), policy)
    assert (decision.new_size, decision.size) == (size, len(samples))


@pytest.mark.parametrize(
    ("samples", "hold"),
    [
        (lost(2), "missing"),
        ([*running(9), instance("late", num_running=9, report_age_s=60.0)], "stale"),
        ([*running(9), instance("wrong", num_running=-1)], "nonsense"),
    ],
)
def test_an_observation_with_a_problem_keeps_the_size(samples: list[InstanceSample], hold: str) -> None:
    decision = decided(samples)
    assert (decision.new_size, decision.hold) == (2, hold)
    assert decision.reason


def test_load_on_what_is_warm_and_not_counted_yet_makes_the_pool_grow() -> None:
    assert decided([*running(10, 10), *young(9, 9)], 40).new_size == 6


def test_load_on_what_is_not_counted_yet_keeps_those_that_are() -> None:
    assert decided([*running(3, 3), *young(0)], 40).new_size == 1
    assert decided([*running(3, 3), *young(7)], 40).new_size == 2
    assert decided([*running(7, 7), *young(7)], 40).new_size == 2, "three would be of a rollout"


@pytest.mark.parametrize("num_present", [1, 4])
def test_where_no_instance_counts_yet_the_size_grows_or_stays(num_present: int) -> None:
    """After a start from none, or of the router: which of them a rollout has added is unknown."""
    waiting = QueueSample(num_queued=50, delay_s=1.0)
    assert decided(young(*[10] * num_present), 40, queue=waiting).new_size == 2 * num_present
    for load in (0, 7):
        decision = decided(young(*[load] * num_present), 40)
        assert decision.hold == "missing"
        assert decision.reason.startswith("no warm instance has been ready for 55 s")


def test_a_latency_that_a_pool_meets_does_not_make_it_grow_during_a_rollout() -> None:
    """Those of the last seconds are from before there was one instance more."""
    policy = POLICY.model_copy(update={"min_ready_s": 40.0, "itl_objective_s": 0.05})
    samples = [*running(3), *young(3)]
    counts = counts_of(samples, policy)
    seen = pool(*samples, size=counts.num_ready, policy=policy, latency_s=0.04)
    assert decide_now(seen, policy).new_size == 1


def test_a_latency_that_a_pool_misses_makes_it_grow_once_for_the_instances_whose_latency_it_is() -> None:
    policy = POLICY.model_copy(update={"min_ready_s": 40.0, "itl_objective_s": 0.05})
    for samples in ([*running(3, 3, 3, 3)], [*running(3, 3, 3, 3), *young(1, 1)]):
        counts = counts_of(samples, policy)
        seen = pool(*samples, size=counts.num_ready, policy=policy, latency_s=0.075)
        assert decide_now(seen, policy).new_size == 6


def test_the_larger_of_both_demands_counts_also_while_some_are_young() -> None:
    policy = POLICY.model_copy(update={"min_ready_s": 40.0, "itl_objective_s": 0.05})
    for samples, latency_s, size in (
        ([*running(10, 10, 10, 10), *young(9)], 0.02, 7),
        ([*running(10, 10, 10, 10), *young(9)], 0.125, 10),
        (running(10, 10, 10, 10), 0.02, 6),
        (running(10, 10, 10, 10), 0.125, 10),
    ):
        counts = counts_of(samples, policy)
        seen = pool(*samples, size=counts.num_ready, policy=policy, latency_s=latency_s)
        assert decide_now(seen, policy).new_size == size


@dataclass
class Hpa:
    """As Kubernetes computes it of an external metric with an average value of 1."""

    ordered: int
    stabilization_s: int = STABILIZATION_S
    orders: list[int] = field(default_factory=list)
    demands: deque[tuple[int, int]] = field(default_factory=deque)

    def sync(self, at_s: int, metric: int | None, num_pods: int) -> None:
        """`metric`: None where it is unavailable."""
        if not self.orders:
            self.demands.append((at_s, self.ordered))
        if metric is not None:
            is_tolerated = abs(metric / num_pods - 1) <= TOLERANCE
            self.demands.append((at_s, num_pods if is_tolerated else metric))
            self.ordered = max(demand for then_s, demand in self.demands if then_s > at_s - self.stabilization_s)
        self.orders.append(self.ordered)


@dataclass
class Pod:
    name: str
    is_new: bool
    ready_s: float
    """When it serves, or crashes."""
    end_s: float = math.inf


@dataclass
class Deployment:
    """With a surge of one. Pods of the new version start in `start_s` seconds; `crash` is what is seen of one then."""

    start_s: int
    pods: list[Pod]
    rolls_at_s: float = math.inf
    crash: InstanceSample | None = None
    min_ready_s: int = 0
    seen_after_s: int | None = None
    """By the router that is asked, by DNS: so long after a pod is ready, which another router uses by then. None: at
    once, and those that start as well."""

    def advance(self, at_s: int, ordered: int) -> None:
        rolls = at_s >= self.rolls_at_s
        self.pods = [one for one in self.pods if at_s < one.end_s]
        staying = [one for one in self.pods if one.end_s == math.inf]
        is_replacing = rolls and not all(one.is_new for one in staying)
        if len(staying) < ordered + is_replacing:
            self.pods.append(Pod(f"decode-{at_s}", rolls, at_s + self.start_s))
        elif is_replacing and sum(self.serves(one, at_s - self.min_ready_s) for one in staying) > ordered:
            next(one for one in staying if not one.is_new).end_s = at_s + DRAIN_S
        elif len(staying) > ordered + is_replacing:
            max(staying, key=lambda one: one.ready_s).end_s = at_s

    def serves(self, pod: Pod, at_s: int) -> bool:
        return at_s >= pod.ready_s and not (pod.is_new and self.crash)

    def samples(self, at_s: int, num_requests: int) -> list[InstanceSample]:
        serving = [one for one in self.pods if self.serves(one, at_s)]
        share, rest = divmod(num_requests, len(serving))
        samples = []
        for index, one in enumerate(serving):
            number = share + (index < rest)
            num_running, up_s = min(number, NUM_SEQS), at_s - one.ready_s - (self.seen_after_s or 0)
            if up_s >= 0:
                samples.append(instance(one.name, up_s=up_s, num_running=num_running, num_waiting=number - num_running))
        for one in self.pods:
            if one not in serving and self.seen_after_s is None:
                crashed = at_s >= one.ready_s and self.crash is not None
                samples.append(self.crash._replace(name=one.name) if self.crash and crashed else starting(one.name))
        return samples


def orders_of(
    deployment: Deployment, load: Load, seconds: int, first_sync_s: int = 0, stabilization_s: int = STABILIZATION_S
) -> list[int]:
    """What an HPA orders in so many seconds, each size once for as long as it stays."""
    hpa = Hpa(len(deployment.pods), stabilization_s)
    for at_s in range(seconds):
        deployment.advance(at_s, hpa.ordered)
        if at_s % SYNC_S == first_sync_s:
            decision = decided(deployment.samples(at_s, load(at_s)), deployment.min_ready_s)
            hpa.sync(at_s, decision.new_size if decision.hold is None else None, len(deployment.pods))
    return [order for order, before in zip(hpa.orders, [0, *hpa.orders], strict=False) if order != before]


def old_pods(number: int) -> list[Pod]:
    return [Pod(f"decode-old-{index}", False, -math.inf) for index in range(number)]


@pytest.mark.parametrize("first_sync_s", range(SYNC_S))
@pytest.mark.parametrize("min_ready_s", [0, 40])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rollout_leaves_the_size_as_it_is(size: int, min_ready_s: int, first_sync_s: int) -> None:
    """At a load at which one instance more would be kept as well."""
    deployment = Deployment(40, old_pods(size), rolls_at_s=30, min_ready_s=min_ready_s)
    assert orders_of(deployment, lambda _: 7 * size, 900, first_sync_s) == [size]
    assert all(pod.is_new for pod in deployment.pods)


@pytest.mark.parametrize("min_ready_s", [0, 40])
@pytest.mark.parametrize("start_s", [30, 700])
def test_a_growing_pool_keeps_what_starts_while_its_load_is_high(start_s: int, min_ready_s: int) -> None:
    """Also where the load needs fewer than at first, and the starts take longer than an HPA's window."""
    deployment = Deployment(start_s, old_pods(4), min_ready_s=min_ready_s)
    assert orders_of(deployment, lambda at_s: 28 if at_s < 60 else 39, 150) == [4, 6]
    deployment = Deployment(start_s, old_pods(4), min_ready_s=min_ready_s)
    assert orders_of(deployment, lambda at_s: 28 if at_s < 60 else 39 if at_s < 100 else 31, 1800) == [4, 6]
    assert len(deployment.pods) == 6


@pytest.mark.parametrize("first_sync_s", range(SYNC_S))
@pytest.mark.parametrize(("min_ready_s", "seen_after_s"), [(0, 0), (40, 0), (40, 36)])
def test_a_window_of_a_minute_and_min_ready_seconds_keeps_what_is_ready_and_not_counted_yet(
    min_ready_s: int, seen_after_s: int, first_sync_s: int
) -> None:
    """The chart rejects less. A new instance takes load at once, so that the old ones alone seem to be enough."""

    def orders(stabilization_s: int) -> list[int]:
        deployment = Deployment(30, old_pods(4), min_ready_s=min_ready_s, seen_after_s=seen_after_s)
        return orders_of(deployment, lambda at_s: 28 if at_s < 60 else 36, 600, first_sync_s, stabilization_s)

    assert orders(60 + min_ready_s) == [4, 5]
    if seen_after_s:
        assert orders(60)[:3] == [4, 5, 4]


def test_a_load_that_falls_while_instances_start_removes_them_after_the_window_once() -> None:
    deployment = Deployment(700, old_pods(4))
    assert orders_of(deployment, lambda at_s: 39 if 60 <= at_s < 100 else 26, 1800) == [4, 6, 4]


CRASHES = {
    "before its first report": starting(),
    "after it": instance(state="lost", report_age_s=20.0),
}


@pytest.mark.parametrize("crash", CRASHES)
def test_a_version_that_crashes_leaves_the_size_as_it_is_and_the_pool_still_grows(crash: str) -> None:
    deployment = Deployment(40, old_pods(2), rolls_at_s=30, crash=CRASHES[crash])
    assert orders_of(deployment, lambda _: 14, 1800) == [2]
    deployment = Deployment(40, old_pods(2), rolls_at_s=30, crash=CRASHES[crash])
    assert orders_of(deployment, lambda at_s: 14 if at_s < 300 else 18, 1800) == [2, 3]
