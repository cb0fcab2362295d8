"""Products of rows with matrices of 8-bit or 4-bit codes, called with addresses by `engine.models.quantized`.

A panel is 64 outputs; one task computes all rows of one panel. Codes, less the zero points of their group if it has
any, become numbers in registers: float32, or pairs of bfloat16 on processors that multiply them; both are exact. With
AVX-512 codes of four bits are places in a table of the numbers, which a register holds.

A row's sum takes the numbers of its input in order, group by group: the sum of a group, times the group's scale, is
added to the total. However many rows are multiplied at once, they add in the same order, and each product is rounded
together with its addition, so that the bits of a row do not depend on the rows beside it. Twelve rows at once, of half
of the panel, share what a code costs to become a number; where there are more, the panel's numbers are made once, in
memory of the thread's own.

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

from engine.attention.compilation import has_tables, kernel, kernel_part
from engine.attention.micro_kernels import I64, VECTOR, ZERO, Arithmetic, for_each, loop
from engine.attention.simd import (
    FLOAT32,
    INT64,
    KINDS,
    PAIRS,
    WIDTH,
    as_floats,
    as_pairs,
    floats_of,
    fused_product,
    next_task,
    pairs_of,
    pointer,
    prefetched,
    put_floats,
    repeated,
    vector_at,
)
from engine.models.panel_linear_kernels import MANY_ROWS, PANEL, rows_of, task_after, vectors_at_once

_AHEAD = 4096
"""Bytes: so far the panel is prefetched, past its end into the next one."""
CODES = {8: np.int8(0), 4: np.uint8(0)}
"""The kinds of codes, by their bits."""
NO_ZEROS, FLOATS = np.uint8(0), np.uint16(0)
"""In place of the kind of zero points, which are codes of 8 bits: there are none; and the codes, of 4 bits, are not
integers (MXFP4)."""
_VECTORS = PANEL // WIDTH
_I32 = ir.IntType(32)
_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)


CONVERTED_ROWS = 64
"""From here on a panel's numbers are made once for all rows: with fewer it saves less than it costs (measured)."""


def multiply_address(dtype: str, bits: int, scales: str, *, in_pairs: bool, has_zeros: bool, are_floats: bool) -> int:
    """`void(int64*)`: counter, rows, outputs (whole vectors), numbers of an input row, numbers of a group, input (rows
    of float32, or of pairs), codes, their bytes for one number of a panel, scales [panels, groups, 64], zero points,
    bias (float32 [panels, 64]), output; of `runs_of`: panels of a run, runs; with CONVERTED_ROWS or more memory for the
    numbers of a panel of each thread, a counter of threads and how many they are; first row of each matrix and the end
    (int64 [matrices + 1]; 0: all rows), matrices, whose panels follow each other. `dtype`: of the output; `scales`:
    theirs."""
    kinds = CODES[bits], KINDS[scales], CODES[8] if has_zeros else FLOATS if are_floats else NO_ZEROS
    kind, numbers = KINDS[dtype], PAIRS if in_pairs else FLOAT32

    @kernel
    def compiled(a):
        _multiply(a, kind, kinds, numbers)

    return int(compiled.address)


@kernel_part
def _multiply(a, kind, kinds, numbers_kind):
    outputs, num_numbers, group, number_bytes = a[2], a[3], a[4], a[7]
    numbers, output = pointer(a[5], numbers_kind), pointer(a[11], kind)
    weights = pointer(a[6], kinds[0]), pointer(a[8], kinds[1]), pointer(a[9], kinds[2])
    num_groups, num_panels = (num_numbers + group - 1) // group, (outputs + PANEL - 1) // PANEL
    place = a[14]
    if place != 0:
        place += next_task(pointer(a[15], INT64)) % a[16] * num_numbers * PANEL * 4
    converted = pointer(place, FLOAT32), weights[1], pointer(a[9], NO_ZEROS)
    run, num_runs = a[12], a[13]
    task, left = task_after(a, 0, 0, run, num_runs)
    begin = 0
    for number in range(a[18]):
        first, last = rows_of(number, a[17], a[1])
        end = begin + num_panels * (first < last)
        bias = pointer(a[10] + 4 * number * num_panels * PANEL, FLOAT32)
        while task < end:
            panel = number * num_panels + task - begin
            matrix = (panel * num_numbers * number_bytes, number_bytes, panel * num_groups * PANEL)
            places = (outputs, (task - begin) * PANEL)
            row = first
            if last - first >= CONVERTED_ROWS:
                _convert(numbers, (num_numbers, group), weights, matrix, converted[0])
                while row + MANY_ROWS <= last:
                    _multiply_many(numbers, (row, num_numbers, group), converted, matrix, bias, output, places)
                    row += MANY_ROWS
            _multiply_codes(numbers, (row, last, num_numbers, group), weights, matrix, bias, output, places)
            task, left = task_after(a, task, left, run, num_runs)
        begin = end


