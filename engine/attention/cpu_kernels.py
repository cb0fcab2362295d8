"""Compiled attention kernels over block-major pages, called by `engine.attention.cpu` with addresses of its tensors.

One task is one tile (a few consecutive tokens of one request) and one key/value head. Its rows are the tile's tokens
times the query heads of that head. The pages are read once, block by block, for all rows, two rows at a time; each row
keeps a running maximum, sum and weighted values (online softmax, arXiv 1805.02867) in float32. While keys are read,
their values are prefetched, and while values are read, the keys of the next block, whose page may be anywhere.

A row's scratch, float32: query [head_dim], weighted values [head_dim], weights [padded], then maximum, sum, shrink.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools

import numpy as np
from numba import njit

from engine.attention.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    WIDTH,
    as_double,
    exp,
    kernel,
    largest,
    load,
    maximum,
    next_task,
    pointer,
    prefetch,
    splat,
    store,
    store_totals,
    total,
)

UNSEEN = np.float32(-1e30)
"""Score of a position that a row does not see. Finite, so that differences are numbers."""
ZERO = np.float32(0)
ONE = np.float32(1)
MAXIMUM, SUM, SHRINK = 0, 1, 2
LINE = 32
"""Elements from one prefetch to the next: a cache line of bfloat16."""


@functools.cache
def write_kv_address(bfloat16: bool) -> int:
    """`void(int64*)`: counter, num_tokens, num_kv_heads, head_dim, block_size, key, value, their row strides,
    slot_mapping, page of this layer, elements per page."""
    kind = BFLOAT16 if bfloat16 else FLOAT32

    @kernel
    def compiled(a):
        _write_kv(a, kind)

    return int(compiled.address)


@functools.cache
def paged_attention_address(bfloat16: bool) -> int:
    """`void(int64*)`: counter, num_tiles, num_kv_heads, group, head_dim, block_size, query, its row stride, output,
    tiles, block_tables, its row stride, page of this layer, elements per page, scale (bits of a double),
    sliding window (0: none), rows of the largest tile."""
    kind = BFLOAT16 if bfloat16 else FLOAT32

    @kernel
    def compiled(a):
        _paged_attention(a, kind)

    return int(compiled.address)


@njit
def _write_kv(a, kind):
    num_tokens, num_heads, head_dim, block_size, page_size = a[1], a[2], a[3], a[4], a[11]
    key, value, cache = pointer(a[5], kind), pointer(a[6], kind), pointer(a[10], kind)
    slots = pointer(a[9], INT64)
    plane = num_heads * block_size * head_dim
    while True:
        token = next_task(a)
        if token >= num_tokens:
            break
        block = slots[token] // block_size
        offset = slots[token] - block * block_size
        for head in range(num_heads):
            target = block * page_size + (head * block_size + offset) * head_dim
            for d in range(0, head_dim, WIDTH):
                source = head * head_dim + d
                store(cache, target + d, load(key, token * a[7] + source))
                store(cache, target + plane + d, load(value, token * a[8] + source))


@njit
def _paged_attention(a, kind):
    num_kv_heads, group, head_dim, block_size = a[2], a[3], a[4], a[5]
    num_tasks, query_stride, page_size, window = a[1] * num_kv_heads, a[7], a[13], a[15]
    query, output, cache = pointer(a[6], kind), pointer(a[8], kind), pointer(a[12], kind)
    tiles, tables = pointer(a[9], INT32), pointer(a[10], INT32)
    scale = splat(np.float32(as_double(a[14])))
    padded = (block_size + WIDTH - 1) // WIDTH * WIDTH
    shape = (head_dim, padded, 2 * head_dim + padded + WIDTH)
    memory = np.zeros((a[16] + 1) * shape[2], np.float32)  # one row more: an odd last row has a neighbour
    rows = pointer(np.int64(memory.ctypes.data), FLOAT32)
    while True:
        task = next_task(a)
        if task >= num_tasks:
            break
        tile, head = 4 * (task // num_kv_heads), task % num_kv_heads
        table, first_token = tiles[tile] * a[11], np.int64(tiles[tile + 1])
        num_tokens, first_position = np.int64(tiles[tile + 2]), np.int64(tiles[tile + 3])
        end = first_position + num_tokens
        source = first_token * query_stride + head * group * head_dim
        for row in range(num_tokens * group):
            column = source + (row // group) * query_stride + (row % group) * head_dim
            _start_row(rows, row * shape[2], shape, query, column, scale)
        first = max(0, first_position - window + 1) // block_size if window > 0 else 0
        last = (end - 1) // block_size
        in_page = head * block_size * head_dim
        keys = tables[table + first] * page_size + in_page
        for index in range(first, last + 1):
            next_keys = tables[table + min(index + 1, last)] * page_size + in_page
            values = keys + num_kv_heads * block_size * head_dim
            start = index * block_size
            count = min(block_size, end - start)
            for row in range(0, num_tokens * group, 2):
                at = row * shape[2]
                _score(rows, at, shape, cache, keys, values, count)
                low, high = count, np.int64(0)
                for one in range(row, row + 2):
                    position = first_position + one // group - start
                    begin = max(0, position - window + 1) if window > 0 else 0
                    stop = min(count, position + 1)
                    _weigh(rows, one * shape[2], shape, begin, stop)
                    low, high = min(low, begin), max(high, stop)
                _accumulate(rows, at, shape, cache, (values, next_keys), low, high)
            keys = next_keys
        target = (first_token * num_kv_heads + head) * group * head_dim
        for row in range(num_tokens * group):
            column = target + (row // group) * num_kv_heads * group * head_dim + (row % group) * head_dim
            _finish_row(rows, row * shape[2], shape, output, column)
    memory[0] = ZERO  # numba frees an array after the last line that names it, whatever points into it


@njit
def _start_row(rows, at, shape, query, column, scale):
    head_dim, padded, _ = shape
    for d in range(0, head_dim, WIDTH):
        store(rows, at + d, load(query, column + d) * scale)
        store(rows, at + head_dim + d, splat(ZERO))
    state = at + 2 * head_dim + padded
    rows[state + MAXIMUM] = UNSEEN
    rows[state + SUM] = ZERO


@njit
def _finish_row(rows, at, shape, output, column):
    head_dim, padded, _ = shape
    inverse = splat(ONE / rows[at + 2 * head_dim + padded + SUM])
    for d in range(0, head_dim, WIDTH):
        store(output, column + d, load(rows, at + head_dim + d) * inverse)


@njit
def _score(rows, at, shape, cache, keys, ahead, count):
    """Two rows' products with `count` keys, four keys at a time, into their weights. Up to three more keys of the same
    page are scored, and masked later."""
    head_dim, _, stride = shape
    first, second = at + 2 * head_dim, at + stride + 2 * head_dim
    for token in range(0, count, 4):
        k0 = keys + token * head_dim
        k1, k2, k3 = k0 + head_dim, k0 + 2 * head_dim, k0 + 3 * head_dim
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(ZERO)
        for d in range(0, head_dim, WIDTH):
            a, b = load(rows, at + d), load(rows, at + stride + d)
            k = load(cache, k0 + d)
            a0, b0 = a0 + a * k, b0 + b * k
            k = load(cache, k1 + d)
            a1, b1 = a1 + a * k, b1 + b * k
            k = load(cache, k2 + d)
            a2, b2 = a2 + a * k, b2 + b * k
            k = load(cache, k3 + d)
            a3, b3 = a3 + a * k, b3 + b * k
        for d in range(0, 4 * head_dim, LINE):
            prefetch(cache, ahead + token * head_dim + d)
        store_totals(rows, first + token, a0, a1, a2, a3)
        store_totals(rows, second + token, b0, b1, b2, b3)


@njit
def _weigh(rows, at, shape, begin, stop):
    """Scores of one row -> weights relative to the new maximum, 0 outside [begin, stop); moves the running sum."""
    head_dim, padded, _ = shape
    weights, state = at + 2 * head_dim, at + 2 * head_dim + padded
    if begin >= stop:
        for token in range(0, padded, WIDTH):
            store(rows, weights + token, splat(ZERO))
        rows[state + SHRINK] = ONE
        return
    _fill_outside(rows, weights, padded, begin, stop, UNSEEN)
    old = rows[state + MAXIMUM]
    top = splat(old)
    for token in range(0, padded, WIDTH):
        top = maximum(top, load(rows, weights + token))
    new = largest(top)
    weight_sum = splat(ZERO)
    for token in range(0, padded, WIDTH):
        weight = exp(load(rows, weights + token) - splat(new))
        store(rows, weights + token, weight)
        weight_sum = weight_sum + weight
    _fill_outside(rows, weights, padded, begin, stop, ZERO)
    shrink = largest(exp(splat(old - new)))
    rows[state + MAXIMUM] = new
    rows[state + SUM] = rows[state + SUM] * shrink + total(weight_sum)
    rows[state + SHRINK] = shrink


@njit
def _fill_outside(rows, weights, padded, begin, stop, number):
    for token in range(begin):
        rows[weights + token] = number
    for token in range(stop, padded):
        rows[weights + token] = number


@njit
def _accumulate(rows, at, shape, cache, values_and_ahead, low, high):
    """Adds values [low, high), times the weights, to two rows' shrunken weighted values, 32 elements at a time."""
    head_dim, padded, stride = shape
    values, ahead = values_and_ahead
    first, second = at + 2 * head_dim, at + stride + 2 * head_dim
    shrink_a, shrink_b = splat(rows[first + padded + SHRINK]), splat(rows[second + padded + SHRINK])
    for d in range(0, head_dim - WIDTH, 2 * WIDTH):
        into_a, into_b = at + head_dim + d, at + stride + head_dim + d
        a0, a1 = load(rows, into_a) * shrink_a, load(rows, into_a + WIDTH) * shrink_a
        b0, b1 = load(rows, into_b) * shrink_b, load(rows, into_b + WIDTH) * shrink_b
        for token in range(low, high):
            v0 = load(cache, values + token * head_dim + d)
            v1 = load(cache, values + token * head_dim + d + WIDTH)
            wa, wb = splat(rows[first + token]), splat(rows[second + token])
            a0, a1, b0, b1 = a0 + wa * v0, a1 + wa * v1, b0 + wb * v0, b1 + wb * v1
            prefetch(cache, ahead + token * head_dim + d)
        store(rows, into_a, a0)
        store(rows, into_a + WIDTH, a1)
        store(rows, into_b, b0)
        store(rows, into_b + WIDTH, b1)
    if head_dim % (2 * WIDTH):
        d = head_dim - WIDTH
        a0 = load(rows, at + head_dim + d) * shrink_a
        b0 = load(rows, at + stride + head_dim + d) * shrink_b
        for token in range(low, high):
            v0 = load(cache, values + token * head_dim + d)
            a0 = a0 + splat(rows[first + token]) * v0
            b0 = b0 + splat(rows[second + token]) * v0
        store(rows, at + head_dim + d, a0)
        store(rows, at + stride + head_dim + d, b0)
