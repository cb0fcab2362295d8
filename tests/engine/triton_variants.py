"""Counts the variants that Triton would compile of the attention kernels: `python -m tests.engine.triton_variants`
prints a JSON object for an engine with graphs and one for an engine without: by kernel, how many the warm-up launches,
and how many more the steps after it.

Steps and launches are those of the product's code on tensors in host memory; a stand-in for each kernel keeps, by
Triton's own rules for a GPU, what a variant depends on: types, whether a number is 1 or a multiple of 16, and whether
an address is. In a process of its own: one that uses Triton's interpreter has other kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from engine.attention import AttentionMetadata, triton_attention
from engine.executor import step as step_module
from engine.executor.decode_graphs import GraphedDecoder, Step, capture_sizes
from engine.executor.step import Int64, StepInputs
from engine.kv_layout import KVLayout
from engine.model_runner import ModelRunner
from engine.models import Decoder, LastTokens
from engine.scheduling.kv_cache_manager import KVCacheManager

CPU = torch.device("cpu")
BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 16, 16, 8, 128, 32
MAX_BLOCKS, MAX_REQUESTS, CHUNK = 300, 40, 512
KERNELS = {name: getattr(triton_attention, name) for name in ("write_kv", "attend", "attend_in_splits", "add_splits")}


class Recorded:
    """Stands in for a kernel: a launch keeps its variant."""

    def __init__(self, kernel: Any) -> None:
        backend = CUDABackend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.variants: set[str] = set()

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        _, specialization, options = self._bind(*arguments, **constants)
        self.variants.add(repr((specialization, options)))


class Layers:
    """A decoder of two layers, of which the last computes what is needed, as a native one."""

    attention_name = "triton"

    def __init__(self) -> None:
        self._attention = triton_attention.TritonAttention()

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        needed: LastTokens | None = None,
        adapters: torch.Tensor | None = None,
    ) -> torch.Tensor:
        del adapters
        num_tokens = len(token_ids)
        fused = torch.zeros((num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM), dtype=torch.bfloat16)
        query, key, value = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        for layer in range(2):
            if layer == 1 and needed is not None:
                query, metadata = query[needed.rows], needed.metadata
            self._attention.forward(
                query, key, value, kv_cache, layer=layer, metadata=metadata, scale=0.1, sliding_window=None
            )
        return torch.zeros((num_tokens, 1))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros((len(hidden), VOCABULARY))


class Executor:
    """Of these layers, with graphs or without."""

    attention_name = "triton"

    def __init__(self, *, uses_graphs: bool) -> None:
        sizes = capture_sizes(MAX_REQUESTS) if uses_graphs else []
        self.warm_up_sizes: Sequence[int] = sizes[::-1]
        self._model: Decoder = Layers()
        if uses_graphs:
            self._model = GraphedDecoder(self._model, _run, sizes=sizes, max_blocks=MAX_BLOCKS)
        self._kv_cache = torch.zeros((1, 2, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), dtype=torch.bfloat16)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        token_ids, positions, metadata = inputs.tensors(CPU)
        return self._model.forward(token_ids, positions, self._kv_cache, metadata, inputs.last_tokens(metadata))

    def compute_logits(self, hidden: torch.Tensor, rows: Int64) -> torch.Tensor:
        return self._model.compute_logits(hidden[torch.from_numpy(rows)])

    def free_for_kv(self, layout: KVLayout, max_model_len: int) -> int:
        raise NotImplementedError

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        raise NotImplementedError

    def check(self) -> None: ...

    def shutdown(self) -> None: ...


def _run(step: Step) -> tuple[Callable[[], object], torch.Tensor]:
    """In the place of a capture."""
    return (lambda: None), step()


def serve(executor: Executor) -> None:
    """Steps of streams alone, of prompts alone and of both, of many lengths."""
    random = Random(1)
    for _ in range(300):
        num_streams = random.randrange(MAX_REQUESTS)
        starts, lens = [random.randrange(1, MAX_BLOCKS * BLOCK_SIZE - 1) for _ in range(num_streams)], [1] * num_streams
        if not num_streams or random.random() < 0.7:
            starts.append(random.randrange(MAX_BLOCKS * BLOCK_SIZE - CHUNK))
            lens.append(random.randrange(2, CHUNK))
        needed = list(range(num_streams + random.randrange(len(lens) - num_streams + 1)))
        width = -(-max(map(sum, zip(starts, lens, strict=True))) // BLOCK_SIZE)
        tables = np.zeros((len(lens), width), np.int32)
        tokens = np.zeros(sum(lens), np.int64)
        inputs = StepInputs.of(tokens, np.array(starts), np.array(lens), tables, BLOCK_SIZE, np.array(needed, np.int64))
        executor.forward(inputs)


def count(*, uses_graphs: bool) -> dict[str, tuple[int, int]]:
    recorded = {name: Recorded(kernel) for name, kernel in KERNELS.items()}
    for name, one in recorded.items():
        setattr(triton_attention, name, one)
    executor = Executor(uses_graphs=uses_graphs)
    kv = KVCacheManager(
        num_blocks=1, block_size=BLOCK_SIZE, max_model_len=BLOCK_SIZE, max_num_seqs=1, enable_prefix_caching=False
    )
    ModelRunner(executor, kv, executor._kv_cache).warm_up()
    before = {name: len(one.variants) for name, one in recorded.items()}
    serve(executor)
    return {name: (before[name], len(one.variants) - before[name]) for name, one in recorded.items()}


if __name__ == "__main__":
    step_module._on = step_module.in_one_copy
    for uses_graphs in (True, False):
        print(json.dumps(count(uses_graphs=uses_graphs)))
