"""Triton kernels of paged attention over block-major pages: KV write, attention of tiles, and the sum over key splits.

A tile is some consecutive tokens of one request; its rows are the tile's tokens times the query heads of one key/value
head. A program goes through the keys of its tile, or of one split of them, in tiles at fixed absolute positions, with a
running maximum, sum and weighted values in float32 (online softmax, arXiv 1805.02867). Splits are of fixed length at
fixed positions as well (flash-decoding), so that a row's order of addition depends on its position alone.

Offsets into the KV memory are 64-bit. With TRITON_INTERPRET=1 the kernels run on CPU, in numpy.
"""

# Triton's compiler types the bodies, not annotations; capitals are its compile-time constants.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: PLR0913, PLR0915 - a kernel has no objects to pass, and its loop is one body

from __future__ import annotations

import triton
import triton.language as tl

UNSEEN = tl.constexpr(-1e30)
"""Score of a position that a row does not see. Finite, so that differences are numbers."""


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
def attend(
    query, cache, tiles, tables, output, sums, query_stride, table_stride, page_stride, plane_stride,
    scale, window, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, split). Without splits (SPLIT_KEYS 0) it writes `output` [tokens, heads, HEAD_DIM]; with
    splits, weighted values to `output` float32 [tiles, KV heads, splits, GROUP, HEAD_DIM], and the maximum and sum to
    `sums` float32 [.., GROUP, 2]; a tile is one token then. `tiles` int32 [.., 4]: request, first token, tokens,
    position of the first token. WIDENS: multiply in float32, for the interpreter, whose products of bfloat16 take its
    bits for integers."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, first_token = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    num_tokens, first_position = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    token, member = row // GROUP, row % GROUP
    position = first_position + token
    is_inside = (d < HEAD_DIM)[None, :]
    is_row = (token < num_tokens)[:, None] & is_inside
    at_row = (first_token + token).to(tl.int64) * query_stride + (head * GROUP + member) * HEAD_DIM
    q = tl.load(query + at_row[:, None] + d[None, :], mask=is_row, other=0.0)
    if WIDENS:
        q = q.to(tl.float32)

    begin, end = 0, first_position + num_tokens
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // TILE_KEYS * TILE_KEYS
    if SPLIT_KEYS:
        begin = tl.maximum(begin, split * SPLIT_KEYS)
        end = tl.minimum(end, (split + 1) * SPLIT_KEYS)
    maximum, total = tl.full((ROWS,), UNSEEN, tl.float32), tl.zeros((ROWS,), tl.float32)
    values = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(begin, end, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        is_key = key < end
        block = tl.load(tables + request * table_stride + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        place = block * page_stride + (head * BLOCK_SIZE + key % BLOCK_SIZE) * HEAD_DIM
        offsets, is_loaded = place[:, None] + d[None, :], is_key[:, None] & is_inside
        k = tl.load(cache + offsets, mask=is_loaded, other=0.0)
        v = tl.load(cache + plane_stride + offsets, mask=is_loaded, other=0.0)
        if WIDENS:
            k, v = k.to(tl.float32), v.to(tl.float32)
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen &= key[None, :] > position[:, None] - window
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        scores = tl.where(is_seen, scores, UNSEEN)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.where(is_seen, tl.exp(scores - new_maximum[:, None]), 0.0)
        shrink = tl.exp(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        values = values * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum

    if SPLIT_KEYS:
        part = ((tile * tl.num_programs(1) + head) * tl.num_programs(2) + split).to(tl.int64) * GROUP + row
        tl.store(output + part[:, None] * HEAD_DIM + d[None, :], values, mask=is_row)
        tl.store(sums + 2 * part, maximum, mask=token < num_tokens)
        tl.store(sums + 2 * part + 1, total, mask=token < num_tokens)
    else:
        heads = tl.num_programs(1) * GROUP
        target = ((first_token + token).to(tl.int64) * heads + head * GROUP + member) * HEAD_DIM
        result = values / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(output + target[:, None] + d[None, :], result.to(output.dtype.element_ty), mask=is_row)


@triton.jit
def add_splits(
    parts, sums, tiles, output, num_splits,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program (tile, query head): the splits of its row, in order, into `output` [tokens, heads, HEAD_DIM]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    first = (tile * (tl.num_programs(1) // GROUP) + head // GROUP).to(tl.int64) * num_splits * GROUP + head % GROUP
    maximum, total = tl.full((1,), UNSEEN, tl.float32), tl.zeros((1,), tl.float32)
    values = tl.zeros((BLOCK_D,), tl.float32)
    for split in range(num_splits):
        part = first + split * GROUP
        new_maximum = tl.maximum(maximum, tl.load(sums + 2 * part))
        old, new = tl.exp(maximum - new_maximum), tl.exp(tl.load(sums + 2 * part) - new_maximum)
        total = total * old + tl.load(sums + 2 * part + 1) * new
        values = values * old + tl.load(parts + part * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0) * new
        maximum = new_maximum
    token = tl.load(tiles + 4 * tile + 1).to(tl.int64)
    target = (token * tl.num_programs(1) + head) * HEAD_DIM + d
    tl.store(output + target, (values / total).to(output.dtype.element_ty), mask=d < HEAD_DIM)
