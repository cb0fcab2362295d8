"""Instances and looks for the autoscaler's tests: everything is idle, warm and healthy unless it is said otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from router.autoscaler.history import History
from router.autoscaler.observation import EMPTY_DOOR, DoorLook, InstanceLook, PoolObservation, observe
from router.autoscaler.policy import AutoscalerSettings, DecodePolicy, PoolPolicy, PrefillPolicy
from router.picking.speeds import Pace
from router.pools.instances import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport, Role
from router.pools.member import State

NUM_SEQS = 10
NUM_BLOCKS = 1000
SPEED = 1000.0
INTERVAL_S = 5.0
STALE_S = 12.0
NOW_S = 10_000.0
LONG_AGO = History(since_s=0.0)


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
    **report: Any,
) -> InstanceLook:
    """One member; `report` are fields of its load report. Of its blocks `used_blocks` are neither free nor cached."""
    load = replace(LoadReport(epoch=name, free_blocks=NUM_BLOCKS - used_blocks), **report)
    info = InstanceInfo(name, name, None, name, Identity(), num_blocks=NUM_BLOCKS, max_num_seqs=num_seqs)
    view = InstanceView(InstanceKey(name, name), info, load, out=out, pace=Pace(prefill_per_s=speed), up_s=up_s)
    return InstanceLook(name, state, up_s, report_age_s, view)


def starting(name: str = "new") -> InstanceLook:
    """A member that has not told anything yet."""
    return InstanceLook(name, "connecting", 0.0, math.inf, None)


def pool(
    *instances: InstanceLook,
    role: Role = "decode",
    at_s: float = NOW_S,
    size: int | None = None,
    door: DoorLook = EMPTY_DOOR,
    latency_s: float | None = None,
    policy: PoolPolicy | None = None,
) -> PoolObservation:
    """A look at these; told to be as many as they are."""
    size = len(instances) if size is None else size
    return observe(role, at_s, size, instances, door, latency_s, policy or policy_of(role), STALE_S)


def pool_of(size: int, *, role: Role = "decode", at_s: float = NOW_S, **fields: Any) -> PoolObservation:
    """A look at `size` equal instances; `fields` as `instance` takes them."""
    return pool(*(instance(f"{role}-{index}", **fields) for index in range(size)), role=role, at_s=at_s)


def policy_of(role: Role = "decode", **fields: Any) -> PoolPolicy:
    return (PrefillPolicy if role == "prefill" else DecodePolicy)(**fields)


def settings_of(**fields: Any) -> AutoscalerSettings:
    return AutoscalerSettings(**{"enabled": True, **fields})


def for_minutes(
    look: Callable[[float], PoolObservation], minutes: float = 6.0, end_s: float = NOW_S
) -> list[PoolObservation]:
    """The looks of the last minutes, one per interval, the last one now."""
    count = int(minutes * 60 / INTERVAL_S)
    return [look(end_s - index * INTERVAL_S) for index in range(count, -1, -1)]
