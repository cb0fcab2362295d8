"""Products of rows with a matrix in panels, called with addresses by `engine.models.linear`.

A panel is 64 outputs, and its inputs follow each other in memory: numbers of float32, pairs of bfloat16 that the
processor multiplies and adds at once, or pairs that are converted to two floats. One task computes 128 rows of one
panel, four at once: their sums stay in registers, and where there are few rows, the time is that of reading the panel.
A row adds the numbers of a group in the order of its inputs, and then the groups, whatever the rows beside it.

Of four rows, 32 registers of sixteen floats hold the sums of the whole panel, or of twelve rows those of its half: what
is converted then serves more rows. Sixteen registers of eight floats hold the sums of a quarter for four rows, and the
numbers beside them: there the panel is read quarter by quarter, of two rows half by half.

Where there are more than four rows, memory would wait while the others read the panel from the second level. So they
prefetch the thread's next panel, a quarter each, for which a thread takes its next task before it computes this one. It
does so only where there are more tasks than threads: otherwise another thread would have none.

Of four rows and fewer, memory would wait at the start of each panel, since what was prefetched past the end of the last
one is another thread's. So a thread takes a run of neighbouring panels at once, and single ones at the end, so that all
threads finish together.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

import functools

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.compilation import has_wide_registers, kernel, kernel_part, multiplies_pairs
from engine.attention.micro_kernels import I64, ZERO, Arithmetic, for_each, loop, num_together
from engine.attention.simd import (
    FLOAT32,
    INT64,
    KINDS,
    PAIRS,
    WIDTH,
    as_floats,
    next_task,
    pointer,
    prefetched,
    put_floats,
    vector_at,
)

PANEL = 64
"""Outputs."""
_GROUP = 256
"""Numbers. Long sums lose digits: those of groups are shorter."""
_AHEAD = 16
"""Numbers, 4 KiB: so far the panel is prefetched, past its end into the next one, by one and two rows, and by the first
four, but for AMD's processors with AVX-512, which see that stream by themselves."""
_NEAR = 4
"""Numbers: so far by one row without AVX-512, which is 8 % faster (benchmarks/LOG.md)."""
CHUNK = 128
"""Rows of a task."""
_RUN = 8
"""Panels, at most. Of 64 KiB each, eight at once are read a tenth faster than one by one (benchmarks/LOG.md)."""
_VECTORS = PANEL // WIDTH
_SUMS = 24
"""At most, in 32 registers."""
MANY_ROWS = 12 if has_wide_registers() else 4
"""Multiplied at once where each weight is converted, and there are as many."""


def multiply_address(dtype: str, *, in_pairs: bool) -> int:
    """`void(int64*)`: counter, rows, outputs (whole vectors), numbers of 32 bits of an input, input [rows, numbers], or
    float32 [rows, inputs] where pairs are converted; matrices [matrices, panels, numbers, 64], bias (float32 [matrices,
    panels, 64]), output [rows, outputs], whether threads prefetch their next panel; of `runs_of`: tasks of a run, runs;
    first row of each matrix and the end (int64 [matrices + 1]; 0: all rows), matrices. `dtype`: float32, or bfloat16,
    whose numbers are pairs, multiplied as such if `in_pairs`."""
    kind = KINDS[dtype]
    numbers = PAIRS if in_pairs else kind
    if dtype == "bfloat16" and not in_pairs:

        @kernel
        def converted(a):
            _multiply_converted(a, kind, numbers)

        return int(converted.address)

    @kernel
    def compiled(a):
        _multiply(a, kind, numbers)

    return int(compiled.address)


def _multiplying_panel(many):
    """Products of rows (first, end, numbers of a row) with one panel: `many` at once where there are as many."""
    multiply_many = _multiply_rows(many, ahead=0)
    num_quarters = _num_quarters(many)

    @kernel_part
    def multiply_panel(x, rows, matrix, bias, output, places, numbers):
        (row, last, num_numbers), (outputs, column, line, end) = rows, places
        quarter = WIDTH * num_numbers
        if row + 4 <= last:
            _multiply_first_four(x, (row, num_numbers), matrix, bias, output, (outputs, column, line, end), numbers)
            line, row = line + quarter, row + 4
        while row + many <= last:
            multiply_many(x, (row, num_numbers), matrix, bias, output, (outputs, column, line, end), numbers)
            line, row = line + quarter * num_quarters, row + many
        while many > 4 and row + 4 <= last:
            _multiply_four(x, (row, num_numbers), matrix, bias, output, (outputs, column, line, end), numbers)
            line, row = line + quarter, row + 4
        if row + 2 <= last:
            _multiply_two(x, (row, num_numbers), matrix, bias, output, (outputs, column, line, end), numbers)
            row += 2
        if row < last:
            _multiply_one(x, (row, num_numbers), matrix, bias, output, (outputs, column, line, end), numbers)

    return multiply_panel


