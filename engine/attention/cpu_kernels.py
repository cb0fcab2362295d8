"""Compiled attention kernels over block-major pages, called by `engine.attention.cpu` with addresses of its tensors.

One task is one tile of queries (consecutive tokens of one request) and one key/value head. Its rows are the tile's
tokens times the query heads of that head. Keys are read once for all rows, in tiles of TILE_KEYS that begin at fixed
positions, wherever their pages lie; each row keeps a running maximum, sum and weighted values (online softmax, arXiv
1805.02867) in float32. The maximum is replaced only where a score exceeds it by SLACK: sums are seldom scaled, and
weights stay below exp(SLACK). So a row's bits depend on its query and its keys alone.

Pages lie in the order in which vectors are read (`KVLayout.order` "vectors"). Their numbers have 32 bits: a float32, or
two elements of 16 bits. Keys of sixteen tokens are [head_dim numbers, 16 tokens], a number being adjacent elements of a
head; values are [tokens, head_dim], a number being the same element of tokens 2 * i and 2 * i + 1. So nothing is moved
between memory and the products: many rows (prefill) take four at a time, few rows (decode) four or two, and
while keys are read, their values are prefetched, and while values are read, the keys of the next tile.

A row's scratch, float32: query [head_dim], weighted values [head_dim], weights [TILE_KEYS], sum of the weights [WIDTH]
(of every sixteenth), then maximum and shrink.

`pair_kernels` has other steps for the same loops, which multiply two elements at a time.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import numpy as np

from engine.attention.compilation import kernel, kernel_part
from engine.attention.micro_kernels import (
    add_weighted_16,
    add_weighted_64,
    few_add_weighted_16,
    few_add_weighted_64,
    few_group_products,
    few_tile_products,
    group_products,
    tile_products,
    two_add_weighted_16,
    two_add_weighted_64,
    two_group_products,
    two_tile_products,
)
from engine.attention.simd import (
    BFLOAT16,
    FLOAT32,
    INT32,
    INT64,
    KINDS,
    PAIRS,
    WIDTH,
    any_above,
    as_double,
    exp,
    first_of,
    largest,
    load,
    maximum,
    next_task,
    pointer,
    splat,
    store,
    total,
)

UNSEEN = np.float32(-1e30)
"""Score of a position that a row does not see. Finite, so that differences are numbers."""
ZERO = np.float32(0)
ONE = np.float32(1)
TILE_KEYS = 64
SUM, MAXIMUM, SHRINK = TILE_KEYS, TILE_KEYS + WIDTH, TILE_KEYS + WIDTH + 1
"""From a row's weights on."""
SLACK = np.float32(8)
GROUPS = TILE_KEYS // WIDTH
NUM_PLACES = 2 * GROUPS
"""Of groups of keys, in this tile and the next; after them is one number for `attend`, 0 at first."""
NUM_ROWS = 4
MANY_ROWS = 8
"""From so many rows on, a tile stays in the cache: prefetching costs more than it saves."""


def single_tiles_address(_: str) -> int:
    """`void(int64*)`: counter, num_requests, seq_lens, tiles. Each request has one token in the step."""

    @kernel
    def compiled(a):
        num_requests, seq_lens, tiles = a[1], pointer(a[2], INT32), pointer(a[3], INT32)
        for request in range(num_requests):
            tiles[4 * request] = request
            tiles[4 * request + 1] = request
            tiles[4 * request + 2] = 1
            tiles[4 * request + 3] = seq_lens[request] - 1

    return int(compiled.address)


def write_kv_address(dtype: str) -> int:
    """`void(int64*)`: counter, num_tokens, num_kv_heads, head_dim, block_size, key, value, their row strides,
    slot_mapping, page of this layer, elements per page, elements from keys to values."""
    if dtype == "float32":

        @kernel
        def floats(a):
            _write_floats(a)

        return int(floats.address)

    @kernel
    def halves(a):
        _write_halves(a)

    return int(halves.address)


