"""Weight-only quantization: matrices of 8-bit or 4-bit codes with scales, and their products with rows.

Codes are those of the checkpoint (`engine.models.packed_codes`) or are made of its weights, which become the nearest
multiple of a scale: int8 one scale for each output, int4 one for each 32 inputs of an output. Nothing is calibrated.
Activations, KV, embeddings, norms, biases, the output layer and the routers of experts keep their type.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from engine.attention.compilation import multiplies_pairs
from engine.attention.cpu import is_compiled_for
from engine.attention.openmp import launcher_for
from engine.attention.simd import WIDTH
from engine.config import Quantization
from engine.models.elementwise import to_float32
from engine.models.panel_linear_kernels import PANEL, runs_of
from engine.models.quantized_kernels import CONVERTED_ROWS, multiply_address

INT4_GROUP = 32
"""Inputs that share a scale."""
BITS = {"none": 4, "int8": 8, "int4": 4}
"""Of a code of a checkpoint, at most, so that it is kept."""
_Arguments = ctypes.c_int64 * 19


@functools.cache
def _address_of(bits: int, scales: str, *, in_pairs: bool, has_zeros: bool, are_floats: bool) -> Callable[[str], int]:
    options = {"in_pairs": in_pairs, "has_zeros": has_zeros, "are_floats": are_floats}
    return lambda dtype: multiply_address(dtype, bits, scales, **options)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """The weight of a linear layer: `(codes[o, i] - zeros[o, i // group]) * scales[o, i // group]`."""

    codes: torch.Tensor
    """int8 [out_features, in_features]."""
    scales: torch.Tensor
    """bfloat16, float16 or float32 [out_features, groups]."""
    bits: int
    group: int
    """Inputs of a group; the last one may have fewer."""
    zeros: torch.Tensor | None = None
    """int8 [out_features, groups]; None: all are 0."""
    are_floats: bool = False
    """MXFP4: the codes are 0, ±1, ±2, ±3, ±4, ±6, ±8 or ±12, twice the numbers that its four bits stand for."""

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

    def values(self) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        every = self.in_groups(1)
        codes = every.codes.float() if every.zeros is None else every.codes.float() - every.zeros
        return codes * every.scales.float()

    def in_groups(self, group: int) -> QuantizedMatrix:
        """The same weights with groups of so many inputs, a divisor of `self.group`."""
        if group == self.group:
            return self
        num_groups = -(-self.codes.shape[1] // group)

        def repeated(numbers: torch.Tensor) -> torch.Tensor:
            return numbers.repeat_interleave(self.group // group, dim=1)[:, :num_groups].contiguous()

        zeros = None if self.zeros is None else repeated(self.zeros)
        return replace(self, scales=repeated(self.scales), group=group, zeros=zeros)

    def narrow(self, dim: int, start: int, length: int) -> QuantizedMatrix:
        """A part of its outputs (dim 0) or inputs (dim 1), with the numbers that it has in the whole."""
        codes = self.codes.narrow(dim, start, length).clone()
        if dim == 0:
            scales, zeros = self._by_group(slice(start, start + length), slice(None))
            return replace(self, codes=codes, scales=scales, zeros=zeros)
        if self.scales.shape[1] == 1:
            return replace(self, codes=codes, group=length)
        group = math.gcd(start, self.group)  # smaller groups where the part begins inside of one
        groups = slice(start // group, -(-(start + length) // group))
        scales, zeros = self.in_groups(group)._by_group(slice(None), groups)
        return replace(self, codes=codes, scales=scales, group=group, zeros=zeros)

    def _by_group(self, outputs: slice, groups: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        zeros = None if self.zeros is None else self.zeros[outputs, groups].clone()
        return self.scales[outputs, groups].clone(), zeros


def stacked(parts: list[QuantizedMatrix]) -> QuantizedMatrix:
    """One matrix for several projections of the same input."""
    group = math.gcd(*(part.group for part in parts))
    parts = [part.in_groups(group) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [torch.zeros_like(part.scales, dtype=torch.int8) if part.zeros is None else part.zeros for part in parts]
        )
    codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
    are_alike = len({part.are_floats for part in parts}) == 1
    bits = max(part.bits for part in parts) if are_alike else 8
    return QuantizedMatrix(codes, scales, bits, group, zeros, are_floats=are_alike and parts[0].are_floats)


class QuantizedLinear:
    """y = x W^T + b on CPU, W of codes. The bits of a row do not depend on the other rows of the call, nor on the
    number of threads."""

    def __init__(
        self, matrix: QuantizedMatrix, bias: torch.Tensor | None, dtype: torch.dtype, *, num_matrices: int = 1
    ) -> None:
        """`matrix`, bias: of all matrices, one after the other; `dtype`: of inputs and outputs."""
        self.out_features, self.in_features = len(matrix.codes) // num_matrices, matrix.codes.shape[1]
        self._num_matrices = num_matrices
        self._dtype = dtype
        is_even = self.in_features % 2 == 0 and matrix.group % 2 == 0
        self._in_pairs = is_even and dtype == torch.bfloat16 and multiplies_pairs()
        inputs_per_number = 2 if self._in_pairs else 1
        self._num_numbers, self._group = self.in_features // inputs_per_number, matrix.group // inputs_per_number
        self._outputs = -(-self.out_features // WIDTH) * WIDTH
        self._stored_dtype = dtype if is_compiled_for(dtype) else torch.float32
        packed = partial(_packed, num_matrices=num_matrices)
        self._codes = packed(matrix.codes, inputs_per_number)
        if matrix.bits == 4:
            if matrix.are_floats:
                _make_float_codes(self._codes)
            lower, upper = self._codes.view(-1, 2, WIDTH).unbind(1)
            self._codes = (lower & 15) | (upper << 4)
        self._number_bytes = PANEL * inputs_per_number * matrix.bits // 8
        scales = matrix.scales if is_compiled_for(matrix.scales.dtype) else matrix.scales.float()
        self._scales = packed(scales, 1)
        self._zeros = None
        if matrix.zeros is not None:
            self._zeros = packed(matrix.zeros.repeat_interleave(inputs_per_number, dim=1), inputs_per_number)
        address_of = _address_of(
            matrix.bits,
            str(scales.dtype).removeprefix("torch."),
            in_pairs=self._in_pairs,
            has_zeros=self._zeros is not None,
            are_floats=matrix.are_floats,
        )
        self._launch = launcher_for(address_of, self._stored_dtype)
        self._bias = padded_bias(bias, num_matrices, self.out_features)
        self._threads_begun = torch.zeros(1, dtype=torch.int64, device="cpu")

    def __call__(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        """See `engine.models.experts.GroupedLinear`; without `starts` there is one layer."""
        numbers = x.contiguous() if self._in_pairs else to_float32(x)
        output = torch.empty((x.shape[0], self._outputs), dtype=self._stored_dtype, device="cpu")
        num_threads = torch.get_num_threads()
        num_used = max(1, min(x.shape[0], self._num_matrices))  # at most
        num_tasks = len(self._scales) // self._num_matrices * num_used
        converted = None
        if x.shape[0] >= CONVERTED_ROWS:
            converted = _scratch_of(num_threads * self._num_numbers * PANEL)
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
            0 if self._zeros is None else self._zeros.data_ptr(),
            self._bias.data_ptr(),
            output.data_ptr(),
            *runs_of(num_tasks, num_threads, -(-x.shape[0] // num_used)),
            0 if converted is None else converted.data_ptr(),
            self._threads_begun.data_ptr(),
            num_threads,
            0 if starts is None else starts.data_ptr(),
            self._num_matrices,
        )
        self._launch(num_threads, arguments)
        return output[:, : self.out_features].to(self._dtype).contiguous()


class _Scratch(threading.local):
    """Memory of the thread that calls, which layers of one size share. Recorded launches point to it."""

    def __init__(self) -> None:
        self.by_size: dict[int, torch.Tensor] = {}


_scratch = _Scratch()


def _scratch_of(size: int) -> torch.Tensor:
    """float32 [size]; anything."""
    if (memory := _scratch.by_size.get(size)) is None:
        memory = _scratch.by_size[size] = torch.empty(size, dtype=torch.float32, device="cpu")
    return memory


def _packed(numbers: torch.Tensor, inputs_per_number: int, *, num_matrices: int) -> torch.Tensor:
    """[outputs of all matrices, inputs] in the order of `quantized_kernels`, each matrix with outputs of zeros at the
    end: [panels, numbers, outputs of a panel, inputs of a number]."""
    matrices = numbers.unflatten(0, (num_matrices, -1))
    padded = torch.nn.functional.pad(matrices, (0, 0, 0, -matrices.shape[1] % PANEL))
    return (
        padded.reshape(-1, PANEL, numbers.shape[1] // inputs_per_number, inputs_per_number).transpose(1, 2).contiguous()
    )


def _make_float_codes(numbers: torch.Tensor) -> None:
    """Makes of twice each number the code of four bits (sign, exponent, mantissa): 0, 1, 2, 3, 4, 6, 8, 12 are 0 to 7.
    Panel by panel: numpy's look-up takes eight bytes for each number."""
    code_of = np.zeros(256, np.uint8)  # by the number's byte
    for code, number in enumerate((0, 1, 2, 3, 4, 6, 8, 12)):
        code_of[-number], code_of[number] = code | 8, code
    for panel in numbers.view(torch.uint8).numpy():
        panel[...] = np.take(code_of, panel)


def padded_bias(bias: torch.Tensor | None, num_matrices: int, out_features: int) -> torch.Tensor:
    """float32 [matrices, whole panels]; bias [matrices * out_features], None: zeros."""
    if bias is None:
        bias = torch.zeros(num_matrices * out_features, dtype=torch.float32, device="cpu")
    return torch.nn.functional.pad(bias.float().view(num_matrices, -1), (0, -out_features % PANEL))
