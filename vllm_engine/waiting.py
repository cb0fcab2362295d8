"""How vLLM's processes wait for each other's messages on a CPU: asleep.

vLLM polls its shared memory without a pause for a second after each message. There is always one that waits: EngineCore
while the worker computes, and while KV is awaited both in turns. On a GPU that costs a spare core; on a CPU it takes
time from models that compute, of other instances too: a prompt that was handed over took 1.4 to 1.6 times as long.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform

_BUSY_S = 1.0
_LONGEST_MS = 5
"""While messages are frequent: what one costs whose notification is lost."""

_wait = SpinCondition.wait


def sleep_while_waiting() -> None:
    """In this process, from now on. Idempotent."""
    if current_platform.is_cpu():
        SpinCondition.wait = _sleep


def _sleep(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    """vLLM's own idle mode at once: until it is notified, or the caller looks again."""
    condition.busy_loop_s = 0.0
    is_busy = time.monotonic() < condition.last_read + _BUSY_S
    _wait(condition, timeout_ms=_LONGEST_MS if is_busy else timeout_ms)
