"""Other forms of the same weights: what libraries write beside `save_pretrained`'s own. All compute the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, Quantization
from engine.errors import InvalidCheckpoint
from tests.builders import lively_checkpoint, lively_model
from tests.engine.models.test_parallel import computed
from tests.oracle import GreedyOracle

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
RANKS = [(1, 1), (2, 1), (1, 3), (2, 2)]
"""Tensor and pipeline ranks."""


def _engine(folder: Path, quantization: Quantization = "none") -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", num_threads=1, quantization=quantization)


def _assert_same(folder: Path, other: Path, tensor: int, pipeline: int, quantization: Quantization = "none") -> None:
    expected = computed(_engine(folder, quantization), tensor, pipeline)
    for found, one in zip(computed(_engine(other, quantization), tensor, pipeline), expected, strict=True):
        assert torch.equal(found, one)


def _assert_transformers_reads(folder: Path, other: Path) -> None:
    """The form is one that transformers loads as the same model, or a test with it would prove little."""
    prompt, output = list(range(40, 64)), [5, 6]
    oracles = [GreedyOracle(one) for one in (folder, other)]
    one, same = (oracle.logits(prompt, output) for oracle in oracles)
    torch.testing.assert_close(one, same, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tensor", "pipeline"), RANKS)
def test_a_tied_model_may_have_its_output_layer_alone(tmp_path: Path, tensor: int, pipeline: int) -> None:
    """`safetensors.torch.save_model` keeps the alphabetically first name of a shared tensor."""
    folder, other = (lively_checkpoint(tmp_path / name, "qwen3") for name in ("whole", "head"))
    save_model(AutoModelForCausalLM.from_pretrained(folder), str(other / "model.safetensors"))
    assert [name for name in load_file(other / "model.safetensors") if name in (_EMBEDDING, _HEAD)] == [_HEAD]
    _assert_transformers_reads(folder, other)
    _assert_same(folder, other, tensor, pipeline)


def test_a_model_that_is_not_tied_needs_its_embedding(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "qwen3", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors[_EMBEDDING]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=re.escape(f"'{_EMBEDDING}' is missing")):
        computed(_engine(folder), 1, 1)


def _with_fused_experts(folder: Path, arch: str) -> Path:
    """The tensors of transformers' own module, all experts of a layer in one."""
    lively_checkpoint(folder, arch)
    tensors = {name: tensor.contiguous() for name, tensor in lively_model(arch).state_dict().items()}
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("tensor", "pipeline"), RANKS)
@pytest.mark.parametrize(("arch", "quantization"), [("qwen3_moe", "none"), ("mixtral", "none"), ("mixtral", "int8")])
def test_experts_of_a_layer_may_be_one_tensor(
    tmp_path: Path, arch: str, quantization: Quantization, tensor: int, pipeline: int
) -> None:
    folder, other = lively_checkpoint(tmp_path / "each", arch), _with_fused_experts(tmp_path / "fused", arch)
    _assert_transformers_reads(folder, other)
    _assert_same(folder, other, tensor, pipeline, quantization)


@pytest.mark.parametrize("tensor", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fused: fused[:-1], r"'model.layers.0.mlp.experts\.7\.\w+_proj\.weight' is missing"),
        (lambda fused: torch.cat([fused, fused[:1]]), r"does not use: 'model.layers.0.mlp.experts\.8\.\w+\.weight'"),
        (lambda fused: fused[:, :-1], r"'model.layers.0.mlp.experts\.0\.\w+\.weight' of .* has shape"),
        (lambda fused: fused[0], r"'model.layers.0.mlp.experts\.0\.\w+_proj\.weight' is missing"),
    ],
)  # fmt: skip
def test_fused_experts_of_another_number_or_size_are_named(
    tmp_path: Path, tensor: str, change: object, message: str
) -> None:
    folder = _with_fused_experts(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{tensor}"
    tensors[name] = change(tensors[name]).contiguous()  # type: ignore[operator]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InvalidCheckpoint, match=message):
        computed(_engine(folder), 1, 1)
