"""Weights that a checkpoint has as codes of 4 or 8 bits, several in one int32: GPTQ, AWQ, pack-quantized.

A weight is its code less a zero point, times a scale; both are those of a group of its output's inputs. Groups are of
adjacent inputs, or, where GPTQ took the inputs in another order, named for each input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import InvalidCheckpoint, shown
from engine.models.quantized import QuantizedMatrix
from engine.models.weight_codes import PACKED_BITS, Packing

_WORD = 32
_SHAPE = "weight_shape"
"""Name of what the codes and the architecture say, too."""
_IN_ORDER = -1
"""In place of a group: groups are of adjacent inputs."""
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The weight of a linear layer."""

    matrix: QuantizedMatrix
    """Its inputs by groups."""
    order: torch.Tensor | None
    """int64 [in_features]: input of the layer that each input of `matrix` is; None: the same."""

    def values(self) -> torch.Tensor:
        """float32 [out_features, in_features]."""
        values = self.matrix.values()
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A linear layer's tensors in a checkpoint."""

    module: str
    shape: tuple[int, int]
    """out_features, in_features."""
    packing: Packing
    group: int
    """As `WeightCodes.group`."""
    read: Callable[[str], torch.Tensor | None]
    """Returns the tensor of a name; None: it is absent."""

    def names(self) -> list[str]:
        """Of all tensors that it may have."""
        packing = self.packing
        names = (packing.codes, packing.scales, packing.zeros, packing.group_of, _SHAPE)
        return [f"{self.module}.{name}" for name in names]

    def bits(self) -> int:
        """Bits of a code, by the size of their tensor. Raises InvalidCheckpoint if that does not fit."""
        codes, dim = self._tensor(self.packing.codes, (torch.int32,)), self.packing.packed[0]
        size = self._size(dim)
        for bits in PACKED_BITS:
            sizes = [-(-size // (_WORD // bits)) if one == dim else self._size(one) for one in (0, 1)]
            if list(codes.shape) == sizes:
                return bits
        raise self._misfit(self.packing.codes, codes, f"weights of shape {list(self.shape)}")

    def order(self) -> torch.Tensor | None:
        """See `PackedMatrix.order`. Raises InvalidCheckpoint for groups that do not have as many inputs each."""
        group_of = self.read(f"{self.module}.{self.packing.group_of}")
        if group_of is None or (group_of == _IN_ORDER).any():
            return None
        num_groups = self._by_output(self._tensor(self.packing.scales, _SCALES)).shape[1]
        order = group_of.long().argsort(stable=True)
        adjacent = torch.arange(self.shape[1]) // self._group(num_groups)
        if group_of.shape != (self.shape[1],) or not torch.equal(group_of.long()[order], adjacent):
            raise self._misfit(self.packing.group_of, group_of, f"{num_groups} groups of {self.shape[1]} inputs")
        return None if torch.equal(group_of.long(), adjacent) else order

    def matrix(self) -> PackedMatrix:
        """Raises InvalidCheckpoint for tensors that are missing or do not fit."""
        bits, packing = self.bits(), self.packing
        scales = self._by_output(self._tensor(packing.scales, _SCALES)).contiguous()
        num_groups = scales.shape[1]
        group = self._group(num_groups)
        if len(scales) != self.shape[0]:
            raise self._misfit(packing.scales, scales, f"weights of shape {list(self.shape)}")
        codes = self._unpacked(self._tensor(packing.codes, (torch.int32,)), bits, packing.packed[0], self.shape[1])
        zeros = self._zeros(bits, scales)
        order = self.order()
        if order is not None:
            codes = codes[:, order]
        return PackedMatrix(QuantizedMatrix(codes.contiguous(), scales, bits, group, zeros), order)

    def _zeros(self, bits: int, scales: torch.Tensor) -> torch.Tensor | None:
        """As `QuantizedMatrix.zeros`."""
        packing = self.packing
        if self.read(f"{self.module}.{packing.zeros}") is None:
            return None
        stored = self._tensor(packing.zeros, (torch.int32,))
        zeros = self._unpacked(stored, bits, packing.packed[1], scales.shape[1], packing.zero_offset)
        if zeros.shape != scales.shape:
            raise self._misfit(packing.zeros, stored, f"scales of shape {list(scales.shape)}")
        return zeros if zeros.any() else None

    def _unpacked(self, words: torch.Tensor, bits: int, dim: int, num_columns: int, offset: int = 0) -> torch.Tensor:
        """Numbers of `bits` [outputs, `num_columns`], less half of their range: int8."""
        places = self.packing.places or range(_WORD // bits)
        mask, half = (1 << bits) - 1, 1 << bits - 1
        numbers = [(((words >> bits * place) + offset & mask) - half).to(torch.int8) for place in places]
        unpacked = torch.stack(numbers, dim + 1).flatten(dim, dim + 1)
        return self._by_output(unpacked)[: self.shape[0], :num_columns].contiguous()

    def _by_output(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t() if self.packing.is_transposed else tensor

    def _size(self, dim: int) -> int:
        """Of the codes, were there one in each element."""
        return self.shape[1 - dim] if self.packing.is_transposed else self.shape[dim]

    def _group(self, num_groups: int) -> int:
        """Inputs of a group; of this layer alone it may be another size than config.json says."""
        size = self.shape[1]
        if self.group > 0 and -(-size // self.group) == num_groups:
            return self.group
        if not num_groups or size % num_groups:
            raise InvalidCheckpoint(f"{shown(self.module)} has {num_groups} groups of {size} inputs")
        return size // num_groups

    def _tensor(self, name: str, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
        tensor = self.read(f"{self.module}.{name}")
        if tensor is None:
            raise InvalidCheckpoint(f"{shown(self.module)} has no {name}")
        if tensor.dtype not in dtypes or tensor.dim() != len(self.shape):
            raise self._misfit(name, tensor, f"a matrix of {', '.join(map(str, dtypes))}")
        return tensor

    def _misfit(self, name: str, tensor: torch.Tensor, expected: str) -> InvalidCheckpoint:
        found = f"{tensor.dtype} of shape {list(tensor.shape)}"
        return InvalidCheckpoint(f"tensor {shown(f'{self.module}.{name}')} is {found}; it must fit {expected}")
