"""What only vLLM's workers know: the attention backend and the KV memory as they are, not as they were asked for."""

from __future__ import annotations

import math
from typing import Any


class WorkerFacts:
    """Mixed into vLLM's worker class; called by `AsyncLLM.collective_rpc`."""

    model_runner: Any

    def tandem_facts(self) -> dict[str, Any]:
        """Plain values: it travels by vLLM's message pack."""
        runner = self.model_runner
        caches = list(runner.kv_caches)
        return {
            "runner": type(runner).__name__,
            "attention": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
            "kv_dtype": sorted({str(cache.dtype).removeprefix("torch.") for cache in caches}),
            "kv_shape": [list(cache.shape) for cache in caches],
            "kv_bytes": sum(math.prod(cache.shape) * cache.element_size() for cache in caches),
        }
