"""The interface between the model runner and a decoder."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.backend import AttentionMetadata


class Decoder(Protocol):
    """Owns the weights; the caller owns the KV cache and the step's metadata. Used by one thread."""

    @property
    def attention_name(self) -> str:
        """Name of the attention backend."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """One step: token_ids, positions int [num_tokens] -> final hidden states [num_tokens, hidden_size].

        Keys and values of the step are written into kv_cache at metadata.slot_mapping.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size]."""
