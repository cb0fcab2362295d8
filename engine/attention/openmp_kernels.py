"""Runs recorded launches of kernels, called by `engine.attention.openmp`."""

# Functions that numba calls with types have no useful annotations of their own.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-unimported"

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.attention.compilation import kernel, kernel_part
from engine.attention.simd import INT64, next_task, pointer

_I64 = ir.IntType(64)


@functools.cache
def run_launches_address() -> int:
    """`void(int64*)`: counter, launches, table int64 [launches, 3], address of the runtime's `void barrier()` (0: one
    thread). A row of the table: address of the kernel, that of its arguments, whether all threads run it."""

    @kernel
    def compiled(a):
        _run_launches(a)

    return int(compiled.address)


@kernel_part
def _run_launches(a):
    is_first_thread = next_task(a) == 0
    num_launches, table, barrier = a[1], pointer(a[2], INT64), a[3]
    was_parallel = False
    for launch in range(0, 3 * num_launches, 3):
        is_parallel = table[launch + 2] != 0
        if barrier != 0 and launch > 0 and (is_parallel or was_parallel):
            _call_barrier(barrier)
        if is_parallel or is_first_thread:
            _call_kernel(table[launch], table[launch + 1])
        was_parallel = is_parallel


@intrinsic
def _call_barrier(typingctx, address):
    """Calls the function `void()` at this address."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _call_kernel(typingctx, address, arguments):
    """Calls the kernel at this address."""

    def codegen(context, builder, sig, args):
        function = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
