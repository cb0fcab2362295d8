"""Instances and observations for the autoscaler's tests: idle, warm and healthy unless a test says otherwise."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from router.autoscaler.decide import History
from router.autoscaler.observation import InstanceSample, PoolObservation, observe
from router.autoscaler.router_signals import EMPTY_QUEUE, QueueSample
from router.autoscaler.settings import AutoscalerSettings, DecodePolicy, PoolPolicy, PrefillPolicy
from router.pools.instance import State
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport, Role
from router.pools.throughput import ThroughputEstimate

NUM_SEQS = 10
NUM_BLOCKS = 1000
BLOCK_SIZE = 16
SPEED = 1000.0
INTERVAL_S = 5.0
STALE_S = 12.0
NOW_S = 10_000.0
LONG_AGO = History(since_s=0.0)


@functools.lru_cache(maxsize=1000)
def instance(
    name: str = "decode-0",
    *,
    state: State = "ready",
    up_s: float = math.inf,
    report_age_s: float = 0.1,
    out: str | None = None,
    used_blocks: int = 0,
    num_seqs: int = NUM_SEQS,
    speed: float | None = SPEED,
    num_recent: int = 0,
    **report: Any,
) -> InstanceSample:
    """One instance; `report` are fields of its load report. Of its blocks `used_blocks` are neither free nor cached; it
    has computed `num_recent` prompt tokens lately. Equal ones are one object: virtual loops look at thousands."""
    load = replace(LoadReport(epoch=name, free_blocks=NUM_BLOCKS - used_blocks), **report)
    identity, throughput = Identity(block_size=BLOCK_SIZE), ThroughputEstimate(speed, num_recent_computed=num_recent)
    info = InstanceInfo(name, name, None, name, identity, num_blocks=NUM_BLOCKS, max_num_seqs=num_seqs)
    view = InstanceView(InstanceKey(name, name), info, load, out=out, throughput=throughput, up_s=up_s)
    return InstanceSample(name, state, report_age_s, view, name, out)


def starting(name: str = "new") -> InstanceSample:
    """An instance that has not reported yet."""
    return InstanceSample(name, "connecting", math.inf, None, name, "connecting")


def pool(
    *instances: InstanceSample,
    role: Role = "decode",
    at_s: float = NOW_S,
    size: int | None = None,
    queue: QueueSample = EMPTY_QUEUE,
    latency_s: float | None = None,
    policy: PoolPolicy | None = None,
) -> PoolObservation:
    """An observation of these; the desired size is their number by default."""
    size = len(instances) if size is None else size
    return observe(role, at_s, size, instances, queue, latency_s, policy or policy_of(role), STALE_S)


def pool_of(size: int, *, role: Role = "decode", at_s: float = NOW_S, **fields: Any) -> PoolObservation:
    """An observation of `size` equal instances; `fields` as `instance` takes them."""
    return pool(*(instance(f"{role}-{index}", **fields) for index in range(size)), role=role, at_s=at_s)


def policy_of(role: Role = "decode", **fields: Any) -> PoolPolicy:
    return (PrefillPolicy if role == "prefill" else DecodePolicy)(**fields)


def settings_of(**fields: Any) -> AutoscalerSettings:
    return AutoscalerSettings(**{"enabled": True, **fields})


def for_minutes(
    observation: Callable[[float], PoolObservation], minutes: float = 6.0, end_s: float = NOW_S
) -> list[PoolObservation]:
    """The observations of the last minutes, one per interval, the last one now."""
    count = int(minutes * 60 / INTERVAL_S)
    return [observation(end_s - index * INTERVAL_S) for index in range(count, -1, -1)]
