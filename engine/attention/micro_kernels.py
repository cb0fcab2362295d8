"""The inner loops of attention over pages, for several rows at a time, written as LLVM instructions.

Written out, because what counts is which values stay in registers: a sum for each row and vector, while every key or
value that is loaded serves all rows. Whatever the number of rows and keys, each sum adds the same numbers in one order
and each product is rounded together with its addition, or, without FMA, always before it: all variants give the same
bits. Products of float32 are summed by sixteen first: one by one their logits differ from transformers' by up to
1.3e-4, so by 8e-5. Elements of 16 bits round far more.
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.attention.compilation import has_wide_registers
from engine.attention.simd import WIDTH, fused_product, halves_of, pair_product, prefetched, repeated, vector_at

I64 = ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
ZERO = ir.Constant(VECTOR, [0.0] * WIDTH)


class Arithmetic:
    """How to multiply numbers of 32 bits: floats, pairs of bfloat16, or two elements of 16 bits that become floats."""

    def __init__(self, kind) -> None:
        self._kind = kind
        self.in_pairs = kind == types.uint32
        self.num_factors = 1 if kind in (types.float32, types.uint32) else 2
        """Of a number: so many queries or weights belong to it."""
        self.per_number = 1 if kind == types.float32 else 2
        """Elements of a head, or tokens, in a number."""

    def factors(self, builder, numbers):
        return [numbers] if self.num_factors == 1 else halves_of(builder, numbers, self._kind)

    def outer_product(self, builder, rows, vectors, sums):
        """`sums` with the product of each number in `rows` and each of `vectors` added, row by row."""
        product = pair_product if self.in_pairs else fused_product
        pairs = [(row, vector) for row in (repeated(builder, one) for one in rows) for vector in vectors]
        return [product(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]


def loop(builder, first, last, initial, body):
    """`values = body(index, values)` for each index in [first, last); returns the last values."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    values = [builder.phi(value.type) for value in initial]
    builder.cbranch(builder.icmp_signed("<", index, last), inside, after)
    builder.position_at_end(inside)
    results = body(index, values)
    for phi, start, result in zip(
        [index, *values], [first, *initial], [builder.add(index, I64(1)), *results], strict=True
    ):
        phi.add_incoming(start, before)
        phi.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def for_each(builder, count, body):
    """`body(index)` for each index below `count`; one alone is a constant, with what depends on it."""
    if count == 1:
        body(I64(0))
    else:
        loop(builder, I64(0), I64(count), [], lambda index, _: body(index) or [])


