"""Compiled attention kernels over block-major pages, called by `engine.attention.cpu` with addresses of its tensors.

One task is one tile of queries (consecutive tokens of one request) and one key/value head. Its rows are the tile's
tokens times the query heads of that head. Keys are read once for all rows, in tiles of TILE_KEYS that begin at fixed
positions, wherever their pages lie; each row keeps a running maximum, sum and weighted values (online softmax, arXiv
1805.02867) in float32. So a row's bits depend on its query and its keys alone.

Few rows (decode) read keys and values where they lie, two rows at a time: while keys are read, their values are
prefetched, and while values are read, the keys of the next tile. Many rows (prefill) share a tile that is converted to
float32 once, its keys transposed, four rows at a time (`micro_kernels`). Both add the same numbers in the same order.

A row's scratch, float32: query [head_dim], weighted values [head_dim], weights [TILE_KEYS], then maximum, sum, shrink.

`pair_kernels` has other steps for the same loops, which multiply two numbers at a time.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools

import numpy as np
from numba import njit

from engine.attention.compilation import kernel
from engine.attention.micro_kernels import (
    NUM_ROWS,
    add_weighted_16,
    add_weighted_64,
    store_products,
    store_transposed,
)
from engine.attention.simd import (
    FLOAT32,
    INT32,
    INT64,
    KINDS,
    WIDTH,
    as_double,
    exp,
    fused,
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
TILE_KEYS = 64
PACKED_ROWS = 8
"""From so many rows on, a converted and transposed tile costs less than reading it again and again."""
LINE = 32
"""Elements from one prefetch to the next: a cache line of bfloat16."""


@functools.cache
def write_kv_address(dtype: str) -> int:
    """`void(int64*)`: counter, num_tokens, num_kv_heads, head_dim, block_size, key, value, their row strides,
    slot_mapping, page of this layer, elements per page, elements from keys to values."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _write_kv(a, kind)

    return int(compiled.address)