def paged_attention_address(dtype: str) -> int:
    """`void(int64*)`: counter, num_tiles, num_kv_heads, group, head_dim, block_size, query, its row stride, output,
    tiles, block_tables, its row stride, page of this layer, elements per page, scale (bits of a double),
    sliding window (0: none), rows of the largest tile, soft cap of the scores (bits of a double; 0: none),
    elements from keys to values, sinks (0: none)."""
    kind = KINDS[dtype]
    per_number = 1 if dtype == "float32" else 2

    @kernel
    def compiled(a):
        _paged_attention(a, kind, kind, kind, per_number, 1)

    return int(compiled.address)


@kernel_part
def _write_floats(a):
    num_tokens, num_heads, head_dim, block_size, page_size = a[1], a[2], a[3], a[4], a[11]
    key, value, cache = pointer(a[5], FLOAT32), pointer(a[6], FLOAT32), pointer(a[10], FLOAT32)
    slots, plane = pointer(a[9], INT64), a[12]
    while True:
        first_token = next_task(a) * WIDTH
        if first_token >= num_tokens:
            break
        for token in range(first_token, min(first_token + WIDTH, num_tokens)):
            page, inside = slots[token] // block_size * page_size, slots[token] % block_size
            for head in range(num_heads):
                keys = page + head * block_size * head_dim + inside // WIDTH * WIDTH * head_dim + inside % WIDTH
                values = page + head * block_size * head_dim + plane + inside * head_dim
                key_row, value_row = token * a[7] + head * head_dim, token * a[8] + head * head_dim
                for d in range(head_dim):
                    cache[keys + WIDTH * d] = key[key_row + d]
                for d in range(0, head_dim, WIDTH):
                    store(cache, values + d, load(value, value_row + d))


