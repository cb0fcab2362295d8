"""Attention in bfloat16 on processors that multiply tiles (Intel AMX): the loops of `cpu_kernels`, with the weights of
`pair_kernels`.

Sixteen rows at a time are multiplied with sixteen keys, and their weights with the values of 32 tokens, which begin at
fixed positions: a row's bits depend on its query and its keys alone. Tokens that no row sees have weights of 0 there.
Their pages may hold anything, NaN of another request too, and the values of 32 tokens lie in two pages where a page is
smaller: in both cases the values are copied first, with zeros for what no row sees.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import numpy as np

from engine.attention.amx_micro_kernels import (
    TILE_ROWS,
    add_weighted_32_tokens,
    add_weighted_64_tokens,
    address_of,
    few_add_weighted_32_tokens,
    few_add_weighted_64_tokens,
    few_store_group_scores,
    few_store_tile_scores,
    release_tiles,
    set_tile_rows,
    store_group_scores,
    store_tile_scores,
)
from engine.attention.compilation import kernel, kernel_part
from engine.attention.cpu_kernels import GROUPS, NUM_PLACES, ONE, SHRINK, TILE_KEYS, ZERO, attention_loops, span
from engine.attention.pair_kernels import LOG2_E, start_row, weigh_rows
from engine.attention.simd import BFLOAT16, FLOAT32, PAIRS, WIDTH, load, prefetch, splat, store

_HALF = TILE_KEYS // 2
"""Tokens whose values are one tile."""
_BYTES = 4
"""Of a number."""


def paged_attention_address(dtype: str) -> int:
    """`cpu_kernels.paged_attention_address` for bfloat16 and heads of whole tiles (`supports`)."""
    assert dtype == "bfloat16", dtype

    @kernel
    def compiled(a):
        _paged_attention(a, PAIRS, FLOAT32, BFLOAT16, 2, 2)
        release_tiles()

    return int(compiled.address)


def supports(head_dim: int) -> bool:
    """Whether heads are whole tiles."""
    return head_dim % (2 * TILE_ROWS) == 0


@kernel_part
def _attend(rows, shape, cache, offsets, queries, kind, per_number):
    num_rows = queries[0]
    seen = span(0, num_rows, queries)
    if seen[0] < seen[1]:
        if num_rows <= TILE_ROWS:
            _attend_few(rows, shape, cache, offsets, queries, seen)
        else:
            _attend_many(rows, shape, cache, offsets, queries, seen)


@kernel_part
def _attend_few(rows, shape, cache, offsets, queries, seen):
    head_dim, _, stride, _, _ = shape
    (found, (_, there)), num_rows = offsets, queries[0]
    _set_rows(found, num_rows)
    _score(rows, 0, shape, cache, offsets, seen, True)
    values = _copy_values(rows, cache, offsets, seen, shape)
    weigh_rows(rows, shape, (0, num_rows), seen, queries)
    _shrink_sums(rows, (0, num_rows), head_dim, stride)
    following = address_of(cache, found[there + 2]), address_of(cache, found[there + 3])
    _accumulate_few(rows, values, seen, head_dim, stride, following)


@kernel_part
def _attend_many(rows, shape, cache, offsets, queries, seen):
    head_dim, _, stride, _, _ = shape
    found, num_rows = offsets[0], queries[0]
    values = _copy_values(rows, cache, offsets, seen, shape)
    for row in range(0, num_rows, TILE_ROWS):
        past = min(row + TILE_ROWS, num_rows)
        tokens = span(row, past, queries)
        if tokens[0] < tokens[1]:
            _set_rows(found, past - row)
            _score(rows, row * stride, shape, cache, offsets, tokens, False)
            weigh_rows(rows, shape, (row, past), tokens, queries)
            _shrink_sums(rows, (row, past), head_dim, stride)
            _accumulate(rows, row * stride, values, tokens, head_dim, stride)


@kernel_part
def _set_rows(found, count):
    if found[NUM_PLACES] != count:
        found[NUM_PLACES] = count
        set_tile_rows(count, count)


@kernel_part
def _score(rows, at, shape, cache, offsets, tokens, is_few):
    head_dim, size, stride, plane, _ = shape
    found, (here, _) = offsets
    first, past = tokens[0] // WIDTH, (tokens[1] + WIDTH - 1) // WIDTH
    queries, target, steps = address_of(rows, at), at + 2 * head_dim, size // WIDTH
    row_bytes, plane_bytes = stride * _BYTES, plane * _BYTES
    if past - first == GROUPS:
        groups = (
            address_of(cache, found[here]),
            address_of(cache, found[here + 1]),
            address_of(cache, found[here + 2]),
            address_of(cache, found[here + 3]),
        )
        if is_few:
            few_store_tile_scores(queries, groups, address_of(rows, target), row_bytes, steps, plane_bytes)
        else:
            store_tile_scores(queries, groups, address_of(rows, target), row_bytes, steps, plane_bytes)
        return
    for group in range(first, past):
        keys, scores = (address_of(cache, found[here + group]),), address_of(rows, target + WIDTH * group)
        if is_few:
            few_store_group_scores(queries, keys, scores, row_bytes, steps, plane_bytes)
        else:
            store_group_scores(queries, keys, scores, row_bytes, steps, plane_bytes)


@kernel_part
def _copy_values(rows, cache, offsets, seen, shape):
    """The addresses of both halves of a tile's values."""
    head_dim, _, _, _, spare = shape
    lower = _copy_half(rows, (spare, 0), cache, offsets, seen, shape)
    return lower, _copy_half(rows, (spare + TILE_ROWS * head_dim, 1), cache, offsets, seen, shape)


