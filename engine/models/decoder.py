"""The interface between the model runner and a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.backend import AttentionMetadata


@dataclass(frozen=True, slots=True)
class LastTokens:
    """The tokens of a step whose hidden states are needed: the last ones of some requests, one at least."""

    rows: torch.Tensor
    """int64 [num_rows]: their places in the step."""
    metadata: AttentionMetadata
    """As if these were the step's only queries; its slot_mapping is that of all tokens."""


class Decoder(Protocol):
    """Owns the weights; the caller owns the KV cache and the step's metadata. Used by one thread."""

    attention_name: str
    """Name of the attention backend."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        needed: LastTokens | None = None,
    ) -> torch.Tensor:
        """One step: token_ids, positions int [num_tokens] -> final hidden states [num_tokens, hidden_size].

        Keys and values of the step are written into kv_cache at metadata.slot_mapping. With `needed` the hidden states
        of other tokens may be anything.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> float32 [rows, vocab_size]."""
