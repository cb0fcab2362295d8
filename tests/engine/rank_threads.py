"""The ranks of a group as threads of the test: the same exchange as between processes, without starting any."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.ranks import SharedMemoryRanks

Result = TypeVar("Result")


def group_of(size: int) -> tuple[list[SharedMemoryRanks], list[dict[int, socket.socket]]]:
    """The ends of all ranks, and their sockets, to be closed."""
    memory = mmap.mmap(-1, SharedMemoryRanks.memory_bytes(size))
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one + 1, size):
            peers[one][other], peers[other][one] = socket.socketpair()
    return [SharedMemoryRanks(rank, peers[rank], memory) for rank in range(size)], peers


def on_all_ranks(size: int, compute: Callable[[int, SharedMemoryRanks], Result]) -> list[Result]:
    """`compute` on every rank at the same time."""
    group, peers = group_of(size)
    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(compute, range(size), group))
    for sock in (sock for ends in peers for sock in ends.values()):
        sock.close()
    return results
