"""Paged attention by the library flash-attn (arXiv 2307.08691), for GPUs: one call for a step's prompts and tokens.

No GPU has run this (docs/gpu.md); tests run it with a stand-in of the library's function. The library divides the keys
of a batch of single tokens as it sees fit, so that a row's bits may depend on its batch.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from engine.attention import AttentionMetadata
from engine.attention.reference import write_kv

PAGE_TOKENS = 256
"""The library's blocks are multiples of this."""
MAX_HEAD_DIM = 256


class FlashAttention:
    """Not thread-safe: it keeps the last step's lengths, summed at the first layer."""

    name = "flash"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap or 0.0
        self._attend: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
        self._metadata: AttentionMetadata | None = None
        self._key_starts: torch.Tensor

    @staticmethod
    def supports(*, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """On CUDA, in 16 bits, with large blocks."""
        fits = block_size % PAGE_TOKENS == 0 and head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM
        return device.type == "cuda" and fits and dtype in (torch.bfloat16, torch.float16)

    def forward(  # noqa: PLR0913 - as many as attention has
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        layer: int,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        assert sinks is None  # see `select_backend`
        if metadata is not self._metadata:
            self._key_starts = torch.nn.functional.pad(metadata.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
            self._metadata = metadata
        write_kv(kv_cache, key, value, layer=layer, slot_mapping=metadata.slot_mapping)
        # The library's pages are [block_size, heads, head_dim], with any strides but the last.
        keys, values = kv_cache[:, layer].transpose(2, 3).unbind(1)
        attended: torch.Tensor = self._attend(
            query,
            keys,
            values,
            cu_seqlens_q=metadata.query_start_loc,
            cu_seqlens_k=self._key_starts,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            softcap=self._softcap,
            block_table=metadata.block_tables,
        )
        return attended
