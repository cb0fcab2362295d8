"""Linear layers: multiplied by torch, on CPU packed or by our own kernels, or quantised; several projections of one
input are stacked into one matrix."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention.compilation import Products, has_tiles, has_wide_registers, multiplies_pairs
from engine.attention.openmp import launcher_for
from engine.attention.simd import WIDTH
from engine.config import Quantization
from engine.machine import second_level_bytes
from engine.models.amx_linear_kernels import TILE_INPUTS, multiply_in_tiles_address
from engine.models.elementwise import to_float32
from engine.models.experts import GroupedLinear
from engine.models.panel_linear_kernels import CHUNK, PANEL, multiply_address, runs_of
from engine.models.quantized import QuantizedLinear, QuantizedMatrix, padded_bias, stacked
from engine.models.weights import WeightSource


class Additions(Protocol):
    """What is added to linear layers."""

    def added_to(self, base: Linear, parts: Mapping[str, int], in_features: int) -> Linear:
        """`base`, the projections `parts` of one input, with what is added to them."""


@dataclass(frozen=True, slots=True)
class LinearSource:
    """Takes linear layers from a source of tensors, as quantised as they shall be."""

    weights: WeightSource
    dtype: torch.dtype
    """Of inputs and outputs."""
    quantization: Quantization = "none"
    adapters: Additions | None = None

    def take(self, parts: dict[str, int], in_features: int, *, has_bias: bool) -> Linear:
        """One matrix for several projections of the same input, in this order; `parts`: name -> output features."""
        base = self._base(parts, in_features, has_bias=has_bias)
        return base if self.adapters is None else self.adapters.added_to(base, parts, in_features)

    def can_group(self, layers: list[dict[str, int]], in_features: int) -> bool:
        """Whether kernels of our own are to compute them, whose codes they may have."""
        parts = {name: size for layer in layers for name, size in layer.items()}
        return are_kernels(self.dtype, self.quantization) or self._keeps_codes(_shapes(parts, in_features))

    def take_grouped(self, layers: list[dict[str, int]], in_features: int, *, has_bias: bool) -> GroupedLinear:
        """Where `can_group`. Each layer as `parts` of `take`."""
        parts = {name: size for layer in layers for name, size in layer.items()}
        taken, bias = self._taken(parts, in_features), self._bias(parts) if has_bias else None
        if isinstance(taken, torch.Tensor):
            return PanelLinear(taken, bias, num_matrices=len(layers))
        return QuantizedLinear(taken, bias, self.dtype, num_matrices=len(layers))

    def _base(self, parts: dict[str, int], in_features: int, *, has_bias: bool) -> Linear:
        taken, bias = self._taken(parts, in_features), self._bias(parts) if has_bias else None
        return make_linear(taken, bias) if isinstance(taken, torch.Tensor) else QuantizedLinear(taken, bias, self.dtype)

    def _bias(self, parts: dict[str, int]) -> torch.Tensor:
        return _taken_together(self.weights, {f"{name}.bias": (size,) for name, size in parts.items()})

    def _taken(self, parts: dict[str, int], in_features: int) -> torch.Tensor | QuantizedMatrix:
        weights, quantization, shapes = self.weights, self.quantization, _shapes(parts, in_features)
        if quantization == "none" and not self._keeps_codes(shapes):
            return _taken_together(weights, shapes)
        return stacked([weights.take_quantized(name, shape, quantization) for name, shape in shapes.items()])

    def _keeps_codes(self, shapes: Mapping[str, tuple[int, int]]) -> bool:
        return all(self.weights.keeps_codes(name, shape) for name, shape in shapes.items())


def _shapes(parts: Mapping[str, int], in_features: int) -> dict[str, tuple[int, int]]:
    return {f"{name}.weight": (size, in_features) for name, size in parts.items()}


def _taken_together(weights: WeightSource, shapes: Mapping[str, tuple[int, ...]]) -> torch.Tensor:
    return torch.cat([weights.take(name, shape, is_kept=False) for name, shape in shapes.items()])


class Linear(Protocol):
    """A linear layer."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: Quantization = "none") -> Linear:
    """y = x W^T + b. weight [out_features, in_features], bias [out_features], on the device and of the dtype to run
    with. On CPU the layer has copies of both, and the bits of a row do not depend on the other rows of the call."""
    if quantization != "none":
        return QuantizedLinear(QuantizedMatrix.of(weight, quantization), bias, weight.dtype)
    return PanelLinear(weight, bias) if PanelLinear.supports(weight) else PackedLinear(weight, bias)


