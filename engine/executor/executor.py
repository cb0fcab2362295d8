"""The executor's interface, and the executor of one process."""

from __future__ import annotations

import math
import mmap
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.errors import CapacityError
from engine.executor.step import Int64, StepInputs
from engine.kv_layout import KVLayout
from engine.machine import available_bytes
from engine.models import load_model
from engine.models.config import DecoderConfig


class Executor(Protocol):
    """Runs the model. One call at a time; `check` and `shutdown` between steps."""

    attention_name: str

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        """The KV memory [num_blocks, *layout.page_shape], zeros; called once, before the first step. Its pages hold
        all layers and heads, however they are divided among ranks. Raises CapacityError."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """One step on all ranks: the final hidden states [num_tokens, hidden_size]."""

    def compute_logits(self, hidden: torch.Tensor, rows: Int64) -> torch.Tensor:
        """float32 [len(rows), vocab_size] of rows of the last step's `hidden`."""

    def check(self) -> None:
        """Raises RankLost if a rank has ended."""

    def shutdown(self) -> None:
        """End the other ranks. Idempotent."""


class OneProcessExecutor:
    """One rank, in the core's process."""

    def __init__(self, config: EngineConfig, model_config: DecoderConfig) -> None:
        """Loads the model. Raises InvalidCheckpoint, UnsupportedModel."""
        self._device = torch.device(config.device)
        self._dtype = getattr(torch, model_config.resolve_dtype(config.dtype))
        self._model = load_model(model_config, config)
        self._kv_cache: torch.Tensor
        self.attention_name = self._model.attention_name

    def allocate_kv(self, layout: KVLayout, num_blocks: int) -> torch.Tensor:
        self._kv_cache = _zeroed_memory((num_blocks, *layout.page_shape), self._dtype, self._device)
        return self._kv_cache

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        token_ids, positions, metadata = inputs.tensors(self._device)
        return self._model.forward(token_ids, positions, self._kv_cache, metadata)

    def compute_logits(self, hidden: torch.Tensor, rows: Int64) -> torch.Tensor:
        return self._model.compute_logits(hidden[torch.from_numpy(rows).to(self._device)])

    def check(self) -> None:
        return None

    def shutdown(self) -> None:
        return None


def _zeroed_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On CPU the system zeroes each page at its first touch: writing 2 GiB here would take seconds."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        raise no_kv_memory(num_bytes) from None
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def no_kv_memory(num_bytes: int) -> CapacityError:
    """The error for KV memory of this size."""
    return CapacityError(
        f"cannot allocate {num_bytes / 2**30:.1f} GiB of KV memory: {available_bytes() / 2**30:.1f} GiB free; "
        "lower kv_cache_bytes or num_blocks"
    )
