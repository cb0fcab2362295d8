"""How many threads the core's kernels use: torch's, which the compiled kernels share (engine/attention/openmp.py)."""

from __future__ import annotations

import os

import torch

from engine.machine import useful_threads


def set_num_threads(num_threads: int | None) -> int:
    """Set torch's threads; None: as OMP_NUM_THREADS says, else as many as the machine and the container let compute at
    one time. Returns the number."""
    if num_threads is None and "OMP_NUM_THREADS" not in os.environ:
        num_threads = min(torch.get_num_threads(), useful_threads())
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()
