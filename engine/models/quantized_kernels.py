"""Products of rows with matrices of 8-bit or 4-bit codes, called with addresses by `engine.models.quantized`.

A panel is 64 outputs; one task computes all rows of one panel. Codes, less the zero points of their group if it has
any, become numbers in registers: float32, or pairs of bfloat16 on processors that multiply them; both are exact. A
row's sum takes the numbers of its input in order, group by group: the sum of a group, times the group's scale, is added
to the total. However many rows are multiplied at once, they add in the same order, and each product is rounded together
with its addition, so that the bits of a row do not depend on the rows beside it. Twelve rows at once, of half of the
panel, share what a code costs to become a number.

Codes of a panel, input after input: those of the 64 outputs; where pairs are multiplied, two inputs of each output.
In this order as bytes; of 4 bits, sixteen bytes hold 32 codes, the first sixteen in the lower halves. Zero points of a
panel, group after group: as codes of 8 bits for one number of the input.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"
from __future__ import annotations

from functools import partial

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.compilation import kernel, kernel_part
from engine.attention.micro_kernels import I64, VECTOR, ZERO, Arithmetic, for_each, loop
from engine.attention.simd import (
    FLOAT32,
    KINDS,
    PAIRS,
    WIDTH,
    as_floats,
    as_pairs,
    fused_product,
    pointer,
    prefetched,
    put_floats,
    repeated,
    vector_at,
)
from engine.models.panel_linear_kernels import MANY_ROWS, PANEL, task_after, vectors_at_once

_AHEAD = 4096
"""Bytes: so far the panel is prefetched, past its end into the next one."""
CODES = {8: np.int8(0), 4: np.uint8(0)}
"""The kinds of codes, by their bits."""
NO_ZEROS = np.uint8(0)
"""The kind of zero points that are not there; others are codes of 8 bits."""
_VECTORS = PANEL // WIDTH
_I32 = ir.IntType(32)
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)


def multiply_address(dtype: str, bits: int, scales: str, *, in_pairs: bool, has_zeros: bool) -> int:
    """`void(int64*)`: counter, rows, outputs (whole vectors), numbers of an input row, numbers of a group, input (rows
    of float32, or of pairs), codes, their bytes for one number of a panel, scales [panels, groups, 64], zero points,
    bias (float32 [panels, 64]), output; of `runs_of`: panels of a run, runs. `dtype`: of the output; `scales`: theirs.
    """
    kinds = CODES[bits], KINDS[scales], CODES[8] if has_zeros else NO_ZEROS
    kind, numbers = KINDS[dtype], PAIRS if in_pairs else FLOAT32

    @kernel
    def compiled(a):
        _multiply(a, kind, kinds, numbers)

    return int(compiled.address)


@kernel_part
def _multiply(a, kind, kinds, numbers_kind):
    rows, outputs, num_numbers, group, number_bytes = a[1], a[2], a[3], a[4], a[7]
    numbers, bias, output = pointer(a[5], numbers_kind), pointer(a[10], FLOAT32), pointer(a[11], kind)
    weights = pointer(a[6], kinds[0]), pointer(a[8], kinds[1]), pointer(a[9], kinds[2])
    num_groups = (num_numbers + group - 1) // group
    run, num_runs = a[12], a[13]
    panel, left = task_after(a, 0, 0, run, num_runs)
    while True:
        column = panel * PANEL
        if column >= outputs:
            break
        matrix = (panel * num_numbers * number_bytes, number_bytes, panel * num_groups * PANEL)
        row = 0
        while row + MANY_ROWS <= rows:
            _multiply_many(numbers, (row, num_numbers, group), weights, matrix, bias, output, (outputs, column))
            row += MANY_ROWS
        while row + 4 <= rows:
            _multiply_four(numbers, (row, num_numbers, group), weights, matrix, bias, output, (outputs, column))
            row += 4
        if row + 2 <= rows:
            _multiply_two(numbers, (row, num_numbers, group), weights, matrix, bias, output, (outputs, column))
            row += 2
        if row < rows:
            _multiply_one(numbers, (row, num_numbers, group), weights, matrix, bias, output, (outputs, column))
        panel, left = task_after(a, panel, left, run, num_runs)


def _coded(builder, codes, at, vector, bits):
    """Sixteen codes as floats: vector number `vector` (int64) of the codes that begin at byte `at`."""
    line = vector if bits == 8 else builder.lshr(vector, I64(1))
    place = builder.add(at, builder.mul(line, I64(WIDTH)))
    loaded = builder.sext(builder.load(vector_at(builder, codes, place, _BYTES), align=1), _INTEGERS)
    if bits == 4:  # the lower half of each byte for even vectors, the upper one for odd
        is_lower = builder.sub(I64(1), builder.and_(vector, I64(1)))
        left = builder.mul(is_lower, I64(28))
        right = builder.add(builder.mul(is_lower, I64(24)), I64(4))
        left, right = (repeated(builder, builder.trunc(shift, _I32), _INTEGERS) for shift in (left, right))
        loaded = builder.ashr(builder.shl(loaded, left), right)
    return builder.sitofp(loaded, VECTOR)


def _numbers(builder, codes, at, vectors, bits, zeros, in_pairs):
    """A panel's weights for one number of the input: of these vectors of codes, less the zero points if there are any;
    of pairs half as many."""
    numbers = [_coded(builder, codes, at, vector, bits) for vector in vectors]
    if zeros:
        numbers = [builder.fsub(number, zero) for number, zero in zip(numbers, zeros, strict=True)]
    if not in_pairs:
        return numbers
    return [as_pairs(builder, *halves) for halves in zip(numbers[::2], numbers[1::2], strict=True)]


def _multiply_rows(num_rows):
    """`num_rows` rows times one panel. Places: row, numbers of an input row, numbers of a group; first byte of the
    panel, bytes of a number, first scale; outputs of a row, first output of the panel."""
    num_vectors = vectors_at_once(num_rows)

    def codegen(context, builder, sig, args):
        numbers, row_places, weights, matrix_places, bias, output, output_places = args
        arithmetic, element = Arithmetic(sig.args[0].dtype), sig.args[5].dtype
        codes, scales, zeros = cgutils.unpack_tuple(builder, weights)
        code_kind, scale_kind, zero_kind = (kind.dtype for kind in sig.args[2])
        bits = 8 if code_kind == types.int8 else 4
        halves = range(arithmetic.per_number)
        row, num_numbers, group = cgutils.unpack_tuple(builder, row_places)
        first_byte, number_bytes, first_scale = cgutils.unpack_tuple(builder, matrix_places)
        outputs, column = cgutils.unpack_tuple(builder, output_places)
        numbers = builder.bitcast(numbers, ir.FloatType().as_pointer())
        rows = [builder.add(row, I64(index)) for index in range(num_rows)]
        starts = [builder.mul(one, num_numbers) for one in rows]
        num_groups = builder.sdiv(builder.sub(builder.add(num_numbers, group), I64(1)), group)

        def multiply_part(part):
            vectors = [builder.add(builder.mul(part, I64(num_vectors)), I64(index)) for index in range(num_vectors)]
            offsets = [builder.mul(vector, I64(WIDTH)) for vector in vectors]
            of_codes = [
                builder.add(builder.mul(one, I64(len(halves))), I64(half)) for one in vectors for half in halves
            ]

            def add_products(zero_points, number, sums):
                at = builder.add(first_byte, builder.mul(number, number_bytes))
                for line in range(0, PANEL * bits // 8 * len(halves), 64):
                    prefetched(builder, codes, builder.add(at, I64(_AHEAD + line)))
                weights = _numbers(builder, codes, at, of_codes, bits, zero_points, arithmetic.in_pairs)
                inputs = [builder.load(builder.gep(numbers, [builder.add(start, number)])) for start in starts]
                return arithmetic.outer_product(builder, inputs, weights, sums)

            def add_group(index, totals):
                first = builder.mul(index, group)
                last = builder.add(first, group)
                last = builder.select(builder.icmp_signed("<", last, num_numbers), last, num_numbers)
                scales_at = builder.add(first_scale, builder.mul(index, I64(PANEL)))
                zeros_at = builder.mul(scales_at, I64(len(halves)))
                has_zeros = zero_kind == types.int8
                zero_points = [_coded(builder, zeros, zeros_at, vector, 8) for vector in of_codes if has_zeros]
                sums = loop(builder, first, last, [ZERO] * len(totals), partial(add_products, zero_points))
                scale = floats_at(scales, scales_at, scale_kind)
                return [
                    fused_product(builder, one, scale[place % num_vectors], total)
                    for place, (one, total) in enumerate(zip(sums, totals, strict=True))
                ]

            def floats_at(base, at, kind):
                return [as_floats(builder, base, builder.add(at, offset), kind) for offset in offsets]

            totals = loop(builder, I64(0), num_groups, floats_at(bias, column, types.float32) * num_rows, add_group)
            for index, offset in enumerate(offsets):
                at = builder.add(column, offset)
                with builder.if_then(builder.icmp_signed("<", at, outputs)):
                    for one, total in zip(rows, totals[index::num_vectors], strict=True):
                        put_floats(builder, output, builder.add(builder.mul(one, outputs), at), total, element)

        for_each(builder, _VECTORS // num_vectors, multiply_part)
        return context.get_dummy_value()

    def typing(typingctx, numbers, row_places, weights, matrix_places, bias, output, output_places):
        three, two = types.UniTuple(types.int64, 3), types.UniTuple(types.int64, 2)
        return types.void(numbers, three, weights, three, bias, output, two), codegen

    return intrinsic(typing)


_multiply_many = _multiply_rows(MANY_ROWS)
_multiply_four = _multiply_rows(4)
_multiply_two = _multiply_rows(2)
_multiply_one = _multiply_rows(1)