_SIGNED = (*range(8), *range(-8, 0))
_SMALL_FLOATS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What codes of four bits stand for: integers, and twice the numbers of MXFP4."""


def _line(builder, codes, at, line):
    """Sixteen bytes."""
    place = builder.add(at, builder.mul(line, I64(WIDTH)))
    return builder.load(vector_at(builder, codes, place, _BYTES), align=1)


def _looked_up(builder, codes, at, vector, table):
    """As `_coded`, of four bits. Where `has_tables`."""
    line = builder.zext(_line(builder, codes, at, builder.lshr(vector, I64(1))), _INTEGERS)
    is_upper = builder.trunc(builder.and_(vector, I64(1)), _I32)
    places = builder.lshr(line, repeated(builder, builder.shl(is_upper, _I32(2)), _INTEGERS))
    return floats_of(builder, table, places)


def _pairs_looked_up(builder, codes, at, vector, table):
    """The codes of a line, those of four bits of two vectors, as pairs. Where `has_tables`."""
    halves = ir.VectorType(ir.IntType(16), WIDTH)
    line = builder.zext(_line(builder, codes, at, builder.lshr(vector, I64(1))), halves)
    upper = builder.lshr(line, ir.Constant(halves, [4] * WIDTH))
    every = ir.Constant(ir.VectorType(_I32, 2 * WIDTH), list(range(2 * WIDTH)))
    return pairs_of(builder, table * 2, builder.shuffle_vector(line, upper, every))


def _coded(builder, codes, at, vector, bits, *, are_floats=False):
    """Sixteen codes as floats: vector number `vector` (int64) of the codes that begin at byte `at`."""
    line = vector if bits == 8 else builder.lshr(vector, I64(1))
    loaded = builder.sext(_line(builder, codes, at, line), _INTEGERS)
    if bits == 4:  # the lower half of each byte for even vectors, the upper one for odd
        is_lower = builder.sub(I64(1), builder.and_(vector, I64(1)))
        left = builder.mul(is_lower, I64(28))
        right = builder.add(builder.mul(is_lower, I64(24)), I64(4))
        left, right = (repeated(builder, builder.trunc(shift, _I32), _INTEGERS) for shift in (left, right))
        loaded = builder.ashr(builder.shl(loaded, left), right)
    return _small_floats(builder, loaded) if are_floats else builder.sitofp(loaded, VECTOR)


def _small_floats(builder, codes):
    """Twice the numbers of codes with a sign, two bits of exponent and one of mantissa; above them is the sign too."""
    magnitudes = builder.and_(codes, _constant(7))
    bits = builder.add(builder.shl(magnitudes, _constant(22)), _constant(127 << 23))  # of the exponents from 1
    is_small = builder.icmp_unsigned("<", magnitudes, _constant(2))
    bits = builder.select(is_small, builder.bitcast(builder.sitofp(magnitudes, VECTOR), _INTEGERS), bits)
    signs = builder.shl(builder.lshr(codes, _constant(31)), _constant(31))
    return builder.bitcast(builder.or_(bits, signs), VECTOR)


def _constant(value):
    return ir.Constant(_INTEGERS, [ir.Constant(_I32, value)] * WIDTH)


def _numbers(builder, codes, at, vectors, bits, zeros, in_pairs, are_floats):
    """A panel's weights for one number of the input: of these vectors of codes, less the zero points if there are any;
    of pairs half as many."""
    has_table, table = bits == 4 and has_tables(), _SMALL_FLOATS if are_floats else _SIGNED
    if has_table and in_pairs and not zeros:
        return [_pairs_looked_up(builder, codes, at, vector, table) for vector in vectors[::2]]
    if has_table:
        numbers = [_looked_up(builder, codes, at, vector, table) for vector in vectors]
    else:
        numbers = [_coded(builder, codes, at, vector, bits, are_floats=are_floats) for vector in vectors]
    if zeros:
        numbers = [builder.fsub(number, zero) for number, zero in zip(numbers, zeros, strict=True)]
    if not in_pairs:
        return numbers
    return [as_pairs(builder, *halves) for halves in zip(numbers[::2], numbers[1::2], strict=True)]


class _Weights:
    """One part of a panel, so many vectors, in codes or already as numbers."""

    def __init__(self, builder, types_of_weights, weights, places, part, num_vectors, *, in_pairs):
        """`places`: numbers of an input row, numbers of a group; first byte of the panel, bytes of a number, first
        scale."""
        self._builder = builder
        self._codes, self._scales, self._zeros = cgutils.unpack_tuple(builder, weights)
        code_kind, self._scale_kind, zero_kind = (kind.dtype for kind in types_of_weights)
        self._is_converted, self._has_zeros = code_kind == types.float32, zero_kind == types.int8
        self._are_floats = zero_kind == types.uint16
        self._bits = 4 if code_kind == types.uint8 else 8
        self._in_pairs, self._per_number = in_pairs, 2 if in_pairs else 1
        self.num_numbers, self._group, self._first_byte, self._number_bytes, self._first_scale = places
        self.num_groups = builder.sdiv(builder.sub(builder.add(self.num_numbers, self._group), I64(1)), self._group)
        self._part, self._num_vectors = part, num_vectors
        vectors = [builder.add(builder.mul(part, I64(num_vectors)), I64(index)) for index in range(num_vectors)]
        self.offsets = [builder.mul(vector, I64(WIDTH)) for vector in vectors]
        self._of_codes = [
            builder.add(builder.mul(vector, I64(self._per_number)), I64(half))
            for vector in vectors
            for half in range(self._per_number)
        ]

    def numbers_of(self, group):
        """First and last number."""
        builder = self._builder
        first = builder.mul(group, self._group)
        last = builder.add(first, self._group)
        return first, builder.select(builder.icmp_signed("<", last, self.num_numbers), last, self.num_numbers)

    def floats_at(self, base, at, kind):
        return [as_floats(self._builder, base, self._builder.add(at, offset), kind) for offset in self.offsets]

    def scales(self, group):
        return self.floats_at(self._scales, self._scales_at(group), self._scale_kind)

    def zeros(self, group):
        """Zero points of a group; [] if there are none."""
        if not self._has_zeros:
            return []
        at = self._builder.mul(self._scales_at(group), I64(self._per_number))
        return [_coded(self._builder, self._zeros, at, vector, 8) for vector in self._of_codes]

    def _scales_at(self, group):
        return self._builder.add(self._first_scale, self._builder.mul(group, I64(PANEL)))

    def vectors(self, number, zeros):
        """For one number of the input."""
        builder = self._builder
        if self._is_converted:
            return [as_floats(builder, self._codes, at, types.float32) for at in self.converted_at(number)]
        at = builder.add(self._first_byte, builder.mul(number, self._number_bytes))
        for line in range(0, PANEL * self._bits // 8 * self._per_number, 64):
            prefetched(builder, self._codes, builder.add(at, I64(_AHEAD + line)))
        return _numbers(builder, self._codes, at, self._of_codes, self._bits, zeros, self._in_pairs, self._are_floats)

    def converted_at(self, number):
        """Where `vectors` are in a converted panel: part by part, of each all numbers."""
        builder = self._builder
        place = builder.add(builder.mul(self._part, self.num_numbers), number)
        first = builder.mul(place, I64(self._num_vectors * WIDTH))
        return [builder.add(first, I64(WIDTH * index)) for index in range(self._num_vectors)]


def _multiply_rows(num_rows):
    """`num_rows` rows times one panel. Places: row, numbers of an input row, numbers of a group; first byte of the
    panel, bytes of a number, first scale; outputs of a row, first output of the panel."""
    num_vectors = vectors_at_once(num_rows)

    def codegen(context, builder, sig, args):
        numbers, row_places, weights, matrix_places, bias, output, output_places = args
        arithmetic, element = Arithmetic(sig.args[0].dtype), sig.args[5].dtype
        row, *sizes = cgutils.unpack_tuple(builder, row_places)
        places = [*sizes, *cgutils.unpack_tuple(builder, matrix_places)]
        outputs, column = cgutils.unpack_tuple(builder, output_places)
        numbers = builder.bitcast(numbers, ir.FloatType().as_pointer())
        rows = [builder.add(row, I64(index)) for index in range(num_rows)]
        starts = [builder.mul(one, sizes[0]) for one in rows]

        def multiply_part(part):
            matrix = _Weights(builder, sig.args[2], weights, places, part, num_vectors, in_pairs=arithmetic.in_pairs)

            def add_products(zeros, number, sums):
                vectors = matrix.vectors(number, zeros)
                inputs = [builder.load(builder.gep(numbers, [builder.add(start, number)])) for start in starts]
                return arithmetic.outer_product(builder, inputs, vectors, sums)

            def add_group(group, totals):
                body = partial(add_products, matrix.zeros(group))
                first, last = matrix.numbers_of(group)
                sums = loop(builder, first, last, [ZERO] * len(totals), body)
                scale = matrix.scales(group)
                return [
                    fused_product(builder, one, scale[place % num_vectors], total)
                    for place, (one, total) in enumerate(zip(sums, totals, strict=True))
                ]

            biases = matrix.floats_at(bias, column, types.float32) * num_rows
            totals = loop(builder, I64(0), matrix.num_groups, biases, add_group)
            for index, offset in enumerate(matrix.offsets):
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


@intrinsic
def _convert(typingctx, numbers, sizes, weights, matrix_places, converted):
    """Writes a panel as numbers of the input's kind, for MANY_ROWS at once. Sizes: numbers of an input row, numbers of
    a group; places as in `_multiply_rows`."""
    num_vectors = vectors_at_once(MANY_ROWS)

    def codegen(context, builder, sig, args):
        _, sizes, weights, matrix_places, converted = args
        in_pairs = Arithmetic(sig.args[0].dtype).in_pairs
        places = [*cgutils.unpack_tuple(builder, sizes), *cgutils.unpack_tuple(builder, matrix_places)]

        def convert_part(part):
            matrix = _Weights(builder, sig.args[2], weights, places, part, num_vectors, in_pairs=in_pairs)

            def convert_number(zeros, number, _):
                for at, vector in zip(matrix.converted_at(number), matrix.vectors(number, zeros), strict=True):
                    put_floats(builder, converted, at, vector, types.float32)
                return []

            def convert_group(group, _):
                first, last = matrix.numbers_of(group)
                loop(builder, first, last, [], partial(convert_number, matrix.zeros(group)))
                return []

            loop(builder, I64(0), matrix.num_groups, [], convert_group)

        for_each(builder, _VECTORS // num_vectors, convert_part)
        return context.get_dummy_value()

    three, two = types.UniTuple(types.int64, 3), types.UniTuple(types.int64, 2)
    return types.void(numbers, two, weights, three, converted), codegen


_multiply_many = _multiply_rows(MANY_ROWS)
_multiply_four = _multiply_rows(4)
_multiply_two = _multiply_rows(2)
_multiply_one = _multiply_rows(1)


@kernel_part
def _multiply_codes(numbers, rows, weights, matrix, bias, output, places):
    """Rows from the first to the last times one panel."""
    row, last, num_numbers, group = rows
    while row + MANY_ROWS <= last:
        _multiply_many(numbers, (row, num_numbers, group), weights, matrix, bias, output, places)
        row += MANY_ROWS
    while row + 4 <= last:
        _multiply_four(numbers, (row, num_numbers, group), weights, matrix, bias, output, places)
        row += 4
    if row + 2 <= last:
        _multiply_two(numbers, (row, num_numbers, group), weights, matrix, bias, output, places)
        row += 2
    if row < last:
        _multiply_one(numbers, (row, num_numbers, group), weights, matrix, bias, output, places)
