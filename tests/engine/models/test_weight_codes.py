"""Checkpoints with weights in codes of 8 bits compute what transformers computes with the values of the codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.config import EngineConfig, Quantization
from engine.errors import InvalidCheckpoint, UnsupportedModel
from engine.models import read_config
from tests.builders import lively_checkpoint
from tests.engine.models.test_parallel import computed
from tests.oracle import GreedyOracle, random_prompts

FP8, INT8 = torch.float8_e4m3fn, torch.int8
_LARGEST = {FP8: 448.0, torch.float8_e5m2: 57344.0, INT8: 127.0}
_PROJECTION = "model.layers.1.mlp.down_proj.weight"


def _groups(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, **weights}}}


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": _groups(**weights)}


BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 40], "activation_scheme": "dynamic"}
FORMS = {
    "blocks, as Qwen and DeepSeek publish them": (BLOCKS, FP8, (48, 40), "_scale_inv", torch.bfloat16),
    "one block": ({**BLOCKS, "weight_block_size": [999, 999]}, FP8, (999, 999), "_scale_inv", None),
    "one scale": ({"quant_method": "fp8", "activation_scheme": "static"}, FP8, None, "_scale", None),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, FP8, None, "_scale", None),
    "rows": ({"quant_method": "fbgemm_fp8"}, FP8, "rows", "_scale", None),
    "e5m2": (_compressed("naive-quantized", strategy="channel"), torch.float8_e5m2, "rows", "_scale", None),
    "int8 rows": (_compressed("int-quantized", strategy="channel"), INT8, "rows", "_scale", torch.bfloat16),
    "int8 groups": (_compressed("int-quantized", group_size=24), INT8, (1, 24), "_scale", torch.float16),
    "compressed blocks": (_compressed("float-quantized", block_structure=[16, 32]), FP8, (16, 32), "_scale", None),
}  # fmt: skip
"""quantization_config, dtype of the codes, what shares a scale (None: the matrix), its name's end, its dtype."""


