"""Linear layers: weights packed on CPU, or quantised, several projections of one input stacked into one matrix."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.config import Quantization
from engine.models.panel_linear import PanelLinear, has_onednn_bfloat16
from engine.models.quantized import QuantizedLinear, stacked
from engine.models.weights import WeightSource


@dataclass(frozen=True, slots=True)
class LinearSource:
    """Takes linear layers from a source of tensors, as quantised as they shall be."""

    weights: WeightSource
    dtype: torch.dtype
    """Of inputs and outputs."""
    quantization: Quantization = "none"

    def take(self, parts: dict[str, int], in_features: int, *, has_bias: bool) -> Linear:
        """One matrix for several projections of the same input, in this order; `parts`: name -> output features."""
        weights, quantization = self.weights, self.quantization
        shapes = {f"{name}.weight": (size, in_features) for name, size in parts.items()}
        bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in parts.items()]) if has_bias else None
        if quantization == "none":
            return make_linear(torch.cat([weights.take(name, shape) for name, shape in shapes.items()]), bias)
        matrices = [weights.take_quantized(name, shape, quantization) for name, shape in shapes.items()]
        return QuantizedLinear(stacked(matrices), bias, self.dtype)


class Linear(Protocol):
    """A linear layer."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """y = x W^T + b. weight [out_features, in_features], bias [out_features], on the device and of the dtype to run
    with. On CPU the bits of a row do not depend on the other rows of the call."""
    return PanelLinear(weight, bias) if PanelLinear.supports(weight) else PackedLinear(weight, bias)


def are_kernels(dtype: torch.dtype, quantization: Quantization) -> bool:
    """Whether linear layers on CPU are computed by compiled kernels of our own, not by torch."""
    return quantization != "none" or PanelLinear.supports(torch.empty((1, 2), dtype=dtype))


class PackedLinear:
    """y = x W^T + b by torch. On CPU the weight is copied once into oneDNN's blocked layout.

    Without packing oneDNN reorders the weight, or reads it strided, in every call: one row of bfloat16 then runs at a
    third of the memory bandwidth. In float32 packing pays from a few rows on.

    On CPU a float16 weight is kept and multiplied in float32: few processors multiply float16. Inputs and results are
    float16.

    For a single row oneDNN takes another kernel, which may add in another order: where it does, a single row is
    computed as two (benchmarks/LOG.md has the cost).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out_features, in_features], bias [out_features], both on the device and of the dtype to run with."""
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        if weight.device.type == "cpu" and weight.dtype == torch.float16:
            weight, bias = weight.float(), None if bias is None else bias.float()
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
        x = torch.randn(2, self.in_features, generator=torch.Generator().manual_seed(0))
        alone, together = (self._product(rows, self._weight, None, "none", [], "") for rows in (x[:1], x))
        return torch.equal(alone, together[:1])


@functools.cache
def _is_one_bfloat16_row_exact(in_features: int) -> bool:
    """As PackedLinear._is_one_row_exact, on 2^17 results: one in 2,000 to 20,000 shows another order of addition."""
    weight, x = (torch.randn(n, in_features, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (512, 256))
    product = torch.ops.mkldnn._linear_pointwise.default
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    one_by_one = torch.cat([product(row, packed, None, "none", [], "") for row in x.split(1)])
    return torch.equal(one_by_one, product(x, packed, None, "none", [], ""))


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return has_onednn_bfloat16()
    return weight.dtype == torch.float32