@kernel_part
def _write_halves(a):
    num_tokens, num_heads, head_dim, block_size, page_size = a[1], a[2], a[3], a[4], a[11] // 2
    key, value, size = pointer(a[5], PAIRS), pointer(a[6], BFLOAT16), head_dim // 2
    cache, slots, plane = pointer(a[10], PAIRS), pointer(a[9], INT64), a[12] // 2
    while True:
        first_token = next_task(a) * WIDTH
        if first_token >= num_tokens:
            break
        for token in range(first_token, min(first_token + WIDTH, num_tokens)):
            slot = slots[token]
            page, inside = slot // block_size * page_size, slot % block_size
            has_next = token + 1 < num_tokens and slots[min(token + 1, num_tokens - 1)] == slot + 1
            has_previous = token > 0 and slots[max(token - 1, 0)] == slot - 1
            for head in range(num_heads):
                keys = page + head * block_size * size + inside // WIDTH * WIDTH * size + inside % WIDTH
                values = page + head * block_size * size + plane + inside // 2 * head_dim
                key_row, value_row = token * (a[7] // 2) + head * size, token * a[8] + head * head_dim
                for number in range(size):
                    cache[keys + WIDTH * number] = key[key_row + number]
                _write_value(cache, values, value, (value_row, a[8], head_dim), inside % 2, has_next, has_previous)


@kernel_part
def _write_value(cache, at, value, place, is_upper, has_next, has_previous):
    """A value with an even place is written with the next one, or with zeros, so that the products of a last token
    without a partner are finite."""
    row, stride, head_dim = place
    if is_upper:
        if not has_previous:
            for d in range(head_dim):
                cache[at + d] = (cache[at + d] & np.uint32(0xFFFF)) | (np.uint32(value[row + d]) << np.uint32(16))
    elif has_next:
        for d in range(head_dim):
            cache[at + d] = value[row + d] | (np.uint32(value[row + stride + d]) << np.uint32(16))
    else:
        for d in range(head_dim):
            cache[at + d] = value[row + d]


@kernel_part
def visible(position, window, count):
    """The keys of `count` that a query sees whose own key is number `position`: [begin, stop)."""
    begin = max(0, position - window + 1) if window > 0 else 0
    return min(begin, count), max(0, min(count, position + 1))


@kernel_part
def span(row, past, queries):
    """The keys of a tile that one of the rows [row, past) sees: [low, high)."""
    _, group, position, window, _, _ = queries
    low, _ = visible(position + row // group, window, TILE_KEYS)
    _, high = visible(position + (past - 1) // group, window, TILE_KEYS)
    return low, high


@kernel_part
def _find_groups(offsets, at, pages, start, end):
    """Where the groups of sixteen keys from `start` to `end` begin, in numbers."""
    tables, table, page_size, in_page, block_size, size = pages
    for group in range(min(GROUPS, (end - start + WIDTH - 1) // WIDTH)):
        token = start + group * WIDTH
        block = token // block_size
        offsets[at + group] = tables[table + block] * page_size + in_page + (token - block * block_size) * size


@kernel_part
def start_sums(rows, at, head_dim):
    """Nothing has been added to a row yet."""
    for d in range(0, head_dim, WIDTH):
        store(rows, at + head_dim + d, splat(ZERO))
    weights = at + 2 * head_dim
    store(rows, weights + SUM, splat(ZERO))
    rows[weights + MAXIMUM] = UNSEEN


@kernel_part
def _start_from_sink(rows, weights, sink):
    """As after a key with this score, without a value."""
    if sink > UNSEEN:
        rows[weights + SUM] = ONE
        rows[weights + MAXIMUM] = sink


@kernel_part
def _start_row(rows, at, head_dim, query, column, scale):
    for d in range(0, head_dim, WIDTH):
        store(rows, at + d, load(query, column + d) * scale)
    start_sums(rows, at, head_dim)


@kernel_part
def _finish_row(rows, at, head_dim, output, column):
    inverse = splat(ONE / total(load(rows, at + 2 * head_dim + SUM)))
    for d in range(0, head_dim, WIDTH):
        store(output, column + d, load(rows, at + head_dim + d) * inverse)


@kernel_part
def cap_scores(rows, scores, low, high, softcap):
    """Scores [low, high) of one row -> softcap * tanh(score / softcap), where tanh(x) = 1 - 2 / (e**2x + 1)."""
    one, two, cap = splat(ONE), splat(np.float32(2)), splat(softcap)
    for token in range(low // WIDTH * WIDTH, high, WIDTH):
        power = exp(two * load(rows, scores + token) / cap)
        store(rows, scores + token, cap * (one - two / (power + one)))


@kernel_part
def _weigh_rows(rows, shape, which, tokens, queries):
    head_dim, _, stride, _, _ = shape
    _, group, position, window, softcap, _ = queries
    for row in range(which[0], which[1]):
        weights = row * stride + 2 * head_dim
        if softcap > ZERO:
            cap_scores(rows, weights, tokens[0], tokens[1], softcap)
        _weigh(rows, weights, tokens, visible(position + row // group, window, TILE_KEYS))


@kernel_part
def _weigh(rows, weights, tokens, seen):
    """Scores of `tokens` of one row -> weights relative to its maximum, 0 where it does not see; adds to their sum."""
    (low, high), (begin, stop) = tokens, seen
    first, past = low // WIDTH * WIDTH, (high + WIDTH - 1) // WIDTH * WIDTH
    rows[weights + SHRINK] = ONE
    if begin >= stop:
        for token in range(first, past, WIDTH):
            store(rows, weights + token, splat(ZERO))
        return
    hide(rows, weights, (first, past), seen)
    top = load(rows, weights + first)
    for token in range(first + WIDTH, past, WIDTH):
        top = maximum(top, load(rows, weights + token))
    old = rows[weights + MAXIMUM]
    if any_above(top, old + SLACK):
        new = largest(top)
        shrink_sum(rows, weights, new, exp(splat(old - new)))
    top = splat(rows[weights + MAXIMUM])
    weight_sum = load(rows, weights + SUM)
    for token in range(first, past, WIDTH):
        weight = exp(load(rows, weights + token) - top)
        store(rows, weights + token, weight)
        weight_sum = weight_sum + weight
    store(rows, weights + SUM, weight_sum)


@kernel_part
def hide(rows, weights, tokens, seen):
    """Tokens that a row does not see get no weight."""
    (first, past), (begin, stop) = tokens, seen
    for token in range(first, begin):
        rows[weights + token] = UNSEEN
    for token in range(stop, past):
        rows[weights + token] = UNSEEN


@kernel_part
def shrink_sum(rows, weights, new, shrink):
    """Replaces a row's maximum; `shrink` is the weight of the old one relative to it."""
    rows[weights + MAXIMUM] = new
    rows[weights + SHRINK] = first_of(shrink)
    store(rows, weights + SUM, load(rows, weights + SUM) * shrink)


def _row_steps(tile_products, group_products, add_weighted_64, add_weighted_16):
    """(products with the keys of a tile, sums of its values) for as many rows as these loops take together."""

    @kernel_part
    def score(rows, at, shape, cache, offsets, tokens, kind):
        head_dim, size, stride, plane, _ = shape
        found, (here, _) = offsets
        first, past = tokens[0] // WIDTH, (tokens[1] + WIDTH - 1) // WIDTH
        if past - first == GROUPS:
            tile_products(rows, (at, stride, at + 2 * head_dim), cache, found, (here, size, plane), kind)
            return
        for group in range(first, past):
            places = (at, stride, at + 2 * head_dim + WIDTH * group)
            group_products(rows, places, cache, found, (here + group, size, plane), kind)

    @kernel_part
    def accumulate(rows, at, shape, cache, offsets, numbers, kind):
        head_dim, _, stride, plane, _ = shape
        (found, (here, there)), (low, high) = offsets, numbers
        weights, whole = at + 2 * head_dim, head_dim // 64 * 64
        shrinks = weights + SHRINK
        for d in range(0, whole, 64):
            sums = (at + head_dim + d, weights, shrinks, stride)
            add_weighted_64(rows, sums, cache, found, (here, there, plane, d, head_dim, low, high), kind)
        for d in range(whole, head_dim, WIDTH):
            sums = (at + head_dim + d, weights, shrinks, stride)
            add_weighted_16(rows, sums, cache, found, (here, there, plane, d, head_dim, low, high), kind)

    return score, accumulate


_score_many, _accumulate_many = _row_steps(tile_products, group_products, add_weighted_64, add_weighted_16)
_score_few, _accumulate_few = _row_steps(
    few_tile_products, few_group_products, few_add_weighted_64, few_add_weighted_16
)
_score_two, _accumulate_two = _row_steps(
    two_tile_products, two_group_products, two_add_weighted_64, two_add_weighted_16
)


def attention_to_tile(weigh_rows):
    """`attend(…)` of `attention_loops` with a few rows at a time, whose weights these steps compute."""

    @kernel_part
    def attend(rows, shape, cache, offsets, queries, kind, per_number):
        stride, num_rows = shape[2], queries[0]
        row = 0
        while row < num_rows:
            num_together = NUM_ROWS if num_rows - row > 2 else 2
            past = min(row + num_together, num_rows)
            tokens = span(row, past, queries)
            if tokens[0] < tokens[1]:
                at, numbers = row * stride, (tokens[0] // per_number, (tokens[1] + per_number - 1) // per_number)
                if num_rows >= MANY_ROWS:
                    _score_many(rows, at, shape, cache, offsets, tokens, kind)
                    weigh_rows(rows, shape, (row, past), tokens, queries)
                    _accumulate_many(rows, at, shape, cache, offsets, numbers, kind)
                elif num_together == NUM_ROWS:
                    _score_few(rows, at, shape, cache, offsets, tokens, kind)
                    weigh_rows(rows, shape, (row, past), tokens, queries)
                    _accumulate_few(rows, at, shape, cache, offsets, numbers, kind)
                else:
                    _score_two(rows, at, shape, cache, offsets, tokens, kind)
                    weigh_rows(rows, shape, (row, past), tokens, queries)
                    _accumulate_two(rows, at, shape, cache, offsets, numbers, kind)
            row += num_together

    return attend


def attention_loops(start_row, attend, power, *, spare_rows=0):
    """`run(arguments, kind, query_kind, output_kind, per_number, per_query)`: the loops over tiles and their keys with
    these steps, whose weights are powers of e**(1 / `power`). A number of the cache holds `per_number` elements,
    multiplied as `kind` says; one of the query `per_query`. The scratch ends with `spare_rows` of head_dim floats for
    `attend`."""

    @kernel_part
    def run(a, kind, query_kind, output_kind, per_number, per_query):
        num_kv_heads, group, head_dim, block_size = a[2], a[3], a[4], a[5]
        size = head_dim // per_number
        num_tasks, query_stride, page_size, window = a[1] * num_kv_heads, a[7] // per_query, a[13] // per_number, a[15]
        query, output, cache = pointer(a[6], query_kind), pointer(a[8], output_kind), pointer(a[12], FLOAT32)
        tiles, tables, sinks = pointer(a[9], INT32), pointer(a[10], INT32), pointer(a[19], FLOAT32)
        scale, softcap = splat(np.float32(as_double(a[14]))), np.float32(as_double(a[17]))
        stride = 2 * head_dim + TILE_KEYS + 2 * WIDTH
        num_scratch = (a[16] + NUM_ROWS - 1) * stride  # the last rows have neighbours
        shape = (head_dim, size, stride, a[18] // per_number, num_scratch)
        memory = np.zeros(num_scratch + spare_rows * head_dim + WIDTH, np.float32)
        places = np.zeros(NUM_PLACES + 1, np.int64)
        rows = pointer((np.int64(memory.ctypes.data) + 63) & ~63, FLOAT32)  # whole cache lines
        found = pointer(np.int64(places.ctypes.data), INT64)
        while True:
            task = next_task(a)
            if task >= num_tasks:
                break
            tile, head = 4 * (task // num_kv_heads), task % num_kv_heads
            table, first_token = tiles[tile] * a[11], np.int64(tiles[tile + 1])
            num_tokens, first_position = np.int64(tiles[tile + 2]), np.int64(tiles[tile + 3])
            num_rows, end = num_tokens * group, first_position + num_tokens
            for row in range(num_rows):
                column = (first_token + row // group) * query_stride
                column += (head * group + row % group) * (head_dim // per_query)
                start_row(rows, row * stride, head_dim, query, column, scale)
                if a[19] != 0:
                    sink = sinks[head * group + row % group] * power
                    _start_from_sink(rows, row * stride + 2 * head_dim, sink)
            first = visible(first_position, window, end)[0] // TILE_KEYS * TILE_KEYS
            pages = (tables, table, page_size, head * block_size * size, block_size, size)
            here, there = np.int64(0), np.int64(GROUPS)
            _find_groups(found, here, pages, first, end)
            for start in range(first, end, TILE_KEYS):
                _find_groups(found, there, pages, start + TILE_KEYS, end)
                queries = (num_rows, group, first_position - start, window, softcap, scale)
                attend(rows, shape, cache, (found, (here, there)), queries, kind, per_number)
                here, there = there, here
            target = (first_token * num_kv_heads + head) * group * head_dim
            for row in range(num_rows):
                column = target + ((row // group) * num_kv_heads * group + row % group) * head_dim
                _finish_row(rows, row * stride, head_dim, output, column)
        memory[0] = ZERO  # numba frees an array after the last line that names it, whatever points into it
        places[0] = 0

    return run


_paged_attention = attention_loops(_start_row, attention_to_tile(_weigh_rows), ONE)