@kernel_part
def _copy_half(rows, spare, cache, offsets, seen, shape):
    """The address of a half of a tile's values: in the pages, or of a copy. Prefetches a group of the next keys."""
    head_dim, size, _, plane, _ = shape
    (found, (here, there)), (target, half) = offsets, spare
    first, low, high = half * _HALF, seen[0], seen[1]
    if high <= first or low >= first + _HALF:
        return np.int64(0)
    group = here + first // WIDTH
    start = found[group] + plane
    is_whole = low <= first and high >= first + _HALF and found[group + 1] + plane == start + WIDTH * size
    for number in range(_HALF // 2):
        token = first + 2 * number
        place, inside = target + number * head_dim, token % WIDTH // 2 * head_dim
        source, following = found[here + token // WIDTH] + plane + inside, found[there + half] + number * size
        is_seen = token + 1 >= low and token < high
        for d in range(0, size, WIDTH):
            prefetch(cache, following + d)
        for d in range(0, head_dim, WIDTH):
            if not is_whole:
                store(rows, place + d, load(cache, source + d) if is_seen else splat(ZERO))
    return address_of(cache, start) if is_whole else address_of(rows, target)


@kernel_part
def _shrink_sums(rows, which, head_dim, stride):
    for row in range(which[0], which[1]):
        at = row * stride
        shrink = rows[at + 2 * head_dim + SHRINK]
        if shrink != ONE:
            for d in range(at + head_dim, at + 2 * head_dim, WIDTH):
                store(rows, d, load(rows, d) * splat(shrink))


@kernel_part
def _accumulate(rows, at, values, tokens, head_dim, stride):
    (lower, upper), (low, high) = values, tokens
    sums, weights = address_of(rows, at + head_dim), address_of(rows, at + 2 * head_dim)
    row_bytes, value_bytes, vectors = stride * _BYTES, head_dim * _BYTES, head_dim // WIDTH
    if low < _HALF and high > _HALF:
        add_weighted_64_tokens(sums, weights, (lower, upper), row_bytes, value_bytes, vectors, 0)
    elif low < _HALF:
        add_weighted_32_tokens(sums, weights, (lower,), row_bytes, value_bytes, vectors, 0)
    else:
        add_weighted_32_tokens(sums, weights + 64, (upper,), row_bytes, value_bytes, vectors, 0)


@kernel_part
def _accumulate_few(rows, values, tokens, head_dim, stride, following):
    """As `_accumulate`; prefetches two groups of keys of the next tile."""
    (lower, upper), (low, high) = values, tokens
    weights = address_of(rows, 2 * head_dim)
    row_bytes, value_bytes, vectors = stride * _BYTES, head_dim * _BYTES, head_dim // (2 * WIDTH)
    for part in range(2):
        moved = part * vectors * 64
        sums = address_of(rows, head_dim) + moved
        both, ahead = (lower + moved, upper + moved), following[part]
        if low < _HALF and high > _HALF:
            few_add_weighted_64_tokens(sums, weights, both, row_bytes, value_bytes, vectors, ahead)
        elif low < _HALF:
            few_add_weighted_32_tokens(sums, weights, (both[0],), row_bytes, value_bytes, vectors, ahead)
        else:
            few_add_weighted_32_tokens(sums, weights + 64, (both[1],), row_bytes, value_bytes, vectors, ahead)


_paged_attention = attention_loops(start_row, _attend, LOG2_E, spare_rows=_HALF)
