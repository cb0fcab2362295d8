"""Paged attention by Triton kernels, for GPUs: prefill tiles in one launch, decode tokens in splits of their keys.

docs/gpu.md lists what of this has run on a GPU. On CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1),
where tests compare them with the reference.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from engine.attention import AttentionMetadata, adjacent_heads, query_tiles

MAX_HEAD_DIM = 256
SPLIT_KEYS = 256
"""Keys of a decode token that are added up together."""
_MIN_ROWS = 16
"""What a matrix product of Triton needs."""
_PROGRAMS = 1024
"""Of a decode step, about: enough to occupy a GPU."""
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is compiled, which changes its speed."""

    tile_keys: int
    num_warps: int
    num_stages: int


def prefill_rows(block_d: int, dtype: torch.dtype) -> int:
    """Tokens times query heads of a KV head in a tile of a prompt, about, for heads of `block_d` elements."""
    if dtype == torch.float32:
        return 32
    return 128 if block_d <= 128 else 64


def prefill_launch(block_d: int, dtype: torch.dtype) -> Launch:
    """At most 99 KiB of shared memory, which every GPU since Ampere has."""
    if dtype == torch.float32:
        return Launch(32, 4, 2) if block_d <= 128 else Launch(16, 4, 1)
    return Launch(64, 8, 3) if block_d <= 128 else Launch(32, 4, 2)


def decode_launch(block_d: int, dtype: torch.dtype) -> Launch:
    """As `prefill_launch`, of single tokens."""
    if dtype == torch.float32:
        return Launch(32 if block_d <= 128 else 16, 4, 2)
    return Launch(64 if block_d <= 128 else 32, 4, 3)


@dataclass(slots=True)
class _Plan:
    """One step. Tiles int32 [num_tiles, 4]: see `query_tiles`."""

    prefill: torch.Tensor
    decode: torch.Tensor
    """Of one token each."""
    tile_tokens: int
    num_splits: int
    """Of the longest sequence."""


