"""Cores, threads, memory and GPUs that this process may use, with a container's limits (cgroup v2); file systems.

A pod with a limit of 2 cores on a node of 64 sees 64 cores and the whole memory of the node. Threads for 64 cores would
exhaust the quota and be throttled; KV memory beyond the limit would get the process killed.
"""

from __future__ import annotations

import functools
import gc
import math
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.imports import named

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_KV_FRACTION = 0.3
_GOMP_SPINS = "500000"
"""Of an idle OpenMP thread before it sleeps: 5 ms by GNU's own estimate of 100 spins per microsecond, from which a
processor may differ by a factor of 5. The pauses between the launches of one step, and between steps, are shorter."""
_KMP_SPIN_MS = "5"
"""The same for LLVM's and Intel's runtimes, which count milliseconds."""
START_UP = "start-up: "
"""Begins the log messages of what a start waits for, which `tandem up` shows."""


def usable_cores() -> list[int]:
    """Ids of the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota(cgroup: Path = _CGROUP) -> float | None:
    """The container's CPU limit in cores; None without one."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def useful_threads(cgroup: Path = _CGROUP) -> int:
    """Threads that can run at the same time: the usable cores, at most the CPU limit rounded up."""
    quota = cpu_quota(cgroup)
    cores = len(usable_cores())
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def openmp_waiting(cores: Collection[int], cgroup: Path = _CGROUP) -> dict[str, str]:
    """Environment variables for a process that is pinned to `cores`; empty: to none.

    On cores of its own, idle OpenMP threads spin for some milliseconds before they sleep, so that the launches of a
    step do not wait for them. On shared cores they sleep at once: there spinning makes a step 5 to 10 times as long
    (benchmarks/LOG.md). Under a CPU limit too, because it counts spinning.
    """
    quota = cpu_quota(cgroup)
    if not cores or (quota is not None and quota < len(usable_cores())):
        return {"OMP_WAIT_POLICY": "passive"}
    return {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": _GOMP_SPINS, "KMP_BLOCKTIME": _KMP_SPIN_MS}


def physical_cores(cores: Sequence[int], cpus: Path = _CPUS) -> list[tuple[int, ...]]:
    """`cores` by physical core: hyperthreads of one core together. One whose siblings are not known is alone."""
    siblings = [_siblings(core, cpus) for core in cores]
    return list(dict.fromkeys(tuple(core for core in cores if core in together) for together in siblings))


def _siblings(core: int, cpus: Path) -> list[int]:
    """From a list such as 0,4 or 0-1."""
    try:
        parts = (cpus / f"cpu{core}" / "topology" / "thread_siblings_list").read_text().strip().split(",")
        bounds = [[int(bound) for bound in part.split("-")] for part in parts]
        return [one for part in bounds for one in range(part[0], part[-1] + 1)]
    except (OSError, ValueError):
        return [core]


@functools.cache
def second_level_bytes(cpus: Path = _CPUS) -> int:
    """A usable core's share of its cache of the second level; 512 KiB where it is not known."""
    cache = cpus / f"cpu{usable_cores()[0]}" / "cache" / "index2"
    try:
        kibibytes = int((cache / "size").read_text().strip().removesuffix("K"))
        num_sharing = (cache / "shared_cpu_map").read_text().replace(",", "")
        return kibibytes * 1024 // max(1, int(num_sharing, 16).bit_count())
    except (OSError, ValueError):
        return 512 * 1024


def visible_gpus() -> list[str]:
    """Names of the GPUs that torch finds, as in CUDA_VISIBLE_DEVICES."""
    import torch  # late: it takes seconds

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return named[:count] or [str(number) for number in range(count)]


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Memory available without swapping, within the container's limit. The page cache counts as available, in a
    container too: a checkpoint that was read takes no memory from KV."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    if limit == "max":
        return available
    return min(available, max(0, int(limit) - max(0, used - _page_cache_bytes(cgroup))))


def free_host_memory_for_kv() -> int:
    """Bytes that KV may take where its size is not given, once the weights are loaded: several instances share a
    host."""
    return int(available_bytes() * _KV_FRACTION)


def _page_cache_bytes(cgroup: Path) -> int:
    """Of files, which memory.current includes; shared memory is none of it. 0 where it is not known."""
    try:
        counters = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return int(counters["active_file"]) + int(counters["inactive_file"])
    except (OSError, ValueError, KeyError):
        return 0


def file_system(folder: Path) -> str:
    """The type of a folder's file system, as the kernel names it."""
    mounts = [one for one in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(one.mountpoint)]
    # Of several at one folder the last one counts.
    return max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown"


def set_up_process(config: EngineConfig) -> None:
    """Call the configured function, which sets up logging."""
    if config.process_setup:
        named(config.process_setup)(**config.process_setup_options)


@contextmanager
def start_up_heap() -> Iterator[None]:
    """What the block makes, such as torch's modules and the model, stays: no collection traverses it, inside the block,
    where that is a sixth of the start, or later, during a step."""
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def place_process(config: EngineConfig, rank: int) -> None:
    """Set cores and threads of the process of one rank. Before torch is imported, for its thread pools. Raises
    EngineError for cores that it cannot have."""
    num_ranks, cores = config.parallelism.num_ranks, config.cpu_cores
    if cores:
        share = cores[len(cores) * rank // num_ranks : len(cores) * (rank + 1) // num_ranks] or cores
        try:
            os.sched_setaffinity(0, share)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(
                f"cpu_cores: {list(share)} cannot be used: {error}; this process runs on {usable_cores()}"
            ) from None
    set_num_threads(config.num_threads, num_processes=1 if cores else num_ranks)


def set_num_threads(num_threads: int | None, *, num_processes: int = 1) -> int:
    """Set torch's threads, which the compiled kernels share (engine/attention/openmp.py); returns their number.

    None: OMP_NUM_THREADS, else as many as can run at the same time, divided among `num_processes` that share the cores.
    """
    import torch  # late: the rest of this module is used without torch

    if num_threads is None and "OMP_NUM_THREADS" not in os.environ:
        num_threads = max(1, min(torch.get_num_threads(), useful_threads()) // num_processes)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()
