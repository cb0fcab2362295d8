"""The interface between a model and its paged attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions of one step's tokens. A step is a flat sequence of tokens, request after request; each request has its
    next `query_len` tokens in it, a prefill chunk or a single decode token.

    All tensors are on the model's device.
    """

    query_start_loc: torch.Tensor
    """int32 [num_requests + 1]: request i owns tokens query_start_loc[i]:query_start_loc[i + 1]."""
    seq_lens: torch.Tensor
    """int32 [num_requests]: tokens in the KV cache after this step, the step's own included. The last query token of
    request i is at position seq_lens[i] - 1, and its queries are the last query_len positions."""
    block_tables: torch.Tensor
    """int32 [num_requests, max_blocks]: physical block ids; entries past the request's blocks are not read."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block_id * block_size + offset, where each token's key and value are written."""
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """Writes the step's keys and values into the pages, then attends over the pages, causally.

    kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous from the heads on: the layers
    and heads of a rank are a slice of the pages of all ranks. Keys and values of a head lie in the order
    `page_order(name)`.
    """

    name: str

    @staticmethod
    def supports(*, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this backend can run with these sizes on this device."""

    def forward(
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
    ) -> torch.Tensor:
        """query [num_queries, num_heads, head_dim], key/value [num_tokens, num_kv_heads, head_dim] ->
        [num_queries, num_heads, head_dim] in query's dtype. `sliding_window` w: position p sees (p - w, p].

        Queries are those of `metadata.query_start_loc`, keys and values those of its slot_mapping: of the same tokens,
        but in a model's last layer, where only some queries are needed."""


def query_tiles(starts: list[int], seq_lens: list[int], tile_tokens: int) -> list[tuple[int, int, int, int]]:
    """Pieces of at most `tile_tokens` queries of one request: request, first token of the step, tokens, position of the
    first token. Of the metadata's query_start_loc and seq_lens."""
    return [
        (request, first, min(tile_tokens, stop - first), seq_len - stop + first)
        for request, ((start, stop), seq_len) in enumerate(zip(pairwise(starts), seq_lens, strict=True))
        for first in range(start, stop, tile_tokens)
    ]


def adjacent_heads(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] with adjacent heads; a copy if they are not."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()
