"""Other forms of the same weights: what libraries write beside `save_pretrained`'s own. All compute the same bits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.errors import InvalidCheckpoint
from tests.builders import lively_checkpoint
from tests.engine.models.test_pipeline_parallel import computed
from tests.oracle import GreedyOracle

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
RANKS = [(1, 1), (2, 1), (1, 3), (2, 2)]
"""Tensor and pipeline ranks."""


def _engine(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", num_threads=1)


def _assert_same(folder: Path, other: Path, tensor: int, pipeline: int) -> None:
    expected = computed(_engine(folder), tensor, pipeline)
    for found, one in zip(computed(_engine(other), tensor, pipeline), expected, strict=True):
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
