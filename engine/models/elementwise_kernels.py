"""Compiled kernels of the elementwise operations, called with addresses by `engine.models.elementwise`.

One task is one row. `engine.attention.openmp` says how kernels run and what arguments[0] is.
"""

# The compiled bodies are typed by numba, not by annotations.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from __future__ import annotations

import numpy as np

from engine.attention.compilation import kernel, kernel_part
from engine.attention.simd import (
    FLOAT32,
    KINDS,
    WIDTH,
    as_double,
    clamped,
    exp,
    load,
    next_task,
    pointer,
    rounded_to,
    splat,
    store,
    total,
)

_CONVERTED = 256
"""Vectors of a task of a conversion."""


def add_rms_norm_address(dtype: str) -> int:
    """`void(int64*)`: counter, rows, hidden, x (0: none), residual, weight, output, eps (bits of a double)."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _add_rms_norm(a, kind)

    return int(compiled.address)


def rotate_address(dtype: str) -> int:
    """`void(int64*)`: counter, rows, num_heads, num_kv_heads, head_dim, qkv, its row stride, cos, sin,
    query weight (0: no norm), key weight, eps (bits of a double)."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _rotate(a, kind)

    return int(compiled.address)


def silu_and_mul_address(dtype: str) -> int:
    """`void(int64*)`: counter, rows, columns of the output, gate_up, output."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _silu_and_mul(a, kind)

    return int(compiled.address)


def clamped_gate_address(dtype: str) -> int:
    """`void(int64*)`: counter, rows, columns of the output, gate_up, output, alpha and limit (bits of doubles)."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _clamped_gate(a, kind)

    return int(compiled.address)


def to_float32_address(dtype: str) -> int:
    """`void(int64*)`: counter, whole vectors, x, float32 output."""
    kind = KINDS[dtype]

    @kernel
    def compiled(a):
        _to_float32(a, kind)

    return int(compiled.address)


@kernel_part
def _add_rms_norm(a, kind):
    rows, hidden = a[1], a[2]
    x, residual, weight, output = pointer(a[3], kind), pointer(a[4], kind), pointer(a[5], kind), pointer(a[6], kind)
    eps = np.float32(as_double(a[7]))
    while True:
        row = next_task(a)
        if row >= rows:
            break
        start = row * hidden
        if a[3] != 0:
            for i in range(start, start + hidden, WIDTH):
                store(residual, i, load(residual, i) + load(x, i))
        _normalise(residual, start, weight, hidden, eps, output, kind)


@kernel_part
def _normalise(source, start, weight, size, eps, target, kind):
    """RMSNorm of source[start : start + size] into the same place of target, which may be source."""
    squares = splat(np.float32(0))
    for i in range(start, start + size, WIDTH):
        number = load(source, i)
        squares = squares + number * number
    scale = splat(np.float32(1) / np.sqrt(total(squares) / np.float32(size) + eps))
    for i in range(0, size, WIDTH):
        number = rounded_to(load(source, start + i) * scale, kind)
        store(target, start + i, number * load(weight, i))


@kernel_part
def _rotate(a, kind):
    rows, num_heads, num_kv_heads, head_dim, stride = a[1], a[2], a[3], a[4], a[6]
    half = head_dim // 2
    qkv, query_weight, key_weight = pointer(a[5], kind), pointer(a[9], kind), pointer(a[10], kind)
    cos, sin = pointer(a[7], FLOAT32), pointer(a[8], FLOAT32)
    eps = np.float32(as_double(a[11]))
    while True:
        row = next_task(a)
        if row >= rows:
            break
        for head in range(num_heads + num_kv_heads):
            start = row * stride + head * head_dim
            if a[9] != 0:
                _normalise(qkv, start, query_weight if head < num_heads else key_weight, head_dim, eps, qkv, kind)
            for i in range(0, half, WIDTH):
                first, second = load(qkv, start + i), load(qkv, start + half + i)
                c, s = load(cos, row * half + i), load(sin, row * half + i)
                store(qkv, start + i, first * c - second * s)
                store(qkv, start + half + i, second * c + first * s)


@kernel_part
def _silu_and_mul(a, kind):
    rows, columns = a[1], a[2]
    gate_up, output = pointer(a[3], kind), pointer(a[4], kind)
    one = splat(np.float32(1))
    while True:
        row = next_task(a)
        if row >= rows:
            break
        start = row * 2 * columns
        for i in range(0, columns, WIDTH):
            gate = load(gate_up, start + i)
            activated = rounded_to(gate / (one + exp(splat(np.float32(0)) - gate)), kind)
            store(output, row * columns + i, activated * load(gate_up, start + columns + i))


@kernel_part
def _clamped_gate(a, kind):
    rows, columns = a[1], a[2]
    gate_up, output = pointer(a[3], kind), pointer(a[4], kind)
    one, alpha, limit = splat(np.float32(1)), splat(np.float32(-as_double(a[5]))), splat(np.float32(as_double(a[6])))
    least, lowest = splat(np.float32(-as_double(a[6]))), splat(np.float32(-np.inf))
    while True:
        row = next_task(a)
        if row >= rows:
            break
        start = row * 2 * columns
        for i in range(0, columns, WIDTH):
            gate = clamped(load(gate_up, start + i), lowest, limit)
            up = clamped(load(gate_up, start + columns + i), least, limit)
            store(output, row * columns + i, (up + one) * (gate / (one + exp(gate * alpha))))


@kernel_part
def _to_float32(a, kind):
    num_vectors, x, output = a[1], pointer(a[2], kind), pointer(a[3], FLOAT32)
    while True:
        first = next_task(a) * _CONVERTED
        if first >= num_vectors:
            break
        for vector in range(first, min(first + _CONVERTED, num_vectors)):
            store(output, WIDTH * vector, load(x, WIDTH * vector))
