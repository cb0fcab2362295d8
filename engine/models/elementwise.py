"""Elementwise operations of the decoder: residual + RMSNorm, q/k norm + RoPE, SiLU * up or gpt-oss's gate.

`Elementwise` runs on any device; on CPU `CompiledElementwise` does each in one compiled call, on a GPU
`TritonElementwise` in one launch. As in transformers normalised values are rounded to the element type before they are
multiplied by the weight.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.attention.cpu import bits_of, is_compiled_for
from engine.attention.openmp import launch
from engine.attention.simd import WIDTH
from engine.models import elementwise_kernels as kernels
from engine.models.config import ClampedGate


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before rotation (Qwen3): weights [head_dim]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Layout of a row of the fused projection: query, key and value heads, each of head_dim elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Elementwise:
    """Torch operations, for any device and dtype. Stateless."""

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place (unless x is None), then RMSNorm(residual) * weight; all [rows, hidden]."""
        if x is not None:
            residual += x
        return _rms_norm(residual, weight, eps)

    def rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape, norm: HeadNorm | None
    ) -> None:
        """Normalises (if `norm`) and rotates the query and key heads of qkv [rows, heads * head_dim] in place;
        cos, sin float32 [rows, head_dim / 2]."""
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        query, key, _ = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if norm is not None:
            query.copy_(_rms_norm(query, norm.query_weight, norm.eps))
            key.copy_(_rms_norm(key, norm.key_weight, norm.eps))
        rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
        first, second = rotated.float().chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        rotated.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * n] -> silu(first half) * second half, [rows, n]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return _gated(gate.float(), 1.0).to(gate.dtype) * up

    def clamped_gate(self, gate_up: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
        """The same with `gate` in place of SiLU."""
        first, second = gate_up.float().chunk(2, dim=-1)
        first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
        return ((second + 1) * _gated(first, gate.alpha)).to(gate_up.dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def _gated(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """x * sigmoid(alpha * x). torch's sigmoid and SiLU compute the last numbers of a thread's memory in another way, so
    that a row's bits would depend on the others."""
    return x / (1 + (-alpha * x).exp())


def elementwise_for(
    device: torch.device, dtype: torch.dtype, *, row_sizes: tuple[int, ...], head_dim: int
) -> Elementwise:
    """The fastest implementation: Triton on a GPU, compiled on CPU if rows and half heads are whole vectors, else
    torch."""
    if device.type == "cuda":
        from engine.models.triton_elementwise import TritonElementwise

        return TritonElementwise()
    is_compiled = device.type == "cpu" and is_compiled_for(dtype)
    if is_compiled and all(size % WIDTH == 0 for size in (*row_sizes, head_dim // 2)):
        return CompiledElementwise()
    return Elementwise()


_NormArguments = ctypes.c_int64 * 8
_RotateArguments = ctypes.c_int64 * 12
_SiluArguments = ctypes.c_int64 * 5
_GateArguments = ctypes.c_int64 * 7
_ConversionArguments = ctypes.c_int64 * 4


class CompiledElementwise(Elementwise):
    """float32, bfloat16 and float16 on CPU, each operation in one compiled call."""

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        output = torch.empty_like(residual)
        rows, hidden = residual.shape
        arguments = _NormArguments(
            0,
            rows,
            hidden,
            0 if x is None else x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            bits_of(eps),
        )
        launch(kernels.add_rms_norm_address, residual.dtype, rows * hidden, arguments)
        return output

    def rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape, norm: HeadNorm | None
    ) -> None:
        rows, stride = qkv.shape
        arguments = _RotateArguments(
            0,
            rows,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            qkv.data_ptr(),
            stride,
            cos.data_ptr(),
            sin.data_ptr(),
            0 if norm is None else norm.query_weight.data_ptr(),
            0 if norm is None else norm.key_weight.data_ptr(),
            0 if norm is None else bits_of(norm.eps),
        )
        launch(kernels.rotate_address, qkv.dtype, rows * stride, arguments)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, columns), dtype=gate_up.dtype, device="cpu")
        arguments = _SiluArguments(0, rows, columns, gate_up.data_ptr(), output.data_ptr())
        launch(kernels.silu_and_mul_address, gate_up.dtype, rows * columns, arguments)
        return output

    def clamped_gate(self, gate_up: torch.Tensor, gate: ClampedGate) -> torch.Tensor:
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, columns), dtype=gate_up.dtype, device="cpu")
        numbers = (bits_of(gate.alpha), bits_of(gate.limit))
        arguments = _GateArguments(0, rows, columns, gate_up.data_ptr(), output.data_ptr(), *numbers)
        launch(kernels.clamped_gate_address, gate_up.dtype, rows * columns, arguments)
        return output


def to_float32(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in float32, contiguous; on CPU in one compiled call where that is possible."""
    x = x.contiguous()
    if x.dtype == torch.float32 or x.numel() % WIDTH or not is_compiled_for(x.dtype):
        return x.float()
    output = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    arguments = _ConversionArguments(0, x.numel() // WIDTH, x.data_ptr(), output.data_ptr())
    launch(kernels.to_float32_address, x.dtype, x.numel(), arguments)
    return output
