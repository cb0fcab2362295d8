"""Weights that a checkpoint has as codes: what config.json says of them, and the values of FP8 and int8.

A weight is its code times a scale: that of its matrix, of its row, or of its block of rows and columns. The values are
computed as the weights are loaded and are kept in the engine's dtype; so are activations and KV, whose scales in the
checkpoint are not needed. Codes of 4 or 8 bits that share an int32 are `engine.models.packed_codes`. Free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InvalidCheckpoint, UnsupportedModel, shown
from engine.models.config import ConfigFields, read_json

if TYPE_CHECKING:
    import torch

SCALES = ("_scale_inv", "_scale")
"""What follows a matrix's name in that of its scales, which multiply it in both cases."""
OTHER_SCALES = (".input_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales of activations and KV."""
_FORMATS = {
    "fp8": (None, (None,)),
    "fbgemm_fp8": (None, (None,)),
    "modelopt": ("quant_algo", ("FP8",)),
    "gptq": ("checkpoint_format", (None, "gptq", "gptq_v2")),
    "awq": ("version", ("gemm", "GEMM")),
    "compressed-tensors": ("format", ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")),
}
"""By quant_method: the field that says how weights are stored, and its values that can be read."""
_SUPPORTED = (
    "unquantized weights; codes of 8 bits: fp8, fbgemm_fp8, modelopt FP8, compressed-tensors float-quantized, "
    "int-quantized and naive-quantized; codes of 4 or 8 bits: gptq, awq gemm, compressed-tensors pack-quantized; "
    "mxfp4 of gpt-oss"
)
_MXFP4_DECODERS = ["GptOssForCausalLM"]
_BITS = 8
PACKED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where a format has the codes of a linear layer, and in which order in their int32."""

    codes: str
    """Name of the tensor in the layer; so are the next three."""
    scales: str
    zeros: str
    """Zero points, in codes; a format may lack them."""
    group_of: str
    """Group of each input, where groups are not those of adjacent inputs; a format may lack them."""
    packed: tuple[int, int]
    """Dimension of which several codes, and several zero points, share an int32."""
    is_transposed: bool
    """Tensors are [inputs, outputs]."""
    places: tuple[int, ...] = ()
    """Place in the int32 of each code, from the lowest bits; (): in order."""
    zero_offset: int = 0
    """What is missing in stored zero points."""


_COMPRESSED = Packing("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", (1, 0), is_transposed=False)
_AWQ = Packing("qweight", "scales", "qzeros", "g_idx", (1, 1), is_transposed=True, places=(0, 4, 1, 5, 2, 6, 3, 7))
_GPTQ = Packing("qweight", "scales", "qzeros", "g_idx", (0, 1), is_transposed=True)


@dataclass(frozen=True, slots=True)
class WeightCodes:
    """How the codes of a checkpoint have their scales."""

    block: tuple[int, int] | None = None
    """Rows and columns that share one; None: a row or the matrix does."""
    packing: Packing | None = None
    """None: each code is an element of a tensor."""
    group: int = -1
    """Adjacent inputs of an output that share a scale where codes are packed; -1: all."""

    def values(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """codes [rows, columns], scales [], [1], [rows], [rows, 1] or, of blocks, [rows / block, columns / block],
        rounded up -> float32 [rows, columns]. Raises InvalidCheckpoint for scales of another shape."""
        rows, columns = codes.shape
        shape = tuple(scales.shape)
        values = codes.float()
        if self.block is not None and shape == (-(-rows // self.block[0]), -(-columns // self.block[1])):
            by_row = scales.float().repeat_interleave(self.block[0], dim=0)[:rows]
            return values.mul_(by_row.repeat_interleave(self.block[1], dim=1)[:, :columns])
        if shape in ((), (1,), (1, 1), (rows,), (rows, 1)):
            return values.mul_(scales.float().reshape(-1, 1))
        raise InvalidCheckpoint(f"scales of shape {list(shape)} do not belong to weights of shape {[rows, columns]}")


def read_codes(folder: Path) -> WeightCodes | None:
    """What `quantization_config` of the checkpoint says; None: the weights are no codes. Raises UnsupportedModel for
    other codes, InvalidCheckpoint for a config.json that cannot be read."""
    raw = read_json(folder / "config.json").get("quantization_config")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise _unsupported(raw)
    quantization = ConfigFields(raw, "quantization_config.")
    method = quantization.raw("quant_method")
    field, supported = _FORMATS.get(str(method), ("", ()))
    stored = quantization.raw(field) if field else None
    if stored not in supported:
        raise _unsupported(method if stored is None else f"{method} {stored}")
    if quantization.raw("transform_config"):
        raise _unsupported(f"{method} with a transform_config")
    if method in ("gptq", "awq"):
        _check_bits(method, quantization.integer("bits"), PACKED_BITS if method == "gptq" else PACKED_BITS[:1])
        offset = 0 if stored == "gptq_v2" else 1
        packing = _AWQ if method == "awq" else replace(_GPTQ, zero_offset=offset)
        return WeightCodes(packing=packing, group=_group(method, quantization))
    if method != "compressed-tensors":
        return WeightCodes(_block(quantization, "weight_block_size"))
    of_group = _of_packed_group if stored == "pack-quantized" else _of_group
    groups = quantization.raw("config_groups")
    found = {of_group(group) for group in groups.values()} if isinstance(groups, dict) else set()
    if len(found) != 1:
        raise _unsupported(f"{method} with several config_groups" if found else f"{method} without config_groups")
    return found.pop()


def are_mxfp4(folder: Path) -> bool:
    """Whether the codes are MXFP4 of gpt-oss's experts. The native decoder keeps them (`engine.models.fused_experts`);
    transformers makes values of them as it loads them."""
    raw = read_json(folder / "config.json")
    codes = raw.get("quantization_config")
    is_mxfp4 = isinstance(codes, dict) and codes.get("quant_method") == "mxfp4"
    return is_mxfp4 and raw.get("architectures") == _MXFP4_DECODERS


def _of_group(group: object) -> WeightCodes:
    weights = _weights_of(group)
    _check_bits("compressed-tensors", weights.integer("num_bits"), (_BITS,))
    if not weights.flag("symmetric", True) or weights.raw("actorder"):
        raise _unsupported("compressed-tensors with zero points or actorder")
    if (size := _group("compressed-tensors", weights)) > 0:
        return WeightCodes((1, size))
    return WeightCodes(_block(weights, "block_structure"))


def _of_packed_group(group: object) -> WeightCodes:
    weights = _weights_of(group)
    _check_bits("compressed-tensors pack-quantized", weights.integer("num_bits"), PACKED_BITS)
    return WeightCodes(packing=_COMPRESSED, group=_group("compressed-tensors", weights))


def _weights_of(group: object) -> ConfigFields:
    raw = group.get("weights") if isinstance(group, dict) else None
    return ConfigFields(raw if isinstance(raw, dict) else {}, "quantization_config.config_groups.*.weights.")


def _group(method: object, fields: ConfigFields) -> int:
    """As `WeightCodes.group`."""
    group = -1 if fields.raw("group_size") is None else fields.integer("group_size")
    if group < 1 and group != -1:
        raise _unsupported(f"{method} with groups of {group}")
    return group


def _check_bits(method: object, bits: int, supported: tuple[int, ...]) -> None:
    if bits not in supported:
        raise _unsupported(f"{method} with {bits} bits")


def _block(fields: ConfigFields, name: str) -> tuple[int, int] | None:
    if not (sizes := fields.items(name)):
        return None
    if [type(size) for size in sizes] != [int, int] or min(sizes) < 1:
        raise UnsupportedModel(f"config.json: {name} is {shown(sizes)}; it must be two integers from 1")
    rows, columns = sizes
    return rows, columns


def _unsupported(what: object) -> UnsupportedModel:
    return UnsupportedModel(f"quantization_config ({shown(what)}) is not supported; supported: {_SUPPORTED}")
