"""Paged attention by Triton kernels, for GPUs: prefill tiles in one launch, decode tokens in splits of their keys.

A tile is some consecutive tokens of one request; its rows are the tile's tokens times the query heads of one key/value
head. A program goes through the keys of its tile, or of splits of them, in tiles at fixed absolute positions, with a
running maximum, sum and weighted values in float32 (online softmax, arXiv 1805.02867). Splits are of fixed length at
fixed positions as well (flash-decoding), so that a row's order of addition depends on its position alone.

Offsets into the KV memory are 64-bit. docs/gpu.md lists what of this has run on a GPU. On CPU the kernels run in
Triton's interpreter (TRITON_INTERPRET=1), in numpy, where tests compare them with the reference.
"""

# Triton's compiler types the bodies of kernels, not annotations; capitals are its compile-time constants.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: PLR0913 - a kernel has no objects to pass

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

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
        """On CUDA, and on CPU in the interpreter."""
        is_runnable = device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
        fits = 16 <= head_dim <= MAX_HEAD_DIM and block_size % 16 == 0
        is_number = dtype in (torch.float32, torch.bfloat16, torch.float16)
        return is_runnable and fits and is_number

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
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`. Row strides are free; heads and their elements are contiguous."""
        group = query.shape[1] // key.shape[1]
        plan = self._plan
        if plan is None or metadata is not self._metadata:
            rows = prefill_rows(triton.next_power_of_2(query.shape[2]), query.dtype)
            plan = self._plan = _make_plan(metadata, max(1, rows // triton.next_power_of_2(group)), query.device)
            self._metadata = metadata
        pages = kv_cache[:, layer]
        _write(adjacent_heads(key), adjacent_heads(value), pages, metadata.slot_mapping)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        window, tables = sliding_window or 0, metadata.block_tables
        step = _Step(adjacent_heads(query), pages, tables, scale, window, self._softcap, sinks)
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
    sinks: torch.Tensor | None

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.pages.shape[2]

    def attend(self, tiles: torch.Tensor, output: torch.Tensor, tile_tokens: int) -> None:
        """Tiles of prompts."""
        launch = prefill_launch(triton.next_power_of_2(self.pages.shape[4]), self.query.dtype)
        attend[(len(tiles), self.pages.shape[2])](
            self.query, self.pages, tiles, self.block_tables, self.sinks, output,
            *self._strides, self.scale * _LOG2_E, self.window, self._softcap,
            ROWS=max(_MIN_ROWS, triton.next_power_of_2(tile_tokens * self.group)), **self._constants(launch),
        )  # fmt: skip

    def most_tiles_in_splits(self, num_splits: int) -> int:
        """In one launch: what its splits add up to takes memory for each."""
        heads, head_dim = self.query.shape[1], self.pages.shape[4]
        return max(1, _most_bytes_of_splits(self.query.device) // (heads * num_splits * (head_dim + 2) * 4))

    def attend_in_splits(self, tiles: torch.Tensor, output: torch.Tensor, num_splits: int) -> None:
        """Decode: one token has too few rows to occupy a GPU, so its keys are divided among programs."""
        num_kv_heads, head_dim = self.pages.shape[2], self.pages.shape[4]
        shape = (len(tiles), num_kv_heads, num_splits, self.group)
        parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=output.device)
        sums = torch.empty((*shape, 2), dtype=torch.float32, device=output.device)
        launch = decode_launch(triton.next_power_of_2(head_dim), self.query.dtype)
        num_programs = min(num_splits, -(-_PROGRAMS // (len(tiles) * num_kv_heads)))
        attend_in_splits[(len(tiles), num_kv_heads, num_programs)](
            self.query, self.pages, tiles, self.block_tables, parts, sums,
            *self._strides, num_splits, self.scale * _LOG2_E, self.window, self._softcap,
            ROWS=max(_MIN_ROWS, triton.next_power_of_2(self.group)), SPLIT_KEYS=SPLIT_KEYS, **self._constants(launch),
        )  # fmt: skip
        add_splits[(len(tiles), output.shape[1])](
            parts, sums, tiles, self.sinks, output, num_splits, self.window,
            GROUP=self.group, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), SPLIT_KEYS=SPLIT_KEYS,
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
            "GROUP": self.group, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_SIZE": block_size, "TILE_KEYS": launch.tile_keys, "HAS_WINDOW": self.window > 0,
            "HAS_SOFTCAP": self.softcap is not None, "WIDENS": self.query.device.type == "cpu",
            "num_warps": launch.num_warps, "num_stages": launch.num_stages,
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
    num_tokens, num_kv_heads, head_dim = key.shape
    write_kv[(num_tokens, num_kv_heads)](
        key, value, pages, slot_mapping, key.stride(0), value.stride(0), pages.stride(0), pages.stride(1),
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_SIZE=pages.shape[3],
    )  # fmt: skip


UNSEEN = tl.constexpr(-1e30)
"""Score of a position that a row does not see. Finite, so that differences are numbers."""
LOG2_E = tl.constexpr(_LOG2_E)
OF_A_STEP = {"do_not_specialize": ["table_stride", "num_splits"], "do_not_specialize_on_alignment": ["tables"]}
"""Triton compiles a kernel anew where a number is 1 or a multiple of 16, or an address is one. These change from step
to step, and streams would wait for a second: the warm-up compiles the one variant that there is."""


@triton.jit
def write_kv(
    key, value, cache, slots, key_stride, value_stride, page_stride, plane_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head): its key and value into the token's slot. `cache`: the pages of one layer."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    d = tl.arange(0, BLOCK_D)
    is_inside = d < HEAD_DIM
    target = slot // BLOCK_SIZE * page_stride + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + d
    source = head * HEAD_DIM + d
    tl.store(cache + target, tl.load(key + token * key_stride + source, mask=is_inside), mask=is_inside)
    values = tl.load(value + token * value_stride + source, mask=is_inside)
    tl.store(cache + plane_stride + target, values, mask=is_inside)


@triton.jit
def _add_keys(
    q, maximum, total, values, begin, end, first, last, position, cache, table, page_stride, plane_stride, head,
    scale, window, softcap,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Goes on with the keys [begin, end) in tiles, of which those below `last` exist; `begin` and, if not IS_MASKED,
    `end` are multiples of TILE_KEYS. IS_MASKED: there are keys that some row does not see. No row sees those below
    `first`, and they are not loaded: the null block in their place may have what is not finite, and a weight of 0 does
    not remove that. `scale` and `softcap` are those of scores in powers of 2."""
    d = tl.arange(0, BLOCK_D)
    for start in range(begin, end, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        is_loaded = (d < HEAD_DIM)[None, :]
        if IS_MASKED:
            exists = key < last
            if HAS_WINDOW:
                exists = exists & (key >= first)
            block = tl.load(table + key // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
            is_loaded = is_loaded & exists[:, None]
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        place = block * page_stride + (head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
        offsets = place[:, None] + d[None, :]
        if IS_MASKED or HEAD_DIM != BLOCK_D:
            k = tl.load(cache + offsets, mask=is_loaded, other=0.0)
            v = tl.load(cache + plane_stride + offsets, mask=is_loaded, other=0.0)
        else:
            k, v = tl.load(cache + offsets), tl.load(cache + plane_stride + offsets)
        if WIDENS:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        if IS_MASKED:
            is_seen = (key < last)[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_seen &= key[None, :] > position[:, None] - window
            scores = tl.where(is_seen, scores, UNSEEN)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        if IS_MASKED:
            weights = tl.where(is_seen, weights, 0.0)
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.dot(weights.to(v.dtype), v, values * shrink[:, None], input_precision="tf32x3")
        maximum = new_maximum
    return maximum, total, values


@triton.jit
def _start(sinks, head):
    """Maximum and sum of rows of these query heads before their first key: of their sinks, which have no value."""
    maximum = tl.zeros_like(head).to(tl.float32) + UNSEEN
    if sinks is not None:
        maximum = tl.maximum(tl.load(sinks + head) * LOG2_E, UNSEEN)
    return maximum, tl.where(maximum > UNSEEN, 1.0, 0.0)


@triton.jit(**OF_A_STEP)
def attend(
    query, cache, tiles, tables, sinks, output, query_stride, table_stride, page_stride, plane_stride,
    scale, window, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head): the rows of a tile of a prompt into `output` [tokens, heads, HEAD_DIM]. `tiles` int32
    [.., 4]: request, first token, tokens, position of the first token; the last ones are begun first, which have the
    most keys in a prompt. WIDENS: multiply in float32, for the interpreter, whose products of bfloat16 take its bits
    for integers."""
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    request, first_token = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    num_tokens, first_position = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token, member = row // GROUP, row % GROUP
    position = first_position + token
    is_row = (token < num_tokens)[:, None] & (d < HEAD_DIM)[None, :]
    at_row = (first_token + token).to(tl.int64) * query_stride + (head * GROUP + member) * HEAD_DIM
    q = tl.load(query + at_row[:, None] + d[None, :], mask=is_row, other=0.0)
    if WIDENS:
        q = q.to(tl.float32)
    maximum, total = _start(sinks, head * GROUP + member)
    values = tl.zeros((ROWS, BLOCK_D), tl.float32)
    table = tables + request * table_stride
    end = first_position + num_tokens
    # Of [begin, end), every row sees [seen, unseen).
    first, seen, unseen = 0, 0, (first_position + 1) // TILE_KEYS * TILE_KEYS
    if HAS_WINDOW:
        first = tl.maximum(first_position - window + 1, 0)
        begin = first // TILE_KEYS * TILE_KEYS
        seen = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), TILE_KEYS) * TILE_KEYS, unseen)
        seen = tl.maximum(seen, begin)
        unseen = tl.maximum(unseen, seen)
        maximum, total, values = _add_keys(
            q, maximum, total, values, begin, seen, first, end, position, cache, table, page_stride, plane_stride, head,
            scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, True, True, HAS_SOFTCAP, WIDENS,
        )  # fmt: skip
    maximum, total, values = _add_keys(
        q, maximum, total, values, seen, unseen, first, end, position, cache, table, page_stride, plane_stride, head,
        scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, False, HAS_WINDOW, HAS_SOFTCAP, WIDENS,
    )  # fmt: skip
    maximum, total, values = _add_keys(
        q, maximum, total, values, unseen, end, first, end, position, cache, table, page_stride, plane_stride, head,
        scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, True, HAS_WINDOW, HAS_SOFTCAP, WIDENS,
    )  # fmt: skip
    heads = tl.num_programs(1) * GROUP
    target = ((first_token + token).to(tl.int64) * heads + head * GROUP + member) * HEAD_DIM
    result = values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + target[:, None] + d[None, :], result.to(output.dtype.element_ty), mask=is_row)


@triton.jit(**OF_A_STEP)
def attend_in_splits(
    query, cache, tiles, tables, parts, sums, query_stride, table_stride, page_stride, plane_stride, num_splits,
    scale, window, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, p): for a tile of one token, splits p, p + P, … of its keys, P being the number of these
    programs: weighted values to `parts` float32 [tiles, KV heads, num_splits, GROUP, HEAD_DIM], maximum and sum to
    `sums` float32 [.., GROUP, 2]. Splits without keys are left as they are."""
    tile, head = tl.program_id(0), tl.program_id(1)
    request, token = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1).to(tl.int64)
    last = tl.load(tiles + 4 * tile + 3)
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    is_row = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    at_row = token * query_stride + (head * GROUP + row) * HEAD_DIM
    q = tl.load(query + at_row[:, None] + d[None, :], mask=is_row, other=0.0)
    if WIDENS:
        q = q.to(tl.float32)
    position = tl.zeros((ROWS,), tl.int32) + last
    table = tables + request * table_stride
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(last - window + 1, 0)
    for split in range(first // SPLIT_KEYS + tl.program_id(2), last // SPLIT_KEYS + 1, tl.num_programs(2)):
        begin, end = split * SPLIT_KEYS, tl.minimum((split + 1) * SPLIT_KEYS, last + 1)
        if HAS_WINDOW:
            begin = tl.maximum(begin, first // TILE_KEYS * TILE_KEYS)
        maximum, total = tl.full((ROWS,), UNSEEN, tl.float32), tl.zeros((ROWS,), tl.float32)
        values = tl.zeros((ROWS, BLOCK_D), tl.float32)
        maximum, total, values = _add_keys(
            q, maximum, total, values, begin, end, first, end, position, cache, table, page_stride, plane_stride, head,
            scale, window, softcap, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE_KEYS, True, HAS_WINDOW, HAS_SOFTCAP, WIDENS,
        )  # fmt: skip
        part = ((tile * tl.num_programs(1) + head) * num_splits + split).to(tl.int64) * GROUP + row
        tl.store(parts + part[:, None] * HEAD_DIM + d[None, :], values, mask=is_row)
        tl.store(sums + 2 * part, maximum, mask=row < GROUP)
        tl.store(sums + 2 * part + 1, total, mask=row < GROUP)


@triton.jit(**OF_A_STEP)
def add_splits(
    parts, sums, tiles, sinks, output, num_splits, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (tile, query head): the splits of its row that have keys, in order, into `output` [tokens, heads,
    HEAD_DIM]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(tiles + 4 * tile + 3)
    d = tl.arange(0, BLOCK_D)
    first = (tile * (tl.num_programs(1) // GROUP) + head // GROUP).to(tl.int64) * num_splits * GROUP + head % GROUP
    maximum, total = _start(sinks, head + tl.arange(0, 1))
    values = tl.zeros((BLOCK_D,), tl.float32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(last - window + 1, 0) // SPLIT_KEYS
    for split in range(begin, last // SPLIT_KEYS + 1):
        part = first + split * GROUP
        new_maximum = tl.maximum(maximum, tl.load(sums + 2 * part))
        old, new = tl.exp2(maximum - new_maximum), tl.exp2(tl.load(sums + 2 * part) - new_maximum)
        total = total * old + tl.load(sums + 2 * part + 1) * new
        values = values * old + tl.load(parts + part * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0) * new
        maximum = new_maximum
    token = tl.load(tiles + 4 * tile + 1).to(tl.int64)
    target = (token * tl.num_programs(1) + head) * HEAD_DIM + d
    tl.store(output + target, (values / total).to(output.dtype.element_ty), mask=d < HEAD_DIM)
