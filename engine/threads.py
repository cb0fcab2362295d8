"""How many threads the core's kernels use."""

from __future__ import annotations

import os

import numba
import torch


def set_num_threads(num_threads: int | None) -> int:
    """Set the threads of torch and numba; None takes the cores this process may run on. Returns the number."""
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    return count
