"""Observes the pools for the autoscaler: values, checked, so that a decision need not doubt them.

    instances, admission queue, latencies ──observe──▶ PoolObservation ──problem──▶ the size stays; the reason says why
                                                             └──────no problem──▶ signals.py, decide.py

Each instance is one of four kinds: *warm* ones, whose load makes a pool grow; *others* that carry load which does not
count towards growth (still cold, draining, leaving); *silent* ones whose load is unknown; and *pending* ones that are
desired and not there. A reported number that is negative, not finite or impossible makes the observation a problem.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from router.admission.controller import AdmissionController
from router.autoscaler.router_signals import EMPTY_QUEUE, Peers, QueueSample, RecentLatencies, RouterSignals, combined
from router.autoscaler.settings import AutoscalerSettings, PoolPolicy
from router.picking.scorers import WAITING_WEIGHT
from router.pools.instance import ENDING, State
from router.pools.instance_info import ROLES, InstanceView, Role
from router.resilience.safeguards import Safeguards

_COUNTS = ("num_waiting", "num_running", "num_loading", "num_waiting_tokens")
_BLOCKS = ("free_blocks", "cached_blocks", "held_blocks", "quarantined_blocks")
_LOADED: frozenset[State] = ENDING | {"ready"}


class Problem(NamedTuple):
    """Why an observation decides nothing."""

    kind: Literal["missing", "stale", "nonsense"]
    message: str


class InstanceSample(NamedTuple):
    """The raw state of one instance of a pool."""

    name: str
    state: State
    report_age_s: float
    view: InstanceView | None
    """With an ejected instance marked as out."""
    address: str = ""
    out: str | None = None
    """Why it is not picked: by its load reports, or as an outlier."""

    @property
    def is_ejected(self) -> bool:
        return self.state == "ready" and self.view is not None and self.view.out is not None


_COUNTED_S = 10.0


class ProcessCounts(NamedTuple):
    """Processes of a pool whose ordered size is unknown."""

    num_ready: int
    """Ready for some time: not one that a rollout has just added."""
    num_ending: int
    """Those that drain or leave."""


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    name: str
    num_waiting: int
    num_running: int
    """Those that load KV included."""
    score: float
    """4*waiting + running, relative to the requests that it can run at one time."""
    waiting_s: float | None
    """Waiting tokens over its speed; None: its speed is unknown."""
    kv_use: float
    """Fraction of its blocks in use; 0 while it does not report them. At a prefill instance without those held for
    readers: more instances would not free them."""
    is_blocked: bool = False
    """Whether its queue stands still because readers do not fetch what it holds. Then the queue is no load of its own,
    and is not counted above."""


@dataclass(frozen=True, slots=True)
class PoolObservation:
    """One pool at one moment. All but role, time, size, `num_present` and `num_ending` are meaningful only without a
    problem."""

    role: Role
    at_s: float
    """On the clock of the observer, seconds."""
    size: int | None
    """The desired size; None: unknown, and the pool cannot be resized."""
    warm: tuple[InstanceLoad, ...] = ()
    others: tuple[InstanceLoad, ...] = ()
    young: frozenset[str] = frozenset()
    """Names of the warm ones that a rollout may have added for a time."""
    num_silent: int = 0
    num_silent_routers: int = 0
    """Other routers whose queue and latencies are unknown."""
    num_present: int = 0
    """Processes that neither drain nor leave: they start, are ready, or are silent."""
    num_ending: int = 0
    """Processes that drain or leave, and ready ones beyond a known `size`."""
    queue: QueueSample = EMPTY_QUEUE
    latency_s: float | None = None
    """TTFT (prefill) or ITL (decode) at `latency_quantile` of the recent requests; None: too few."""
    problem: Problem | None = None

    @property
    def num_pending(self) -> int:
        """Desired instances that are not warm: they start, or are cold, ejected or silent."""
        return max((self.size or 0) - len(self.warm), 0)

    @property
    def of_settled(self) -> PoolObservation:
        """The same with the young ones among the others."""
        settled = tuple(load for load in self.warm if load.name not in self.young)
        young = tuple(load for load in self.warm if load.name in self.young)
        return replace(self, warm=settled, others=(*self.others, *young), young=frozenset())

    @property
    def is_blocked(self) -> bool:
        """Whether the queue of a warm instance stands still for what it holds."""
        return any(load.is_blocked for load in self.warm)


class _InvalidReport(Exception):
    """A reported number is impossible."""


def observe(
    role: Role,
    at_s: float,
    size: int | None,
    samples: Sequence[InstanceSample],
    queue: QueueSample,
    latency_s: float | None,
    policy: PoolPolicy,
    stale_s: float,
) -> PoolObservation:
    """The observation that the samples make. Pure; never raises: an error becomes the observation's problem."""
    num_present = sum(sample.state not in ENDING for sample in samples)
    num_ready = sum(sample.state == "ready" and sample.view is not None for sample in samples)
    num_surplus = 0 if size is None else max(num_ready - size, 0)
    num_ending = len(samples) - num_present + num_surplus
    try:
        _check_numbers("the router's queue", num_queued=queue.num_queued, delay_s=queue.delay_s)
        _check_numbers("the router's latencies", latency_s=latency_s)
        speed = _mean_prefill_speed(samples)
        warm = [sample for sample in samples if _is_warm(sample, policy.warm_up_s)]
        others = [
            sample for sample in samples if sample not in warm and sample.view is not None and sample.state in _LOADED
        ]
        warm_loads = tuple(load_of(role, sample, speed) for sample in warm)
        other_loads = tuple(load_of(role, sample, speed) for sample in others)
    except _InvalidReport as error:
        problem = Problem("nonsense", str(error))
        return PoolObservation(role, at_s, size, num_present=num_present, num_ending=num_ending, problem=problem)
    silent = [sample for sample in samples if _is_silent(sample, policy.start_timeout_s)]
    return PoolObservation(
        role=role,
        at_s=at_s,
        size=size,
        warm=warm_loads,
        others=other_loads,
        young=frozenset(one.name for one in warm if not _is_warm(one, policy.settled_s)),
        num_silent=len(silent),
        num_present=num_present,
        num_ending=num_ending,
        queue=EMPTY_QUEUE if any(load.is_blocked for load in warm_loads) else queue,
        latency_s=latency_s,
        problem=_problem(samples, warm, silent, stale_s),
    )


