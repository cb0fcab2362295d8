"""A step over paged KV, for tests of attention and of models, and the tensors of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.attention import AttentionMetadata

NUM_LAYERS = 3


def paged_step(
    requests: Sequence[tuple[int, int]], *, block_size: int, seed: int = 0
) -> tuple[AttentionMetadata, torch.Tensor, int]:
    """A step of `requests`, each (query_len, seq_len), over shuffled blocks: metadata, positions, number of blocks.

    The same seq_lens rounded up to blocks and the same seed give the same block tables.
    """
    blocks = [-(-seq_len // block_size) for _, seq_len in requests]
    shuffled = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    tables = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    starts, slots, positions = [0], [], []
    for index, (query_len, seq_len) in enumerate(requests):
        table = [shuffled.pop() for _ in range(blocks[index])]
        tables[index, : len(table)] = torch.tensor(table, dtype=torch.int32)
        own = range(seq_len - query_len, seq_len)
        slots += [table[position // block_size] * block_size + position % block_size for position in own]
        positions += own
        starts.append(starts[-1] + query_len)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
        max_query_len=max(query_len for query_len, _ in requests),
        max_seq_len=max(seq_len for _, seq_len in requests),
    )
    return metadata, torch.tensor(positions), sum(blocks) + 2


def paged_tensors(
    metadata: AttentionMetadata,
    num_blocks: int,
    *,
    block_size: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, key, value as slices of one fused projection, and pages that hold NaN wherever no token lies."""
    generator = torch.Generator().manual_seed(7)
    cache = torch.randn(num_blocks, NUM_LAYERS, 2, kv_heads, block_size, head_dim, generator=generator)
    for table, seq_len in zip(metadata.block_tables.tolist(), metadata.seq_lens.tolist(), strict=True):
        if seq_len % block_size:
            cache[table[seq_len // block_size], :, :, :, seq_len % block_size :] = float("nan")
    unused = set(range(num_blocks)) - set(metadata.block_tables.flatten().tolist())
    cache[list(unused)] = float("nan")
    num_tokens = int(metadata.query_start_loc[-1])
    fused = torch.randn(num_tokens, (group + 2) * kv_heads, head_dim, generator=generator).to(dtype)
    query, key, value = fused.split([group * kv_heads, kv_heads, kv_heads], dim=1)
    return query, key, value, cache.to(dtype)


def step_behind_windows(
    requests: Sequence[tuple[int, int]], *, block_size: int, window: int
) -> tuple[AttentionMetadata, AttentionMetadata, int]:
    """A step of `requests` that have no block 0, with whole tables, and as `KVCacheManager.drop_unseen` leaves them:
    with block 0 in the place of those that no row of the step sees. Third, the number of blocks."""
    metadata, _, num_blocks = paged_step(requests, block_size=block_size)
    tables, slots = metadata.block_tables + 1, metadata.slot_mapping + block_size
    dropped = tables.clone()
    for table, (query_len, seq_len) in zip(dropped, requests, strict=True):
        table[: max(0, seq_len - query_len - window + 1) // block_size] = 0
    whole = replace(metadata, block_tables=tables, slot_mapping=slots)
    return whole, replace(whole, block_tables=dropped), num_blocks + 1


def in_vectors(cache: torch.Tensor) -> torch.Tensor:
    """Pages in the order "tokens" [num_blocks, layers, 2, heads, block_size, head_dim], in the order "vectors"."""
    n = 4 // cache.element_size()
    shape, keys, values = cache.shape, *cache.unbind(2)
    outer, (block_size, head_dim) = keys.shape[:3], shape[-2:]
    keys = keys.reshape(*outer, block_size // 16, 16, head_dim // n, n).transpose(4, 5)
    values = values.reshape(*outer, block_size // n, n, head_dim).transpose(4, 5)
    return torch.stack([keys.reshape(*outer, -1), values.reshape(*outer, -1)], dim=2).view(shape)


def in_tokens(pages: torch.Tensor) -> torch.Tensor:
    """Undoes `in_vectors`."""
    n = 4 // pages.element_size()
    shape, keys, values = pages.shape, *pages.unbind(2)
    outer, (block_size, head_dim) = keys.shape[:3], shape[-2:]
    keys = keys.reshape(*outer, block_size // 16, head_dim // n, 16, n).transpose(4, 5)
    values = values.reshape(*outer, block_size // n, head_dim, n).transpose(4, 5)
    return torch.stack([keys.reshape(*outer, -1), values.reshape(*outer, -1)], dim=2).view(shape)
