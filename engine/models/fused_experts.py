"""Experts of a layer in one tensor: the form of transformers 5, and gpt-oss's, whose matrices are transposed or MXFP4.

gpt-oss has gate and up projections by turns. MXFP4 (Open Compute Project, Microscaling Formats 1.0): a number has four
bits, of sign, exponent and mantissa, and 32 inputs of an output share a power of two. Two numbers are in a byte, the
first in its lower half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.errors import InvalidCheckpoint, shown
from engine.models.config import ExpertNames
from engine.models.quantized import QuantizedMatrix

BLOCKS, EXPONENTS = ".blocks", ".scales"
"""Follow the name of a layer in those of its codes and powers of two."""
_GROUP = 32
_BIAS = 127
_NUMBERS = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""Twice the number that four bits stand for: the code of a QuantizedMatrix."""
_PAIRS = np.stack((np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)), axis=1).view(np.int16).ravel()
"""Those of a byte, side by side: numpy looks them up a hundred times as fast as torch."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is: all of one in a file, or an expert's part of it."""

    file_name: str
    name: str
    expert: int | None = None
    rows: slice | None = None
    """None: all."""
    is_transposed: bool = False

    def read(self, file: Any) -> torch.Tensor:
        """`file`: a handle of safetensors. Raises its SafetensorError."""
        if self.expert is None:
            whole: torch.Tensor = file.get_tensor(self.name)
            return whole
        part: torch.Tensor = file.get_slice(self.name)[self.expert]
        part = part.t() if self.is_transposed else part
        return part.contiguous() if self.rows is None else part[self.rows].contiguous()


def single_experts(file: Any, stored: Stored, names: ExpertNames | None) -> dict[str, Stored]:
    """The experts in a layer's tensor of all, by their names one by one; any other tensor by its own, and one without
    numbers, of which a small file can have any number of experts. Of a file only its header is read."""
    prefix, _, fused = stored.name.rpartition(".experts.")
    projection, _, suffix = fused.partition("_proj")
    form = (_OF_GPT_OSS if names == "gpt-oss" else _OF_TRANSFORMERS).get(suffix)
    shape = file.get_slice(stored.name).get_shape() if form and projection in ("gate_up", "down") else []
    if form is None or len(shape) != form.num_dimensions or 0 in shape:
        return {stored.name: stored}
    rows_of: dict[str, slice | None] = {projection: None}
    if projection == "gate_up" and names == "gpt-oss":
        rows_of = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    elif projection == "gate_up":
        rows_of = {"gate": slice(shape[1] // 2), "up": slice(shape[1] // 2, None)}
    return {
        f"{prefix}.experts.{expert}.{part}_proj{form.name}": replace(
            stored, expert=expert, rows=rows, is_transposed=form.is_transposed
        )
        for expert in range(shape[0])
        for part, rows in rows_of.items()
    }


@dataclass(frozen=True, slots=True)
class _Form:
    """Of a tensor of all experts: what follows a layer's name in those of single ones."""

    name: str
    num_dimensions: int
    is_transposed: bool = False
    """[experts, inputs, outputs]."""


_OF_TRANSFORMERS = {"": _Form(".weight", 3)}
_OF_GPT_OSS = {
    "": _Form(".weight", 3, is_transposed=True),
    "_bias": _Form(".bias", 2),
    "_blocks": _Form(BLOCKS, 4),
    "_scales": _Form(EXPONENTS, 3),
}
"""By what follows `_proj`."""


def mxfp4_matrix(layer: str, shape: tuple[int, ...], blocks: torch.Tensor, exponents: torch.Tensor) -> QuantizedMatrix:
    """blocks uint8 [outputs, inputs / 32, 16], exponents uint8 [outputs, inputs / 32]. Raises InvalidCheckpoint for
    others."""
    outputs, inputs = shape
    expected = [outputs, inputs // _GROUP, _GROUP // 2]
    for tensor, size in ((blocks, expected), (exponents, expected[:2])):
        found = list(tensor.shape)
        if tensor.dtype != torch.uint8 or found != size or inputs % _GROUP:
            raise InvalidCheckpoint(
                f"MXFP4 of {shown(layer)} is {tensor.dtype} of shape {found}; "
                f"config.json requires uint8 of shape {size}"
            )
    codes = torch.from_numpy(np.take(_PAIRS, blocks.numpy())).view(torch.int8)
    scales = torch.exp2(exponents.double() - _BIAS - 1).bfloat16()
    return QuantizedMatrix(codes.flatten(1), scales, 4, _GROUP, are_floats=True)
