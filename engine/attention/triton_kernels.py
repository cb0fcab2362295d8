"""Triton kernels of paged attention over block-major pages: KV write, attention of tiles, and the sum over key splits.

A tile is some consecutive tokens of one request; its rows are the tile's tokens times the query heads of one key/value
head. A program goes through the keys of its tile, or of splits of them, in tiles at fixed absolute positions, with a
running maximum, sum and weighted values in float32 (online softmax, arXiv 1805.02867). Splits are of fixed length at
fixed positions as well (flash-decoding), so that a row's order of addition depends on its position alone.

Offsets into the KV memory are 64-bit. With TRITON_INTERPRET=1 the kernels run on CPU, in numpy.
"""

# Triton's compiler types the bodies, not annotations; capitals are its compile-time constants.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: PLR0913 - a kernel has no objects to pass

from __future__ import annotations

import triton
import triton.language as tl

UNSEEN = tl.constexpr(-1e30)
"""Score of a position that a row does not see. Finite, so that differences are numbers."""
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


@triton.jit(**OF_A_STEP)
def attend(
    query, cache, tiles, tables, output, query_stride, table_stride, page_stride, plane_stride, scale, window, softcap,
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
    maximum, total = tl.full((ROWS,), UNSEEN, tl.float32), tl.zeros((ROWS,), tl.float32)
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
    parts, sums, tiles, output, num_splits, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (tile, query head): the splits of its row that have keys, in order, into `output` [tokens, heads,
    HEAD_DIM]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(tiles + 4 * tile + 3)
    d = tl.arange(0, BLOCK_D)
    first = (tile * (tl.num_programs(1) // GROUP) + head // GROUP).to(tl.int64) * num_splits * GROUP + head % GROUP
    maximum, total = tl.full((1,), UNSEEN, tl.float32), tl.zeros((1,), tl.float32)
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
