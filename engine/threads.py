"""How many threads the core's kernels use: torch's, which the compiled kernels share (engine/attention/openmp.py)."""

from __future__ import annotations

import os

import torch


def set_num_threads(num_threads: int | None) -> int:
    """Set torch's threads; None takes the cores this process may run on. Returns the number."""
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count
