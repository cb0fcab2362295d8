"""Sources of a model's tensors: safetensors files, or random numbers. Never a pickle.

A source returns each tensor once, by name and expected shape, so that a missing, mis-shaped or unused tensor is named.
Tensors of files are mapped and not read until they are taken. What a model keeps is in memory of its own: a file that
is overwritten or truncated later changes nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.config import Quantization
from engine.errors import InvalidCheckpoint, shown
from engine.models.config import ExpertNames, ModelConfig, read_json
from engine.models.fused_experts import BLOCKS, EXPONENTS, Stored, mxfp4_matrix, single_experts
from engine.models.packed_codes import PackedLayer, PackedMatrix
from engine.models.quantized import BITS, QuantizedMatrix
from engine.models.weight_codes import OTHER_SCALES, SCALES, WeightCodes
from engine.partition import Part

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_READABLE = (torch.float32, torch.bfloat16, torch.float16)
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_MATRIX = 2
_MAX_NAMED = 5


class WeightSource(Protocol):
    """Returns each tensor of a model once."""

    def has(self, name: str) -> bool:
        """Whether a tensor that a model may lack is there."""

    def take(self, name: str, shape: tuple[int, ...], *, is_kept: bool = True) -> torch.Tensor:
        """The tensor called `name`, of this shape, on the source's device and of its dtype. Not `is_kept`: the caller
        copies it, and it may be a view of the file."""

    def take_quantized(self, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedMatrix:
        """The same, in codes: the checkpoint's own, where they have no more bits than `quantization` says, none as few
        as there are; otherwise new ones. A part has those of the whole."""
        return QuantizedMatrix.of(self.take(name, shape, is_kept=False), quantization)

    def keeps_codes(self, name: str, shape: tuple[int, int]) -> bool:
        """Whether the tensor called `name` is codes that are computed with although no quantization is asked for."""
        del name, shape
        return False

    def finish(self, *, ignored: tuple[str, ...] = (), elsewhere: tuple[str, ...] = ()) -> None:
        """Raises InvalidCheckpoint if tensors were not taken; names ending in one of `ignored`, or beginning with one
        of `elsewhere`, may be left."""


class SafetensorsWeights(WeightSource):
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names, of a checkpoint folder. Experts of
    a layer in one tensor have the names of single ones."""

    def __init__(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        codes: WeightCodes | None = None,
        experts: ExpertNames | None = None,
    ) -> None:
        """`codes`: how codes have their scales; None where there are none, or MXFP4's. `experts`: whose form a tensor
        of all experts has."""
        self._dtype = dtype
        self._device = device
        self._codes = codes
        self._packing = None if codes is None else codes.packing
        self._stored: dict[str, Stored] = {}
        self._files: dict[str, Any] = {}  # untyped handles of safetensors
        folder = Path(folder)
        for file_name in _shards(folder):
            self._files[file_name] = open_tensors(folder / file_name)
            for name in self._files[file_name].keys():  # noqa: SIM118 - a handle is not a dict
                self._stored |= single_experts(self._files[file_name], Stored(file_name, name), experts)

    def has(self, name: str) -> bool:
        return name in self._stored or self._is_packed(name)

    def take(self, name: str, shape: tuple[int, ...], *, is_kept: bool = True) -> torch.Tensor:
        """See `WeightSource.take`. Raises InvalidCheckpoint, naming tensor and file."""
        if len(shape) == _MATRIX and self._is_packed(name):
            return self._take_packed(name, shape).values().to(device=self._device, dtype=self._dtype)
        if self._is_mxfp4(name):
            return self._take_mxfp4(name, shape).values().to(device=self._device, dtype=self._dtype)
        stored = self._stored.pop(name, None)
        if stored is None:
            raise InvalidCheckpoint(f"tensor {shown(name)} is missing from the checkpoint")
        file_name = stored.file_name
        tensor = self._read(name, stored)
        if tuple(tensor.shape) != shape:
            found = list(tensor.shape)
            raise InvalidCheckpoint(
                f"tensor {shown(name)} of {file_name} has shape {found}; config.json requires {list(shape)}"
            )
        if self._codes is not None and tensor.dtype in _CODES and tensor.dim() == _MATRIX:
            tensor = self._values(name, tensor)
        if tensor.dtype not in _READABLE:
            raise InvalidCheckpoint(f"tensor {shown(name)} of {file_name} is {tensor.dtype}; supported: {_READABLE}")
        converted = tensor.to(device=self._device, dtype=self._dtype)
        return converted.clone() if is_kept and converted is tensor else converted

    def take_quantized(self, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedMatrix:
        """See `WeightSource.take_quantized`."""
        if self._is_mxfp4(name):
            return self._take_mxfp4(name, shape)
        if not self._is_packed(name):
            return super().take_quantized(name, shape, quantization)
        packed = self._take_packed(name, shape)
        is_kept = packed.order is None and packed.matrix.bits <= BITS[quantization]
        return packed.matrix if is_kept else QuantizedMatrix.of(packed.values(), quantization)

    def keeps_codes(self, name: str, shape: tuple[int, int]) -> bool:
        """See `WeightSource.keeps_codes`. Codes are not kept where groups are not of adjacent inputs."""
        if self._device.type != "cpu" or not self._is_packed(name):
            return self._device.type == "cpu" and self._is_mxfp4(name)
        layer = self._packed_layer(name, shape)
        return layer.bits() <= BITS["none"] and layer.order() is None

    def _is_packed(self, name: str) -> bool:
        return self._packing is not None and f"{_layer(name)}.{self._packing.codes}" in self._stored

    def _packed_layer(self, name: str, shape: tuple[int, ...]) -> PackedLayer:
        assert self._codes is not None
        assert self._packing is not None
        rows, columns = shape

        def read(name: str) -> torch.Tensor | None:
            return self._read(name, self._stored[name]) if name in self._stored else None

        return PackedLayer(_layer(name), (rows, columns), self._packing, self._codes.group, read)

    def _take_packed(self, name: str, shape: tuple[int, ...]) -> PackedMatrix:
        layer = self._packed_layer(name, shape)
        matrix = layer.matrix()
        for taken in layer.names():
            self._stored.pop(taken, None)
        return matrix

    def _is_mxfp4(self, name: str) -> bool:
        return _layer(name) + BLOCKS in self._stored

    def _take_mxfp4(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix:
        layer = _layer(name)
        blocks, exponents = self._stored.pop(layer + BLOCKS), self._stored.pop(layer + EXPONENTS, None)
        if exponents is None:
            missing = blocks.name.removesuffix("_blocks") + "_scales"  # of all experts, as in the file
            raise InvalidCheckpoint(f"tensor {shown(missing)} is missing from the checkpoint")
        return mxfp4_matrix(layer, shape, *(self._read(one.name, one) for one in (blocks, exponents)))

    def _read(self, name: str, stored: Stored) -> torch.Tensor:
        try:
            return stored.read(self._files[stored.file_name])
        except SafetensorError as error:
            raise InvalidCheckpoint(f"tensor {shown(name)} of {stored.file_name} cannot be read: {error}") from error

    def _values(self, name: str, codes: torch.Tensor) -> torch.Tensor:
        """What the codes of a matrix stand for: float32."""
        assert self._codes is not None
        found = next((name + suffix for suffix in SCALES if name + suffix in self._stored), None)
        if found is None:
            raise InvalidCheckpoint(f"tensor {shown(name)} is {codes.dtype} and has no {shown(name + SCALES[-1])}")
        scales = self._read(found, self._stored.pop(found))
        if scales.dtype not in _READABLE:
            raise InvalidCheckpoint(f"tensor {shown(found)} is {scales.dtype}; supported: {_READABLE}")
        try:
            return self._codes.values(codes, scales)
        except InvalidCheckpoint as error:
            raise InvalidCheckpoint(f"tensor {shown(found)}: {error}") from None

    def finish(self, *, ignored: tuple[str, ...] = (), elsewhere: tuple[str, ...] = ()) -> None:
        if self._codes is not None:
            ignored += OTHER_SCALES
        left = sorted(name for name in self._stored if not name.endswith(ignored) and not name.startswith(elsewhere))
        if self._packing is not None:
            left = [name for name in left if not self._is_zero_bias(name)]
        if left:
            named = shortened([f"{shown(name)} of {self._stored[name].file_name}" for name in left])
            raise InvalidCheckpoint(f"the checkpoint contains tensors that the architecture does not use: {named}")

    def _is_zero_bias(self, name: str) -> bool:
        """Tools that pack codes write one for layers that have none."""
        return name.endswith(".bias") and not self._read(name, self._stored[name]).any()


class DummyWeights(WeightSource):
    """Random weights with varied output: matrices of std 2/sqrt(fan_in), embeddings 1, biases 0.1, norms 1.

    A tensor depends on (seed, name, shape) alone, and not on the order of loading.
    """

    def __init__(self, seed: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device

    def has(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...], *, is_kept: bool = True) -> torch.Tensor:
        del is_kept
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        std = 1.0 if "embed" in name else 0.1 if len(shape) == 1 else 2.0 / shape[-1] ** 0.5
        digest = hashlib.sha256(f"{self._seed}:{name}:{shape}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        # Uniform numbers are generated several times faster than normal ones.
        limit = std * 3**0.5
        numbers = torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(-limit, limit, generator=generator)
        return numbers.to(device=self._device, dtype=self._dtype)

    def finish(self, *, ignored: tuple[str, ...] = (), elsewhere: tuple[str, ...] = ()) -> None:
        """See `WeightSource.finish`."""


class PartWeights(WeightSource):
    """The tensors of another source, cut to one rank's part. Names and shapes are those of the whole model."""

    def __init__(self, source: WeightSource, part: Part, config: ModelConfig) -> None:
        self._source = source
        self._part = part
        self._config = config

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def take(self, name: str, shape: tuple[int, ...], *, is_kept: bool = True) -> torch.Tensor:
        if cut := cut_of(self._part, self._config, name, shape):
            return self._source.take(name, shape, is_kept=False).narrow(*cut).clone()  # so that the whole can be freed
        tensor = self._source.take(name, shape, is_kept=is_kept)
        if _module(name) in _INPUTS and self._part.tensor_rank:  # the bias of a sum over the ranks: the first adds it
            return torch.zeros_like(tensor)
        return tensor

    def take_quantized(self, name: str, shape: tuple[int, int], quantization: Quantization) -> QuantizedMatrix:
        """See `WeightSource.take_quantized`."""
        matrix = self._source.take_quantized(name, shape, quantization)
        cut = cut_of(self._part, self._config, name, shape)
        return matrix.narrow(*cut) if cut else matrix

    def keeps_codes(self, name: str, shape: tuple[int, int]) -> bool:
        """See `WeightSource.keeps_codes`."""
        return self._source.keeps_codes(name, shape)

    def finish(self, *, ignored: tuple[str, ...] = (), elsewhere: tuple[str, ...] = ()) -> None:
        """See `WeightSource.finish`. Other stages take their tensors."""
        others = of_other_stages(self._part, self._config.num_layers)
        self._source.finish(ignored=ignored, elsewhere=(*elsewhere, *others))


def of_other_stages(part: Part, num_layers: int) -> list[str]:
    """Beginnings of the names of their tensors."""
    others = [f"model.layers.{layer}." for layer in range(num_layers) if layer not in part.layers]
    others += () if part.is_first_stage else ("model.embed_tokens.",)
    others += () if part.is_last_stage else ("model.norm.", "lm_head.")
    return others


def cut_of(part: Part, config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Dimension, start and length of the part of the tensor called `name`, whole of this shape; None: all of it."""
    module = _module(name)
    if module in _KV_HEADS:
        heads, head_dim = part.kv_heads, config.head_dim
        return 0, heads.start * head_dim, len(heads) * head_dim
    if module in _OUTPUTS or name.endswith(_BY_HEAD):
        share = part.share(shape[0])
        return 0, share.start, len(share)
    if module in _INPUTS and name.endswith(".weight"):
        share = part.share(shape[1])
        return 1, share.start, len(share)
    return None


_KV_HEADS = ("k_proj", "v_proj")
_OUTPUTS = ("q_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head")
"""Layers whose outputs are divided among the ranks."""
_BY_HEAD = ".sinks"
"""A number of each query head."""
_INPUTS = ("o_proj", "down_proj", "w2")
"""Layers whose inputs are, so that their outputs are summed."""


def _layer(name: str) -> str:
    """`model.layers.0.self_attn.q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.rpartition(".")[0]


def _module(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.split(".")[-2]


def shortened(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def check_files(folder: Path) -> None:
    """Raises InvalidCheckpoint if a file of the checkpoint is missing or incomplete. Reads headers alone."""
    for name in _shards(folder):
        open_tensors(folder / name)


def _shards(folder: Path) -> list[str]:
    if (folder / _SINGLE).exists():
        return [_SINGLE]
    if not (folder / _INDEX).exists():
        raise InvalidCheckpoint(f"the checkpoint has neither {_SINGLE} nor {_INDEX}; other formats are not supported")
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise InvalidCheckpoint(f"{_INDEX} has no weight_map from tensors to files")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise InvalidCheckpoint(f"{_INDEX} names {shown(name)}, which is not a file of the checkpoint's folder")
        if not (folder / name).exists():
            raise InvalidCheckpoint(f"shard {name} that {_INDEX} names is missing")
    return names


def open_tensors(path: Path) -> Any:
    """A handle of a safetensors file, untyped. Raises InvalidCheckpoint."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(f"{path.name} is not a complete safetensors file: {error}") from error