def multiplying(multiply_panel):
    """The kernel's body, with the product of rows and a panel as `_multiplying_panel` makes it."""

    @kernel_part
    def multiply(a, kind, numbers):
        outputs, num_numbers, x, output = a[2], a[3], pointer(a[4], FLOAT32), pointer(a[7], kind)
        prefetches, run, num_runs = a[8] != 0, a[9], a[10]
        num_panels = (outputs + PANEL - 1) // PANEL
        task, left = task_after(a, 0, 0, run, num_runs)
        begin = 0
        for number in range(a[12]):
            first, end_row = rows_of(number, a[11], a[1])
            size = 4 * number * num_panels * PANEL  # bytes of the biases before
            matrix, bias = pointer(a[5] + size * num_numbers, FLOAT32), pointer(a[6] + size, FLOAT32)
            num_chunks = (end_row - first + CHUNK - 1) // CHUNK
            end = begin + num_panels * num_chunks
            while task < end:
                column = (task - begin) // num_chunks * PANEL
                row = first + (task - begin) % num_chunks * CHUNK
                last = min(row + CHUNK, end_row)
                line = line_end = 0
                if prefetches:
                    task, left = task_after(a, task, left, run, num_runs)
                    next_column = (task - begin) // num_chunks * PANEL
                    is_next = column < next_column < outputs and row + 4 < last
                    line, line_end = next_column * num_numbers, (next_column + PANEL * is_next) * num_numbers
                places = (outputs, column, line, line_end)
                multiply_panel(x, (row, last, num_numbers), matrix, bias, output, places, numbers)
                if not prefetches:
                    task, left = task_after(a, task, left, run, num_runs)
            begin = end

    return multiply


@kernel_part
def rows_of(number, starts_address, num_rows):
    """The first row of a matrix, and the end of its rows. The address is 0 where it has all rows."""
    if starts_address == 0:
        return 0, num_rows
    starts = pointer(starts_address, INT64)
    return starts[number], starts[number + 1]


