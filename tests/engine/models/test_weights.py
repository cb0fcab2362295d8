"""Complete checkpoints load, sharded or not; broken ones are rejected with the name of the broken part."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.errors import InvalidCheckpoint
from engine.models import load_model
from engine.models.config import ModelConfig
from engine.models.linear import PackedLinear, make_linear
from engine.models.llama import LlamaModel
from engine.models.weights import DummyWeights, PartWeights, SafetensorsWeights
from engine.partition import Parallelism
from tests.builders import lively_checkpoint
from tests.engine.attention.paged_step import paged_step

CPU = torch.device("cpu")
PROMPT = torch.arange(40, 64)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _load(folder: Path, **options: Any) -> LlamaModel:
    model = load_model(ModelConfig.from_folder(folder), EngineConfig(model=str(folder), dtype="float32", **options))
    assert isinstance(model, LlamaModel)
    return model


def _logits(model: LlamaModel) -> torch.Tensor:
    metadata, positions, num_blocks = paged_step([(len(PROMPT), len(PROMPT))], block_size=16)
    page = model.config.kv_layout(dtype="float32", block_size=16).page_shape
    hidden = model.forward(PROMPT, positions, torch.zeros(num_blocks, *page), metadata)
    return model.compute_logits(hidden)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return lively_checkpoint(tmp_path / "model", "qwen2", num_hidden_layers=2)


def _rewrite(checkpoint: Path, change: Any) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def test_shards_and_a_single_file_are_the_same_model(tmp_path: Path, checkpoint: Path) -> None:
    sharded = lively_checkpoint(tmp_path / "sharded", "qwen2", num_hidden_layers=2, max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(_logits(_load(sharded)), _logits(_load(checkpoint)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path / "sharded", "qwen2", max_shard_size="200KB")
    victim = sorted(folder.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(InvalidCheckpoint, match=f"shard {victim.name} .* is missing"):
        _load(folder)


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InvalidCheckpoint, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        _load(checkpoint)


def test_a_mis_shaped_tensor_is_named_with_both_shapes(checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}))
    message = "'model.norm.weight' of model.safetensors has shape [5]; config.json requires [96]"
    with pytest.raises(InvalidCheckpoint, match=re.escape(message)):
        _load(checkpoint)


def test_an_unexpected_tensor_is_named(checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.update({"model.vision.weight": torch.ones(5)}))
    with pytest.raises(InvalidCheckpoint, match=r"does not use: 'model\.vision\.weight' of model\.safetensors"):
        _load(checkpoint)


@pytest.mark.parametrize("shape", [(1000, 0, 0), (1000, 0, 64), (1000, 2, 0), (0, 2, 64)])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_experts_without_numbers_are_not_counted(checkpoint: Path, name: str, shape: tuple[int, ...]) -> None:
    """They take no bytes of the file, so that its header may name any number of them."""
    experts = f"model.layers.0.mlp.experts.{name}"
    _rewrite(checkpoint, lambda tensors: tensors.update({experts: torch.ones(shape)}))
    message = f"tensors that the architecture does not use: '{experts}' of model.safetensors"
    with pytest.raises(InvalidCheckpoint, match=f"{re.escape(message)}$"):
        _load(checkpoint)


def test_a_tensor_of_integers_is_refused(checkpoint: Path) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(96, dtype=torch.int8)}))
    with pytest.raises(InvalidCheckpoint, match=r"'model\.norm\.weight' .* is torch\.int8"):
        _load(checkpoint)


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors is not a complete safetensors file"):
        _load(checkpoint)


def test_pickles_are_not_read(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(InvalidCheckpoint, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        _load(checkpoint)


def test_an_index_may_not_point_outside_the_folder(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidCheckpoint, match="not a file of the checkpoint's folder"):
        _load(checkpoint)


def test_tables_of_old_checkpoints_and_the_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    expected = _logits(_load(folder))
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    _rewrite(folder, lambda tensors: tensors.update(table))
    _rewrite(folder, lambda tensors: tensors.update({_HEAD: tensors[_EMBEDDING].clone()}))
    assert torch.equal(_logits(_load(folder)), expected)


def test_a_head_of_its_own_is_computed_although_the_config_ties_it(tmp_path: Path) -> None:
    """As in transformers: fine-tunes save one, and leave the config as it was."""
    folder = lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    _rewrite(folder, lambda tensors: tensors.update({_HEAD: tensors[_EMBEDDING].flip(0).contiguous()}))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(PROMPT[None]).logits[0]
    torch.testing.assert_close(_logits(_load(folder)), expected, rtol=1e-4, atol=1e-4)


def _overwrite(path: Path) -> None:
    """In place, as `rsync --inplace` does: what has mapped the file sees it."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_file_that_is_overwritten_after_the_load_changes_nothing(
    tmp_path: Path, architecture: str, quantization: str
) -> None:
    folder = lively_checkpoint(tmp_path, architecture, num_hidden_layers=2)
    model = _load(folder, quantization=quantization)
    before = _logits(model)
    _overwrite(folder / "model.safetensors")
    assert torch.equal(_logits(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["model.norm.weight", _EMBEDDING, "model.layers.0.self_attn.k_proj.bias"])
def test_a_ranks_part_is_in_memory_of_its_own(checkpoint: Path, name: str, dtype: torch.dtype) -> None:
    _rewrite(checkpoint, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    shape = tuple(load_file(checkpoint / "model.safetensors")[name].shape)
    config = ModelConfig.from_folder(checkpoint)
    source = SafetensorsWeights(checkpoint, dtype=dtype, device=CPU)
    part = PartWeights(source, Parallelism(pipeline_parallel_size=2).part(0, config), config).take(name, shape)
    before = part.clone()
    _overwrite(checkpoint / "model.safetensors")
    assert torch.equal(part, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_features", [64, 63])
def test_a_linear_layer_on_cpu_has_copies_of_what_it_was_made_of(dtype: torch.dtype, in_features: int) -> None:
    weight, bias = torch.randn(64, in_features).to(dtype), torch.randn(64).to(dtype)
    for make in (make_linear, PackedLinear):
        given, x = (weight.clone(), bias.clone()), torch.randn(3, in_features).to(dtype)
        layer = make(*given)
        before = layer(x)
        for tensor in given:
            tensor.zero_()
        assert torch.equal(layer(x), before)


def test_dummy_weights_depend_on_seed_and_name_alone() -> None:
    def draw(seed: int, name: str) -> torch.Tensor:
        return DummyWeights(seed, dtype=torch.float32, device=CPU).take(name, (300, 400))

    assert torch.equal(draw(1, "a.weight"), draw(1, "a.weight"))
    assert not torch.equal(draw(1, "a.weight"), draw(2, "a.weight"))
    assert not torch.equal(draw(1, "a.weight"), draw(1, "b.weight"))
    assert draw(1, "a.weight").std().item() == pytest.approx(2 / 400**0.5, rel=0.02)
    assert draw(1, "model.embed_tokens.weight").std().item() == pytest.approx(1, rel=0.02)


def test_dummy_models_are_lively(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    best = _logits(_load(checkpoint, load_format="dummy", seed=3)).argmax(-1)
    assert len(set(best.tolist())) > len(PROMPT) * 0.8
