"""What LoRA adapters add to a linear layer's rows, called with addresses by `engine.models.adapters`.

    order rows by adapter (once a step) ─▶ project: low = x A^T ─▶ add: y += low B^T, projection by projection

Each row reads the matrices of its own adapter, as BGMV does on GPUs (arXiv 2310.18547, 2311.03285): rows of one adapter
follow each other in the order, and several at once share what is loaded. A low number is one sum for each of sixteen
places of a vector, whose halves are then added up until one number is left; an output adds its ranks one after the
other. Both are so for any number of rows at once: the bits of a row depend on that row and its adapter alone.

A is kept in panels of sixteen ranks, B in panels of eight vectors of outputs; the last panel has as many as are left.
In a panel a vector of inputs, or a rank, follows the one before, so that one row reads each panel from its beginning to
its end. Numbers are elements, or where the processor multiplies them pairs of bfloat16: of inputs, or of ranks.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.compilation import has_wide_registers, kernel, kernel_part
from engine.attention.micro_kernels import I64, ZERO, loop
from engine.attention.simd import (
    FLOAT32,
    INT64,
    KINDS,
    PAIRS,
    WIDTH,
    as_element,
    as_floats,
    fused_product,
    next_task,
    pair_product,
    pointer,
    prefetched,
    put_floats,
    repeated,
    vector_at,
)

RANKS = 16
"""Of a panel of A."""
VECTORS = 8
"""Of outputs, of a panel of B."""
BLOCK_FIELDS = 5
_MANY = 4 if has_wide_registers() else 2
"""Rows at once, where one adapter has as many."""
_RANKS_OF_ONE = 16 if has_wide_registers() else 4
_VECTORS_OF_MANY, _VECTORS_OF_ONE = (4, 8) if has_wide_registers() else (2, 4)
_AHEAD = 1024
"""Numbers: so far one row prefetches its panel, past its end into the next one. With many adapters this is half of the
time (benchmarks/LOG.md)."""
_QUAD = 4
"""Ranks of the least task."""
_I32 = ir.IntType(32)


@functools.cache
def order_address() -> int:
    """`void(int64*)`, for one thread: counter, rows, adapters, adapter of each row, order [rows], memory [adapters +
    1]. The order has the rows adapter by adapter, those without one (any greater number) at the end."""

    @kernel
    def compiled(a):
        _order(a)

    return int(compiled.address)


def project_address(dtype: str, *, in_pairs: bool) -> int:
    """`void(int64*)`: counter, rows, rows of a task, tasks of these rows, order, adapter of each row, adapters, table
    [adapters, its width], its width, numbers of an input row, input, numbers of a low row, low. A row of the table:
    address of A, its ranks; for each projection the place of its first rank in a low row, its ranks, and the address of
    its B; all in numbers. Low numbers: float32, or bfloat16 where pairs are multiplied."""
    kind = KINDS[dtype]
    numbers, low = (PAIRS, KINDS["bfloat16"]) if in_pairs else (kind, FLOAT32)

    @kernel
    def compiled(a):
        _project(a, numbers, low)

    return int(compiled.address)


def add_address(dtype: str, *, in_pairs: bool) -> int:
    """`void(int64*)`: as `project_address` to the table's width; blocks, their number, numbers of a low row, low,
    outputs of a row, output. A block: projection, the column of its first output, and of its vectors of outputs the
    first of the block, those of the block, and all."""
    kind = KINDS[dtype]
    numbers = PAIRS if in_pairs else kind

    @kernel
    def compiled(a):
        _add(a, kind, numbers)

    return int(compiled.address)


@kernel_part
def _order(a):
    rows, num_adapters = a[1], a[2]
    tokens, order, ends = pointer(a[3], INT64), pointer(a[4], INT64), pointer(a[5], INT64)
    for adapter in range(num_adapters + 1):
        ends[adapter] = 0
    for row in range(rows):
        ends[min(tokens[row], num_adapters)] += 1
    for adapter in range(num_adapters):
        ends[adapter + 1] += ends[adapter]
    for row in range(rows - 1, -1, -1):
        adapter = min(tokens[row], num_adapters)
        ends[adapter] -= 1
        order[ends[adapter]] = row


@kernel_part
def _num_alike(order, tokens, position, last):
    """Rows of one adapter from this position on: _MANY or one."""
    end = position + _MANY - 1
    return _MANY if end < last and tokens[order[end]] == tokens[order[position]] else 1


@kernel_part
def _project(a, kind, low_kind):
    rows, chunk, num_parts, num_adapters = a[1], a[2], a[3], a[6]
    order, tokens, table = pointer(a[4], INT64), pointer(a[5], INT64), pointer(a[7], INT64)
    x, low = (pointer(a[10], kind), a[9]), (pointer(a[12], low_kind), a[11])
    while True:
        task = next_task(a)
        position, part = task // num_parts * chunk, task % num_parts
        if position >= rows:
            break
        last = min(position + chunk, rows)
        while position < last and tokens[order[position]] < num_adapters:
            entry = tokens[order[position]] * a[8]
            matrix, ranks = pointer(table[entry], kind), table[entry + 1]
            quads = (ranks + _QUAD - 1) // _QUAD
            bounds = (quads * part // num_parts * _QUAD, quads * (part + 1) // num_parts * _QUAD, ranks)
            num_rows = _num_alike(order, tokens, position, last)
            if num_rows > 1:
                _project_many(order, position, x, matrix, bounds, low)
            else:
                _project_one(order, position, x, matrix, bounds, low)
            position += num_rows


@kernel_part
def _project_many(order, position, x, matrix, bounds, low):
    rank, end, ranks = bounds
    while rank < end:
        _products_of_many(order, position, x, matrix, (rank, ranks), low)
        rank += _QUAD if _MANY == 4 else 2


@kernel_part
def _project_one(order, position, x, matrix, bounds, low):
    rank, end, ranks = bounds
    while rank < end:
        if rank % _RANKS_OF_ONE == 0 and rank + _RANKS_OF_ONE <= end:
            _products_of_one(order, position, x, matrix, (rank, ranks), low)
            rank += _RANKS_OF_ONE
        else:
            _products_of_quad(order, position, x, matrix, (rank, ranks), low)
            rank += _QUAD


@kernel_part
def _add(a, kind, numbers_kind):
    rows, chunk, num_adapters, num_blocks = a[1], a[2], a[6], a[10]
    order, tokens, table, blocks = (
        pointer(a[4], INT64),
        pointer(a[5], INT64),
        pointer(a[7], INT64),
        pointer(a[9], INT64),
    )
    low, y = pointer(a[12], FLOAT32), (pointer(a[14], kind), a[13])
    while True:
        task = next_task(a)
        position, block = task // num_blocks * chunk, task % num_blocks * BLOCK_FIELDS
        if position >= rows:
            break
        last = min(position + chunk, rows)
        vectors = (blocks[block + 1], blocks[block + 2], blocks[block + 3], blocks[block + 4])
        while position < last and tokens[order[position]] < num_adapters:
            entry = tokens[order[position]] * a[8] + 2 + 3 * blocks[block]
            lows, matrix = (low, a[11], table[entry], table[entry + 1]), pointer(table[entry + 2], numbers_kind)
            num_rows = _num_alike(order, tokens, position, last)
            if table[entry + 1] > 0:
                _add_block(order, position, num_rows, lows, matrix, vectors, y)
            position += num_rows


@kernel_part
def _add_block(order, position, num_rows, lows, matrix, vectors, y):
    column, first, num_vectors, whole = vectors
    end, at_once = first + num_vectors, _VECTORS_OF_MANY if num_rows > 1 else _VECTORS_OF_ONE
    while first < end:
        is_whole = first + at_once <= end
        if num_rows > 1 and is_whole:
            _sums_of_many(order, position, lows, matrix, (column, first, whole), y)
        elif num_rows > 1:
            _sums_of_many_rest(order, position, lows, matrix, (column, first, whole), y)
        elif is_whole:
            _sums_of_one(order, position, lows, matrix, (column, first, whole), y)
        else:
            _sums_of_one_rest(order, position, lows, matrix, (column, first, whole), y)
        first += at_once if is_whole else 1


def _numbers_at(builder, base, index, kind):
    return as_floats(builder, base, index, types.float32 if kind == types.uint32 else kind)


def _with_products(builder, kind, rows, vectors, sums):
    """`sums` with the product of each of `rows` and each of `vectors` added, row by row."""
    product = pair_product if kind == types.uint32 else fused_product
    pairs = [(row, vector) for row in rows for vector in vectors]
    return [product(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]


def _shuffled(builder, left, right, lanes):
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), [ir.Constant(_I32, lane) for lane in lanes])
    return builder.shuffle_vector(left, right, mask)


def _totals(builder, vectors):
    """A vector that begins with the sum of each vector's elements; of 1, 2, 4, 8 or 16 vectors. A half is added to the
    other, and so on, whatever the number of vectors."""
    size = WIDTH
    while size > 1:
        size //= 2
        lower = [lane for start in range(0, 2 * WIDTH, 2 * size) for lane in range(start, start + size)]
        upper = [lane + size for lane in lower]
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        vectors = [builder.fadd(*(_shuffled(builder, *pair, lanes) for lanes in (lower, upper))) for pair in pairs]
    return vectors[0]


def _panel_of(builder, first, whole, panel, size):
    """Of a matrix in panels, `whole` vectors long, `size` numbers of vectors for each: where vector number `first` of a
    panel's first line is, and how far it is to the next line."""
    begin = builder.mul(builder.sdiv(first, I64(panel)), I64(panel))
    left = builder.sub(whole, begin)
    width = builder.select(builder.icmp_signed("<", left, I64(panel)), left, I64(panel))
    place = builder.add(builder.mul(begin, size), builder.sub(first, begin))
    return builder.mul(place, I64(WIDTH)), builder.mul(width, I64(WIDTH))


