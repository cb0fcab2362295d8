"""Vectors of sixteen floats in numba kernels, and memory by raw address.

numba has no vector type and vectorises only simple loops. `Floats` is LLVM's <16 x float>: one AVX-512 register, or
several narrower ones, with the usual operators; a multiplication followed by an addition may be rounded once.

Elements in memory: bfloat16 is uint16, the upper half of a float32; float16 is int16. Kernels are generic over the
element type; `kind` is an example value of it, one of `KINDS`.

A change of this file compiles all kernels again, as one of any file of kernels does (`compilation`).
"""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic

from engine.attention.compilation import has_fused_products, has_pairs, kernel_part

WIDTH = 16
BFLOAT16 = np.uint16(0)
FLOAT16 = np.int16(0)
FLOAT32 = np.float32(0)
PAIRS = np.uint32(0)
"""Two adjacent bfloat16, which are multiplied and added at once."""
KINDS = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
"""Of the element types, by torch's names."""
INT32 = np.int32(0)
INT64 = np.int64(0)

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_VECTOR = ir.VectorType(_F32, WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)
_HALVES = ir.VectorType(_I16, WIDTH)
_FLOAT16S = ir.VectorType(ir.HalfType(), WIDTH)


class Floats(types.Type):
    """The numba type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="Floats")


floats = Floats()


@register_default(Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, _VECTOR)


def _define_operator(symbol, instruction: str) -> None:
    @infer_global(symbol)
    class _Typing(ConcreteTemplate):
        cases = (signature(floats, floats, floats),)

    @lower_builtin(symbol, floats, floats)
    def _lower(context, builder, sig, args):
        return getattr(builder, instruction)(*args, flags=("contract",))


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_symbol, _instruction)


def _integers(value: int):
    """Sixteen copies of a constant."""
    return ir.Constant(_INTEGERS, [ir.Constant(_I32, value)] * WIDTH)


def _call(builder, name: str, result, args, fastmath=()):
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args, fastmath=fastmath)


@intrinsic
def pointer(typingctx, address, kind):
    """int64 address -> pointer to elements of `kind`'s type."""
    result = types.CPointer(kind)

    def codegen(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return result(types.int64, kind), codegen


@intrinsic
def next_task(typingctx, arguments):
    """Takes the next task number from arguments[0], atomically."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(_I64, 1), "monotonic")

    return types.int64(arguments), codegen


@intrinsic
def as_double(typingctx, bits):
    """The double whose bits are this int64: a float among integer arguments."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def bits_of_double(typingctx, number):
    """The bits of a double as int64."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], _I64)

    return types.int64(types.float64), codegen


def vector_at(builder, base, index, vector=_VECTOR):
    """The address of the vector that begins at base[index]."""
    return builder.bitcast(builder.gep(base, [index]), vector.as_pointer())


def as_floats(builder, base, index, element):
    """Loads elements [index, index + 16) of the numba type `element`."""
    if element == types.float32:
        return builder.load(vector_at(builder, base, index), align=4)
    if element == types.int16:
        return builder.fpext(builder.load(vector_at(builder, base, index, _FLOAT16S), align=2), _VECTOR)
    return _from_bfloat16(builder, builder.load(vector_at(builder, base, index, _HALVES), align=2))


def halves_of(builder, numbers, element):
    """Numbers of 32 bits, each two elements of the numba type `element`: the lower ones as floats, the upper ones."""
    bits = builder.bitcast(numbers, _INTEGERS)
    if element == types.int16:
        halves = (bits, builder.lshr(bits, _integers(16)))
        return [builder.fpext(builder.bitcast(builder.trunc(half, _HALVES), _FLOAT16S), _VECTOR) for half in halves]
    lower = builder.shl(bits, _integers(16))
    upper = builder.and_(bits, _integers(0xFFFF0000))
    return [builder.bitcast(half, _VECTOR) for half in (lower, upper)]


def prefetched(builder, base, index):
    """Prefetches the cache line of base[index]; never faults. Into the second level, which waits for more lines at once
    than the first."""
    address = builder.bitcast(builder.gep(base, [index]), _I8.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), [address, *(ir.Constant(_I32, flag) for flag in (0, 2, 1))])


def repeated(builder, number, vector=_VECTOR):
    """Sixteen copies of one float, or of one number of another type."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(_INTEGERS, [0] * WIDTH))


def fused_product(builder, left, right, added):
    """left * right + added, rounded once; twice on a processor without an instruction for both."""
    if not has_fused_products():
        return builder.fadd(builder.fmul(left, right), added)
    return _call(builder, f"llvm.fma.v{WIDTH}f32", _VECTOR, [left, right, added])


class _Bfloat16(ir.Type):
    """LLVM's type, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_PAIRS = ir.VectorType(_Bfloat16(), 2 * WIDTH)


def pair_product(builder, left, right, added):
    """Elements of `left` and `right` are pairs of bfloat16: left[0] * right[0] + left[1] * right[1] + added. Where
    `has_pairs`."""
    pairs = [builder.bitcast(one, _PAIRS) for one in (left, right)]
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, [added, *pairs])


@intrinsic
def pairs_product(typingctx, left, right, added):
    """`pair_product` for kernels."""

    def codegen(context, builder, sig, args):
        return pair_product(builder, *args)

    return floats(floats, floats, floats), codegen


def as_pairs(builder, lower, upper):
    """32 floats, rounded to bfloat16, as sixteen pairs: the first eight of `lower`. Where `has_pairs`."""
    pairs = _call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, [upper, lower])
    return builder.bitcast(pairs, _VECTOR)


def floats_of(builder, table, places):
    """An element of `table` (sixteen floats) for each place (int32), whose upper 28 bits do not count. Where
    `has_tables`."""
    constant = ir.Constant(_VECTOR, [ir.Constant(_F32, float(number)) for number in table])
    return _call(builder, "llvm.x86.avx512.permvar.sf.512", _VECTOR, [constant, places])


def pairs_of(builder, table, places):
    """As sixteen pairs of bfloat16 (floats), an element of `table` (32 numbers that bfloat16 holds) for each of 32
    places (int16), whose upper 11 bits do not count. Where `has_tables`."""
    halves = ir.VectorType(_I16, 2 * WIDTH)
    bits = np.array(table, np.float32).view(np.uint32) >> 16
    constant = ir.Constant(halves, [ir.Constant(_I16, int(one)) for one in bits])
    return builder.bitcast(_call(builder, "llvm.x86.avx512.permvar.hi.512", halves, [constant, places]), _VECTOR)


@intrinsic
def rounded_pairs(typingctx, lower, upper):
    """`as_pairs` for kernels."""

    def codegen(context, builder, sig, args):
        return as_pairs(builder, *args)

    return floats(floats, floats), codegen


@intrinsic
def _scaled(typingctx, value, exponent):
    """value * 2**exponent for whole numbers of any size; 0 where that is too small. Where `has_pairs`."""

    def codegen(context, builder, sig, args):
        every, current_rounding = ir.Constant(ir.IntType(WIDTH), -1), ir.Constant(_I32, 4)
        arguments = [*args, args[0], every, current_rounding]
        return _call(builder, "llvm.x86.avx512.mask.scalef.ps.512", _VECTOR, arguments)

    return floats(floats, floats), codegen


@intrinsic
def _nearest(typingctx, value):
    """The nearest whole numbers."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.roundeven.v{WIDTH}f32", _VECTOR, list(args))

    return floats(floats), codegen


