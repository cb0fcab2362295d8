"""Linear layers of bfloat16 on processors that multiply pairs (AVX512_BF16).

oneDNN reads its packed matrix at half of the memory's speed where there are few rows, and is no faster for many
(benchmarks/LOG.md). It adds up a single row in another order than several where there are more than 1024 inputs, while
here the bits of a row depend on that row alone.
"""

from __future__ import annotations

import ctypes

import torch

from engine.attention.compilation import multiplies_pairs, multiplies_tiles
from engine.attention.openmp import launcher_for
from engine.attention.simd import WIDTH
from engine.models.pair_linear_kernels import PANEL, multiply_address

SERIAL_PRODUCTS = 1 << 16
"""With fewer multiplications one thread finishes before a second has started."""

_Arguments = ctypes.c_int64 * 8


class PairLinear:
    """y = x W^T + b in bfloat16, added up in float32 and rounded once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight bfloat16 [out_features, in_features], copied into the kernels' order; bias [out_features]."""
        self.out_features, self.in_features = weight.shape
        self._outputs = -(-self.out_features // WIDTH) * WIDTH
        self._panels = _in_panels(weight)
        bias = torch.zeros(self.out_features) if bias is None else bias.float()
        self._bias = torch.nn.functional.pad(bias, (0, -self.out_features % PANEL))
        self._launch = launcher_for(multiply_address, torch.bfloat16)

    @staticmethod
    def supports(weight: torch.Tensor) -> bool:
        """On processors that multiply pairs; those that multiply tiles are left to oneDNN, which uses them."""
        is_paired = weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
        return weight.device.type == "cpu" and is_paired and multiplies_pairs() and not multiplies_tiles()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x bfloat16 [rows, in_features] -> bfloat16 [rows, out_features]."""
        x, num_rows = x.contiguous(), x.shape[0]
        output = x.new_empty((num_rows, self._outputs))
        arguments = _Arguments(
            0,
            num_rows,
            self._outputs,
            self.in_features // 2,
            x.data_ptr(),
            self._panels.data_ptr(),
            self._bias.data_ptr(),
            output.data_ptr(),
        )
        is_serial = num_rows * self._panels.numel() < SERIAL_PRODUCTS
        self._launch(1 if is_serial else torch.get_num_threads(), ctypes.addressof(arguments))
        return output if self._outputs == self.out_features else output[:, : self.out_features].contiguous()


def _in_panels(weight: torch.Tensor) -> torch.Tensor:
    """Pairs as int32 [panels, in_features / 2, 64], the last panel filled with zeros."""
    pairs = weight.contiguous().view(torch.int32)
    whole = len(pairs) // PANEL * PANEL
    panels = pairs.new_zeros((-(-len(pairs) // PANEL), pairs.shape[1], PANEL))
    panels[: whole // PANEL] = pairs[:whole].view(-1, PANEL, pairs.shape[1]).transpose(1, 2)
    panels[whole // PANEL :, :, : len(pairs) - whole] = pairs[whole:].t()
    return panels