def _rows_at(builder, order, position, num_rows):
    places = [builder.add(position, I64(index)) for index in range(num_rows)]
    return [builder.load(builder.gep(order, [place])) for place in places]


def _loaded_line(builder, matrix, places, kind, ahead):
    """The vectors at these places of the matrix."""
    for place in places if ahead else ():
        prefetched(builder, matrix, builder.add(place, I64(_AHEAD)))
    return [_numbers_at(builder, matrix, place, kind) for place in places]


def _products(num_rows, num_ranks, *, ahead=False):
    """Low numbers of rows. Arguments: order, position, (x, numbers of a row), A, (first rank, all ranks), (low, its
    numbers of a row). Beyond the last rank it is repeated, where a low row has numbers that are not used."""

    def codegen(context, builder, sig, args):
        order, position, x, matrix, ranks, low = args
        kind, low_kind = sig.args[3].dtype, sig.args[5][0].dtype
        (x, num_numbers), (first, whole), (low, stride) = (
            cgutils.unpack_tuple(builder, one) for one in (x, ranks, low)
        )
        num_vectors = builder.sdiv(num_numbers, I64(WIDTH))
        starts = [builder.mul(row, num_numbers) for row in _rows_at(builder, order, position, num_rows)]
        line, step = _panel_of(builder, first, whole, RANKS, num_vectors)
        left = builder.sub(builder.sub(whole, first), I64(1))
        offsets = [builder.select(builder.icmp_signed("<", I64(one), left), I64(one), left) for one in range(num_ranks)]
        lines = [builder.add(line, builder.mul(offset, I64(WIDTH))) for offset in offsets]

        def add_products(number, sums):
            at, below = builder.mul(number, I64(WIDTH)), builder.mul(number, step)
            inputs = [_numbers_at(builder, x, builder.add(start, at), kind) for start in starts]
            places = [builder.add(one, below) for one in lines]
            return _with_products(builder, kind, inputs, _loaded_line(builder, matrix, places, kind, ahead), sums)

        sums = loop(builder, I64(0), num_vectors, [ZERO] * (num_rows * num_ranks), add_products)
        totals = as_element(builder, _totals(builder, sums), low_kind)
        for row in range(num_rows):
            part = _shuffled(builder, totals, totals, range(row * num_ranks, (row + 1) * num_ranks))
            place = builder.add(builder.mul(builder.add(position, I64(row)), stride), first)
            builder.store(part, vector_at(builder, low, place, part.type), align=2)
        return context.get_dummy_value()

    def typing(typingctx, order, position, x, matrix, ranks, low):
        return types.void(order, position, x, matrix, ranks, low), codegen

    return intrinsic(typing)


