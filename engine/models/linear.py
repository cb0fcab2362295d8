"""One linear layer, laid out for the device it runs on."""

from __future__ import annotations

import torch


class PackedLinear:
    """y = x W^T + b. Owns its weight; on CPU that is a copy reordered once into oneDNN's blocked layout.

    Unpacked, oneDNN reorders or reads strided at every call, and a row of bfloat16 runs at a third of the memory's
    speed. In float32 packing wins from a few rows on. Either way a row's result depends on how
    many rows share the call by no more than float rounding.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight [out_features, in_features], bias [out_features], both on the device and of the dtype to run with."""
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        is_packed = _can_pack(weight)
        # Named once: looking the operator up costs as much as a small layer.
        self._product = torch.ops.mkldnn._linear_pointwise.default if is_packed else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if is_packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        if self._product is not None:
            y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
            return y
        return torch.nn.functional.linear(x, self._weight, self._bias)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
