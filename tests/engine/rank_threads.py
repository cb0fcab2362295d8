"""The ranks of an engine as threads of the test: the same exchange as between processes, without starting any."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.config import EngineConfig
from engine.executor.worker import load_part
from engine.models import Decoder
from engine.models.config import ModelConfig
from engine.partition import Parallelism, Part
from engine.ranks import Ends, SharedMemoryRanks, close_all, connect_all

Result = TypeVar("Result")


def group_of(size: int) -> tuple[list[SharedMemoryRanks], list[Ends]]:
    """The tensor ranks of one stage, and their sockets, to be closed."""
    memory = mmap.mmap(-1, SharedMemoryRanks.memory_bytes(size))
    all_ends = connect_all(Parallelism(size))
    return [SharedMemoryRanks(rank, ends.peers, memory) for rank, ends in enumerate(all_ends)], all_ends


def on_all_ranks(size: int, compute: Callable[[int, SharedMemoryRanks], Result]) -> list[Result]:
    """`compute` on every rank of one stage at the same time."""
    group, all_ends = group_of(size)
    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(compute, range(size), group))
    close_all(all_ends)
    return results


def on_all_parts(engine: EngineConfig, config: ModelConfig, compute: Callable[[Part, Decoder], Result]) -> list[Result]:
    """`compute` on every rank of every stage at the same time, with its part of the model."""
    parallelism = engine.parallelism
    all_ends = connect_all(parallelism)
    slots_fd = os.memfd_create("slots")
    num_bytes = SharedMemoryRanks.memory_bytes(parallelism.tensor_parallel_size)
    os.ftruncate(slots_fd, parallelism.pipeline_parallel_size * num_bytes)

    def compute_part(rank: int) -> Result:
        part = parallelism.part(rank, config)
        return compute(part, load_part(engine, config, part, all_ends[rank], slots_fd))

    try:
        with ThreadPoolExecutor(parallelism.num_ranks) as threads:
            return list(threads.map(compute_part, range(parallelism.num_ranks)))
    finally:
        close_all(all_ends)
        os.close(slots_fd)
