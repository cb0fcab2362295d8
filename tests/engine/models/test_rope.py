"""Rotary tables equal those of transformers to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.config import ModelConfig
from engine.models.rope import RotaryEmbedding
from tests.builders import hf_config

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
        | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False, "beta_fast": 16.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
        | {"attention_factor": 0.9},
    ],
)
def test_cos_and_sin_equal_transformers(tmp_path: Path, parameters: dict[str, Any]) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # seconds, which this test alone spends

    config = hf_config("llama", rope_parameters=dict(parameters), head_dim=64, max_position_embeddings=2048)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    positions = torch.tensor([0, 1, 2, 17, 1000, 2047])
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])

    rope = RotaryEmbedding(ModelConfig.from_folder(tmp_path).rope, head_dim=64, device=torch.device("cpu"))
    cos, sin = rope.cos_sin(positions)

    assert torch.equal(cos, expected_cos[0, :, :32])
    assert torch.equal(sin, expected_sin[0, :, :32])
