"""Linear layers on CPU, as fast for one row as the memory is.

Where oneDNN multiplies a type, it reads its packed matrix at half of the memory's speed for few rows, and is no faster
for many (benchmarks/LOG.md). It adds up a single row in another order than several, in float32 always and in bfloat16
with more than 1024 inputs, while here the bits of a row depend on that row alone. bfloat16 without AVX-512 has no
product in oneDNN, and torch's own reaches an eighth of the processor's speed.
"""

from __future__ import annotations

import ctypes

import torch

from engine.attention.compilation import has_wide_registers, multiplies_pairs, multiplies_tiles
from engine.attention.openmp import launcher_for
from engine.attention.simd import WIDTH
from engine.models.elementwise import to_float32
from engine.models.panel_linear_kernels import PANEL, multiply_address

SERIAL_PRODUCTS = 1 << 16
"""With fewer multiplications of numbers one thread finishes before a second has started."""

_Arguments = ctypes.c_int64 * 8


class PanelLinear:
    """y = x W^T + b in float32, or in bfloat16: multiplied and added up in float32, and rounded once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out_features, in_features], copied into the kernels' order; bias [out_features]."""
        self.out_features, self.in_features = weight.shape
        self._outputs = -(-self.out_features // WIDTH) * WIDTH
        self._panels = _in_panels(weight)
        bias = torch.zeros(self.out_features) if bias is None else bias.float()
        self._bias = torch.nn.functional.pad(bias, (0, -self.out_features % PANEL))
        self._are_converted = weight.dtype == torch.bfloat16 and not multiplies_pairs()
        self._launch = launcher_for(multiply_address, weight.dtype)

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """float32 with AVX-512, whose registers hold the sums. bfloat16 where the processor multiplies pairs of it, but
        not tiles, which oneDNN uses; and where oneDNN has no product of bfloat16: they are converted to float32."""
        if weight.device.type != "cpu":
            return False
        if weight.dtype == torch.bfloat16:
            is_best = multiplies_pairs() and not multiplies_tiles()
            return weight.shape[1] % 2 == 0 and (is_best or not has_onednn_bfloat16())
        return weight.dtype == torch.float32 and has_wide_registers()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features], same dtype."""
        num_rows = x.shape[0]
        output = x.new_empty((num_rows, self._outputs))
        if not num_rows:
            return output[:, : self.out_features]
        x = to_float32(x) if self._are_converted else x.contiguous()
        arguments = _Arguments(
            0,
            num_rows,
            self._outputs,
            self._panels.shape[1],
            x.data_ptr(),
            self._panels.data_ptr(),
            self._bias.data_ptr(),
            output.data_ptr(),
        )
        is_serial = num_rows * self._panels.numel() < SERIAL_PRODUCTS
        self._launch(1 if is_serial else torch.get_num_threads(), arguments)
        return output if self._outputs == self.out_features else output[:, : self.out_features].contiguous()


def has_onednn_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _in_panels(weight: torch.Tensor) -> torch.Tensor:
    """Numbers of 32 bits [panels, numbers, 64], the last panel filled with zeros."""
    numbers = weight.contiguous().view(torch.int32)
    whole = len(numbers) // PANEL * PANEL
    panels = numbers.new_zeros((-(-len(numbers) // PANEL), numbers.shape[1], PANEL))
    panels[: whole // PANEL] = numbers[:whole].view(-1, PANEL, numbers.shape[1]).transpose(1, 2)
    panels[whole // PANEL :, :, : len(numbers) - whole] = numbers[whole:].t()
    return panels