def _write(folder: Path, config: object, tensors: dict[str, torch.Tensor]) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _checkpoints(tmp_path: Path, form: str, arch: str = "qwen3", **overrides: Any) -> tuple[Path, Path]:
    """A checkpoint in codes, and one in float32 with what they stand for."""
    config, dtype, shared, suffix, scale_dtype = FORMS[form]
    folder = lively_checkpoint(tmp_path / "codes", arch, **overrides)
    plain = Path(shutil.copytree(folder, tmp_path / "plain"))
    stored = load_file(folder / "model.safetensors")
    values = dict(stored)
    for name, weight in list(stored.items()):
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = weight.shape
        height, width = shared if isinstance(shared, tuple) else (1, columns) if shared else (rows, columns)
        of_row, of_column = torch.arange(rows) // height, torch.arange(columns) // width
        scales = torch.zeros(int(of_row[-1]) + 1, int(of_column[-1]) + 1)
        for row, column in ((row, column) for row in range(len(scales)) for column in range(scales.shape[1])):
            block = weight[of_row == row][:, of_column == column]
            scales[row, column] = block.abs().max() / _LARGEST[dtype] * 1.5  # so that the largest codes are reached
        scales = scales.to(scale_dtype or torch.float32)
        by_weight = scales.float()[of_row][:, of_column]
        codes = (weight / by_weight).clamp(-_LARGEST[dtype], _LARGEST[dtype])
        stored[name] = (codes.round() if dtype == INT8 else codes).to(dtype)
        stored[name + suffix] = scales.squeeze() if shared is None else scales
        stored[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.1)
        values[name] = stored[name].float() * by_weight
    stored["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    _write(folder, config, stored)
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return folder, plain


def _engine(folder: Path, quantization: Quantization = "none") -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", num_threads=1, quantization=quantization)


def check_greedy_answers(folder: Path, plain: Path) -> None:
    """Those of a checkpoint in codes are transformers' with `plain`, which has their values."""
    oracle = GreedyOracle(plain)
    prompts = random_prompts(3, longest=40, vocab_size=oracle.vocab_size)
    llm = LLM(str(folder), dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    answers = llm.generate([{"prompt_token_ids": one} for one in prompts], params)
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(prompt, answer.outputs[0].token_ids)


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_transformers_with_the_values(tmp_path: Path, form: str) -> None:
    folder, plain = _checkpoints(tmp_path, form)
    assert torch.equal(*[computed(_engine(one), 1, 1)[0] for one in (folder, plain)])
    check_greedy_answers(folder, plain)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_ranks_take_their_parts_of_the_values(
    tmp_path: Path, arch: str, quantization: Quantization, tensor: int, pipeline: int
) -> None:
    folder, plain = _checkpoints(tmp_path, "blocks, as Qwen and DeepSeek publish them", arch)
    expected = computed(_engine(plain, quantization), tensor, pipeline)
    for found, one in zip(computed(_engine(folder, quantization), tensor, pipeline), expected, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_scale_inv", None, f"tensor '{_PROJECTION}' is torch.float8_e4m3fn and has no '{_PROJECTION}_scale'"),
        ("_scale_inv", torch.ones(3, 3), f"tensor '{_PROJECTION}_scale_inv': scales of shape [3, 3] do not belong to"),
        ("_scale_inv", torch.ones(2, 2, dtype=torch.uint8), f"tensor '{_PROJECTION}_scale_inv' is torch.uint8; supp"),
        ("_zero_point", torch.ones(2, 2), f"does not use: '{_PROJECTION}_zero_point' of model.safetensors"),
        ("", torch.ones(96, dtype=INT8), f"tensor '{_PROJECTION}' of model.safetensors has shape [96]; config.json"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    folder, _ = _checkpoints(tmp_path, "blocks, as Qwen and DeepSeek publish them")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(_PROJECTION + name, None)
    if value is not None:
        tensors[_PROJECTION + name] = value
    _write(folder, BLOCKS, tensors)
    with pytest.raises(InvalidCheckpoint, match=re.escape(message)):
        computed(_engine(folder), 1, 1)


def test_codes_that_the_config_does_not_describe_are_refused(tmp_path: Path) -> None:
    folder, _ = _checkpoints(tmp_path, "one scale")
    fields = json.loads((folder / "config.json").read_text())
    del fields["quantization_config"]
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidCheckpoint, match=re.escape("is torch.float8_e4m3fn; supported: (torch.float32,")):
        computed(_engine(folder), 1, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "mxfp4"}, "quantization_config ('mxfp4') is not supported; supported: unquantized weights"),
        ({}, "quantization_config (None) is not supported"),
        ("fp8", "quantization_config ('fp8') is not supported"),
        ({"quant_method": ["fp8"]}, "quantization_config (['fp8']) is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "('modelopt NVFP4') is not supported"),
        ({"quant_method": "modelopt"}, "('modelopt') is not supported"),
        (_compressed("nvfp4-pack-quantized"), "('compressed-tensors nvfp4-pack-quantized') is not supported"),
        ({**_compressed("int-quantized"), "transform_config": {"a": 1}}, "with a transform_config') is not supported"),
        ({**_compressed("int-quantized"), "config_groups": {}}, "without config_groups') is not supported"),
        ({**_compressed("int-quantized"), "config_groups": 3}, "without config_groups') is not supported"),
        ({**_compressed("int-quantized"), "config_groups": {"a": 1}}, "num_bits is None; it must be an integer"),
        (_compressed("int-quantized", num_bits=4), "with 4 bits') is not supported"),
        (_compressed("int-quantized", symmetric=False), "with zero points or actorder') is not supported"),
        (_compressed("int-quantized", actorder="group"), "or actorder') is not supported"),
        (_compressed("int-quantized", group_size="x"), "group_size is 'x'; it must be an integer"),
        (_compressed("int-quantized", group_size=0), "with groups of 0') is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]; it must be two"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is [128, 0]; it must be two"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; it must be a list"),
    ],
)  # fmt: skip
def test_codes_of_other_kinds_are_refused_by_name(tmp_path: Path, config: object, message: str) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        read_config(tmp_path)


@pytest.mark.parametrize(("arch", "model_impl"), [("qwen3", "transformers"), ("gemma2", "auto")])
def test_the_transformers_backend_refuses_them(tmp_path: Path, arch: str, model_impl: str) -> None:
    folder = lively_checkpoint(tmp_path, arch)
    _write(folder, {"quant_method": "fp8"}, load_file(folder / "model.safetensors"))
    with pytest.raises(UnsupportedModel, match=r"a quantised checkpoint is not supported by the transformers backend$"):
        read_config(folder, model_impl)
