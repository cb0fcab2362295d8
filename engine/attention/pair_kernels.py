"""Attention in bfloat16 on processors that multiply pairs of bfloat16: the loops of `cpu_kernels` with other steps.

A number is a pair of adjacent elements, so a head has half as many. Products of queries and keys take a pair at a time
and are scaled afterwards. Weights are rounded to bfloat16, and a pair of tokens is weighted at a time: tokens 2 * i and
2 * i + 1 of a tile, wherever a chunk begins. Sums are float32; of 32 elements come those with an even place first, then
those with an odd one, until the row is finished. Few rows and many add the same products in the same order.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import numpy as np
from numba import njit

from engine.attention.compilation import kernel
from engine.attention.cpu_kernels import (
    LINE,
    MAXIMUM,
    ONE,
    SHRINK,
    SUM,
    TILE_KEYS,
    UNSEEN,
    ZERO,
    attention_loops,
    cap_scores,
    fill,
    span,
    start_sums,
    visible,
)
from engine.attention.micro_kernels import (
    NUM_ROWS,
    add_weighted_pairs_32,
    add_weighted_pairs_64,
    store_pair_products,
    store_transposed,
)
from engine.attention.simd import (
    BFLOAT16,
    FLOAT32,
    WIDTH,
    even_pairs,
    exp2,
    first_of,
    fused,
    largest,
    load,
    maximum,
    odd_pairs,
    pairs_product,
    prefetch,
    rounded_pairs,
    rounded_to,
    splat,
    store,
    store_totals,
    total,
)

LOG2_E = np.float32(1.4426950408889634)
PAIR_OF_ONES = np.array(0x3F803F80, np.uint32).view(np.float32)[()]
ELEMENTS = 2 * WIDTH
"""Of a head: whole vectors of pairs."""


def paged_attention_address(dtype: str) -> int:
    """`cpu_kernels.paged_attention_address` for bfloat16 and heads of whole vectors of pairs."""
    assert dtype == "bfloat16", dtype

    @kernel
    def compiled(a):
        _paged_attention(a, FLOAT32, 2)

    return int(compiled.address)


@njit
def _start_row(rows, at, shape, query, column, scale):
    size, head_dim, _, _ = shape
    for pair in range(0, size, WIDTH):
        store(rows, at + pair, load(query, column + pair))
    start_sums(rows, at, head_dim)


@njit
def _pack(cache, offsets, first, shape, count, tile_kv):
    """Keys of a tile as pairs [size, TILE_KEYS], its values as pairs of tokens [TILE_KEYS / 2, head_dim]."""
    size, head_dim, _, plane = shape
    keys, values = tile_kv
    for token in range(0, count, WIDTH):
        for pair in range(0, size, WIDTH):
            store_transposed(cache, offsets, first + token, pair, keys, pair * TILE_KEYS + token, TILE_KEYS)
    for token in range(0, count, 2):
        one, other = offsets[first + token] + plane, offsets[first + token + 1] + plane
        for pair in range(0, size, WIDTH):
            a, b = load(cache, one + pair), load(cache, other + pair)
            target = token // 2 * head_dim + 2 * pair
            store(values, target, even_pairs(a, b))
            store(values, target + WIDTH, odd_pairs(a, b))


@njit
def _attend_packed(rows, shape, tile_kv, queries):
    size, head_dim, stride, _ = shape
    keys, values = tile_kv
    for row in range(0, queries[0], NUM_ROWS):
        past = min(row + NUM_ROWS, queries[0])
        low, high = span(row, past, queries)
        if low >= high:
            continue
        at, weights = row * stride, row * stride + 2 * head_dim
        for token in range(low // WIDTH * WIDTH, high, WIDTH):
            store_pair_products(rows, (at, stride, weights + token), keys, (token, TILE_KEYS, size // WIDTH))
        _weigh_rows(rows, shape, (row, past), (low, high), queries)
        first, last = low // 2, (high + 1) // 2
        whole = head_dim // 64 * 64
        for d in range(0, whole, 64):
            sums = (at + head_dim + d, weights, weights + TILE_KEYS + SHRINK, stride)
            add_weighted_pairs_64(rows, sums, values, (d, head_dim, first, last))
        for d in range(whole, head_dim, ELEMENTS):
            sums = (at + head_dim + d, weights, weights + TILE_KEYS + SHRINK, stride)
            add_weighted_pairs_32(rows, sums, values, (d, head_dim, first, last))


@njit
def _attend_in_place(rows, shape, cache, offsets, queries):
    _, _, stride, _ = shape
    for row in range(0, queries[0], 2):
        past = min(row + 2, queries[0])
        low, high = span(row, past, queries)
        if low >= high:
            continue
        _score(rows, row * stride, shape, cache, offsets, low, high)
        _weigh_rows(rows, shape, (row, past), (low, high), queries)
        _accumulate(rows, row * stride, shape, cache, offsets, low // 2, (high + 1) // 2)


@njit
def _weigh_rows(rows, shape, which, tokens, queries):
    """Products of the rows [first, past) with the keys `tokens` -> pairs of weights."""
    _, head_dim, stride, _ = shape
    _, group, position, window, softcap, scale = queries
    for row in range(which[0], which[1]):
        weights, factor = row * stride + 2 * head_dim, LOG2_E
        if softcap > ZERO:
            for token in range(tokens[0] // WIDTH * WIDTH, tokens[1], WIDTH):
                store(rows, weights + token, load(rows, weights + token) * scale)
            cap_scores(rows, weights, tokens[0], tokens[1], softcap)
        else:
            factor = LOG2_E * first_of(scale)
        _weigh(rows, weights, tokens, visible(position + row // group, window, TILE_KEYS), factor)


@njit
def _weigh(rows, weights, tokens, seen, factor):
    """As `cpu_kernels.weigh`, by powers of two of the scores times `factor`; the sum is that of the rounded weights."""
    (low, high), (begin, stop) = tokens, seen
    first, past = low // ELEMENTS * ELEMENTS, (high + ELEMENTS - 1) // ELEMENTS * ELEMENTS
    state = weights + TILE_KEYS
    if begin >= stop:
        for token in range(first, past, ELEMENTS):
            store(rows, weights + token // 2, splat(ZERO))
        rows[state + SHRINK] = ONE
        return
    fill(rows, weights + first, begin - first, UNSEEN)
    fill(rows, weights + stop, past - stop, UNSEEN)
    top = splat(UNSEEN)
    for token in range(first, past, WIDTH):
        top = maximum(top, load(rows, weights + token))
    old = rows[state + MAXIMUM]
    new = max(old, largest(top) * factor)
    ones, weight_sum = splat(PAIR_OF_ONES), splat(ZERO)
    for token in range(first, past, ELEMENTS):
        lower = exp2(fused(load(rows, weights + token), splat(factor), splat(-new)))
        upper = exp2(fused(load(rows, weights + token + WIDTH), splat(factor), splat(-new)))
        pairs = rounded_pairs(lower, upper)
        weight_sum = pairs_product(pairs, ones, weight_sum)
        store(rows, weights + token // 2, pairs)  # where tokens lay that have been read
    shrink = first_of(exp2(splat(old - new)))
    rows[state + MAXIMUM] = new
    rows[state + SUM] = rows[state + SUM] * shrink + total(weight_sum)
    rows[state + SHRINK] = shrink


@njit
def _score(rows, at, shape, cache, offsets, low, high):
    """Two rows' products with keys [low, high), four keys at a time, where their weights will be. Up to three more keys
    of the same page are multiplied, and masked later."""
    size, head_dim, stride, plane = shape
    found, here, _ = offsets
    first, second = at + 2 * head_dim, at + stride + 2 * head_dim
    for token in range(low // 4 * 4, high, 4):
        k0 = found[here + token]
        k1, k2, k3 = k0 + size, k0 + 2 * size, k0 + 3 * size
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(ZERO)
        for pair in range(0, size, WIDTH):
            a, b = load(rows, at + pair), load(rows, at + stride + pair)
            k = load(cache, k0 + pair)
            a0, b0 = pairs_product(a, k, a0), pairs_product(b, k, b0)
            k = load(cache, k1 + pair)
            a1, b1 = pairs_product(a, k, a1), pairs_product(b, k, b1)
            k = load(cache, k2 + pair)
            a2, b2 = pairs_product(a, k, a2), pairs_product(b, k, b2)
            k = load(cache, k3 + pair)
            a3, b3 = pairs_product(a, k, a3), pairs_product(b, k, b3)
        for pair in range(0, 4 * size, LINE // 2):
            prefetch(cache, k0 + plane + pair)
        store_totals(rows, first + token, a0, a1, a2, a3)
        store_totals(rows, second + token, b0, b1, b2, b3)


@njit
def _accumulate(rows, at, shape, cache, offsets, low, high):
    """Adds the pairs of tokens [low, high), times the weights, to two rows' shrunken weighted values."""
    size, head_dim, stride, plane = shape
    found, here, there = offsets
    first, second = at + 2 * head_dim, at + stride + 2 * head_dim
    shrink_a, shrink_b = splat(rows[first + TILE_KEYS + SHRINK]), splat(rows[second + TILE_KEYS + SHRINK])
    for pair in range(0, size, WIDTH):
        into_a, into_b = at + head_dim + 2 * pair, at + stride + head_dim + 2 * pair
        a0, a1 = load(rows, into_a) * shrink_a, load(rows, into_a + WIDTH) * shrink_a
        b0, b1 = load(rows, into_b) * shrink_b, load(rows, into_b + WIDTH) * shrink_b
        for two in range(low, high):
            token = here + 2 * two
            v, w = load(cache, found[token] + plane + pair), load(cache, found[token + 1] + plane + pair)
            even, odd = even_pairs(v, w), odd_pairs(v, w)
            wa, wb = splat(rows[first + two]), splat(rows[second + two])
            a0, a1 = pairs_product(wa, even, a0), pairs_product(wa, odd, a1)
            b0, b1 = pairs_product(wb, even, b0), pairs_product(wb, odd, b1)
            prefetch(cache, found[there + 2 * two] + pair)
            prefetch(cache, found[there + 2 * two + 1] + pair)
        store(rows, into_a, a0)
        store(rows, into_a + WIDTH, a1)
        store(rows, into_b, b0)
        store(rows, into_b + WIDTH, b1)


@njit
def _finish_row(rows, at, shape, output, column):
    size, head_dim, _, _ = shape
    inverse = splat(ONE / rows[at + 2 * head_dim + TILE_KEYS + SUM])
    for pair in range(0, size, WIDTH):
        sums = at + head_dim + 2 * pair
        even, odd = load(rows, sums) * inverse, load(rows, sums + WIDTH) * inverse
        # A float's upper half is its bfloat16.
        store(output, column + pair, odd_pairs(rounded_to(even, BFLOAT16), rounded_to(odd, BFLOAT16)))


_paged_attention = attention_loops(_start_row, _pack, _attend_packed, _attend_in_place, _finish_row)
