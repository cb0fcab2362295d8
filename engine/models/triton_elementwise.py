"""Elementwise operations of the decoder as Triton kernels, for GPUs: each reads and writes its rows once.

With TRITON_INTERPRET=1 the kernels run on CPU, in numpy.
"""

# Triton's compiler types the bodies of kernels, not annotations; capitals are its compile-time constants.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ruff: noqa: PLR0913 - a kernel has no objects to pass

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.models.elementwise import Elementwise, HeadNorm, HeadShape

_HEADS = 8
"""Of one program of `rotate_heads`."""
_COLUMNS = 1024
"""Of one program of `silu_mul`."""


class TritonElementwise(Elementwise):
    """One launch for each operation. Stateless."""

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Elementwise.add_rms_norm`."""
        output = torch.empty_like(residual)
        rows, hidden = residual.shape
        block = triton.next_power_of_2(hidden)
        add_norm[(rows,)](
            residual if x is None else x, residual, weight, output, eps,
            HIDDEN=hidden, BLOCK=block, HAS_X=x is not None, num_warps=min(16, max(2, block // 512)),
        )  # fmt: skip
        return output

    def rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape, norm: HeadNorm | None
    ) -> None:
        """See `Elementwise.rotate`."""
        num_heads, half = shape.num_heads + shape.num_kv_heads, shape.head_dim // 2
        rotate_heads[(qkv.shape[0], triton.cdiv(num_heads, _HEADS))](
            qkv, cos, sin,
            qkv if norm is None else norm.query_weight, qkv if norm is None else norm.key_weight,
            qkv.stride(0), 0.0 if norm is None else norm.eps,
            NUM_QUERY=shape.num_heads, NUM_HEADS=num_heads, HALF=half, BLOCK=triton.next_power_of_2(half),
            HEADS=_HEADS, HAS_NORM=norm is not None, num_warps=2,
        )  # fmt: skip

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Elementwise.silu_and_mul`."""
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, columns), dtype=gate_up.dtype, device=gate_up.device)
        silu_mul[(rows, triton.cdiv(columns, _COLUMNS))](gate_up, output, gate_up.stride(0), columns, BLOCK=_COLUMNS)
        return output


@triton.jit
def add_norm(
    x, residual, weight, output, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_X: tl.constexpr
):  # fmt: skip
    """Program (row): `Elementwise.add_rms_norm` of contiguous rows."""
    column = tl.arange(0, BLOCK)
    is_inside = column < HIDDEN
    at = tl.program_id(0).to(tl.int64) * HIDDEN + column
    row = tl.load(residual + at, mask=is_inside, other=0.0)
    if HAS_X:
        row = (row.to(tl.float32) + tl.load(x + at, mask=is_inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(residual + at, row, mask=is_inside)
    wide = row.to(tl.float32)
    normalised = wide * tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    scale = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    result = scale * normalised.to(row.dtype).to(tl.float32)
    tl.store(output + at, result.to(row.dtype), mask=is_inside)


@triton.jit
def _weighted(normalised, query_weight, key_weight, is_query, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Half of the heads [HEADS, BLOCK] times their weights, rounded to the element type, as float32."""
    pair = tl.arange(0, BLOCK)
    of_query = tl.load(query_weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    weight = tl.where(is_query, of_query[None, :], of_key[None, :])
    return (weight * normalised.to(tl.float32)).to(normalised.dtype).to(tl.float32)


@triton.jit
def rotate_heads(
    qkv, cos, sin, query_weight, key_weight, row_stride, eps,
    NUM_QUERY: tl.constexpr, NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Program (row, group of HEADS heads): `Elementwise.rotate`."""
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_inside = (head < NUM_HEADS)[:, None] & (pair < HALF)[None, :]
    at = qkv + row * row_stride + head[:, None] * (2 * HALF) + pair[None, :]
    lower = tl.load(at, mask=is_inside, other=0.0)
    upper = tl.load(at + HALF, mask=is_inside, other=0.0)
    dtype = lower.dtype
    first, second = lower.to(tl.float32), upper.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        is_query = (head < NUM_QUERY)[:, None]
        first = _weighted((first * scale).to(dtype), query_weight, key_weight, is_query, HALF, BLOCK)
        second = _weighted((second * scale).to(dtype), query_weight + HALF, key_weight + HALF, is_query, HALF, BLOCK)
    c = tl.load(cos + row * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    tl.store(at, (first * c - second * s).to(dtype), mask=is_inside)
    tl.store(at + HALF, (second * c + first * s).to(dtype), mask=is_inside)


@triton.jit
def silu_mul(gate_up, output, row_stride, columns, BLOCK: tl.constexpr):
    """Program (row, block of columns): `Elementwise.silu_and_mul`."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < columns
    gate = tl.load(gate_up + row * row_stride + column, mask=is_inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + columns + column, mask=is_inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(output + row * columns + column, (activated * up).to(gate.dtype), mask=is_inside)
