"""Paged attention by definition: gather, then softmax in float32. Slow; other backends are tested against it."""

from __future__ import annotations

import torch

from engine.attention import AttentionMetadata


class ReferenceAttention:
    """Supports any device, block size and dtype; stateless."""

    name = "reference"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap

    @staticmethod
    def supports(*, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        return True

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
        write_kv(kv_cache, key, value, layer=layer, slot_mapping=metadata.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        starts = metadata.query_start_loc.tolist()
        for index, seq_len in enumerate(metadata.seq_lens.tolist()):
            rows = slice(starts[index], starts[index + 1])
            keys, values = gather_kv(kv_cache, metadata.block_tables[index], layer=layer, seq_len=seq_len)
            output[rows] = _attend(
                query[rows],
                keys,
                values,
                scale=scale,
                sliding_window=sliding_window,
                softcap=self._softcap,
                sinks=sinks,
            )
        return output


def write_kv(
    kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, slot_mapping: torch.Tensor
) -> None:
    """Writes key and value [num_tokens, num_kv_heads, head_dim] into the slots of `layer`."""
    block_size = kv_cache.shape[4]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[block_ids, layer, 0, :, offsets] = key
    kv_cache[block_ids, layer, 1, :, offsets] = value


def gather_kv(
    kv_cache: torch.Tensor, block_table: torch.Tensor, *, layer: int, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """keys, values, each [seq_len, num_kv_heads, head_dim], copied out of the request's pages."""
    block_size = kv_cache.shape[4]
    num_blocks = -(-seq_len // block_size)
    pages = kv_cache[block_table[:num_blocks].long(), layer]  # [blocks, 2, heads, block_size, head_dim]
    tokens = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :seq_len]
    return tokens[0], tokens[1]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [q, num_heads, d] at the last q positions of keys/values [s, num_kv_heads, d] -> [q, num_heads, d]."""
    group = query.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1)
    values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,shd->hqs", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(keys.shape[0], device=query.device)
    query_positions = key_positions[-query.shape[0] :, None] if query.shape[0] else key_positions[:0, None]
    hidden = key_positions > query_positions
    if sliding_window is not None:
        hidden |= key_positions <= query_positions - sliding_window
        # The null block in the place of these may have what is not finite, and a weight of 0 does not remove that.
        values = values.masked_fill(hidden.all(dim=0)[:, None, None], 0.0)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(dim=-1)
    if sinks is not None:  # the part of the sum that is not the sink's
        weights *= torch.sigmoid(scores.logsumexp(dim=-1, keepdim=True) - sinks[:, None, None])
    return torch.einsum("hqs,shd->qhd", weights, values).to(query.dtype)
