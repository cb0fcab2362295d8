"""Paged attention on CPU: compiled loops for decode and short chunks, matrix products for long chunks.

A step's plan (tiles, long chunks, masks) depends on the metadata alone: it is made at the first layer and kept for the
others.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, field

import torch

from engine.attention import cpu_kernels
from engine.attention.backend import AttentionMetadata
from engine.attention.openmp import launcher_for
from engine.attention.simd import WIDTH

TILE_TOKENS = 16
"""Query tokens that share a pass over the pages in the compiled loops."""
LONG_CHUNK = 32
LONG_WORK = 1 << 14
"""From LONG_CHUNK query tokens and LONG_WORK query-key pairs on, gathering pages and matrix products are faster."""
SERIAL_ELEMENTS = 1 << 15
"""Below this many KV elements one thread finishes before a second has started."""

_WriteArguments = ctypes.c_int64 * 12
_AttentionArguments = ctypes.c_int64 * 17


@dataclass(slots=True)
class _LongChunk:
    """A request computed with matrix products. `masks`: by sliding window, made when first needed."""

    rows: slice
    block_table: torch.Tensor
    query_len: int
    seq_len: int
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    """One step. `tiles` int32 [num_tiles, 4]: request, first token of the step, tokens, position of the first token."""

    tiles: torch.Tensor
    long_chunks: list[_LongChunk]
    max_tile_tokens: int
    num_visible: int
    """Sum over the tiles of their visible positions: the work of one head."""


class CpuAttention:
    """Not thread-safe: it keeps the last step's plan."""

    name = "cpu"

    def __init__(self) -> None:
        self._metadata: AttentionMetadata | None = None
        self._plan: _Plan | None = None

    @staticmethod
    def supports(*, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """float32 and bfloat16 on CPU, head sizes of whole vectors, blocks of whole groups of four keys."""
        fits = head_dim % WIDTH == 0 and block_size % 4 == 0
        return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and fits

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
        """See `AttentionBackend.forward`. Row strides are free; within a row elements are contiguous."""
        plan = self._plan
        if plan is None or metadata is not self._metadata:
            plan = self._plan = _make_plan(metadata)
            self._metadata = metadata
        _write_kv(key, value, kv_cache, layer, metadata.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype)
        if plan.max_tile_tokens:
            _attend_tiles(query, kv_cache, output, layer, metadata, plan, scale, sliding_window or 0)
        for chunk in plan.long_chunks:
            output[chunk.rows] = _attend_long(query[chunk.rows], kv_cache, layer, chunk, scale, sliding_window)
        return output


def _make_plan(metadata: AttentionMetadata) -> _Plan:
    # The kernels read raw memory of these types.
    assert metadata.block_tables.dtype == torch.int32
    assert metadata.block_tables.stride(-1) == 1
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.slot_mapping.is_contiguous()
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    tiles: list[tuple[int, int, int, int]] = []
    long_chunks = []
    for request, seq_len in enumerate(seq_lens):
        start, end = starts[request], starts[request + 1]
        query_len = end - start
        if query_len == 1:
            tiles.append((request, start, 1, seq_len - 1))
        elif query_len >= LONG_CHUNK and query_len * seq_len >= LONG_WORK:
            table = metadata.block_tables[request]
            long_chunks.append(_LongChunk(slice(start, end), table, query_len, seq_len))
        else:
            for token in range(0, query_len, TILE_TOKENS):
                count = min(TILE_TOKENS, query_len - token)
                tiles.append((request, start + token, count, seq_len - query_len + token))
    return _Plan(
        tiles=torch.tensor(tiles, dtype=torch.int32),
        long_chunks=long_chunks,
        max_tile_tokens=max((tile[2] for tile in tiles), default=0),
        num_visible=sum(tile[2] + tile[3] for tile in tiles),
    )


def _write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    key, value = _row_major(key), _row_major(value)
    arguments = _WriteArguments(
        0,
        num_tokens,
        num_kv_heads,
        head_dim,
        kv_cache.shape[4],
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        value.stride(0),
        slot_mapping.data_ptr(),
        _layer_address(kv_cache, layer),
        kv_cache.stride(0),
    )
    work = num_tokens * num_kv_heads * head_dim
    num_threads = torch.get_num_threads() if work >= SERIAL_ELEMENTS else 1
    launcher_for(cpu_kernels.write_kv_address, kv_cache.dtype)(num_threads, ctypes.addressof(arguments))


def _attend_tiles(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    layer: int,
    metadata: AttentionMetadata,
    plan: _Plan,
    scale: float,
    window: int,
) -> None:
    _, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    group = num_heads // num_kv_heads
    query = _row_major(query)
    arguments = _AttentionArguments(
        0,
        plan.tiles.shape[0],
        num_kv_heads,
        group,
        head_dim,
        block_size,
        query.data_ptr(),
        query.stride(0),
        output.data_ptr(),
        plan.tiles.data_ptr(),
        metadata.block_tables.data_ptr(),
        metadata.block_tables.stride(0),
        _layer_address(kv_cache, layer),
        kv_cache.stride(0),
        bits_of(scale),
        window,
        plan.max_tile_tokens * group,
    )
    work = plan.num_visible * num_kv_heads * head_dim
    num_threads = torch.get_num_threads() if work >= SERIAL_ELEMENTS else 1
    run = launcher_for(cpu_kernels.paged_attention_address, kv_cache.dtype)
    run(num_threads, ctypes.addressof(arguments))


def _attend_long(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    chunk: _LongChunk,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """query [query_len, num_heads, head_dim] of one request -> the same shape."""
    keys, values = _gather_heads(kv_cache, layer, chunk)
    mask = chunk.masks.get(sliding_window)
    if mask is None:
        mask = chunk.masks[sliding_window] = _mask(chunk, sliding_window, query.dtype)
    output = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return output[0].transpose(0, 1)


def _gather_heads(kv_cache: torch.Tensor, layer: int, chunk: _LongChunk) -> tuple[torch.Tensor, torch.Tensor]:
    """keys, values [num_kv_heads, seq_len, head_dim] of one request, copied out of its pages."""
    _, _, num_planes, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_blocks = -(-chunk.seq_len // block_size)
    pages = kv_cache[:, layer].index_select(0, chunk.block_table[:num_blocks])
    heads = pages.permute(1, 2, 0, 3, 4).reshape(num_planes, num_kv_heads, num_blocks * block_size, head_dim)
    keys, values = heads[:, :, : chunk.seq_len].unbind(0)
    return keys, values


def _mask(chunk: _LongChunk, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [query_len, seq_len]: 0, or -inf where a query must not see a key."""
    keys = torch.arange(chunk.seq_len)
    queries = keys[chunk.seq_len - chunk.query_len :, None]
    hidden = keys > queries
    if sliding_window is not None:
        hidden |= keys <= queries - sliding_window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _row_major(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, head_dim] with adjacent heads; a copy if they are not."""
    return rows if rows.stride(2) == 1 and rows.stride(1) == rows.shape[2] else rows.contiguous()


def _layer_address(kv_cache: torch.Tensor, layer: int) -> int:
    return kv_cache.data_ptr() + layer * kv_cache.stride(1) * kv_cache.element_size()


@functools.cache
def bits_of(number: float) -> int:
    """The bits of a double as int64, the argument type of kernels."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits
