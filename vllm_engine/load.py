"""vLLM's load as the engine's load report.

vLLM reports with a step's outputs. Between them the numbers of requests are the host's own, so that they are right
while vLLM computes a long step and after it has ended its last request. Blocks that only the prefix cache uses count as
free, as in vLLM.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.metrics.loggers import StatLoggerBase

from engine.core.messages import EngineLoad
from engine.scheduling.scheduler_output import SchedulerCounters
from vllm_engine.kv_messages import KVLoad

_SLOWEST_DECAY = 0.9


@dataclass(slots=True)
class RequestCounts:
    """The host's own counts of requests that have not ended."""

    num_unfinished: int = 0
    num_loading: int = 0
    """Of these, those with blocks that wait for KV or seed."""
    num_without_room: int = 0
    """Of these, those that wait for such blocks."""
    num_streams: int = 0
    """Of these, those that have a token."""
    num_waiting_tokens: int = 0
    """Of those that compute their prompt and have no token yet."""


class LoadMeter(StatLoggerBase):
    """vLLM calls `record` after each step, on the host's event loop. The host asks for `load`."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._stats: Any = None
        self._counters = SchedulerCounters()
        self._step_s = 0.0
        self._last_s: float | None = None

    def log_engine_initialized(self) -> None:
        pass

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        del others, more
        if not self.num_blocks:
            return  # the host does not serve yet: vLLM warms up
        self._stats = scheduler_stats or self._stats
        self._measure_step(has_outputs=iteration_stats is not None)
        if iteration_stats is None:
            return
        num_prefilled: int = iteration_stats.prompt_token_stats.computed
        num_generated: int = iteration_stats.num_generation_tokens
        self._counters.step_computed(num_prefilled + num_generated)
        self._counters.num_prefilled_tokens += num_prefilled
        self._counters.num_generated_tokens += num_generated
        self._counters.num_preemptions += iteration_stats.num_preempted_reqs

    def _measure_step(self, *, has_outputs: bool) -> None:
        """A step without outputs computes a part of a prompt, or waits for KV. After `idle` vLLM has such steps too, as
        long as a hand-over is read: they begin no measurement."""
        now = time.monotonic()
        if self._last_s is not None:  # a slow step raises the estimate at once, and it falls step by step
            self._step_s = max(now - self._last_s, self._step_s * _SLOWEST_DECAY)
        if self._last_s is not None or has_outputs:
            self._last_s = now

    def idle(self) -> None:
        """No request runs: the time until the next step is not a step's."""
        self._last_s = None

    def load(self, requests: RequestCounts, kv: KVLoad) -> EngineLoad:
        stats = self._stats
        num_computed = requests.num_unfinished - requests.num_loading
        num_running = min(num_computed, stats.num_running_reqs) if stats is not None else 0
        num_used = round(stats.kv_cache_usage * self.num_blocks) if stats is not None else 0
        num_running_blocks = max(0, num_used - kv.held_blocks - kv.quarantined_blocks)
        return EngineLoad(
            num_waiting=num_computed - num_running,
            num_running=num_running,
            num_prefilling=max(num_running - requests.num_streams, 0),
            num_loading=requests.num_loading,
            num_waiting_tokens=requests.num_waiting_tokens,
            num_without_room=requests.num_without_room,
            free_blocks=max(0, self.num_blocks - num_running_blocks - kv.held_blocks - kv.quarantined_blocks),
            running_blocks=num_running_blocks,
            step_s=self._step_s,
            **(self._counters.totals() | msgspec.structs.asdict(kv)),
        )