def make_grouped_linear(weight: torch.Tensor, bias: torch.Tensor | None, quantization: Quantization) -> GroupedLinear:
    """weight [layers, out_features, in_features], bias [layers, out_features]: as `make_linear`, for the kernels."""
    num_layers, bias = len(weight), None if bias is None else bias.flatten()
    if quantization == "none":
        return PanelLinear(weight.flatten(0, 1), bias, num_matrices=num_layers)
    matrices = stacked([QuantizedMatrix.of(matrix, quantization) for matrix in weight])
    return QuantizedLinear(matrices, bias, weight.dtype, num_matrices=num_layers)


def are_kernels(dtype: torch.dtype, quantization: Quantization) -> bool:
    """Whether linear layers on CPU are computed by compiled kernels of our own, not by torch."""
    return quantization != "none" or PanelLinear.supports(torch.empty((1, TILE_INPUTS), dtype=dtype, device="cpu"))


class PackedLinear:
    """y = x W^T + b by torch. On CPU the weight is copied once into oneDNN's blocked layout.

    Without packing oneDNN reorders the weight, or reads it strided, in every call: one row of bfloat16 then runs at a
    third of the memory bandwidth. In float32 packing pays from a few rows on.

    On CPU a float16 weight is kept and multiplied in float32: few processors multiply float16. Inputs and results are
    float16. So is one of bfloat16 where oneDNN multiplies tiles (AMX): there its order depends on the number of rows.

    For a single row oneDNN takes another kernel, which may add in another order: where it does, a single row is
    computed as two (benchmarks/LOG.md has the cost).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out_features, in_features], bias [out_features], both on the device and of the dtype to run with."""
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        is_widened = weight.dtype == torch.float16 or (weight.dtype == torch.bfloat16 and has_tiles())
        if weight.device.type == "cpu" and is_widened:
            weight, bias = weight.float(), None if bias is None else bias.float()
        elif weight.device.type == "cpu":  # both may be views of a file
            weight, bias = weight if _can_pack(weight) else weight.clone(), None if bias is None else bias.clone()
        self._bias = bias
        is_packed = _can_pack(weight)
        # Looked up once: the lookup costs as much as a small layer.
        self._product = torch.ops.mkldnn._linear_pointwise.default if is_packed else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if is_packed else weight
        self._doubles_single_rows = weight.device.type == "cpu" and not self._is_one_row_exact(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        if self._dtype != self._weight.dtype:
            return self._multiplied(x.to(self._weight.dtype)).to(self._dtype)
        return self._multiplied(x)

    def _multiplied(self, x: torch.Tensor) -> torch.Tensor:
        if self._doubles_single_rows and x.shape[0] == 1:
            return self._multiplied(x.expand(2, -1))[:1]
        if self._product is not None:
            y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
            return y
        return torch.nn.functional.linear(x, self._weight, self._bias)

    def _is_one_row_exact(self, dtype: torch.dtype) -> bool:
        """Whether one row has the bits that it has among others. In float32 most results show another order."""
        if self._product is None:
            return False
        if dtype == torch.bfloat16:
            return _is_one_bfloat16_row_exact(self.in_features)
        x = _random(2, self.in_features, seed=0)
        alone, together = (self._product(rows, self._weight, None, "none", [], "") for rows in (x[:1], x))
        return torch.equal(alone, together[:1])


@functools.cache
def _is_one_bfloat16_row_exact(in_features: int) -> bool:
    """As PackedLinear._is_one_row_exact, on 2^17 results: one in 2,000 to 20,000 shows another order of addition."""
    weight, x = (_random(n, in_features, seed=n).bfloat16() for n in (512, 256))
    product = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    one_by_one = torch.cat([product(row, packed, None, "none", [], "") for row in x.split(1)])
    return torch.equal(one_by_one, product(x, packed, None, "none", [], ""))


def _random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return _has_onednn_bfloat16()
    return weight.dtype == torch.float32


_SHORT_PRODUCTS = 1 << 16
"""With fewer multiplications of numbers one thread finishes before a second has started."""

_Arguments = ctypes.c_int64 * 13
_address_of: dict[Products, Callable[[str], int]] = {
    "tiles": multiply_in_tiles_address,
    "pairs": functools.partial(multiply_address, in_pairs=True),
    "floats": functools.partial(multiply_address, in_pairs=False),
}


class PanelLinear:
    """y = x W^T + b on CPU, as fast for one row as the memory is. In float32, or in bfloat16: multiplied and added up
    in float32, and rounded once.

    Where oneDNN multiplies a type, it reads its packed matrix at half of the memory's speed for few rows, and is no
    faster for many (benchmarks/LOG.md). It adds up a single row in another order than several, in float32 always and in
    bfloat16 with more than 1024 inputs, while here the bits of a row depend on that row alone. bfloat16 takes it four
    times as long by AVX-512 alone, and one and a half times by the pairs of Intel's processors. Without AVX-512 it has
    no product of bfloat16, and torch's own reaches an eighth of the processor's speed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, num_matrices: int = 1) -> None:
        """weight [num_matrices * out_features, in_features], copied into the kernels' order; bias [num_matrices *
        out_features]."""
        self.out_features, self.in_features = len(weight) // num_matrices, weight.shape[1]
        self._num_matrices = num_matrices
        self._outputs = -(-self.out_features // WIDTH) * WIDTH
        products = _products(weight)
        self._panels = _in_panels(weight, num_matrices)
        if products == "tiles":
            self._panels = _in_tiles(self._panels)
        self._bias = padded_bias(bias, num_matrices, self.out_features)
        # Where two panels and the rows do not fit, the next panel would evict this one before its last rows.
        self._next_fits = 3 * self._panels[:1].nbytes <= second_level_bytes()
        self._are_converted = weight.dtype == torch.bfloat16 and products == "floats"
        self._launch = launcher_for(_address_of[products], weight.dtype)

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """float32 with AVX-512, whose registers hold the sums; bfloat16 there, too, and where oneDNN has no product of
        it."""
        if weight.device.type != "cpu":
            return False
        if weight.dtype == torch.bfloat16:
            return weight.shape[1] % 2 == 0 and (has_wide_registers() or not _has_onednn_bfloat16())
        return weight.dtype == torch.float32 and has_wide_registers()

    def __call__(self, x: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
        """See `GroupedLinear`; without `starts` there is one layer."""
        num_rows = x.shape[0]
        output = x.new_empty((num_rows, self._outputs))
        if not num_rows:
            return output[:, : self.out_features]
        x = to_float32(x) if self._are_converted else x.contiguous()
        num_used = min(num_rows, self._num_matrices)  # at most
        rows_of_one = -(-num_rows // num_used)
        num_tasks = len(self._panels) // self._num_matrices * num_used * -(-rows_of_one // CHUNK)
        num_threads = torch.get_num_threads()
        arguments = _Arguments(
            0,
            num_rows,
            self._outputs,
            self._panels.shape[1],
            x.data_ptr(),
            self._panels.data_ptr(),
            self._bias.data_ptr(),
            output.data_ptr(),
            self._next_fits and rows_of_one > 4 and num_tasks > num_threads,
            *runs_of(num_tasks, num_threads, rows_of_one),
            0 if starts is None else starts.data_ptr(),
            self._num_matrices,
        )
        is_short = num_rows * self._panels.numel() < _SHORT_PRODUCTS * self._num_matrices
        self._launch(None if is_short else num_threads, arguments)
        return output if self._outputs == self.out_features else output[:, : self.out_features].contiguous()


def _products(weight: torch.Tensor) -> Products:
    """How this processor multiplies a weight [out_features, in_features]."""
    if weight.dtype != torch.bfloat16:
        return "floats"
    if has_tiles() and weight.shape[1] % TILE_INPUTS == 0:
        return "tiles"
    return "pairs" if multiplies_pairs() else "floats"


def _has_onednn_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_tiles(panels: torch.Tensor) -> torch.Tensor:
    """The same numbers in the order of `amx_linear_kernels`."""
    num_panels, num_numbers, _ = panels.shape
    tiles = panels.view(num_panels, num_numbers * 2 // TILE_INPUTS, TILE_INPUTS // 2, 2, 2, WIDTH)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(num_panels, num_numbers, PANEL)


def _in_panels(weight: torch.Tensor, num_matrices: int) -> torch.Tensor:
    """Numbers of 32 bits [panels, numbers, 64], the last panel of each matrix filled with zeros."""
    numbers = weight.contiguous().view(torch.int32).unflatten(0, (num_matrices, -1))
    num_outputs, num_numbers = numbers.shape[1:]
    whole = num_outputs // PANEL
    shape = (num_matrices, -(-num_outputs // PANEL), num_numbers, PANEL)
    panels = torch.zeros(shape, dtype=torch.int32, device="cpu")
    panels[:, :whole] = numbers[:, : whole * PANEL].unflatten(1, (whole, PANEL)).transpose(2, 3)
    panels[:, whole:, :, : num_outputs - whole * PANEL] = numbers[:, None, whole * PANEL :].transpose(2, 3)
    return panels.flatten(0, 1)