def runs_of(num_tasks: int, num_threads: int, num_rows: int) -> tuple[int, int]:
    """How many tasks a thread takes at once, and how often it is so many; then it takes them one by one."""
    run = min(num_tasks // (4 * num_threads), _RUN) if num_rows <= 4 else 1
    return (run, (num_tasks - run * num_threads // 2) // run) if run > 1 else (1, 0)


@kernel_part
def task_after(a, task, left, run, num_runs):
    """The thread's task after this one, of which `left` follow in its run; and how many follow that one."""
    if left > 0:
        return task + 1, left - 1
    number = next_task(a)
    if number < num_runs:
        return number * run, run - 1
    return number + num_runs * (run - 1), 0


def vectors_at_once(num_rows):
    """How many vectors of the panel's sums the registers hold for so many rows."""
    return min(num_together(num_rows, _VECTORS), _SUMS // num_rows)


def _num_quarters(num_rows):
    """How many quarters of the next panel so many rows prefetch: about one for each four rows."""
    return min(_VECTORS // vectors_at_once(num_rows), num_rows // 4)


def _multiply_rows(num_rows, *, ahead):
    """`num_rows` rows times one panel. Arguments: x, (row, numbers of an input row), matrix, bias, output, (outputs of
    a row, first output of the panel, and in the matrix where to prefetch the next panel from, and its end), and how
    numbers are multiplied: a kind of `Arithmetic`. `ahead`: by how many numbers the panel is prefetched, 0: not."""
    num_vectors = vectors_at_once(num_rows)
    num_parts = _VECTORS // num_vectors
    num_quarters = _num_quarters(num_rows)

    def codegen(context, builder, sig, args):
        x, row_places, matrix, bias, output, places, _ = args
        arithmetic = Arithmetic(sig.args[6])
        row, num_numbers = cgutils.unpack_tuple(builder, row_places)
        outputs, column, line, end = cgutils.unpack_tuple(builder, places)
        rows = [builder.add(row, I64(index)) for index in range(num_rows)]
        num_factors = I64(arithmetic.num_factors)
        starts = [builder.mul(one, builder.mul(num_numbers, num_factors)) for one in rows]
        panel = builder.mul(column, num_numbers)

        def multiply_part(part, *, prefetches_next=False):
            offset = builder.mul(part, I64(WIDTH * num_vectors))

            def add_products(number, sums):
                present = builder.add(panel, builder.mul(number, I64(PANEL)))
                for place in range(0, PANEL if ahead else 0, WIDTH):
                    prefetched(builder, matrix, builder.add(present, I64(ahead * PANEL + place)))
                if prefetches_next:
                    index = builder.add(builder.mul(part, num_numbers), number)
                    index = builder.udiv(index, I64(num_parts // num_quarters))
                    prefetched(builder, matrix, builder.add(line, builder.mul(index, I64(WIDTH))))
                first = builder.add(present, offset)
                vectors = [builder.add(first, I64(WIDTH * vector)) for vector in range(num_vectors)]
                weights = [builder.load(vector_at(builder, matrix, vector), align=4) for vector in vectors]
                factors = [arithmetic.factors(builder, weight) for weight in weights]
                for factor in range(arithmetic.num_factors):
                    at = builder.add(builder.mul(number, num_factors), I64(factor))
                    inputs = [builder.load(builder.gep(x, [builder.add(start, at)])) for start in starts]
                    sums = arithmetic.outer_product(builder, inputs, [weight[factor] for weight in factors], sums)
                return sums

            totals = _summed(builder, num_numbers, num_rows * num_vectors, add_products)
            for vector in range(num_vectors):
                at = builder.add(builder.add(column, offset), I64(WIDTH * vector))
                with builder.if_then(builder.icmp_signed("<", at, outputs)):
                    added = as_floats(builder, bias, at, types.float32)
                    for one, total in zip(rows, totals[vector::num_vectors], strict=True):
                        place = builder.add(builder.mul(one, outputs), at)
                        put_floats(builder, output, place, builder.fadd(total, added), sig.args[4].dtype)

        if num_quarters == 0:
            for_each(builder, num_parts, multiply_part)
        else:
            with builder.if_else(builder.icmp_signed("<", line, end)) as (prefetching, otherwise):
                with prefetching:
                    for_each(builder, num_parts, functools.partial(multiply_part, prefetches_next=True))
                with otherwise:
                    for_each(builder, num_parts, multiply_part)
        return context.get_dummy_value()

    def typing(typingctx, x, row_places, matrix, bias, output, places, numbers):
        return types.void(x, row_places, matrix, bias, output, places, numbers), codegen

    return intrinsic(typing)


def _summed(builder, num_numbers, num_sums, add_products):
    """`num_sums` sums of what `add_products(number, sums)` adds for each number, group by group."""
    zeros = [ZERO] * num_sums

    def add_group(index, totals):
        first = builder.mul(index, I64(_GROUP))
        last = builder.add(first, I64(_GROUP))
        last = builder.select(builder.icmp_signed("<", last, num_numbers), last, num_numbers)
        sums = loop(builder, first, last, zeros, add_products)
        return [builder.fadd(*two) for two in zip(totals, sums, strict=True)]

    num_groups = builder.sdiv(builder.add(num_numbers, I64(_GROUP - 1)), I64(_GROUP))
    return loop(builder, I64(0), num_groups, zeros, add_group)


_multiply_first_four = _multiply_rows(4, ahead=0 if multiplies_pairs() else _AHEAD)
"""For a panel that may not be in the second level yet."""
_multiply_four = _multiply_rows(4, ahead=0)
_multiply_two = _multiply_rows(2, ahead=_AHEAD)
_multiply_one = _multiply_rows(1, ahead=_AHEAD if has_wide_registers() else _NEAR)
_multiply = multiplying(_multiplying_panel(4))
_multiply_converted = multiplying(_multiplying_panel(MANY_ROWS))