def _sums(num_rows, num_vectors, *, ahead=False):
    """Outputs of rows. Arguments: order, position, (low, its numbers of a row, those before the projection's and those
    of the projection), B, (column of its first output, first vector, all vectors), (output, columns of a row)."""

    def codegen(context, builder, sig, args):
        order, position, lows, matrix, vectors, y = args
        kind, element = sig.args[3].dtype, sig.args[5][0].dtype
        low, stride, before, num_numbers = cgutils.unpack_tuple(builder, lows)
        (column, first, whole), (y, columns) = (cgutils.unpack_tuple(builder, one) for one in (vectors, y))
        rows = _rows_at(builder, order, position, num_rows)
        positions = [builder.add(position, I64(index)) for index in range(num_rows)]
        starts = [builder.add(builder.mul(one, stride), before) for one in positions]
        line, step = _panel_of(builder, first, whole, VECTORS, num_numbers)
        offsets = [I64(WIDTH * index) for index in range(num_vectors)]

        def add_products(number, sums):
            below = builder.add(line, builder.mul(number, step))
            weights = _loaded_line(builder, matrix, [builder.add(below, one) for one in offsets], kind, ahead)
            inputs = [builder.load(builder.gep(low, [builder.add(start, number)])) for start in starts]
            return _with_products(builder, kind, [repeated(builder, one) for one in inputs], weights, sums)

        sums = loop(builder, I64(0), num_numbers, [ZERO] * (num_rows * num_vectors), add_products)
        column = builder.add(column, builder.mul(first, I64(WIDTH)))
        places = [builder.add(builder.mul(row, columns), column) for row in rows]
        for place, total in zip([builder.add(one, offset) for one in places for offset in offsets], sums, strict=True):
            put_floats(builder, y, place, builder.fadd(as_floats(builder, y, place, element), total), element)
        return context.get_dummy_value()

    def typing(typingctx, order, position, lows, matrix, vectors, y):
        return types.void(order, position, lows, matrix, vectors, y), codegen

    return intrinsic(typing)


_products_of_many = _products(_MANY, _QUAD if _MANY == 4 else 2)
_products_of_one = _products(1, _RANKS_OF_ONE, ahead=True)
_products_of_quad = _products(1, _QUAD, ahead=True)
_sums_of_many = _sums(_MANY, _VECTORS_OF_MANY)
_sums_of_many_rest = _sums(_MANY, 1)
_sums_of_one = _sums(1, _VECTORS_OF_ONE, ahead=True)
_sums_of_one_rest = _sums(1, 1)
