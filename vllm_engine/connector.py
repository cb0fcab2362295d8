"""Tandem's KV connector as vLLM loads it: once in its scheduler, once in its worker.

Each method passes on to one half, in vLLM's types. `vllm_engine/kv_messages.py` shows what goes where.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from vllm_engine.kv_messages import MAX_HELD_FRACTION, KVSeeds, KVSetup, KVStep
from vllm_engine.kv_scheduler import SchedulerHalf
from vllm_engine.kv_worker import StepResults, WorkerHalf, distinct

_BUSY_S = 1.0
_LONGEST_MS = 5
"""While messages are frequent: what one costs whose notification is lost."""

_wait = SpinCondition.wait


class VllmKVConnector(KVConnectorBase_V1):
    """Until the host has called `connect` in the worker, which it does before any request, nothing moves.

    It does not support vLLM's hybrid manager, which would reuse blocks behind a sliding window before they are saved,
    and have no blocks for them where they are loaded. Without the manager vLLM keeps the whole KV of models that have
    full attention as well; others it treats as before.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _sleep_while_waiting()  # vLLM makes one of these in EngineCore and one in the worker
        if not _keeps_whole_kv(kv_cache_config.kv_cache_groups):
            raise ValueError(
                "models with several kinds of KV (hybrid), or with a sliding window in every layer, are not handed "
                "over yet: --kv-connector null"
            )
        self._layers: list[torch.Tensor] = []
        self._worker: WorkerHalf | None = None
        self._results = StepResults()
        if role == KVConnectorRole.SCHEDULER:
            options = self._kv_transfer_config.kv_connector_extra_config
            self._scheduler = SchedulerHalf(
                block_size=vllm_config.cache_config.block_size,
                num_blocks=kv_cache_config.num_blocks,
                max_model_len=vllm_config.model_config.max_model_len,
                max_held_fraction=options[MAX_HELD_FRACTION],
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """Each block of a layer is contiguous. On CPU that is the only one; on GPUs vLLM prefers another."""
        return "LBHNC"

    # Scheduler

    def on_new_request(self, request: Any) -> None:
        self._scheduler.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduler.num_external_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        [block_ids] = blocks.get_block_ids()
        self._scheduler.blocks_allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.take_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        seeds = connector_output.kv_connector_worker_meta
        assert seeds is None or isinstance(seeds, KVSeeds)
        sent, received = connector_output.finished_sending, connector_output.finished_recving
        self._scheduler.take_results(seeds, sent or set(), received or set())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids), None

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layers = distinct(kv_caches.values())

    def connect(self, setup: KVSetup) -> str:
        """Begin to move KV. Returns the name of Tandem's connector; raises EngineError."""
        self._worker = WorkerHalf(self._layers, self._kv_cache_config.num_blocks, setup)
        return self._worker.name

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin_step(self._bound_step)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KVStep)
        if self._worker is not None:
            self._worker.flush_preempted(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin with the step, in `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM computes a request only once all of its KV is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step(self._bound_step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._results = StepResults() if self._worker is None else self._worker.take_results(self._bound_step)
        return KVConnectorTransferResults(finished_sending=self._results.sent, finished_recving=self._results.received)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._results.bad_block_ids

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return KVSeeds(self._results.seeds) if self._results.seeds else None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    @property
    def _bound_step(self) -> KVStep:
        step = self._get_connector_metadata()
        assert isinstance(step, KVStep)
        return step


def _keeps_whole_kv(groups: list[Any]) -> bool:
    """Whether vLLM has a block for each part of a prompt, until the request ends."""
    specs: list[Any] = []
    for group in groups:
        spec = group.kv_cache_spec
        specs += spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return len(groups) == 1 and all(isinstance(spec, FullAttentionSpec) for spec in specs)


def _sleep_while_waiting() -> None:
    """In this process, from now on, on a CPU. Idempotent.

    vLLM polls its shared memory without a pause for a second after each message. There is always one that waits:
    EngineCore while the worker computes, and while KV is awaited both in turns. On a GPU that costs a spare core; on a
    CPU it takes time from models that compute, of other instances too: a prompt that was handed over took 1.4 to 1.6
    times as long.
    """
    if current_platform.is_cpu():
        SpinCondition.wait = _sleep


def _sleep(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    """vLLM's own idle mode at once: until it is notified, or the caller looks again."""
    condition.busy_loop_s = 0.0
    is_busy = time.monotonic() < condition.last_read + _BUSY_S
    _wait(condition, timeout_ms=_LONGEST_MS if is_busy else timeout_ms)
