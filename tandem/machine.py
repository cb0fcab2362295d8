"""What this machine has: the cores this process may use and the memory that is free, container limits included."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import psutil

_CGROUP_V2 = Path("/sys/fs/cgroup")
_PORTS = range(20_000, 32_000)
"""Below the range from which Linux takes the ports of outgoing connections, so none of those can be in the way."""


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota() -> float | None:
    """Cores' worth of time that the container grants, None without a limit."""
    try:
        quota, period = (_CGROUP_V2 / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def available_bytes() -> int:
    """Memory that new processes can take without swapping, and no more than a container's limit leaves."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP_V2 / "memory.max").read_text().strip()
        used = int((_CGROUP_V2 / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports nobody listens on now, all different. They are not held: another program could take one meanwhile."""
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        ports.append(port)
    if len(ports) < count:
        raise OSError(f"{host} has fewer than {count} free ports between {_PORTS.start} and {_PORTS.stop - 1}")
    return ports


def share_cores(cores: list[int], num_instances: int, pin: bool) -> list[tuple[int, ...]]:
    """The cores of each instance: equal, separate shares, or empty tuples where pinning is off or cores are too few."""
    per_instance = len(cores) // max(1, num_instances)
    if not pin or per_instance == 0:
        return [()] * num_instances
    return [tuple(cores[index * per_instance : (index + 1) * per_instance]) for index in range(num_instances)]