@intrinsic
def first_of(typingctx, value):
    """The first of the sixteen floats."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], ir.Constant(_I32, 0))

    return types.float32(floats), codegen


@intrinsic
def load(typingctx, base, index):
    """Elements [index, index + 16) as floats."""
    element = base.dtype

    def codegen(context, builder, sig, args):
        return as_floats(builder, args[0], args[1], element)

    return floats(base, types.int64), codegen


def put_floats(builder, base, index, vector, element):
    """Writes elements [index, index + 16) of the numba type `element`, rounded as by `as_element`."""
    rounded = as_element(builder, vector, element)
    align = 4 if element == types.float32 else 2
    builder.store(rounded, vector_at(builder, base, index, rounded.type), align=align)


def as_element(builder, vector, element):
    """The floats as sixteen numbers of the numba type `element`: rounded to nearest, ties to even; NaN stays."""
    if element == types.float32:
        return vector
    return builder.fptrunc(vector, _FLOAT16S) if element == types.int16 else _as_bfloat16(builder, vector)


@intrinsic
def store(typingctx, base, index, value):
    """`put_floats` for kernels."""
    element = base.dtype

    def codegen(context, builder, sig, args):
        target, offset, vector = args
        put_floats(builder, target, offset, vector, element)
        return context.get_dummy_value()

    return types.void(base, types.int64, floats), codegen


def _as_bfloat16(builder, vector):
    """The nearest bfloat16 of each float, as integers of 16 bits; NaN stays. In hardware numbers below 2**-126, which
    bfloat16 has with fewer digits, become 0."""
    if has_pairs():
        halves = _call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_Bfloat16(), WIDTH), [vector])
        return builder.bitcast(halves, _HALVES)
    bits = builder.bitcast(vector, _INTEGERS)
    odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    rounded = builder.add(bits, builder.add(odd, _integers(0x7FFF)))
    magnitude = builder.and_(bits, _integers(0x7FFFFFFF))
    is_nan = builder.icmp_unsigned(">", magnitude, _integers(0x7F800000))
    rounded = builder.select(is_nan, _integers(0x7FC00000), rounded)
    return builder.trunc(builder.lshr(rounded, _integers(16)), _HALVES)


def _from_bfloat16(builder, halves):
    wide = builder.shl(builder.zext(halves, _INTEGERS), _integers(16))
    return builder.bitcast(wide, _VECTOR)


@intrinsic
def rounded_to(typingctx, value, kind):
    """The vector after a store to `kind` and a load back, without the memory."""

    def codegen(context, builder, sig, args):
        if sig.args[1] == types.int16:
            return builder.fpext(builder.fptrunc(args[0], _FLOAT16S), _VECTOR)
        if sig.args[1] != types.uint16:
            return args[0]
        return _from_bfloat16(builder, _as_bfloat16(builder, args[0]))

    return floats(floats, kind), codegen


@intrinsic
def fused(typingctx, left, right, added):
    """`fused_product` for kernels: rounded once where the processor can, while `*` and `+` may or may not."""

    def codegen(context, builder, sig, args):
        return fused_product(builder, *args)

    return floats(floats, floats, floats), codegen


@intrinsic
def splat(typingctx, number):
    """Sixteen copies of a float32."""

    def codegen(context, builder, sig, args):
        return repeated(builder, args[0])

    return floats(types.float32), codegen


@intrinsic
def total(typingctx, value):
    """Sum of the elements."""

    def codegen(context, builder, sig, args):
        arguments = [ir.Constant(_F32, 0.0), args[0]]
        return _call(builder, f"llvm.vector.reduce.fadd.v{WIDTH}f32", _F32, arguments, fastmath=("reassoc",))

    return types.float32(floats), codegen


@intrinsic
def largest(typingctx, value):
    """Maximum of the elements."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.vector.reduce.fmax.v{WIDTH}f32", _F32, list(args), fastmath=("nnan",))

    return types.float32(floats), codegen


