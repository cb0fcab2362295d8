"""What this machine grants the process: cores and memory, a container's limits (cgroup v2) included.

A pod on a node with 64 cores and a limit of 2 sees 64 cores and the node's memory. Threads for all of them stop each
other whenever the quota is used up, and KV memory beyond the limit ends in a kill without a word.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """Cores' worth of time that the container grants, None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def useful_threads(cgroup: Path = _CGROUP) -> int:
    """Threads that can compute at one time: as many as there are usable cores, rounded up where time is granted."""
    quota = cpu_quota(cgroup)
    cores = len(usable_cores())
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory that new processes can take without swapping, and no more than a container's limit leaves."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))
