"""Products of rows with a matrix in panels, called with addresses by `engine.models.panel_linear`.

A panel is 64 outputs, and its inputs follow each other in memory: numbers of float32, or pairs of bfloat16 that the
processor multiplies and adds at once. One task computes 128 rows of one panel, four at once: their sums stay in
registers, and where there are few rows, the time is that of reading the panel. A row adds the numbers of a group in the
order of its inputs, and then the groups, whatever the rows beside it.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

import functools

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.compilation import kernel
from engine.attention.micro_kernels import loop
from engine.attention.simd import (
    FLOAT32,
    KINDS,
    PAIRS,
    WIDTH,
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

PANEL = 64
"""Outputs."""
_GROUP = 256
"""Numbers. Long sums lose digits: those of groups are shorter."""
_AHEAD = 16
"""Numbers, 4 KiB: for one and two rows the panel is prefetched so far, past its end into the next one."""
_CHUNK = 128
"""Rows of a task."""
_VECTORS = PANEL // WIDTH
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)


@functools.cache
def multiply_address(dtype: str) -> int:
    """`void(int64*)`: counter, rows, outputs (whole vectors), numbers of an input row, input [rows, numbers], matrix
    [panels, numbers, 64], bias (float32 [panels, 64]), output [rows, outputs]. `dtype`: float32, or bfloat16, whose
    numbers are pairs."""
    kind, numbers = KINDS[dtype], PAIRS if dtype == "bfloat16" else FLOAT32

    @kernel
    def compiled(a):
        _multiply(a, kind, numbers)

    return int(compiled.address)


@njit
def _multiply(a, kind, numbers_kind):
    rows, outputs, num_numbers = a[1], a[2], a[3]
    x, matrix = pointer(a[4], numbers_kind), pointer(a[5], numbers_kind)
    bias, output = pointer(a[6], FLOAT32), pointer(a[7], kind)
    num_chunks = (rows + _CHUNK - 1) // _CHUNK
    while True:
        task = next_task(a)
        column = task // num_chunks * PANEL
        if column >= outputs:
            break
        row = task % num_chunks * _CHUNK
        last = min(row + _CHUNK, rows)
        while row + 4 <= last:
            _multiply_four(x, (row, num_numbers), matrix, bias, output, (outputs, column))
            row += 4
        if row + 2 <= last:
            _multiply_two(x, (row, num_numbers), matrix, bias, output, (outputs, column))
            row += 2
        if row < last:
            _multiply_one(x, (row, num_numbers), matrix, bias, output, (outputs, column))


def _multiply_codegen(num_rows, product, element):
    def codegen(context, builder, sig, args):
        x, row_places, matrix, bias, output, output_places = args
        row, num_numbers = cgutils.unpack_tuple(builder, row_places)
        outputs, column = cgutils.unpack_tuple(builder, output_places)
        x, matrix = (builder.bitcast(one, ir.FloatType().as_pointer()) for one in (x, matrix))
        starts = [builder.mul(builder.add(row, _I64(index)), num_numbers) for index in range(num_rows)]
        panel = builder.mul(column, num_numbers)

        def add_products(number, sums):
            first = builder.add(panel, builder.mul(number, _I64(PANEL)))
            places = [builder.add(first, _I64(WIDTH * vector)) for vector in range(_VECTORS)]
            weights = [builder.load(vector_at(builder, matrix, place), align=4) for place in places]
            if num_rows < 4:
                for place in places:
                    prefetched(builder, matrix, builder.add(place, _I64(_AHEAD * PANEL)))
            result = []
            for index, start in enumerate(starts):
                factor = repeated(builder, builder.load(builder.gep(x, [builder.add(start, number)])))
                mine = sums[index * _VECTORS : (index + 1) * _VECTORS]
                result += [product(builder, factor, *two) for two in zip(weights, mine, strict=True)]
            return result

        zeros = [ir.Constant(_VECTOR, [0.0] * WIDTH)] * (num_rows * _VECTORS)

        def add_group(index, totals):
            first = builder.mul(index, _I64(_GROUP))
            last = builder.add(first, _I64(_GROUP))
            last = builder.select(builder.icmp_signed("<", last, num_numbers), last, num_numbers)
            sums = loop(builder, first, last, zeros, add_products)
            return [builder.fadd(*two) for two in zip(totals, sums, strict=True)]

        num_groups = builder.sdiv(builder.add(num_numbers, _I64(_GROUP - 1)), _I64(_GROUP))
        totals = loop(builder, _I64(0), num_groups, zeros, add_group)
        for vector in range(_VECTORS):
            at = builder.add(column, _I64(WIDTH * vector))
            with builder.if_then(builder.icmp_signed("<", at, outputs)):
                added = as_floats(builder, bias, at, types.float32)
                for index in range(num_rows):
                    place = builder.add(builder.mul(builder.add(row, _I64(index)), outputs), at)
                    total = builder.fadd(totals[index * _VECTORS + vector], added)
                    put_floats(builder, output, place, total, element)
        return context.get_dummy_value()

    return codegen


def _typed(num_rows, x, row_places, matrix, bias, output, output_places):
    """Places: row, numbers of an input row; outputs of a row, first output of the panel."""
    product = pair_product if x.dtype == types.uint32 else fused_product
    result = types.void(x, row_places, matrix, bias, output, output_places)
    return result, _multiply_codegen(num_rows, product, output.dtype)


@intrinsic
def _multiply_four(typingctx, x, row_places, matrix, bias, output, output_places):
    """Four rows times one panel."""
    return _typed(4, x, row_places, matrix, bias, output, output_places)


@intrinsic
def _multiply_two(typingctx, x, row_places, matrix, bias, output, output_places):
    """Two rows times one panel."""
    return _typed(2, x, row_places, matrix, bias, output, output_places)


@intrinsic
def _multiply_one(typingctx, x, row_places, matrix, bias, output, output_places):
    """One row times one panel."""
    return _typed(1, x, row_places, matrix, bias, output, output_places)
