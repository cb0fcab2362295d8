"""Products of rows with a panel (`panel_linear_kernels`) by tiles of bfloat16, on processors that multiply them (AMX).

The numbers of a tile, sixteen of sixteen outputs, are adjacent: [panels, halves, steps, 2 tiles, 16, 16], a step being
32 inputs. Of up to sixteen rows the sums of the whole panel are in tiles, and it is read once, as fast as memory is.
Of 32 rows those of a half of it are: each tile that is loaded then serves two products. All sums add step by step, in
the order of the inputs, whatever the rows beside them.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.amx_micro_kernels import (
    LEFT,
    RIGHT,
    TILE_ROWS,
    add_product,
    address_of,
    clear,
    load_tile,
    prefetch_lines,
    release_tiles,
    set_tile_rows,
    store_tile,
)
from engine.attention.compilation import kernel, kernel_part
from engine.attention.micro_kernels import I64, loop
from engine.attention.simd import BFLOAT16, FLOAT32, PAIRS, WIDTH, load, pointer, store
from engine.models.panel_linear_kernels import PANEL, multiplying

TILE_INPUTS = 2 * TILE_ROWS
"""Of a step."""
_HALF = PANEL // 2
_MANY_ROWS = 2 * TILE_ROWS
_TILE = 64 * TILE_ROWS
"""Bytes."""
_STEP = 2 * _TILE
"""Bytes of the two tiles of a half."""
_AHEAD = 4
"""Steps that few rows prefetch."""
_FLOATS = ir.FloatType()


def multiply_in_tiles_address(dtype: str) -> int:
    """`panel_linear_kernels.multiply_address` for bfloat16 and inputs of whole steps."""
    assert dtype == "bfloat16", dtype

    @kernel
    def compiled(a):
        _multiply(a, BFLOAT16, PAIRS)
        release_tiles()

    return int(compiled.address)


@kernel_part
def _multiply_panel(x, rows, matrix, bias, output, places, numbers):
    """See `multiplying`. Does not prefetch the next panel."""
    (row, last, num_numbers), (outputs, column, _, _) = rows, places
    row_bytes, num_steps = 4 * num_numbers, num_numbers // TILE_ROWS
    inputs, panel = address_of(x, row * num_numbers), address_of(matrix, column * num_numbers)
    sums_address = _scratch()
    sums = pointer(sums_address, FLOAT32)
    if last - row > TILE_ROWS:
        set_tile_rows(TILE_ROWS, TILE_ROWS)
        count = _MANY_ROWS
        while last - row > TILE_ROWS:
            if last - row < _MANY_ROWS:
                count = last - row
                set_tile_rows(TILE_ROWS, count - TILE_ROWS)
            for half in range(2):
                right, target = panel + half * num_steps * _STEP, sums_address + half * 4 * _HALF
                _add_many(inputs, row_bytes, right, target, num_steps)
            _finish(sums, count, bias, output, (row, outputs, column))
            row, inputs = row + count, inputs + count * row_bytes
    if last > row:
        set_tile_rows(last - row, last - row)
        _add_few(inputs, row_bytes, panel, sums_address, num_steps)
        _finish(sums, last - row, bias, output, (row, outputs, column))


@kernel_part
def _finish(sums, count, bias, output, places):
    """Adds the bias to the sums of `count` rows and writes them."""
    row, outputs, column = places
    width = min(PANEL, outputs - column)
    for index in range(count):
        source, target = index * PANEL, (row + index) * outputs + column
        for offset in range(0, width, WIDTH):
            store(output, target + offset, load(sums, source + offset) + load(bias, column + offset))


@intrinsic
def _scratch(typingctx):
    """The address of sums, on the stack of the function that calls it."""

    def codegen(context, builder, sig, args):
        memory = cgutils.alloca_once(builder, ir.ArrayType(_FLOATS, _MANY_ROWS * PANEL))
        memory.align = 64
        return builder.ptrtoint(memory, I64)

    return types.int64(), codegen


def _add_products(num_lefts):
    num_halves = 2 // num_lefts
    width = 4 * PANEL

    def codegen(context, builder, sig, args):
        left, row_bytes, right, target, num_steps = args
        lefts = [builder.add(left, builder.mul(row_bytes, I64(TILE_ROWS * index))) for index in range(num_lefts)]
        halves = [builder.add(right, builder.mul(num_steps, I64(_STEP * half))) for half in range(num_halves)]
        places = [
            (
                2 * (index + half) + vector,
                builder.add(target, I64(width * TILE_ROWS * index + 64 * (2 * half + vector))),
            )
            for index in range(num_lefts)
            for half in range(num_halves)
            for vector in range(2)
        ]
        for tile, _ in places:
            clear(builder, tile)

        def add_step(step, _):
            for index in range(num_lefts):
                load_tile(builder, LEFT[index], builder.add(lefts[index], builder.mul(step, I64(64))), row_bytes)
            for half in range(num_halves):
                here = builder.add(halves[half], builder.mul(step, I64(_STEP)))
                for vector in range(2):
                    load_tile(builder, RIGHT[vector], builder.add(here, I64(_TILE * vector)), I64(64))
                    for index in range(num_lefts):
                        add_product(builder, 2 * (index + half) + vector, LEFT[index], RIGHT[vector])
                if num_lefts == 1:
                    prefetch_lines(builder, builder.add(here, I64(_AHEAD * _STEP)), _STEP // 64)
            return []

        loop(builder, I64(0), num_steps, [], add_step)
        for tile, place in places:
            store_tile(builder, tile, place, I64(width))
        return context.get_dummy_value()

    def typing(typingctx, left, row_bytes, right, target, num_steps):
        return types.void(left, row_bytes, right, target, num_steps), codegen

    typing.__doc__ = f"""Adds up so many steps of {TILE_ROWS * num_lefts} rows with {num_halves} halves of a panel, each
    of which has as many. All are addresses in bytes; at `target` are {_HALF * num_halves} sums of a row."""
    return intrinsic(typing)


_add_few = _add_products(1)
_add_many = _add_products(2)
_multiply = multiplying(_multiply_panel)
