"""The pools as a table for people and as JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tandem.commands.pools.reach import aligned, pool_name

if TYPE_CHECKING:
    from protos.tandem.v1 import pools_pb2


def table(answer: pools_pb2.ListPoolsResponse) -> str:
    """A row for each instance, then a line for each pool."""
    rows: list[tuple[str, ...]] = [
        ("POOL", "INSTANCE", "STATE", "WAITING", "RUNNING", "LOADING", "KV USED", "OURS", "ADDRESS")
    ]
    rows += [_row(one) for one in answer.instances]
    instances = "the pools are empty" if len(rows) == 1 else aligned(rows, right={3, 4, 5, 6, 7})
    return "\n".join([instances, "", *(line for pool in answer.pools for line in _pool_lines(pool))])


def as_dict(answer: pools_pb2.ListPoolsResponse) -> dict[str, Any]:
    """The same for programs."""
    return {
        "pools": [_pool_as_dict(pool) for pool in answer.pools],
        "instances": [_instance_as_dict(one) for one in answer.instances],
    }


def _row(one: pools_pb2.PoolInstance) -> tuple[str, ...]:
    told = one.HasField("load")
    load = one.load
    numbers = [load.num_waiting, load.num_running, load.num_loading] if told else ["-"] * 3
    used = f"{load.blocks.running / one.num_blocks:.0%} of {one.num_blocks}" if told and one.num_blocks else "-"
    return (
        pool_name(one.role),
        one.instance_id or "-",
        one.out or "ready",
        *map(str, numbers),
        used,
        str(one.num_running_here),
        one.address,
    )


def _pool_lines(pool: pools_pb2.PoolStatus) -> list[str]:
    """How many there are and are to be, who wanted that, and what the autoscaler thinks."""
    wanted = f" of {pool.size}" if pool.HasField("size") else ""
    lines = [f"{pool_name(pool.role)}: {pool.num_ready}{wanted} ready"]
    if pool.HasField("last_change"):
        change = pool.last_change
        lines[0] += (
            f"; {change.previous_size} → {change.size} by the {change.cause}, {age(change.age_s)} ago: {change.reason}"
        )
    if pool.HasField("autoscaler"):
        status = pool.autoscaler
        does = f"wants {status.desired_size}" if status.leads else "another router decides"
        lines.append(f"  autoscaler {status.min_size}..{status.max_size}: {does}; {status.reason}")
    return lines


def age(seconds: float) -> str:
    """A duration in whole seconds, minutes or hours."""
    for unit, unit_s in (("h", 3600.0), ("min", 60.0)):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _pool_as_dict(pool: pools_pb2.PoolStatus) -> dict[str, Any]:
    change, status = pool.last_change, pool.autoscaler
    last_change = {
        "previous_size": change.previous_size,
        "size": change.size,
        "cause": change.cause,
        "reason": change.reason,
        "age_s": change.age_s,
    }
    autoscaler = {
        "min_size": status.min_size,
        "max_size": status.max_size,
        "leads": status.leads,
        "desired_size": status.desired_size,
        "reason": status.reason,
        "age_s": status.age_s,
    }
    return {
        "pool": pool_name(pool.role),
        "num_ready": pool.num_ready,
        "size": pool.size if pool.HasField("size") else None,
        "last_change": last_change if pool.HasField("last_change") else None,
        "autoscaler": autoscaler if pool.HasField("autoscaler") else None,
    }


def _instance_as_dict(instance: pools_pb2.PoolInstance) -> dict[str, Any]:
    load = instance.load
    known = {
        "num_waiting": load.num_waiting,
        "num_running": load.num_running,
        "num_loading": load.num_loading,
        "num_waiting_tokens": load.num_waiting_tokens,
        "num_blocks": instance.num_blocks,
        "num_used_blocks": load.blocks.running,
        "num_cached_blocks": load.blocks.cached,
        "step_s": load.step_s,
        "draining": load.draining,
    }
    return {
        "pool": pool_name(instance.role),
        "instance": instance.instance_id,
        "address": instance.address,
        "out": instance.out or None,
        "num_running_here": instance.num_running_here,
        "load": known if instance.HasField("load") else None,
    }
