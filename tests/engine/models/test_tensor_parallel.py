"""The ranks of a model together compute what one rank computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig, Quantization
from engine.executor.worker import rank_view
from engine.models import Decoder, load_model
from engine.models.config import ModelConfig
from engine.partition import Part
from tests.builders import lively_checkpoint
from tests.engine.attention.paged_step import paged_step
from tests.engine.rank_threads import on_all_parts


@pytest.mark.parametrize(
    ("arch", "size", "fields", "quantization"),
    [
        (
            "qwen3",
            2,
            {"intermediate_size": 128},
            "none",
        ),  # the output layer shares the embedding's rows; compiled elementwise
        ("llama", 2, {"attention_bias": True, "mlp_bias": True}, "none"),
        ("mixtral", 2, {}, "int8"),
        ("qwen3_moe", 2, {}, "none"),
        ("llama", 2, {}, "int4"),  # a rank's part of down_proj ends inside of a group
        ("mistral", 4, {"vocab_size": 1001}, "none"),  # two ranks have copies of each KV head
        (
            "qwen2",
            3,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 96},
            "none",
        ),
    ],
)
def test_ranks_compute_what_one_rank_computes(
    tmp_path: Path, arch: str, size: int, fields: dict[str, Any], quantization: Quantization
) -> None:
    folder = lively_checkpoint(tmp_path, arch, **fields)
    config = ModelConfig.from_folder(folder)
    engine = EngineConfig(model=str(folder), dtype="float32", num_threads=1, quantization=quantization)
    metadata, positions, num_blocks = paged_step([(1, 20), (70, 90), (1, 1)], block_size=16)
    tokens = torch.arange(len(positions)) * 37 % config.vocab_size
    layout = config.kv_layout(dtype="float32", block_size=16)
    caches = [torch.zeros(num_blocks, *layout.page_shape) for _ in range(2)]
    expected = load_model(config, engine)
    hidden = expected.forward(tokens, positions, caches[0], metadata)

    def compute(part: Part, model: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
        result = model.forward(tokens, positions, rank_view(caches[1], part), metadata)
        return result, model.compute_logits(result[-2:])

    results = on_all_parts(msgspec.structs.replace(engine, tensor_parallel_size=size), config, compute)
    for result, _ in results:
        assert torch.equal(result, results[0][0])
        torch.testing.assert_close(result, hidden, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(results[0][1], expected.compute_logits(hidden[-2:]), atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(caches[1], caches[0], atol=2e-4, rtol=1e-4)
