"""A step over paged KV, for tests of attention and of models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import AttentionMetadata


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
