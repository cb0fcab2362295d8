"""Compiled loops over block-major pages. Called by `engine.attention.cpu` alone, with addresses of its tensors.

One task is one tile (a few consecutive tokens of one request) and one key/value head. Its rows are the tile's tokens
times the query heads that share the head. Blocks are visited once, converted to float32 once, and serve all rows;
each row keeps a running maximum, sum and weighted values (online softmax, arXiv 1805.02867), in float32.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools

import numpy as np
from numba import carray, cfunc, njit, types

from engine.attention.intrinsics import as_double, exp, from_float, next_task, pointer, to_float

SIGNATURE = types.void(types.CPointer(types.int64))
BFLOAT16 = np.uint16(0)
FLOAT32 = np.float32(0)
INT32 = np.int32(0)
INT64 = np.int64(0)
ANYWHERE = 1 << 40
"""Length given to arrays that stand for the whole KV memory: indices are computed, not checked."""


@functools.cache
def write_kv_address(bfloat16: bool) -> int:
    """`void(int64*)`: counter, num_tokens, num_kv_heads, head_dim, block_size, key, value, their row strides,
    slot_mapping, page of this layer, elements per page."""
    if bfloat16:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _write_kv(a, BFLOAT16)

    else:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _write_kv(a, FLOAT32)

    return int(kernel.address)


@functools.cache
def paged_attention_address(bfloat16: bool) -> int:
    """`void(int64*)`: counter, num_tiles, num_kv_heads, group, head_dim, block_size, query, its row stride, output,
    tiles, block_tables, its row stride, page of this layer, elements per page, scale (bits of a double),
    sliding window (0: none), rows of the largest tile."""
    if bfloat16:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _paged_attention(a, BFLOAT16)

    else:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _paged_attention(a, FLOAT32)

    return int(kernel.address)


@njit
def _write_kv(a, kind):
    num_tokens, num_heads, head_dim, block_size = a[1], a[2], a[3], a[4]
    key = carray(pointer(a[5], kind), (ANYWHERE,))
    value = carray(pointer(a[6], kind), (ANYWHERE,))
    slots = carray(pointer(a[9], INT64), (num_tokens,))
    cache = carray(pointer(a[10], kind), (ANYWHERE,))
    plane = num_heads * block_size * head_dim
    while True:
        token = next_task(a)
        if token >= num_tokens:
            break
        block = slots[token] // block_size
        offset = slots[token] - block * block_size
        for head in range(num_heads):
            target = block * a[11] + (head * block_size + offset) * head_dim
            from_key = token * a[7] + head * head_dim
            from_value = token * a[8] + head * head_dim
            for d in range(head_dim):
                cache[target + d] = key[from_key + d]
            for d in range(head_dim):
                cache[target + plane + d] = value[from_value + d]


@njit(fastmath=True)
def _paged_attention(a, kind):
    num_tiles, num_kv_heads, group, head_dim, block_size = a[1], a[2], a[3], a[4], a[5]
    query = carray(pointer(a[6], kind), (ANYWHERE,))
    output = carray(pointer(a[8], kind), (ANYWHERE,))
    tiles = carray(pointer(a[9], INT32), (num_tiles, 4))
    tables = carray(pointer(a[10], INT32), (ANYWHERE,))
    cache = carray(pointer(a[12], kind), (ANYWHERE,))
    scale = np.float32(as_double(a[14]))
    window, max_rows = a[15], a[16]
    plane = num_kv_heads * block_size * head_dim
    queries = np.empty((max_rows, head_dim), np.float32)
    sums = np.empty((max_rows, head_dim), np.float32)
    scores = np.empty((max_rows, block_size), np.float32)
    state = np.empty((2, max_rows), np.float32)
    block = np.empty((block_size, head_dim), np.float32)
    while True:
        task = next_task(a)
        if task >= num_tiles * num_kv_heads:
            break
        tile, head = task // num_kv_heads, task % num_kv_heads
        request, first_token, num_tokens, first_position = tiles[tile]
        num_rows = num_tokens * group
        first_column = head * group * head_dim
        _load_queries(query, first_token * a[7] + first_column, a[7], group, num_rows, scale, queries)
        sums[:num_rows] = np.float32(0)
        state[0, :num_rows] = np.float32(-1e30)
        state[1, :num_rows] = np.float32(0)
        oldest = max(0, first_position - window + 1) if window > 0 else 0
        end = first_position + num_tokens
        for index in range(oldest // block_size, (end + block_size - 1) // block_size):
            start = index * block_size
            page = np.int64(tables[request * a[11] + index]) * a[13] + head * block_size * head_dim
            count = min(block_size, end - start)
            _load_block(cache, page, count, block)
            _score(queries, num_rows, block, count, scores)
            _load_block(cache, page + plane, count, block)
            for row in range(num_rows):
                position = first_position + row // group
                low = max(0, position - window + 1 - start) if window > 0 else 0
                high = min(count, position + 1 - start)
                if low < high:
                    _add_block(scores[row], low, high, block, state, row, sums[row])
        width = num_kv_heads * group * head_dim
        for row in range(num_rows):
            target = (first_token + row // group) * width + first_column + (row % group) * head_dim
            inverse = np.float32(1) / state[1, row]
            for d in range(head_dim):
                output[target + d] = from_float(sums[row, d] * inverse, kind)


@njit(fastmath=True)
def _load_queries(query, start, stride, group, num_rows, scale, queries):
    head_dim = queries.shape[1]
    for row in range(num_rows):
        source = start + (row // group) * stride + (row % group) * head_dim
        for d in range(head_dim):
            queries[row, d] = to_float(query[source + d]) * scale


@njit(fastmath=True)
def _load_block(cache, start, count, block):
    head_dim = block.shape[1]
    for token in range(count):
        for d in range(head_dim):
            block[token, d] = to_float(cache[start + token * head_dim + d])


@njit(fastmath=True)
def _score(queries, num_rows, keys, count, scores):
    head_dim = keys.shape[1]
    for row in range(num_rows):
        for token in range(count):
            score = np.float32(0)
            for d in range(head_dim):
                score += queries[row, d] * keys[token, d]
            scores[row, token] = score


@njit(fastmath=True)
def _add_block(scores, low, high, values, state, row, sums):
    """One step of the online softmax for one row: tokens [low, high) of a block whose values are float32."""
    head_dim = values.shape[1]
    maximum = state[0, row]
    for token in range(low, high):
        maximum = max(maximum, scores[token])
    shrink = exp(state[0, row] - maximum)
    total = state[1, row] * shrink
    for token in range(low, high):
        scores[token] = exp(scores[token] - maximum)
    for token in range(low, high):
        total += scores[token]
    state[0, row] = maximum
    state[1, row] = total
    for d in range(head_dim):
        sums[d] *= shrink
    token = low
    while token + 4 <= high:
        p0, p1, p2, p3 = scores[token], scores[token + 1], scores[token + 2], scores[token + 3]
        for d in range(head_dim):
            sums[d] += (
                p0 * values[token, d]
                + p1 * values[token + 1, d]
                + p2 * values[token + 2, d]
                + p3 * values[token + 3, d]
            )
        token += 4
    for rest in range(token, high):
        weight = scores[rest]
        for d in range(head_dim):
            sums[d] += weight * values[rest, d]
