"""torch's settings of the whole process, as an `LLM` needs them in a program that may have others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from engine.machine import set_num_threads


@contextmanager
def own_torch_settings(num_threads: int | None, *, num_processes: int = 1) -> Iterator[None]:
    """Inside of the block torch has these threads (see `set_num_threads`) and makes float32 tensors on the CPU by
    default; after it, what it had before."""
    num_before, dtype_before = torch.get_num_threads(), torch.get_default_dtype()
    # Only where it is needed: inside of it every operation of torch takes some microseconds more.
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with device:
        try:
            torch.set_default_dtype(torch.float32)
            set_num_threads(num_threads, num_processes=num_processes)
            yield
        finally:
            torch.set_default_dtype(dtype_before)
            if torch.get_num_threads() != num_before:
                torch.set_num_threads(num_before)