class TritonAttention:
    """Not thread-safe: it keeps the last step's plan, made at the first layer."""

    name = "triton"

    def __init__(self, softcap: float | None = None) -> None:
        self._softcap = softcap
        self._metadata: AttentionMetadata | None = None
        self._plan: _Plan | None = None

    @staticmethod
    def supports(*, block_size: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """On CUDA, and on CPU in the interpreter, where triton is installed."""
        is_runnable = device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
        fits = 16 <= head_dim <= MAX_HEAD_DIM and block_size % 16 == 0
        is_number = dtype in (torch.float32, torch.bfloat16, torch.float16)
        return is_runnable and fits and is_number and importlib.util.find_spec("triton") is not None

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
        """See `AttentionBackend.forward`. Row strides are free; heads and their elements are contiguous."""
        group = query.shape[1] // key.shape[1]
        plan = self._plan
        if plan is None or metadata is not self._metadata:
            rows = prefill_rows(_power_of_two(query.shape[2]), query.dtype)
            plan = self._plan = _make_plan(metadata, max(1, rows // _power_of_two(group)), query.device)
            self._metadata = metadata
        pages = kv_cache[:, layer]
        _write(adjacent_heads(key), adjacent_heads(value), pages, metadata.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        step = _Step(adjacent_heads(query), pages, metadata.block_tables, scale, sliding_window or 0, self._softcap)
        if len(plan.prefill):
            step.attend(plan.prefill, output, plan.tile_tokens)
        if len(plan.decode):
            for tiles in plan.decode.split(step.most_tiles_in_splits(plan.num_splits)):
                step.attend_in_splits(tiles, output, plan.num_splits)
        return output


@dataclass(frozen=True, slots=True)
class _Step:
    """The inputs of one layer in one step; `pages` [num_blocks, 2, num_kv_heads, block_size, head_dim] with strides."""

    query: torch.Tensor
    pages: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    window: int
    softcap: float | None

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.pages.shape[2]

    def attend(self, tiles: torch.Tensor, output: torch.Tensor, tile_tokens: int) -> None:
        """Tiles of prompts."""
        from engine.attention import triton_kernels as kernels

        launch = prefill_launch(_power_of_two(self.pages.shape[4]), self.query.dtype)
        kernels.attend[(len(tiles), self.pages.shape[2])](
            self.query, self.pages, tiles, self.block_tables, output,
            *self._strides, self.scale * _LOG2_E, self.window, self._softcap,
            ROWS=max(_MIN_ROWS, _power_of_two(tile_tokens * self.group)), **self._constants(launch),
        )  # fmt: skip

    def most_tiles_in_splits(self, num_splits: int) -> int:
        """In one launch: what its splits add up to takes memory for each."""
        heads, head_dim = self.query.shape[1], self.pages.shape[4]
        return max(1, _most_bytes_of_splits(self.query.device) // (heads * num_splits * (head_dim + 2) * 4))

    def attend_in_splits(self, tiles: torch.Tensor, output: torch.Tensor, num_splits: int) -> None:
        """Decode: one token has too few rows to occupy a GPU, so its keys are divided among programs."""
        from engine.attention import triton_kernels as kernels

        num_kv_heads, head_dim = self.pages.shape[2], self.pages.shape[4]
        shape = (len(tiles), num_kv_heads, num_splits, self.group)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=output.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=output.device)
        launch = decode_launch(_power_of_two(head_dim), self.query.dtype)
        num_programs = min(num_splits, -(-_PROGRAMS // (len(tiles) * num_kv_heads)))
        kernels.attend_in_splits[(len(tiles), num_kv_heads, num_programs)](
            self.query, self.pages, tiles, self.block_tables, parts, sums,
            *self._strides, num_splits, self.scale * _LOG2_E, self.window, self._softcap,
            ROWS=max(_MIN_ROWS, _power_of_two(self.group)), SPLIT_KEYS=SPLIT_KEYS, **self._constants(launch),
        )  # fmt: skip
        kernels.add_splits[(len(tiles), output.shape[1])](
            parts, sums, tiles, output, num_splits, self.window,
            GROUP=self.group, HEAD_DIM=head_dim, BLOCK_D=_power_of_two(head_dim), SPLIT_KEYS=SPLIT_KEYS,
            HAS_WINDOW=self.window > 0,
        )  # fmt: skip

    @property
    def _strides(self) -> tuple[int, int, int, int]:
        return self.query.stride(0), self.block_tables.stride(0), self.pages.stride(0), self.pages.stride(1)

    @property
    def _softcap(self) -> float:
        return 1.0 if self.softcap is None else self.softcap * _LOG2_E

    def _constants(self, launch: Launch) -> dict[str, Any]:
        """Of the kernels that read keys."""
        _, _, _, block_size, head_dim = self.pages.shape
        return {
            "GROUP": self.group, "HEAD_DIM": head_dim, "BLOCK_D": _power_of_two(head_dim), "BLOCK_SIZE": block_size,
            "TILE_KEYS": launch.tile_keys, "HAS_WINDOW": self.window > 0, "HAS_SOFTCAP": self.softcap is not None,
            "WIDENS": self.query.device.type == "cpu", "num_warps": launch.num_warps, "num_stages": launch.num_stages,
        }  # fmt: skip


@functools.cache
def _most_bytes_of_splits(device: torch.device) -> int:
    """That a step may take: a 64th of the GPU. Hundreds of requests of which one has a long context would take GiBs,
    which the size of the KV memory leaves no room for."""
    return torch.cuda.get_device_properties(device).total_memory // 64 if device.type == "cuda" else 1 << 28


def _make_plan(metadata: AttentionMetadata, tile_tokens: int, device: torch.device) -> _Plan:
    """Of single tokens without a look at the device, so that the plan can be part of a CUDA graph. Otherwise it reads
    the metadata on the host, which waits for the device once per step, before its first layer."""
    if metadata.max_query_len == 1:
        index = torch.arange(len(metadata.seq_lens), dtype=torch.int32, device=device)
        singles = torch.stack((index, index, torch.ones_like(index), metadata.seq_lens - 1), dim=1)
        return _Plan(_tiles([], device), singles, 1, -(-metadata.max_seq_len // SPLIT_KEYS))
    starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    tiles = query_tiles(starts, seq_lens, tile_tokens)
    query_lens = [stop - start for start, stop in pairwise(starts)]
    prefill = [tile for tile in tiles if query_lens[tile[0]] > 1]
    decode = [tile for tile in tiles if query_lens[tile[0]] == 1]
    longest = max((tile[3] + 1 for tile in decode), default=0)
    return _Plan(_tiles(prefill, device), _tiles(decode, device), tile_tokens, -(-longest // SPLIT_KEYS))


def _tiles(tiles: list[tuple[int, int, int, int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 4)


def _write(key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    from engine.attention import triton_kernels as kernels

    num_tokens, num_kv_heads, head_dim = key.shape
    kernels.write_kv[(num_tokens, num_kv_heads)](
        key, value, pages, slot_mapping, key.stride(0), value.stride(0), pages.stride(0), pages.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=_power_of_two(head_dim), BLOCK_SIZE=pages.shape[3],
    )  # fmt: skip


def _power_of_two(size: int) -> int:
    """The smallest that is not less."""
    return 1 << (size - 1).bit_length()
