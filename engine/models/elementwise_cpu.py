"""The decoder's small steps on CPU: one compiled call each."""

from __future__ import annotations

import ctypes
import functools

import torch

from engine.attention.cpu import bits_of
from engine.attention.openmp import Launcher, launcher
from engine.models import elementwise_kernels as kernels
from engine.models.elementwise import HeadNorm, HeadShape

SERIAL_ELEMENTS = 1 << 15
"""Below this many elements one thread is done before a second has started."""

_NormArguments = ctypes.c_int64 * 8
_RotateArguments = ctypes.c_int64 * 12
_SiluArguments = ctypes.c_int64 * 5


class CompiledElementwise:
    """float32 and bfloat16 on CPU; holds no state."""

    def add_rms_norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """See `Elementwise.add_rms_norm`."""
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
        _add_rms_norm(residual.dtype)(_num_threads(rows * hidden), ctypes.addressof(arguments))
        return output

    def rotate(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape, norm: HeadNorm | None
    ) -> None:
        """See `Elementwise.rotate`."""
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
        _rotate(qkv.dtype)(_num_threads(rows * stride), ctypes.addressof(arguments))

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Elementwise.silu_and_mul`."""
        rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
        output = torch.empty((rows, columns), dtype=gate_up.dtype)
        arguments = _SiluArguments(0, rows, columns, gate_up.data_ptr(), output.data_ptr())
        _silu_and_mul(gate_up.dtype)(_num_threads(rows * columns), ctypes.addressof(arguments))
        return output


def _num_threads(num_elements: int) -> int:
    return torch.get_num_threads() if num_elements >= SERIAL_ELEMENTS else 1


@functools.cache
def _add_rms_norm(dtype: torch.dtype) -> Launcher:
    return launcher(kernels.add_rms_norm_address(dtype == torch.bfloat16))


@functools.cache
def _rotate(dtype: torch.dtype) -> Launcher:
    return launcher(kernels.rotate_address(dtype == torch.bfloat16))


@functools.cache
def _silu_and_mul(dtype: torch.dtype) -> Launcher:
    return launcher(kernels.silu_and_mul_address(dtype == torch.bfloat16))