@intrinsic
def any_above(typingctx, value, limit):
    """Whether one of the elements exceeds a float32."""

    def codegen(context, builder, sig, args):
        above = builder.fcmp_ordered(">", args[0], repeated(builder, args[1]))
        bits = builder.bitcast(above, ir.IntType(WIDTH))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(floats, types.float32), codegen


@intrinsic
def maximum(typingctx, left, right):
    """Element by element."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.maxnum.v{WIDTH}f32", _VECTOR, list(args), fastmath=("nnan",))

    return floats(floats, floats), codegen


@intrinsic
def minimum(typingctx, left, right):
    """Element by element."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.minnum.v{WIDTH}f32", _VECTOR, list(args), fastmath=("nnan",))

    return floats(floats, floats), codegen


@intrinsic
def clamped(typingctx, value, least, greatest):
    """Element by element; NaN stays, while `minimum` and `maximum` make any number of it."""

    def codegen(context, builder, sig, args):
        value, least, greatest = args
        value = builder.select(builder.fcmp_ordered("<", value, least), least, value)
        return builder.select(builder.fcmp_ordered(">", value, greatest), greatest, value)

    return floats(floats, floats, floats), codegen


@intrinsic
def floor(typingctx, value):
    """Element by element."""

    def codegen(context, builder, sig, args):
        return _call(builder, f"llvm.floor.v{WIDTH}f32", _VECTOR, list(args))

    return floats(floats), codegen


@intrinsic
def prefetch(typingctx, base, index):
    """`prefetched` for kernels."""

    def codegen(context, builder, sig, args):
        prefetched(builder, *args)
        return context.get_dummy_value()

    return types.void(base, types.int64), codegen


@intrinsic
def power_of_two(typingctx, exponent):
    """2**n for whole n in [-126, 127], built from exponent bits."""

    def codegen(context, builder, sig, args):
        biased = builder.add(builder.fptosi(args[0], _INTEGERS), _integers(127))
        return builder.bitcast(builder.shl(biased, _integers(23)), _VECTOR)

    return floats(floats), codegen


@kernel_part
def exp(x):
    """e**x within 2 ulp for x in [-87, 88], clamped outside.

    x = n ln 2 + r with |r| <= ln 2 / 2; Taylor to r**7 leaves 5e-9.
    """
    x = minimum(maximum(x, splat(np.float32(-87.0))), splat(np.float32(88.0)))
    n = floor(x * splat(np.float32(1.4426950408889634)) + splat(np.float32(0.5)))
    r = x - n * splat(np.float32(0.693359375)) + n * splat(np.float32(2.12194440e-4))
    p = splat(np.float32(1 / 5040))
    p = p * r + splat(np.float32(1 / 720))
    p = p * r + splat(np.float32(1 / 120))
    p = p * r + splat(np.float32(1 / 24))
    p = p * r + splat(np.float32(1 / 6))
    p = p * r + splat(np.float32(0.5))
    p = p * r + splat(np.float32(1.0))
    p = p * r + splat(np.float32(1.0))
    return p * power_of_two(n)


@kernel_part
def exp2(x):
    """2**x, the relative error below 8e-5 (bfloat16 rounds by up to 4e-3); 0 for x below -150. Where
    `has_pairs`.

    x = n + r with |r| <= 1 / 2, and the cubic whose largest relative error is least.
    """
    n = _nearest(x)
    r = x - n
    p = splat(np.float32(0.055171669541422906))
    p = fused(p, r, splat(np.float32(0.24261112543767827)))
    p = fused(p, r, splat(np.float32(0.6932609856528288)))
    p = fused(p, r, splat(np.float32(0.9999280733463329)))
    return _scaled(p, n)
