"""vLLM's load as the engine's load report.

vLLM reports with a step's outputs. Between them the numbers of requests are the host's own, so that they are right
while vLLM computes a long step and after it has ended its last request. Blocks that only the prefix cache uses count as
free, as in vLLM.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from engine.core.messages import STEP_TOKENS, EngineLoad

_SLOWEST_DECAY = 0.9


class LoadMeter(StatLoggerBase):
    """vLLM calls `record` after each step, on the host's event loop. The host asks for `load`."""

    def __init__(self) -> None:
        self.num_blocks = 0
        self._stats: Any = None
        self._num_steps = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKENS) + 1)
        self._num_step_tokens = 0
        self._num_prefilled_tokens = 0
        self._num_generated_tokens = 0
        self._num_preemptions = 0
        self._step_s = 0.0
        self._last_s: float | None = None

    def log_engine_initialized(self) -> None:
        pass

    def record(self, scheduler_stats: Any, iteration_stats: Any, *others: Any, **more: Any) -> None:
        del others, more
        self._stats = scheduler_stats or self._stats
        if iteration_stats is None:
            return
        num_prefilled = iteration_stats.prompt_token_stats.computed
        num_tokens = num_prefilled + iteration_stats.num_generation_tokens
        self._num_steps += 1
        self._num_step_tokens += num_tokens
        self._steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
        self._num_prefilled_tokens += num_prefilled
        self._num_generated_tokens += iteration_stats.num_generation_tokens
        self._num_preemptions += iteration_stats.num_preempted_reqs
        now = time.monotonic()
        if self._last_s is not None:  # a slow step raises the estimate at once, and it falls step by step
            self._step_s = max(now - self._last_s, self._step_s * _SLOWEST_DECAY)
        self._last_s = now

    def idle(self) -> None:
        """No request runs: the time until the next step is not a step's."""
        self._last_s = None

    def load(self, *, num_requests: int, num_waiting_tokens: int) -> EngineLoad:
        """`num_requests`: all that have not ended; `num_waiting_tokens`: of those without a token yet."""
        stats = self._stats
        num_running = min(num_requests, stats.num_running_reqs) if stats is not None else 0
        num_used = round(stats.kv_cache_usage * self.num_blocks) if stats is not None else 0
        return EngineLoad(
            num_waiting=num_requests - num_running,
            num_running=num_running,
            num_waiting_tokens=num_waiting_tokens,
            free_blocks=self.num_blocks - num_used,
            running_blocks=num_used,
            num_steps=self._num_steps,
            steps_by_tokens=list(self._steps_by_tokens),
            num_step_tokens=self._num_step_tokens,
            step_s=self._step_s,
            num_prefilled_tokens=self._num_prefilled_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_preemptions=self._num_preemptions,
        )
