"""The small steps between the matrix products: residual + RMSNorm, q/k norm + RoPE, SiLU * up.

Here they are torch operations, for any device; on CPU `engine.models.elementwise_cpu` does each in one compiled call.
Rounding follows transformers: normalised values return to the element type before they meet the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before rotation (Qwen3): weights [head_dim]."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How a row of the fused projection divides: query heads, key heads, value heads, each of head_dim elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class Elementwise(Protocol):
    """The steps as the decoder calls them."""

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place (unless x is None), then RMSNorm(residual) * weight; all [rows, hidden]."""
        ...

    def rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape, norm: HeadNorm | None
    ) -> None:
        """Normalises (if `norm`) and rotates the query and key heads of qkv [rows, heads * head_dim] in place;
        cos, sin float32 [rows, head_dim / 2]."""
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * n] -> silu(first half) * second half, [rows, n]."""
        ...


class TorchElementwise:
    """Any device and dtype."""

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Elementwise.add_rms_norm`."""
        if x is not None:
            residual += x
        return _rms_norm(residual, weight, eps)

    def rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape, norm: HeadNorm | None
    ) -> None:
        """See `Elementwise.rotate`."""
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
        """See `Elementwise.silu_and_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalised.to(x.dtype)


def elementwise_for(
    device: torch.device, dtype: torch.dtype, *, row_sizes: tuple[int, ...], head_dim: int
) -> Elementwise:
    """What is fast on this device: on CPU compiled loops, if rows and half heads are whole vectors."""
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        from engine.attention.simd import WIDTH
        from engine.models.elementwise_cpu import CompiledElementwise

        if all(size % WIDTH == 0 for size in (*row_sizes, head_dim // 2)):
            return CompiledElementwise()
    return TorchElementwise()
