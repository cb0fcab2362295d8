"""Compiled loops of the decoder's small steps. Called by `engine.models.elementwise_cpu` alone, with addresses.

The task of each is one row. See `engine.attention.openmp` for how they run and what arguments[0] is.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import functools

import numpy as np
from numba import carray, cfunc, njit, types

from engine.attention.intrinsics import as_double, exp, from_float, next_task, pointer, to_float

SIGNATURE = types.void(types.CPointer(types.int64))
BFLOAT16 = np.uint16(0)
FLOAT32 = np.float32(0)


@functools.cache
def add_rms_norm_address(bfloat16: bool) -> int:
    """`void(int64*)`: counter, rows, hidden, x (0: none), residual, weight, output, eps (bits of a double)."""
    if bfloat16:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _add_rms_norm(a, BFLOAT16)

    else:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _add_rms_norm(a, FLOAT32)

    return int(kernel.address)


@functools.cache
def rotate_address(bfloat16: bool) -> int:
    """`void(int64*)`: counter, rows, num_heads, num_kv_heads, head_dim, qkv, its row stride, cos, sin,
    query weight (0: no norm), key weight, eps (bits of a double)."""
    if bfloat16:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _rotate(a, BFLOAT16)

    else:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _rotate(a, FLOAT32)

    return int(kernel.address)


@functools.cache
def silu_and_mul_address(bfloat16: bool) -> int:
    """`void(int64*)`: counter, rows, columns of the output, gate_up, output."""
    if bfloat16:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _silu_and_mul(a, BFLOAT16)

    else:

        @cfunc(SIGNATURE, cache=True)
        def kernel(a):
            _silu_and_mul(a, FLOAT32)

    return int(kernel.address)


@njit(fastmath=True)
def _add_rms_norm(a, kind):
    rows, hidden = a[1], a[2]
    x = carray(pointer(a[3], kind), (rows, hidden))
    residual = carray(pointer(a[4], kind), (rows, hidden))
    weight = carray(pointer(a[5], kind), (hidden,))
    output = carray(pointer(a[6], kind), (rows, hidden))
    eps = np.float32(as_double(a[7]))
    while True:
        row = next_task(a)
        if row >= rows:
            break
        if a[3] != 0:
            for i in range(hidden):
                residual[row, i] = from_float(to_float(residual[row, i]) + to_float(x[row, i]), kind)
        _normalise(residual[row], weight, eps, output[row], kind)


@njit(fastmath=True)
def _normalise(source, weight, eps, target, kind):
    """RMSNorm of one vector; source and target may be the same."""
    size = weight.shape[0]
    squares = np.float32(0)
    for i in range(size):
        number = to_float(source[i])
        squares += number * number
    scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
    for i in range(size):
        number = to_float(from_float(to_float(source[i]) * scale, kind))
        target[i] = from_float(number * to_float(weight[i]), kind)


@njit(fastmath=True)
def _rotate(a, kind):
    rows, num_heads, num_kv_heads, head_dim, stride = a[1], a[2], a[3], a[4], a[6]
    half = head_dim // 2
    qkv = carray(pointer(a[5], kind), (rows * stride,))
    cos = carray(pointer(a[7], np.float32(0)), (rows, half))
    sin = carray(pointer(a[8], np.float32(0)), (rows, half))
    query_weight = carray(pointer(a[9], kind), (head_dim,))
    key_weight = carray(pointer(a[10], kind), (head_dim,))
    eps = np.float32(as_double(a[11]))
    while True:
        row = next_task(a)
        if row >= rows:
            break
        for head in range(num_heads + num_kv_heads):
            start = row * stride + head * head_dim
            vector = qkv[start : start + head_dim]
            if a[9] != 0:
                _normalise(vector, query_weight if head < num_heads else key_weight, eps, vector, kind)
            for i in range(half):
                first, second = to_float(vector[i]), to_float(vector[i + half])
                vector[i] = from_float(first * cos[row, i] - second * sin[row, i], kind)
                vector[i + half] = from_float(second * cos[row, i] + first * sin[row, i], kind)


@njit(fastmath=True)
def _silu_and_mul(a, kind):
    rows, columns = a[1], a[2]
    gate_up = carray(pointer(a[3], kind), (rows, 2 * columns))
    output = carray(pointer(a[4], kind), (rows, columns))
    while True:
        row = next_task(a)
        if row >= rows:
            break
        for i in range(columns):
            gate = to_float(gate_up[row, i])
            activated = to_float(from_float(gate / (np.float32(1) + exp(-gate)), kind))
            output[row, i] = from_float(activated * to_float(gate_up[row, columns + i]), kind)
