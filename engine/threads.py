"""How many threads the core's kernels use: torch's, which the compiled kernels share (engine/attention/openmp.py)."""

from __future__ import annotations

import torch


def set_num_threads(num_threads: int | None) -> int:
    """Set torch's threads; None leaves torch's own choice: OMP_NUM_THREADS, else the cores this process may run on.
    Returns the number."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()
