"""What the host calls in vLLM's workers, which alone know attention backend and KV memory as they are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_engine.grammars import State, worker_grammars
from vllm_engine.kv_messages import KVSetup
from vllm_engine.kv_worker import distinct
from vllm_engine.requests import read_sampled_request

if TYPE_CHECKING:
    from vllm_engine.connector import VllmKVConnector


class WorkerFacts:
    """Mixed into vLLM's worker class; called by `AsyncLLM.collective_rpc`."""

    model_config: Any
    model_runner: Any

    def tandem_facts(self) -> dict[str, Any]:
        """Plain values: it travels by vLLM's message pack."""
        runner = self.model_runner
        caches = distinct(runner.kv_caches)
        return {
            "runner": type(runner).__name__,
            "attention": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
            "kv_dtype": sorted({str(cache.dtype).removeprefix("torch.") for cache in caches}),
            "kv_shape": [list(cache.shape) for cache in caches],
            "kv_bytes": sum(math.prod(cache.shape) * cache.element_size() for cache in caches),
        }

    def tandem_connect(self, setup: bytes) -> str:
        """`setup`: a KVSetup as msgpack. Returns the connector's name; raises EngineError."""
        connector = cast("VllmKVConnector", get_kv_transfer_group())
        return connector.connect(msgspec.msgpack.decode(setup, type=KVSetup))

    def tandem_begun(self) -> list[str]:
        """Ids of requests that were in a step and have not ended; some of those that just have are among them."""
        found = (read_sampled_request(state.sampling_params) for state in self.model_runner.requests.values())
        return [sampled.request.request_id for sampled in found if sampled is not None]

    def tandem_compile(self, constraints: bytes) -> list[State]:
        """See WorkerGrammars.compile."""
        model = self.model_config
        return worker_grammars(Path(model.model), model.get_vocab_size()).compile(constraints)
