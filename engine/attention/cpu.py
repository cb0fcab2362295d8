"""Paged attention on CPU: one compiled kernel for decode and for chunks of any length.

One kernel, so that the bits of a row depend on its query and its keys alone: not on the chunk, the batch or the threads
that it is computed with. A step's plan depends on the metadata alone: it is made at the first layer and kept for the
others.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention import AttentionMetadata, adjacent_heads, amx_kernels, cpu_kernels, pair_kernels, query_tiles
from engine.attention.compilation import converts_float16, has_tiles, multiplies_pairs
from engine.attention.openmp import launch, launcher_for
from engine.attention.simd import WIDTH

TILE_TOKENS = 32
"""Query tokens that share a pass over the keys."""

_TilesArguments = ctypes.c_int64 * 4
_WriteArguments = ctypes.c_int64 * 13
_AttentionArguments = ctypes.c_int64 * 20


@dataclass(slots=True)
class _Plan:
    """One step. `tiles` int32 [num_tiles, 4]: see `query_tiles`."""

    tiles: torch.Tensor
    max_tile_tokens: int
    num_visible: int
    """Sum over the tiles of their visible positions, or more: the work of one head."""


class CpuAttention:
    """Not thread-safe: it keeps the last step's plan."""

    name = "cpu"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap
        self._metadata: AttentionMetadata | None = None
        self._plan: _Plan | None = None

    @staticmethod
    def supports(*, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """float32, bfloat16 and float16 on CPU, heads and blocks of whole vectors."""
        fits = head_dim % WIDTH == 0 and block_size % WIDTH == 0
        return device.type == "cpu" and is_compiled_for(dtype) and fits

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
        """See `AttentionBackend.forward`. Row strides are free; within a row elements are contiguous."""
        plan = self._plan
        if plan is None or metadata is not self._metadata:
            plan = self._plan = _make_plan(metadata)
            self._metadata = metadata
        _write_kv(key, value, kv_cache, layer, metadata.slot_mapping)
        return self._attend_tiles(query, kv_cache, layer, metadata, plan, scale, sliding_window, sinks)

    def _attend_tiles(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: int,
        metadata: AttentionMetadata,
        plan: _Plan,
        scale: float,
        sliding_window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device="cpu")
        _, num_heads, head_dim = query.shape
        num_kv_heads, block_size = kv_cache.shape[3:5]
        group = num_heads // num_kv_heads
        query = adjacent_heads(query)
        assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
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
            sliding_window or 0,
            plan.max_tile_tokens * group,
            bits_of(self._softcap or 0.0),
            kv_cache.stride(2),
            0 if sinks is None else sinks.data_ptr(),
        )
        num_elements = plan.num_visible * num_kv_heads * head_dim
        launch(_attention_address_of(query.dtype, head_dim), kv_cache.dtype, num_elements, arguments)
        return output


def _attention_address_of(dtype: torch.dtype, head_dim: int) -> Callable[[str], int]:
    """How this processor computes attention."""
    if dtype == torch.bfloat16 and has_tiles() and amx_kernels.supports(head_dim):
        return amx_kernels.paged_attention_address
    in_pairs = dtype == torch.bfloat16 and multiplies_pairs()
    return pair_kernels.paged_attention_address if in_pairs else cpu_kernels.paged_attention_address


def _make_plan(metadata: AttentionMetadata) -> _Plan:
    # The kernels read raw memory of these types.
    assert metadata.block_tables.dtype == torch.int32
    assert metadata.block_tables.stride(-1) == 1
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.slot_mapping.is_contiguous()
    if metadata.max_query_len == 1:
        return _plan_of_single_tokens(metadata)
    tiles = query_tiles(metadata.query_start_loc.tolist(), metadata.seq_lens.tolist(), TILE_TOKENS)
    return _Plan(
        tiles=torch.tensor(tiles, dtype=torch.int32, device="cpu"),
        max_tile_tokens=max(tile[2] for tile in tiles),
        num_visible=sum(tile[2] + tile[3] for tile in tiles),
    )


def _plan_of_single_tokens(metadata: AttentionMetadata) -> _Plan:
    """Reads no length here, but in a kernel, which is run again when the step is replayed."""
    assert metadata.seq_lens.dtype == torch.int32
    assert metadata.seq_lens.is_contiguous()
    num_requests = len(metadata.seq_lens)
    tiles = torch.empty((num_requests, 4), dtype=torch.int32, device="cpu")
    arguments = _TilesArguments(0, num_requests, metadata.seq_lens.data_ptr(), tiles.data_ptr())
    launcher_for(cpu_kernels.single_tiles_address, tiles.dtype)(None, arguments)
    return _Plan(tiles, 1, num_requests * metadata.max_seq_len)


def _write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, layer: int, slot_mapping: torch.Tensor
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    key, value = adjacent_heads(key), adjacent_heads(value)
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
        kv_cache.stride(2),
    )
    launch(cpu_kernels.write_kv_address, kv_cache.dtype, num_tokens * num_kv_heads * head_dim, arguments)


def _layer_address(kv_cache: torch.Tensor, layer: int) -> int:
    return kv_cache.data_ptr() + layer * kv_cache.stride(1) * kv_cache.element_size()


def is_compiled_for(dtype: torch.dtype) -> bool:
    """Whether compiled kernels have elements of this type on this processor."""
    return dtype in (torch.float32, torch.bfloat16) or (dtype == torch.float16 and converts_float16())


@functools.cache
def bits_of(number: float) -> int:
    """The bits of a double as int64, the argument type of kernels."""
    bits: int = struct.unpack("q", struct.pack("d", number))[0]
    return bits