def load_of(role: Role, sample: InstanceSample, speed_per_s: float | None) -> InstanceLoad:
    """The load of an instance that has reported; `speed_per_s` is used where its own speed is unknown."""
    view = sample.view
    assert view is not None, "only instances that have reported have a load"
    load, info = view.load, view.info
    _check_report(sample.name, view)
    num_running = load.num_running + load.num_loading
    is_blocked = role == "prefill" and _is_blocked(view)
    num_waiting = 0 if is_blocked else load.num_waiting
    num_tokens = 0 if is_blocked else load.num_waiting_tokens
    speed_per_s = view.throughput.prefill_per_s or speed_per_s
    waiting_s = 0.0 if num_tokens == 0 else num_tokens / speed_per_s if speed_per_s else None
    _check_numbers(sample.name, waiting_s=waiting_s)
    return InstanceLoad(
        name=sample.name,
        num_waiting=num_waiting,
        num_running=num_running,
        score=(WAITING_WEIGHT * num_waiting + num_running) / info.max_num_seqs,
        waiting_s=waiting_s,
        kv_use=(view.num_used_blocks - (load.held_blocks if role == "prefill" else 0)) / max(info.num_blocks, 1),
        is_blocked=is_blocked,
    )


def counts_of(samples: Sequence[InstanceSample], policy: PoolPolicy) -> ProcessCounts:
    """A ready instance counts as such once a rollout that adds it has begun to drain its predecessor: when Kubernetes
    has seen it ready too, and minReadySeconds have passed. That is before its load does, at `policy.settled_s`."""
    counted_s = policy.min_ready_s + min(_COUNTED_S, policy.warm_up_s)
    ready = [one.view for one in samples if one.state == "ready" and one.view is not None]
    num_ending = sum(sample.state in ENDING for sample in samples)
    num_ready = sum(view.up_s >= counted_s for view in ready)
    return ProcessCounts(num_ready, num_ending)


def _is_blocked(view: InstanceView) -> bool:
    """Whether prompts wait, none is begun, and what is held for readers was computed before the last seconds. KV that
    has just been computed is held everywhere, and between two steps no prompt may be begun."""
    load, num_held = view.load, view.load.held_blocks * max(view.info.identity.block_size, 1)
    is_begun = load.num_prefilling + load.num_loading > 0
    return load.num_waiting > 0 and not is_begun and num_held > view.throughput.num_recent_computed


def _is_warm(sample: InstanceSample, warm_up_s: float) -> bool:
    view = sample.view
    return sample.state == "ready" and view is not None and view.out is None and view.up_s >= warm_up_s


def _is_silent(sample: InstanceSample, forgotten_s: float) -> bool:
    """Whether it had load recently and does not report what became of it."""
    if sample.view is None or sample.state not in ("lost", "wedged"):
        return False
    return max(sample.report_age_s, sample.view.load.core_silence_s) < forgotten_s


def _mean_prefill_speed(samples: Iterable[InstanceSample]) -> float | None:
    """Of the instances that have a measured one, tokens per second."""
    speeds = [sample.view.throughput.prefill_per_s for sample in samples if sample.view is not None]
    known = [speed for speed in speeds if speed is not None]
    for speed in known:
        _check_numbers("the measured prefill speed", tokens_per_s=speed)
    return sum(known) / len(known) if known else None


def _problem(
    samples: Sequence[InstanceSample], warm: Sequence[InstanceSample], silent: Sequence[InstanceSample], stale_s: float
) -> Problem | None:
    if old := [sample for sample in warm if not sample.report_age_s <= stale_s]:
        oldest = max(old, key=lambda sample: sample.report_age_s)
        return Problem("stale", f"{oldest.name} reported {oldest.report_age_s:.1f} s ago, {stale_s:g} s are too long")
    if not warm:
        many = f"none of {len(samples)} instances" if samples else "no instance"
        return Problem("missing", f"{many} is warm and reports" + (f"; {len(silent)} fell silent" if silent else ""))
    return None


def _check_report(name: str, view: InstanceView) -> None:
    load, info = view.load, view.info
    _check_numbers(
        name,
        **{what: getattr(load, what) for what in (*_COUNTS, *_BLOCKS)},
        step_s=load.step_s,
        core_silence_s=load.core_silence_s,
    )
    if info.max_num_seqs <= 0:
        raise _InvalidReport(f"{name} reports max_num_seqs = {info.max_num_seqs}, which must be positive")
    num_reported = sum(getattr(load, what) for what in _BLOCKS)
    if num_reported > info.num_blocks:
        raise _InvalidReport(f"{name} reports {num_reported} blocks and has {info.num_blocks}")


def _check_numbers(source: str, **amounts: float | None) -> None:
    for what, amount in amounts.items():
        if amount is not None and not (math.isfinite(amount) and amount >= 0):
            raise _InvalidReport(f"{source}: {what} = {amount:g}, which is invalid")


@dataclass(frozen=True, slots=True)
class Observer:
    """The one place that reads the router's state for the autoscaler. Belongs to the router's event loop."""

    safeguards: Safeguards
    admission: AdmissionController
    latencies: RecentLatencies
    settings: AutoscalerSettings
    peers: Peers

    def observe(self, sizes: Mapping[Role, int]) -> dict[Role, PoolObservation]:
        """Both pools now; `sizes` are the desired ones."""
        routers = [router_signals_of(self.admission), *self.peers.signals()]
        for_prefill = combined(one.queue for one in routers if one.lacking == "prefill")
        prefill = self._observe("prefill", sizes.get("prefill"), for_prefill)
        for_decode = combined(one.queue for one in routers if is_for_decode(one.lacking, prefill))
        return {"prefill": prefill, "decode": self._observe("decode", sizes.get("decode"), for_decode)}

    def _observe(self, role: Role, size: int | None, queue: QueueSample) -> PoolObservation:
        samples, latency_s = tuple(samples_of(role, self.safeguards)), self.latencies.of(role, self.peers.signals())
        policy, stale_s = self.settings.policies[role], self.settings.stale_s
        observation = observe(role, time.monotonic(), size, samples, queue, latency_s, policy, stale_s)
        return replace(observation, num_silent_routers=self.peers.num_silent)

    def idle_s(self) -> float:
        """Since the last request of any router ended; 0 while there is one, or a router does not answer."""
        if self.peers.num_silent:
            return 0.0
        return min(signals.idle_s for signals in (router_signals_of(self.admission), *self.peers.signals()))


def router_signals_of(admission: AdmissionController, latencies: RecentLatencies | None = None) -> RouterSignals:
    """This router's."""
    samples = {role: latencies.samples(role) for role in ROLES.values()} if latencies is not None else {}
    return RouterSignals(queue_of(admission), lacking_pool(admission), samples, admission.idle_s)


def queue_of(admission: AdmissionController) -> QueueSample:
    """The queued requests, and the delay of a new one: the queued tokens over the rate at which they are admitted,
    without those that their tenants' own limits hold back."""
    if not admission.num_queued:
        return EMPTY_QUEUE
    rate_per_s = admission.rate_per_s
    return QueueSample(admission.num_queued, admission.queue.startable_cost / rate_per_s if rate_per_s else None)


def lacking_pool(admission: AdmissionController) -> Role | None:
    """Which pool the queue waits for; None: neither, since the router's own limits, or those of all tenants that wait,
    are reached."""
    in_use, limits, head = admission.in_use, admission.limits, admission.queue.head()
    if head is None and admission.queue.num_queued and not admission.num_held:
        return None
    num_more = head.item.charge.num_tokens if head is not None else 1
    if in_use.num_requests >= limits.num_requests or in_use.num_tokens + num_more > limits.num_tokens:
        return None
    return limits.prefilled_by if in_use.num_prefill_tokens >= limits.num_prefill_tokens else "decode"


def is_for_decode(lacking: Role | None, prefill: PoolObservation) -> bool:
    """Whether the queue waits for the decode pool: also where prefill is lacking because its KV is not fetched."""
    return lacking == "decode" or (lacking == "prefill" and prefill.is_blocked)


def samples_of(role: Role, safeguards: Safeguards) -> Iterator[InstanceSample]:
    """Of `processes` of a pool, in their order."""
    pool = safeguards.pools.by_role[role]
    marked = {view.key: view for view in safeguards.outliers[role].marked(pool.views())}
    for instance in pool.processes:
        view = marked.get(instance.key) if instance.key is not None else None
        out = instance.out if view is None else view.out
        yield InstanceSample(instance.name, instance.state, instance.report_age_s, view, instance.address, out)
