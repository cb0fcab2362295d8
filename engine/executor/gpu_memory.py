"""How much memory of a GPU the KV may take: what the engine's part leaves beside the weights and the largest step.

No GPU has run this (docs/gpu.md); tests run it with a CPU model and counted memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.errors import CapacityError


class DeviceMemory(Protocol):
    """The functions of `torch.cuda` that this module uses."""

    def mem_get_info(self) -> tuple[int, int]:
        """Bytes free and in all, for every process on the device."""

    def empty_cache(self) -> None: ...
    def reset_peak_memory_stats(self) -> None: ...
    def max_memory_allocated(self) -> int: ...
    def memory_allocated(self) -> int: ...


def bytes_for_kv(device: DeviceMemory, utilization: float, largest_step: Callable[[], object]) -> int:
    """`utilization`: the part of the device's memory for this engine and all that is there already.

    Raises CapacityError where weights and a step need all of it."""
    device.empty_cache()
    device.reset_peak_memory_stats()
    largest_step()
    for_steps = device.max_memory_allocated() - device.memory_allocated()
    device.empty_cache()  # what the step has left in torch's cache is free
    free, total = device.mem_get_info()
    left = int(total * utilization) - (total - free) - for_steps
    if left <= 0:
        raise CapacityError(
            f"the GPU has no memory for KV: of {total} bytes {utilization:.0%} may be used, {total - free} are used "
            f"and a step needs {for_steps}; raise gpu_memory_utilization, or lower max_num_batched_tokens"
        )
    return left
