"""Checkpoints with several codes in one int32 compute what transformers computes with the values of the codes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, Quantization
from engine.errors import InvalidCheckpoint, UnsupportedModel
from engine.models import load_model, read_config
from engine.models.quantized import QuantizedLinear
from engine.models.weight_codes import read_codes
from engine.models.weights import SafetensorsWeights
from tests.builders import lively_checkpoint
from tests.engine.models.test_parallel import computed
from tests.engine.models.test_weight_codes import check_greedy_answers

_DOWN = "model.layers.1.mlp.down_proj"
_WORD = 32
_I32 = torch.int32
_Array = np.ndarray[Any, Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns in an int32 of AWQ, from the lowest bits."""


def _packed(numbers: _Array, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Numbers of so many bits, as many adjacent ones of dimension `dim` in an int32 as it holds."""
    rows = np.moveaxis(numbers, dim, 0)
    size = _WORD // bits
    words = np.zeros((-(-len(rows) // size), *rows.shape[1:]), np.int64)
    for word in range(len(words)):
        for place in range(size):
            index = word * size + (order[place] if order else place)
            if index < len(rows):
                words[word] |= rows[index].astype(np.int64) << bits * place
    return torch.from_numpy(np.moveaxis(words, 0, dim).astype(np.uint32).view(np.int32).copy())


Tensors = dict[str, torch.Tensor]


def _gptq(codes: _Array, scales: torch.Tensor, zeros: _Array, groups: _Array, bits: int) -> Tensors:
    stored = (zeros - 1) % (1 << bits)
    return {
        "qweight": _packed(codes.T, bits, 0),
        "scales": scales.T.contiguous(),
        "qzeros": _packed(stored.T, bits, 1),
        "g_idx": torch.from_numpy(groups).int(),
        "bias": torch.zeros(len(codes)),  # as AutoGPTQ writes it
    }


def _gptq_v2(codes: _Array, scales: torch.Tensor, zeros: _Array, groups: _Array, bits: int) -> Tensors:
    return _gptq(codes, scales, zeros + 1, groups, bits)


def _awq(codes: _Array, scales: torch.Tensor, zeros: _Array, groups: _Array, bits: int) -> Tensors:
    del groups
    return {
        "qweight": _packed(codes.T, bits, 1, AWQ_ORDER),
        "scales": scales.T.contiguous(),
        "qzeros": _packed(zeros.T, bits, 1, AWQ_ORDER),
    }


def _compressed(codes: _Array, scales: torch.Tensor, zeros: _Array, groups: _Array, bits: int) -> Tensors:
    tensors = {
        "weight_packed": _packed(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    if (zeros != 1 << bits - 1).any():
        tensors["weight_zero_point"] = _packed(zeros, bits, 0)
    if (np.diff(groups) < 0).any():
        tensors["weight_g_idx"] = torch.from_numpy(groups).int()
    return tensors


def _pack_quantized(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", **weights}}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
Writer = Callable[[_Array, torch.Tensor, _Array, _Array, int], Tensors]
COMPRESSED = _pack_quantized(group_size=32)
F16, BF16 = torch.float16, torch.bfloat16
FORMS: dict[str, tuple[dict[str, Any], Writer, int, int, bool, bool, torch.dtype]] = {
    "gptq": (GPTQ, _gptq, 4, 32, True, False, F16),
    "gptq with zero points": ({**GPTQ, "sym": False}, _gptq, 4, 16, False, False, F16),
    "gptq of 8 bits": ({**GPTQ, "bits": 8}, _gptq, 8, 32, True, False, F16),
    "gptq of one group": ({**GPTQ, "group_size": -1}, _gptq, 4, 0, True, False, F16),
    "gptq in another order": ({**GPTQ, "desc_act": True}, _gptq, 4, 32, False, True, F16),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, _gptq_v2, 4, 32, False, False, F16),
    "awq": (AWQ, _awq, 4, 32, False, False, F16),
    "pack-quantized": (COMPRESSED, _compressed, 4, 32, True, False, BF16),
    "pack-quantized rows": (_pack_quantized(strategy="channel"), _compressed, 4, 0, True, False, F16),
    "pack-quantized with zero points": (COMPRESSED, _compressed, 4, 16, False, False, F16),
    "pack-quantized of 8 bits": (_pack_quantized(num_bits=8), _compressed, 8, 32, False, False, F16),
    "pack-quantized in another order": (_pack_quantized(actorder="group"), _compressed, 4, 32, True, True, BF16),
}
"""quantization_config, what writes a layer; bits, group (0: all inputs), whether zero points are the middle, whether
groups are of inputs that are not adjacent; type of the scales."""
KEPT = [form for form, (_, _, bits, _, _, is_ordered, _) in FORMS.items() if bits == 4 and not is_ordered]


def _checkpoints(tmp_path: Path, form: str, arch: str = "qwen3", **overrides: Any) -> tuple[Path, Path]:
    """A checkpoint in codes, and one in float32 with what they stand for. One layer of each is no codes."""
    config, write, bits, group, is_symmetric, is_ordered, scale_dtype = FORMS[form]
    folder = lively_checkpoint(tmp_path / "codes", arch, **overrides)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    stored = load_file(folder / "model.safetensors")
    values = dict(stored)
    random = np.random.default_rng(1)
    for name, weight in list(stored.items()):
        if not name.endswith("_proj.weight") or "layers.0.self_attn.v_proj" in name:
            continue
        num_rows, num_columns = weight.shape
        groups: Any = np.arange(num_columns) // (group or num_columns)
        if is_ordered:
            random.shuffle(groups)
        zeros: Any = np.full((num_rows, groups.max() + 1), 1 << bits - 1)
        if not is_symmetric:
            zeros = random.integers(0, 1 << bits, zeros.shape)  # 0 included
        largest = torch.stack([weight[:, groups == one].abs().amax(1) for one in range(zeros.shape[1])], 1)
        scales = (largest / (1 << bits - 1)).to(scale_dtype)
        by_weight, zero = scales.float()[:, groups], zeros[:, groups]
        codes = (np.round((weight.float() / by_weight).numpy()) + zero).clip(0, (1 << bits) - 1).astype(np.int64)
        del stored[name]
        module = name.removesuffix(".weight")
        tensors = write(codes, scales, zeros, groups, bits)
        stored |= {f"{module}.{part}": tensor for part, tensor in tensors.items()}
        values[name] = torch.from_numpy(codes - zero).float() * by_weight
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return folder, plain


def _engine(folder: Path, quantization: Quantization = "none") -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", num_threads=1, quantization=quantization)


def _layers(folder: Path, quantization: Quantization = "none") -> list[Any]:
    """Of each decoder layer the MLP's second product."""
    model: Any = load_model(read_config(folder), _engine(folder, quantization))
    return [layer.mlp._down for layer in model._layers]


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_transformers_with_the_values(tmp_path: Path, form: str) -> None:
    """Codes of 4 bits stay codes."""
    folder, plain = _checkpoints(tmp_path, form)
    found, expected = (computed(_engine(one), 1, 1)[0] for one in (folder, plain))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert {isinstance(layer, QuantizedLinear) for layer in _layers(folder)} == {form in KEPT}
    check_greedy_answers(folder, plain)


@pytest.mark.parametrize(
    ("form", "bits"), [("gptq with zero points", 4), ("gptq of 8 bits", 8), ("gptq in another order", 0)]
)
def test_int8_keeps_the_codes_and_rounds_what_is_no_codes(tmp_path: Path, form: str, bits: int) -> None:
    """`bits`: 0 where values are rounded."""
    folder, plain = _checkpoints(tmp_path, form)
    layer = _layers(folder, "int8")[0]
    assert layer._codes.nbytes == layer.out_features * layer.in_features * (bits or 8) // 8
    found, expected = (computed(_engine(one, "int8"), 1, 1)[0] for one in (folder, plain))
    assert torch.equal(found, expected) == (bits == 0)


def test_codes_become_values_on_a_gpu(tmp_path: Path) -> None:
    folder, plain = _checkpoints(tmp_path, "awq")
    weight, shape = f"{_DOWN}.weight", (64, 160)
    for device, is_kept in (("cpu", True), ("meta", False)):
        weights = SafetensorsWeights(folder, dtype=BF16, device=torch.device(device), codes=read_codes(folder))
        assert weights.keeps_codes(weight, shape) is is_kept
        found = weights.take(weight, shape)
        assert (found.shape, found.dtype, found.device.type) == (shape, BF16, device)
        if is_kept:
            assert torch.equal(found, load_file(plain / "model.safetensors")[weight].bfloat16())


@pytest.mark.parametrize(
    ("form", "arch", "tensor", "pipeline"),
    [
        ("gptq with zero points", "qwen3", 2, 2),
        ("awq", "qwen3_moe", 2, 1),
        ("pack-quantized rows", "qwen3", 2, 1),
        ("gptq in another order", "qwen3_moe", 2, 1),
    ],
)
def test_ranks_take_their_parts_of_the_codes(tmp_path: Path, form: str, arch: str, tensor: int, pipeline: int) -> None:
    folder, _ = _checkpoints(tmp_path, form, arch)
    expected, found = computed(_engine(folder), 1, 1), computed(_engine(folder), tensor, pipeline)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qweight", torch.ones(3, 3), f"tensor '{_DOWN}.qweight' is torch.float32 of shape [3, 3]; it must fit a"),
        ("qweight", torch.ones(3, 3, dtype=_I32), "int32 of shape [3, 3]; it must fit weights of shape [64, 160]"),
        ("scales", None, f"'{_DOWN}' has no scales"),
        ("scales", torch.ones(5, 63), f"'{_DOWN}.scales' is torch.float32 of shape [63, 5]; it must fit weights of"),
        ("scales", torch.ones(7, 64), f"'{_DOWN}' has 7 groups of 160 inputs"),
        ("scales", torch.ones(0, 64), f"'{_DOWN}' has 0 groups of 160 inputs"),
        ("qzeros", torch.ones(5, 3, dtype=_I32), f"'{_DOWN}.qzeros' is torch.int32 of shape [5, 3]; it must fit"),
        ("qzeros", torch.ones(5, 8), f"'{_DOWN}.qzeros' is torch.float32 of shape [5, 8]; it must fit a matrix of"),
        ("qzeros", torch.ones(40, dtype=_I32), f"'{_DOWN}.qzeros' is torch.int32 of shape [40]; it must fit a"),
        ("g_idx", torch.zeros(160, dtype=_I32), f"'{_DOWN}.g_idx' is torch.int32 of shape [160]; it must fit 5"),
        ("g_idx", torch.zeros(5, dtype=_I32), f"'{_DOWN}.g_idx' is torch.int32 of shape [5]; it must fit 5 groups"),
        ("bias", torch.ones(64), f"does not use: '{_DOWN}.bias' of model.safetensors"),
        ("weight", torch.ones(64, 160), f"does not use: '{_DOWN}.weight' of model.safetensors"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    folder, _ = _checkpoints(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(f"{_DOWN}.{name}", None)
    if value is not None:
        tensors[f"{_DOWN}.{name}"] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidCheckpoint, match=re.escape(message)):
        computed(_engine(folder), 1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": 3}, "quantization_config ('gptq with 3 bits') is not supported; supported: unquantized"),
        ({**GPTQ, "bits": "4"}, "quantization_config.bits is '4'; it must be an integer"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "('gptq marlin') is not supported"),
        ({**AWQ, "version": "gemv"}, "('awq gemv') is not supported"),
        ({**AWQ, "group_size": 0}, "('awq with groups of 0') is not supported"),
        ({**AWQ, "bits": 8}, "('awq with 8 bits') is not supported"),
        (_pack_quantized(num_bits=2), "('compressed-tensors pack-quantized with 2 bits') is not supported"),
    ],
)  # fmt: skip
def test_codes_of_other_kinds_are_refused_by_name(tmp_path: Path, config: object, message: str) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        read_config(tmp_path)
