"""The inner loops of attention over packed keys and values, for four rows at a time, written as LLVM instructions.

Written out, because what counts is which values stay in registers: sixteen sums, while every key or value that is
loaded serves four rows. Each sum adds the same numbers in the same order as the loops for single rows do, and each
product is rounded together with its addition, so that both give the same bits.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.simd import WIDTH, as_floats, fused_product, pair_product, repeated, vector_at

NUM_ROWS = 4
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
_ZERO = ir.Constant(_VECTOR, [0.0] * WIDTH)


def loop(builder, first, last, initial, body):
    """`values = body(index, values)` for each index in [first, last); returns the last values."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    values = [builder.phi(value.type) for value in initial]
    builder.cbranch(builder.icmp_signed("<", index, last), inside, after)
    builder.position_at_end(inside)
    results = body(index, values)
    for phi, start, result in zip(
        [index, *values], [first, *initial], [builder.add(index, _I64(1)), *results], strict=True
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _store_products(product):
    def codegen(context, builder, sig, args):
        rows, row_places, keys, key_places = args
        queries, stride, target = cgutils.unpack_tuple(builder, row_places)
        first_key, key_stride, num_groups = cgutils.unpack_tuple(builder, key_places)
        starts = [builder.add(queries, builder.mul(stride, _I64(row))) for row in range(NUM_ROWS)]

        def pair(lane):
            """Per row: the partial sum of numbers lane, lane + 16, …, and that of lane + 8, lane + 24, …, added."""

            def add_products(group, sums):
                at = builder.add(builder.mul(group, _I64(WIDTH)), _I64(lane))
                result = []
                for half, offset in enumerate((0, WIDTH // 2)):
                    number = builder.add(at, _I64(offset))
                    key = builder.load(
                        vector_at(builder, keys, builder.add(first_key, builder.mul(number, key_stride))), align=4
                    )
                    for row in range(NUM_ROWS):
                        query = builder.load(builder.gep(rows, [builder.add(starts[row], number)]))
                        total = sums[half * NUM_ROWS + row]
                        result.append(product(builder, repeated(builder, query), key, total))
                return result

            sums = loop(builder, _I64(0), num_groups, [_ZERO] * (2 * NUM_ROWS), add_products)
            return [builder.fadd(sums[row], sums[NUM_ROWS + row]) for row in range(NUM_ROWS)]

        def added(lanes):
            """The tree over lanes of `pair`, depth first: three sums of each row wait at most."""
            if len(lanes) == 1:
                return pair(lanes[0])
            left, right = added(lanes[::2]), added(lanes[1::2])
            return [builder.fadd(a, b) for a, b in zip(left, right, strict=True)]

        for row, total in enumerate(added(range(WIDTH // 2))):
            at = builder.add(target, builder.mul(stride, _I64(row)))
            builder.store(total, vector_at(builder, rows, at), align=4)
        return context.get_dummy_value()

    return codegen


@intrinsic
def store_products(typingctx, rows, row_places, keys, key_places):
    """Products of four rows with sixteen keys. Places: queries, stride, target; first_key, key_stride, num_groups.

    rows[queries + row * stride:] has a row's 16 * num_groups numbers; keys[first_key + d * key_stride + i] is number d
    of key i. rows[target + row * stride + i] gets the product of a row and key i: the partial sums of every sixteenth
    number, then their sum in the tree of `store_totals`.
    """
    places = types.UniTuple(types.int64, 3)
    return types.void(rows, places, keys, places), _store_products(fused_product)


@intrinsic
def store_pair_products(typingctx, rows, row_places, keys, key_places):
    """`store_products` of numbers that are pairs of bfloat16."""
    places = types.UniTuple(types.int64, 3)
    return types.void(rows, places, keys, places), _store_products(pair_product)


def _add_weighted(num_vectors, product):
    def codegen(context, builder, sig, args):
        rows, row_places, values, value_places = args
        sums, weights, shrinks, stride = cgutils.unpack_tuple(builder, row_places)
        first_value, value_stride, low, high = cgutils.unpack_tuple(builder, value_places)
        offsets = [builder.mul(stride, _I64(row)) for row in range(NUM_ROWS)]
        places = [
            vector_at(builder, rows, builder.add(builder.add(sums, offset), _I64(WIDTH * vector)))
            for offset in offsets
            for vector in range(num_vectors)
        ]
        shrink = [
            repeated(builder, builder.load(builder.gep(rows, [builder.add(shrinks, offset)]))) for offset in offsets
        ]
        initial = [
            builder.fmul(builder.load(place, align=4), shrink[number // num_vectors])
            for number, place in enumerate(places)
        ]

        def add_products(token, sums):
            start = builder.add(first_value, builder.mul(token, value_stride))
            loaded = [
                builder.load(vector_at(builder, values, builder.add(start, _I64(WIDTH * vector))), align=4)
                for vector in range(num_vectors)
            ]
            result = []
            for row, offset in enumerate(offsets):
                place = builder.gep(rows, [builder.add(builder.add(weights, offset), token)])
                weight = repeated(builder, builder.load(place))
                result += [
                    product(builder, weight, value, sums[row * num_vectors + vector])
                    for vector, value in enumerate(loaded)
                ]
            return result

        for place, total in zip(places, loop(builder, low, high, initial, add_products), strict=True):
            builder.store(total, place, align=4)
        return context.get_dummy_value()

    return codegen


@intrinsic
def add_weighted_64(typingctx, rows, row_places, values, value_places):
    """Adds to 64 sums of four rows, shrunk first, the values [low, high) times the rows' weights. Places: sums,
    weights, shrinks, stride; first_value, value_stride, low, high.

    rows[sums + row * stride:] has a row's sums, rows[weights + row * stride:] its weights, rows[shrinks + row * stride]
    its shrink; values[first_value + token * value_stride:] the values.
    """
    places = types.UniTuple(types.int64, 4)
    return types.void(rows, places, values, places), _add_weighted(4, fused_product)


@intrinsic
def add_weighted_16(typingctx, rows, row_places, values, value_places):
    """`add_weighted_64` for sixteen sums."""
    places = types.UniTuple(types.int64, 4)
    return types.void(rows, places, values, places), _add_weighted(1, fused_product)


@intrinsic
def add_weighted_pairs_64(typingctx, rows, row_places, values, value_places):
    """`add_weighted_64` where weights and values are pairs of bfloat16: of tokens 2 * i and 2 * i + 1."""
    places = types.UniTuple(types.int64, 4)
    return types.void(rows, places, values, places), _add_weighted(4, pair_product)


@intrinsic
def add_weighted_pairs_32(typingctx, rows, row_places, values, value_places):
    """`add_weighted_pairs_64` for 32 sums."""
    places = types.UniTuple(types.int64, 4)
    return types.void(rows, places, values, places), _add_weighted(2, pair_product)


@intrinsic
def store_transposed(typingctx, source, offsets, first, number, target, index, stride):
    """Sixteen numbers of sixteen rows: target[index + n * stride + i] = source[offsets[first + i] + number + n]."""
    element = source.dtype

    def codegen(context, builder, sig, args):
        source, offsets, first, number, target, index, stride = args
        lines = []
        for line in range(WIDTH):
            offset = builder.load(builder.gep(offsets, [builder.add(first, _I64(line))]))
            lines.append(as_floats(builder, source, builder.add(offset, number), element))
        for distance in (8, 4, 2, 1):
            lines = _exchanged(builder, lines, distance)
        for line, vector in enumerate(lines):
            at = builder.add(index, builder.mul(stride, _I64(line)))
            builder.store(vector, vector_at(builder, target, at), align=4)
        return context.get_dummy_value()

    return types.void(source, offsets, types.int64, types.int64, target, types.int64, types.int64), codegen


def _exchanged(builder, lines, distance):
    """Lines i and i + distance exchange their blocks of `distance` numbers off the diagonal."""
    result = list(lines)
    for line in range(WIDTH):
        if line & distance:
            continue
        upper, lower = lines[line], lines[line + distance]
        own = [n if not n & distance else WIDTH + n - distance for n in range(WIDTH)]
        other = [n + distance if not n & distance else WIDTH + n for n in range(WIDTH)]
        for place, order in ((line, own), (line + distance, other)):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), order)
            result[place] = builder.shuffle_vector(upper, lower, mask)
    return result
