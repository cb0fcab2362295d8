"""Weight-only quantization: matrices of 8-bit or 4-bit codes with scales, and their products with rows.

A weight becomes the nearest multiple of a scale: int8 one scale for each output, int4 one for each 32 inputs of an
output. Nothing is calibrated. Activations, KV, embeddings, norms, biases, the output layer and the routers of experts
keep their type.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass

import torch

from engine.attention.compilation import multiplies_pairs
from engine.attention.cpu import is_compiled_for
from engine.attention.openmp import launcher_for
from engine.attention.simd import WIDTH
from engine.config import Quantization
from engine.models.elementwise import to_float32
from engine.models.panel_linear_kernels import PANEL, runs_of
from engine.models.quantized_kernels import multiply_address

INT4_GROUP = 32
"""Inputs that share a scale."""
_Arguments = ctypes.c_int64 * 13
_address_of = {
    (bits, in_pairs): functools.partial(multiply_address, bits=bits, in_pairs=in_pairs)
    for bits in (8, 4)
    for in_pairs in (False, True)
}


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """The weight of a linear layer: `codes[o, i] * scales[o, i // group]`."""

    codes: torch.Tensor
    """int8 [out_features, in_features]."""
    scales: torch.Tensor
    """bfloat16 [out_features, groups]."""
    bits: int
    group: int
    """Inputs of a group; the last one may have fewer."""

    @classmethod
    def of(cls, weight: torch.Tensor, quantization: Quantization) -> QuantizedMatrix:
        """The nearest multiples of the scales to weight [out_features, in_features]."""
        bits, group = (8, weight.shape[1]) if quantization == "int8" else (4, INT4_GROUP)
        missing = -weight.shape[1] % group
        groups = torch.nn.functional.pad(weight.float(), (0, missing)).unflatten(1, (-1, group))
        least, greatest = groups.aminmax(dim=2, keepdim=True)
        extreme = torch.where(greatest >= -least, greatest, least)
        # The number farthest from 0 becomes 127 or -127; of 4 bits -8, since there is no 8.
        scales = (extreme.abs() / 127 if bits == 8 else extreme / -8).bfloat16()
        steps = (groups / scales.float().masked_fill(scales == 0, 1)).round_()
        codes = steps.clamp_(-127 if bits == 8 else -8, 127 if bits == 8 else 7).to(torch.int8)
        return cls(codes.flatten(1)[:, : weight.shape[1]], scales.squeeze(2), bits, group)

    def narrow(self, dim: int, start: int, length: int) -> QuantizedMatrix:
        """A part of its outputs (dim 0) or inputs (dim 1), with the numbers that it has in the whole."""
        codes = self.codes.narrow(dim, start, length).clone()
        if dim == 0:
            return QuantizedMatrix(codes, self.scales.narrow(0, start, length).clone(), self.bits, self.group)
        if self.scales.shape[1] == 1:
            return QuantizedMatrix(codes, self.scales, self.bits, length)
        group = math.gcd(start, self.group)  # smaller groups where the part begins inside of one
        scales = self.scales.repeat_interleave(self.group // group, dim=1)
        groups = slice(start // group, -(-(start + length) // group))
        return QuantizedMatrix(codes, scales[:, groups].clone(), self.bits, group)


def stacked(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix for several projections of the same input."""
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    return QuantizedMatrix(codes, scales, parts[0].bits, parts[0].group)


class QuantizedLinear:
    """y = x W^T + b on CPU, W of codes. The bits of a row do not depend on the other rows of the call, nor on the
    number of threads."""

    def __init__(self, matrix: QuantizedMatrix, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`dtype`: of inputs and outputs."""
        self.out_features, self.in_features = matrix.codes.shape
        self._dtype = dtype
        is_even = self.in_features % 2 == 0 and matrix.group % 2 == 0
        self._in_pairs = is_even and dtype == torch.bfloat16 and multiplies_pairs()
        inputs_per_number = 2 if self._in_pairs else 1
        self._num_numbers, self._group = self.in_features // inputs_per_number, matrix.group // inputs_per_number
        self._outputs = -(-self.out_features // WIDTH) * WIDTH
        self._stored_dtype = dtype if is_compiled_for(dtype) else torch.float32
        self._launch = launcher_for(_address_of[matrix.bits, self._in_pairs], self._stored_dtype)
        missing = -self.out_features % PANEL
        self._codes = _packed(matrix, missing, inputs_per_number)
        self._number_bytes = PANEL * inputs_per_number * matrix.bits // 8
        scales = torch.nn.functional.pad(matrix.scales, (0, 0, 0, missing))
        self._scales = scales.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
        if bias is None:
            bias = torch.zeros(self.out_features, dtype=torch.float32, device="cpu")
        self._bias = torch.nn.functional.pad(bias.float(), (0, missing))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        numbers = x.contiguous() if self._in_pairs else to_float32(x)
        output = torch.empty((x.shape[0], self._outputs), dtype=self._stored_dtype, device="cpu")
        num_threads = torch.get_num_threads()
        arguments = _Arguments(
            0,
            x.shape[0],
            self._outputs,
            self._num_numbers,
            self._group,
            numbers.data_ptr(),
            self._codes.data_ptr(),
            self._number_bytes,
            self._scales.data_ptr(),
            self._bias.data_ptr(),
            output.data_ptr(),
            *runs_of(len(self._scales), num_threads, x.shape[0]),
        )
        self._launch(num_threads, arguments)
        return output[:, : self.out_features].to(self._dtype).contiguous()


def _packed(matrix: QuantizedMatrix, missing: int, inputs_per_number: int) -> torch.Tensor:
    """The codes in the order of `quantized_kernels`, with `missing` outputs of zeros at the end."""
    padded = torch.nn.functional.pad(matrix.codes, (0, 0, 0, missing))
    numbers = padded.reshape(-1, PANEL, padded.shape[1] // inputs_per_number, inputs_per_number)
    codes = numbers.transpose(1, 2).contiguous()  # [panels, numbers, outputs, inputs of a number]
    if matrix.bits == 8:
        return codes
    lower, upper = codes.view(-1, 2, WIDTH).unbind(1)
    return (lower & 15) | (upper << 4)
