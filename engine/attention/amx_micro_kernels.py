"""Products of tiles of bfloat16 (Intel AMX) in numba kernels.

A tile is a register of sixteen rows of 64 bytes. Its product instruction adds to sixteen by sixteen floats the products
of sixteen rows of 32 numbers with 32 rows of sixteen, which lie in pairs: [16 pairs, 16 columns]. That is the order of
keys and values in a page (`KVLayout.order` "vectors") and of weights in a panel: they are read from where they are.
For each of the sums two chains of sixteen fused products, of the even and of the odd numbers, are added up first; so a
sum's bits depend neither on the other rows nor on their number. Numbers below 2**-126 are 0.

Registers 0 to 3 hold sums, 4 and 5 left factors, 6 and 7 right ones. How many rows a register has is part of a thread's
state: `set_tile_rows` before the products, `release_tiles` when a kernel ends. Where `has_tiles`.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.micro_kernels import I64, loop
from engine.attention.simd import prefetched

TILE_ROWS = 16
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_LINE = I64(64)
LEFT, RIGHT = (4, 5), (6, 7)
_PALETTE = 1


def _call(builder, name, *args):
    function = ir.FunctionType(ir.VoidType(), [one.type for one in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, f"llvm.x86.{name}"), args)


def load_tile(builder, tile, address, stride):
    """Rows of 64 bytes, `stride` bytes apart."""
    _call(builder, "tileloadd64", _I8(tile), builder.inttoptr(address, _I8.as_pointer()), stride)


def store_tile(builder, tile, address, stride):
    _call(builder, "tilestored64", _I8(tile), builder.inttoptr(address, _I8.as_pointer()), stride)


def add_product(builder, sums, left, right):
    _call(builder, "tdpbf16ps", _I8(sums), _I8(left), _I8(right))


def clear(builder, tile):
    _call(builder, "tilezero", _I8(tile))


def prefetch_lines(builder, address, count=TILE_ROWS):
    """So many lines of 64 bytes."""
    start = builder.inttoptr(address, _I8.as_pointer())
    for line in range(count):
        prefetched(builder, start, I64(64 * line))


def _moved(builder, address, index, size):
    """`address` + `index` * `size` bytes."""
    return builder.add(address, builder.mul(index, size))


@intrinsic
def address_of(typingctx, base, index):
    """The address of base[index] as int64."""

    def codegen(context, builder, sig, args):
        return builder.ptrtoint(builder.gep(args[0], [args[1]]), I64)

    return types.int64(base, types.int64), codegen


@intrinsic
def set_tile_rows(typingctx, first, second):
    """Left factors 4 and sums 0 and 1 get `first` rows (1 to 16), left factors 5 and sums 2 and 3 `second` ones."""

    def codegen(context, builder, sig, args):
        memory = cgutils.alloca_once(builder, ir.ArrayType(_I8, 64))
        start = builder.bitcast(memory, _I8.as_pointer())
        builder.store(ir.Constant(ir.ArrayType(_I8, 64), None), memory)
        builder.store(_I8(_PALETTE), start)
        first, second = (builder.trunc(one, _I8) for one in args)
        rows = [first, first, second, second, first, second, _I8(TILE_ROWS), _I8(TILE_ROWS)]
        for tile, count in enumerate(rows):
            columns = builder.bitcast(builder.gep(start, [I64(16 + 2 * tile)]), _I16.as_pointer())
            builder.store(_I16(64), columns)
            builder.store(count, builder.gep(start, [I64(48 + tile)]))
        _call(builder, "ldtilecfg", start)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def release_tiles(typingctx):
    """The thread's tiles are empty: nothing of them is kept when another thread runs."""

    def codegen(context, builder, sig, args):
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _store_scores(num_groups, *, ahead):
    def codegen(context, builder, sig, args):
        left, right, target, stride, num_steps, plane = args
        keys = cgutils.unpack_tuple(builder, right)
        for group in range(num_groups):
            clear(builder, group)

        def add_step(step, _):
            load_tile(builder, LEFT[0], _moved(builder, left, step, _LINE), stride)
            for group in range(num_groups):
                tile = RIGHT[group % 2]
                place = _moved(builder, keys[group], step, I64(TILE_ROWS * 64))
                load_tile(builder, tile, place, _LINE)
                if ahead:
                    prefetch_lines(builder, builder.add(place, plane))
                add_product(builder, group, LEFT[0], tile)
            return []

        loop(builder, I64(0), num_steps, [], add_step)
        for group in range(num_groups):
            store_tile(builder, group, builder.add(target, I64(group * 64)), stride)
        return context.get_dummy_value()

    def typing(typingctx, left, right, target, stride, num_steps, plane):
        return types.void(left, right, target, stride, num_steps, plane), codegen

    typing.__doc__ = f"""Products of rows, `stride` bytes apart, with {num_groups} groups of sixteen keys, each at an
    address of its own, written to `target`, whose rows are as far apart. All are addresses in bytes; a step is 32
    elements of a head. With `ahead` the values of these keys are prefetched, `plane` bytes after the keys."""
    return intrinsic(typing)


store_tile_scores = _store_scores(4, ahead=False)
store_group_scores = _store_scores(1, ahead=False)
few_store_tile_scores = _store_scores(4, ahead=True)
few_store_group_scores = _store_scores(1, ahead=True)


def _add_weighted(num_halves, *, ahead):
    num_together = 1 if ahead else 2

    def codegen(context, builder, sig, args):
        sums, weights, values, stride, value_stride, num_vectors, following = args
        halves = cgutils.unpack_tuple(builder, values)
        for half in range(num_halves):
            load_tile(builder, LEFT[half], builder.add(weights, I64(half * 64)), stride)

        def add_vectors(index, _):
            first = builder.mul(index, I64(64 * num_together))
            for vector in range(num_together):
                place = builder.add(first, I64(64 * vector))
                load_tile(builder, vector, builder.add(sums, place), stride)
                for half in range(num_halves):
                    load_tile(builder, RIGHT[half], builder.add(halves[half], place), value_stride)
                    add_product(builder, vector, LEFT[half], RIGHT[half])
                store_tile(builder, vector, builder.add(sums, place), stride)
                if ahead:
                    prefetch_lines(builder, _moved(builder, following, index, I64(TILE_ROWS * 64)))
            return []

        loop(builder, I64(0), builder.sdiv(num_vectors, I64(num_together)), [], add_vectors)
        return context.get_dummy_value()

    def typing(typingctx, sums, weights, values, stride, value_stride, num_vectors, following):
        return types.void(sums, weights, values, stride, value_stride, num_vectors, following), codegen

    typing.__doc__ = f"""Adds to the rows at `sums` the values of {32 * num_halves} tokens times the rows' weights, in
    pairs. All are addresses in bytes; the values of 32 tokens have one each, and pairs of tokens are `value_stride`
    bytes apart. With `ahead` as many tiles are prefetched from `following` on, else there are two or more vectors."""
    return intrinsic(typing)


add_weighted_64_tokens = _add_weighted(2, ahead=False)
add_weighted_32_tokens = _add_weighted(1, ahead=False)
few_add_weighted_64_tokens = _add_weighted(2, ahead=True)
few_add_weighted_32_tokens = _add_weighted(1, ahead=True)
