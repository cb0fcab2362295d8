"""Attention in bfloat16 on processors that multiply pairs of bfloat16: the loops of `cpu_kernels` with other steps.

A number is a pair. Products of queries and keys are scaled afterwards; weights are rounded to bfloat16, and a pair of
tokens is weighted at a time: tokens 2 * i and 2 * i + 1 of a tile, wherever a chunk begins. Sums are float32.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import numpy as np

from engine.attention.compilation import kernel, kernel_part
from engine.attention.cpu_kernels import (
    MAXIMUM,
    ONE,
    SHRINK,
    SLACK,
    SUM,
    TILE_KEYS,
    ZERO,
    attention_loops,
    attention_to_tile,
    cap_scores,
    hide,
    shrink_sum,
    start_sums,
    visible,
)
from engine.attention.simd import (
    BFLOAT16,
    FLOAT32,
    PAIRS,
    WIDTH,
    any_above,
    exp2,
    first_of,
    fused,
    largest,
    load,
    maximum,
    pairs_product,
    rounded_pairs,
    splat,
    store,
)

LOG2_E = np.float32(1.4426950408889634)
PAIR_OF_ONES = np.array(0x3F803F80, np.uint32).view(np.float32)[()]
_TWO_VECTORS = 2 * WIDTH
"""Of weights, which become one of pairs."""


def paged_attention_address(dtype: str) -> int:
    """`cpu_kernels.paged_attention_address` for bfloat16."""
    assert dtype == "bfloat16", dtype

    @kernel
    def compiled(a):
        _paged_attention(a, PAIRS, FLOAT32, BFLOAT16, 2, 2)

    return int(compiled.address)


@kernel_part
def start_row(rows, at, head_dim, query, column, scale):
    for pair in range(head_dim // 2):
        rows[at + pair] = query[column + pair]
    start_sums(rows, at, head_dim)


@kernel_part
def weigh_rows(rows, shape, which, tokens, queries):
    """Products of the rows [first, past) with the keys `tokens` -> pairs of weights."""
    head_dim, _, stride, _, _ = shape
    _, group, position, window, softcap, scale = queries
    _, stop = visible(position + which[0] // group, window, TILE_KEYS)
    begin, _ = visible(position + (which[1] - 1) // group, window, TILE_KEYS)
    if begin == 0 and stop == TILE_KEYS and softcap == ZERO:
        _weigh_whole_tile(rows, which, head_dim, stride, LOG2_E * first_of(scale))
        return
    for row in range(which[0], which[1]):
        weights, factor = row * stride + 2 * head_dim, LOG2_E
        if softcap > ZERO:
            for token in range(tokens[0] // WIDTH * WIDTH, tokens[1], WIDTH):
                store(rows, weights + token, load(rows, weights + token) * scale)
            cap_scores(rows, weights, tokens[0], tokens[1], softcap)
        else:
            factor = LOG2_E * first_of(scale)
        _weigh(rows, weights, tokens, visible(position + row // group, window, TILE_KEYS), factor)


@kernel_part
def _weigh(rows, weights, tokens, seen, factor):
    """As in `cpu_kernels`, by powers of two of the scores times `factor`; the sum is that of the rounded weights."""
    (low, high), (begin, stop) = tokens, seen
    first, past = low // _TWO_VECTORS * _TWO_VECTORS, (high + _TWO_VECTORS - 1) // _TWO_VECTORS * _TWO_VECTORS
    rows[weights + SHRINK] = ONE
    if begin >= stop:
        for token in range(first, past, _TWO_VECTORS):
            store(rows, weights + token // 2, splat(ZERO))
        return
    hide(rows, weights, (first, past), seen)
    top = maximum(load(rows, weights + first), load(rows, weights + first + WIDTH))
    for token in range(first + _TWO_VECTORS, past, _TWO_VECTORS):
        top = maximum(top, maximum(load(rows, weights + token), load(rows, weights + token + WIDTH)))
    _raise_maximum(rows, weights, top * splat(factor))
    start, ones = splat(-rows[weights + MAXIMUM]), splat(PAIR_OF_ONES)
    weight_sum = load(rows, weights + SUM)
    for token in range(first, past, _TWO_VECTORS):
        lower = exp2(fused(load(rows, weights + token), splat(factor), start))
        upper = exp2(fused(load(rows, weights + token + WIDTH), splat(factor), start))
        pairs = rounded_pairs(lower, upper)
        weight_sum = pairs_product(pairs, ones, weight_sum)
        store(rows, weights + token // 2, pairs)  # where tokens lay that have been read
    store(rows, weights + SUM, weight_sum)


@kernel_part
def _weigh_whole_tile(rows, which, head_dim, stride, factor):
    """As `_weigh`, for rows that all see each of the 64 keys."""
    scale, ones = splat(factor), splat(PAIR_OF_ONES)
    for row in range(which[0], which[1]):
        weights = row * stride + 2 * head_dim
        first, second = load(rows, weights), load(rows, weights + WIDTH)
        third, fourth = load(rows, weights + 2 * WIDTH), load(rows, weights + 3 * WIDTH)
        rows[weights + SHRINK] = ONE
        _raise_maximum(rows, weights, maximum(maximum(first, second), maximum(third, fourth)) * scale)
        start = splat(-rows[weights + MAXIMUM])
        lower = rounded_pairs(exp2(fused(first, scale, start)), exp2(fused(second, scale, start)))
        upper = rounded_pairs(exp2(fused(third, scale, start)), exp2(fused(fourth, scale, start)))
        store(rows, weights, lower)
        store(rows, weights + WIDTH, upper)
        store(rows, weights + SUM, pairs_product(upper, ones, pairs_product(lower, ones, load(rows, weights + SUM))))


@kernel_part
def _raise_maximum(rows, weights, top):
    old = rows[weights + MAXIMUM]
    if any_above(top, old + SLACK):
        new = largest(top)
        shrink_sum(rows, weights, new, exp2(splat(old - new)))


_paged_attention = attention_loops(start_row, attention_to_tile(weigh_rows), LOG2_E)