@functools.cache
def paged_attention_address(dtype: str) -> int:
    """`void(int64*)`: counter, num_tiles, num_kv_heads, group, head_dim, block_size, query, its row stride, output,
    tiles, block_tables, its row stride, page of this layer, elements per page, scale (bits of a double),
    sliding window (0: none), rows of the largest tile, soft cap of the scores (bits of a double; 0: none),
    elements from keys to values."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _paged_attention(a, kind, 1)

    return int(compiled.address)


@njit
def _write_kv(a, kind):
    num_tokens, num_heads, head_dim, block_size, page_size = a[1], a[2], a[3], a[4], a[11]
    key, value, cache = pointer(a[5], kind), pointer(a[6], kind), pointer(a[10], kind)
    slots = pointer(a[9], INT64)
    plane = a[12]
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
def visible(position, window, count):
    """The keys of `count` that a query sees whose own key is number `position`: [begin, stop)."""
    begin = max(0, position - window + 1) if window > 0 else 0
    return min(begin, count), max(0, min(count, position + 1))


@njit
def _attend_packed(rows, shape, tile_kv, queries):
    """All rows' scores, weights and weighted values of a packed tile, four rows at a time."""
    head_dim, _, stride, _ = shape
    num_rows, group, position, window, softcap, _ = queries
    keys, values = tile_kv
    for row in range(0, num_rows, NUM_ROWS):
        past = min(row + NUM_ROWS, num_rows)
        low, high = span(row, past, queries)
        if low >= high:
            continue
        at, weights = row * stride, row * stride + 2 * head_dim
        for token in range(low // WIDTH * WIDTH, high, WIDTH):
            places = (at, stride, weights + token)
            store_products(rows, places, keys, (token, TILE_KEYS, head_dim // WIDTH))
        for one in range(row, past):
            if softcap > ZERO:
                cap_scores(rows, one * stride + 2 * head_dim, low, high, softcap)
            seen = visible(position + one // group, window, TILE_KEYS)
            _weigh(rows, one * stride, head_dim, (low, high), seen)
        whole = head_dim // 64 * 64
        for d in range(0, whole, 64):
            sums = (at + head_dim + d, weights, weights + TILE_KEYS + SHRINK, stride)
            add_weighted_64(rows, sums, values, (d, head_dim, low, high))
        for d in range(whole, head_dim, WIDTH):
            sums = (at + head_dim + d, weights, weights + TILE_KEYS + SHRINK, stride)
            add_weighted_16(rows, sums, values, (d, head_dim, low, high))


@njit
def _attend_in_place(rows, shape, cache, offsets, queries):
    """The same with keys and values where they lie, two rows at a time."""
    head_dim, _, stride, _ = shape
    num_rows, group, position, window, softcap, _ = queries
    for row in range(0, num_rows, 2):
        past = min(row + 2, num_rows)
        low, high = span(row, past, queries)
        if low >= high:
            continue
        _score(rows, row * stride, shape, cache, offsets, low, high)
        for one in range(row, past):
            if softcap > ZERO:
                cap_scores(rows, one * stride + 2 * head_dim, low, high, softcap)
            seen = visible(position + one // group, window, TILE_KEYS)
            _weigh(rows, one * stride, head_dim, (low, high), seen)
        _accumulate(rows, row * stride, shape, cache, offsets, low, high)


@njit
def span(row, past, queries):
    """The keys of a tile that one of the rows [row, past) sees: [low, high)."""
    _, group, position, window, _, _ = queries
    low, _ = visible(position + row // group, window, TILE_KEYS)
    _, high = visible(position + (past - 1) // group, window, TILE_KEYS)
    return low, high


@njit
def _find_keys(offsets, at, pages, start, end):
    """Element offsets of the keys [start, start + TILE_KEYS), up to `end`; the last one fills up a group."""
    tables, table, page_size, in_page, block_size, head_dim = pages
    count = min(TILE_KEYS, end - start)
    found = np.int64(0)
    while found < count:
        block = (start + found) // block_size
        inside = start + found - block * block_size
        key = tables[table + block] * page_size + in_page + inside * head_dim
        for _ in range(min(block_size - inside, count - found)):
            offsets[at + found] = key
            key += head_dim
            found += 1
    while found > 0 and found % WIDTH:
        offsets[at + found] = offsets[at + found - 1]
        found += 1


@njit
def _pack(cache, offsets, first, shape, count, tile_kv):
    """Keys of a tile as float32 [head_dim, TILE_KEYS], its values as [TILE_KEYS, head_dim]."""
    head_dim, _, _, plane = shape
    keys, values = tile_kv
    for token in range(0, count, WIDTH):
        for d in range(0, head_dim, WIDTH):
            store_transposed(cache, offsets, first + token, d, keys, d * TILE_KEYS + token, TILE_KEYS)
    for token in range(count):
        source = offsets[first + token] + plane
        for d in range(0, head_dim, WIDTH):
            store(values, token * head_dim + d, load(cache, source + d))


@njit
def _start_row(rows, at, shape, query, column, scale):
    head_dim = shape[0]
    for d in range(0, head_dim, WIDTH):
        store(rows, at + d, load(query, column + d) * scale)
    start_sums(rows, at, head_dim)


@njit
def start_sums(rows, at, head_dim):
    """Nothing has been added to a row yet."""
    for d in range(0, head_dim, WIDTH):
        store(rows, at + head_dim + d, splat(ZERO))
    state = at + 2 * head_dim + TILE_KEYS
    rows[state + MAXIMUM] = UNSEEN
    rows[state + SUM] = ZERO


@njit
def _finish_row(rows, at, shape, output, column):
    head_dim = shape[0]
    inverse = splat(ONE / rows[at + 2 * head_dim + TILE_KEYS + SUM])
    for d in range(0, head_dim, WIDTH):
        store(output, column + d, load(rows, at + head_dim + d) * inverse)


@njit
def _score(rows, at, shape, cache, offsets, low, high):
    """Two rows' products with keys [low, high), four keys at a time, into their weights. Up to three more keys of the
    same page are scored, and masked later."""
    head_dim, _, stride, plane = shape
    found, here, _ = offsets
    first, second = at + 2 * head_dim, at + stride + 2 * head_dim
    for token in range(low // 4 * 4, high, 4):
        k0 = found[here + token]
        k1, k2, k3 = k0 + head_dim, k0 + 2 * head_dim, k0 + 3 * head_dim
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(ZERO)
        for d in range(0, head_dim, WIDTH):
            a, b = load(rows, at + d), load(rows, at + stride + d)
            k = load(cache, k0 + d)
            a0, b0 = fused(a, k, a0), fused(b, k, b0)
            k = load(cache, k1 + d)
            a1, b1 = fused(a, k, a1), fused(b, k, b1)
            k = load(cache, k2 + d)
            a2, b2 = fused(a, k, a2), fused(b, k, b2)
            k = load(cache, k3 + d)
            a3, b3 = fused(a, k, a3), fused(b, k, b3)
        for d in range(0, 4 * head_dim, LINE):
            prefetch(cache, k0 + plane + d)
        store_totals(rows, first + token, a0, a1, a2, a3)
        store_totals(rows, second + token, b0, b1, b2, b3)


@njit
def cap_scores(rows, scores, low, high, softcap):
    """Scores [low, high) of one row -> softcap * tanh(score / softcap), where tanh(x) = 1 - 2 / (e**2x + 1)."""
    one, two, cap = splat(ONE), splat(np.float32(2)), splat(softcap)
    for token in range(low // WIDTH * WIDTH, high, WIDTH):
        power = exp(two * load(rows, scores + token) / cap)
        store(rows, scores + token, cap * (one - two / (power + one)))


@njit
def _weigh(rows, at, head_dim, span, seen):
    """Scores of one row in `span` -> weights relative to the new maximum, 0 where it does not see; moves the running
    sum."""
    (low, high), (begin, stop) = span, seen
    first, past = low // WIDTH * WIDTH, (high + WIDTH - 1) // WIDTH * WIDTH
    weights, state = at + 2 * head_dim, at + 2 * head_dim + TILE_KEYS
    if begin >= stop:
        for token in range(first, past, WIDTH):
            store(rows, weights + token, splat(ZERO))
        rows[state + SHRINK] = ONE
        return
    fill(rows, weights + first, begin - first, UNSEEN)
    fill(rows, weights + stop, past - stop, UNSEEN)
    old = rows[state + MAXIMUM]
    top = splat(old)
    for token in range(first, past, WIDTH):
        top = maximum(top, load(rows, weights + token))
    new = largest(top)
    weight_sum = splat(ZERO)
    for token in range(first, past, WIDTH):
        weight = exp(load(rows, weights + token) - splat(new))
        store(rows, weights + token, weight)
        weight_sum = weight_sum + weight
    fill(rows, weights + first, begin - first, ZERO)
    fill(rows, weights + stop, past - stop, ZERO)
    shrink = largest(exp(splat(old - new)))
    rows[state + MAXIMUM] = new
    rows[state + SUM] = rows[state + SUM] * shrink + total(weight_sum)
    rows[state + SHRINK] = shrink


@njit
def fill(rows, at, count, number):
    for token in range(count):
        rows[at + token] = number


@njit
def _accumulate(rows, at, shape, cache, offsets, low, high):
    """Adds values [low, high), times the weights, to two rows' shrunken weighted values, 32 elements at a time."""
    head_dim, _, stride, plane = shape
    found, here, there = offsets
    first, second = at + 2 * head_dim, at + stride + 2 * head_dim
    shrink_a, shrink_b = splat(rows[first + TILE_KEYS + SHRINK]), splat(rows[second + TILE_KEYS + SHRINK])
    for d in range(0, head_dim - WIDTH, 2 * WIDTH):
        into_a, into_b = at + head_dim + d, at + stride + head_dim + d
        a0, a1 = load(rows, into_a) * shrink_a, load(rows, into_a + WIDTH) * shrink_a
        b0, b1 = load(rows, into_b) * shrink_b, load(rows, into_b + WIDTH) * shrink_b
        for token in range(low, high):
            value = found[here + token] + plane + d
            v0, v1 = load(cache, value), load(cache, value + WIDTH)
            wa, wb = splat(rows[first + token]), splat(rows[second + token])
            a0, a1, b0, b1 = fused(wa, v0, a0), fused(wa, v1, a1), fused(wb, v0, b0), fused(wb, v1, b1)
            prefetch(cache, found[there + token] + d)
        store(rows, into_a, a0)
        store(rows, into_a + WIDTH, a1)
        store(rows, into_b, b0)
        store(rows, into_b + WIDTH, b1)
    if head_dim % (2 * WIDTH):
        d = head_dim - WIDTH
        a0 = load(rows, at + head_dim + d) * shrink_a
        b0 = load(rows, at + stride + head_dim + d) * shrink_b
        for token in range(low, high):
            v0 = load(cache, found[here + token] + plane + d)
            a0, b0 = fused(splat(rows[first + token]), v0, a0), fused(splat(rows[second + token]), v0, b0)
        store(rows, at + head_dim + d, a0)
        store(rows, at + stride + head_dim + d, b0)


def attention_loops(start_row, pack, attend_packed, attend_in_place, finish_row):
    """`run(arguments, kind, per_number)`: the loops over tiles and their keys with these steps. Queries, cache and
    output are numbers of `kind`, each of which holds `per_number` elements of a head."""

    @njit
    def run(a, kind, per_number):
        num_kv_heads, group, head_dim, block_size = a[2], a[3], a[4], a[5]
        size = head_dim // per_number
        num_tasks, query_stride, page_size, window = a[1] * num_kv_heads, a[7] // per_number, a[13] // per_number, a[15]
        query, output, cache = pointer(a[6], kind), pointer(a[8], kind), pointer(a[12], kind)
        tiles, tables = pointer(a[9], INT32), pointer(a[10], INT32)
        scale, softcap = splat(np.float32(as_double(a[14]))), np.float32(as_double(a[17]))
        stride = 2 * head_dim + TILE_KEYS + WIDTH
        shape = (size, head_dim, stride, a[18] // per_number)
        num_scratch = (a[16] + NUM_ROWS - 1) * stride  # the last rows have neighbours
        memory = np.zeros(num_scratch + 2 * TILE_KEYS * head_dim + WIDTH, np.float32)
        places = np.zeros(2 * TILE_KEYS, np.int64)
        rows_address = (np.int64(memory.ctypes.data) + 63) & ~63  # whole cache lines
        keys_address = rows_address + 4 * num_scratch
        rows, offsets = pointer(rows_address, FLOAT32), pointer(np.int64(places.ctypes.data), INT64)
        tile_kv = pointer(keys_address, FLOAT32), pointer(keys_address + 4 * TILE_KEYS * head_dim, FLOAT32)
        while True:
            task = next_task(a)
            if task >= num_tasks:
                break
            tile, head = 4 * (task // num_kv_heads), task % num_kv_heads
            table, first_token = tiles[tile] * a[11], np.int64(tiles[tile + 1])
            num_tokens, first_position = np.int64(tiles[tile + 2]), np.int64(tiles[tile + 3])
            num_rows, end = num_tokens * group, first_position + num_tokens
            source = first_token * query_stride + head * group * size
            for row in range(num_rows):
                column = source + (row // group) * query_stride + (row % group) * size
                start_row(rows, row * stride, shape, query, column, scale)
            first = visible(first_position, window, end)[0] // TILE_KEYS * TILE_KEYS
            pages = (tables, table, page_size, head * block_size * size, block_size, size)
            here, there = np.int64(0), np.int64(TILE_KEYS)
            _find_keys(offsets, here, pages, first, end)
            for start in range(first, end, TILE_KEYS):
                _find_keys(offsets, there, pages, start + TILE_KEYS, end)
                queries = (num_rows, group, first_position - start, window, softcap, scale)
                if num_rows >= PACKED_ROWS:
                    pack(cache, offsets, here, shape, min(TILE_KEYS, end - start), tile_kv)
                    attend_packed(rows, shape, tile_kv, queries)
                else:
                    attend_in_place(rows, shape, cache, (offsets, here, there), queries)
                here, there = there, here
            target = (first_token * num_kv_heads + head) * group * size
            for row in range(num_rows):
                column = target + (row // group) * num_kv_heads * group * size + (row % group) * size
                finish_row(rows, row * stride, shape, output, column)
        memory[0] = ZERO  # numba frees an array after the last line that names it, whatever points into it
        places[0] = 0

    return run


_paged_attention = attention_loops(_start_row, _pack, _attend_packed, _attend_in_place, _finish_row)