def num_together(num_rows, num_vectors):
    """How many of a row's `num_vectors` vectors of sums are computed at once: as many as the registers hold. With 32 of
    sixteen floats all, with sixteen of eight floats four for all rows together."""
    return num_vectors if has_wide_registers() else min(num_vectors, 4 // num_rows)


def _store_sums(builder, arithmetic, targets, size, add_products):
    """The sums of `add_products` over numbers [0, size); of float32 by sixteen, each added to what is stored."""
    zeros = [ZERO] * len(targets)
    if arithmetic.per_number > 1:
        for place, total in zip(targets, loop(builder, I64(0), size, zeros, add_products), strict=True):
            builder.store(total, place, align=4)
        return
    for place in targets:
        builder.store(ZERO, place, align=4)

    def add_part(part, _):
        first = builder.mul(part, I64(WIDTH))
        sums = loop(builder, first, builder.add(first, I64(WIDTH)), zeros, add_products)
        for place, total in zip(targets, sums, strict=True):
            builder.store(builder.fadd(builder.load(place, align=4), total), place, align=4)
        return []

    loop(builder, I64(0), builder.sdiv(size, I64(WIDTH)), [], add_part)


def _store_products(num_rows, num_groups, *, ahead):
    at_once = num_together(num_rows, num_groups)

    def codegen(context, builder, sig, args):
        rows, row_places, cache, offsets, places, _ = args
        arithmetic = Arithmetic(sig.args[5])
        queries, stride, target = cgutils.unpack_tuple(builder, row_places)
        first_group, size, plane = cgutils.unpack_tuple(builder, places)
        by_row = [builder.mul(stride, I64(row)) for row in range(num_rows)]
        starts = [builder.add(queries, offset) for offset in by_row]

        def store_part(part):
            numbers = [builder.add(builder.mul(part, I64(at_once)), I64(group)) for group in range(at_once)]
            groups = [builder.load(builder.gep(offsets, [builder.add(first_group, number)])) for number in numbers]

            def add_products(number, sums):
                line = builder.mul(number, I64(WIDTH))
                at = [builder.add(group, line) for group in groups]
                keys = [
                    arithmetic.factors(builder, builder.load(vector_at(builder, cache, place), align=4)) for place in at
                ]
                if ahead:
                    for place in at:
                        prefetched(builder, cache, builder.add(place, plane))
                for factor in range(arithmetic.num_factors):
                    place = builder.add(builder.mul(number, I64(arithmetic.num_factors)), I64(factor))
                    queries = [builder.load(builder.gep(rows, [builder.add(start, place)])) for start in starts]
                    sums = arithmetic.outer_product(builder, queries, [key[factor] for key in keys], sums)
                return sums

            targets = [
                vector_at(builder, rows, builder.add(builder.add(target, offset), builder.mul(number, I64(WIDTH))))
                for offset in by_row
                for number in numbers
            ]
            _store_sums(builder, arithmetic, targets, size, add_products)

        for_each(builder, num_groups // at_once, store_part)
        return context.get_dummy_value()

    def typing(typingctx, rows, row_places, cache, offsets, places, kind):
        triple = types.UniTuple(types.int64, 3)
        return types.void(rows, triple, cache, offsets, triple, kind), codegen

    typing.__doc__ = f"""Products of {num_rows} rows with {num_groups} groups of sixteen keys. Places: queries, stride,
    target; first_group, size, plane.

    rows[queries + row * stride:] has a row's query; the keys' number n is cache[offsets[first_group + g] + 16 * n:].
    rows[target + row * stride + 16 * g + i] gets the product of a row and key i of group g.
    With `ahead` the values of these keys are prefetched, `plane` numbers after the keys.
    """
    return intrinsic(typing)


def _add_weighted(num_rows, num_vectors, *, ahead):
    at_once = num_together(num_rows, num_vectors)

    def codegen(context, builder, sig, args):
        rows, row_places, cache, offsets, places, _ = args
        arithmetic = Arithmetic(sig.args[5])
        per_group = I64(WIDTH // arithmetic.per_number)
        sums, weights, shrinks, stride = cgutils.unpack_tuple(builder, row_places)
        here, there, plane, first_value, value_stride, low, high = cgutils.unpack_tuple(builder, places)
        by_row = [builder.mul(stride, I64(row)) for row in range(num_rows)]
        shrink = [
            repeated(builder, builder.load(builder.gep(rows, [builder.add(shrinks, offset)]))) for offset in by_row
        ]
        num_groups = builder.sdiv(builder.add(high, builder.sub(per_group, I64(1))), per_group)

        def add_part(part):
            element = builder.mul(part, I64(WIDTH * at_once))
            vectors = [builder.add(element, I64(WIDTH * vector)) for vector in range(at_once)]
            targets = [
                vector_at(builder, rows, builder.add(builder.add(sums, offset), vector))
                for offset in by_row
                for vector in vectors
            ]
            initial = [
                builder.fmul(builder.load(target, align=4), shrink[number // at_once])
                for number, target in enumerate(targets)
            ]

            def add_group(group, sums):
                start = builder.load(builder.gep(offsets, [builder.add(here, group)]))
                start = builder.add(builder.add(start, plane), first_value)
                following = builder.add(builder.load(builder.gep(offsets, [builder.add(there, group)])), first_value)
                begin = builder.mul(group, per_group)
                end = builder.add(begin, per_group)

                def add_products(number, sums):
                    inside = builder.mul(builder.sub(number, begin), value_stride)
                    at = [builder.add(builder.add(start, inside), vector) for vector in vectors]
                    values = [
                        arithmetic.factors(builder, builder.load(vector_at(builder, cache, place), align=4))
                        for place in at
                    ]
                    if ahead:
                        for vector in vectors:
                            prefetched(builder, cache, builder.add(builder.add(following, inside), vector))
                    for factor in range(arithmetic.num_factors):
                        place = builder.add(builder.mul(number, I64(arithmetic.num_factors)), I64(factor))
                        place = builder.add(weights, place)
                        mine = [builder.load(builder.gep(rows, [builder.add(place, offset)])) for offset in by_row]
                        sums = arithmetic.outer_product(builder, mine, [value[factor] for value in values], sums)
                    return sums

                first = builder.select(builder.icmp_signed("<", begin, low), low, begin)
                last = builder.select(builder.icmp_signed("<", high, end), high, end)
                return loop(builder, first, last, sums, add_products)

            results = loop(builder, builder.sdiv(low, per_group), num_groups, initial, add_group)
            for target, total in zip(targets, results, strict=True):
                builder.store(total, target, align=4)

        for_each(builder, num_vectors // at_once, add_part)
        return context.get_dummy_value()

    def typing(typingctx, rows, row_places, cache, offsets, places, kind):
        four, seven = types.UniTuple(types.int64, 4), types.UniTuple(types.int64, 7)
        return types.void(rows, four, cache, offsets, seven, kind), codegen

    typing.__doc__ = f"""Adds to {16 * num_vectors} sums of {num_rows} rows, shrunk first, values times the rows'
    weights. Places: sums, weights, shrinks, stride; here, there, plane, first_value, value_stride, low, high.

    rows[sums + row * stride:] has a row's sums, rows[weights + row * stride:] its weights, rows[shrinks + row * stride]
    its shrink. The values' numbers [low, high) of the tile are those of groups of sixteen tokens, `value_stride` apart,
    which begin at cache[offsets[here + group] + plane + first_value].
    With `ahead` the keys of the groups `there` are prefetched.
    """
    return intrinsic(typing)


# For many rows; for three or four; for one or two.
tile_products = _store_products(4, 4, ahead=False)
group_products = _store_products(4, 1, ahead=False)
add_weighted_64 = _add_weighted(4, 4, ahead=False)
add_weighted_16 = _add_weighted(4, 1, ahead=False)
few_tile_products = _store_products(4, 4, ahead=True)
few_group_products = _store_products(4, 1, ahead=True)
few_add_weighted_64 = _add_weighted(4, 4, ahead=True)
few_add_weighted_16 = _add_weighted(4, 1, ahead=True)
two_tile_products = _store_products(2, 4, ahead=True)
two_group_products = _store_products(2, 1, ahead=True)
two_add_weighted_64 = _add_weighted(2, 4, ahead=True)
two_add_weighted_16 = _add_weighted(2, 1, ahead=True)
