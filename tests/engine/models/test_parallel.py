"""The ranks of a model together compute what one rank computes, and its stages have the bits of one stage. Of the
checkpoint each takes its own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, Quantization
from engine.errors import InvalidCheckpoint
from engine.executor.step import Step, StepInputs
from engine.executor.worker import rank_view
from engine.models import Decoder, load_model
from engine.models.config import ModelConfig
from engine.partition import Part
from tests.builders import lively_checkpoint
from tests.engine.attention.paged_step import paged_step
from tests.engine.rank_threads import on_all_parts

Computed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Hidden states and logits of the last stage's first rank, and the KV memory."""


def computed(engine: EngineConfig, tensor: int, pipeline: int) -> Computed:
    engine = msgspec.structs.replace(engine, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    config = ModelConfig.from_folder(Path(engine.model))
    metadata, positions, num_blocks = paged_step([(1, 20), (70, 90), (1, 1)], block_size=16)
    tokens = torch.arange(len(positions)) * 37 % config.vocab_size
    layout = config.kv_layout(dtype=engine.dtype, block_size=16)
    cache = torch.zeros(num_blocks, *layout.page_shape, dtype=getattr(torch, engine.dtype))

    def compute(part: Part, model: Decoder) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = model.forward(tokens, positions, rank_view(cache, part), metadata)
        return hidden, model.compute_logits(hidden[-2:]) if part.is_last_stage else None

    hidden, logits = on_all_parts(engine, config, compute)[engine.parallelism.core_rank]
    assert logits is not None
    return hidden, logits, cache


@pytest.mark.parametrize(
    ("arch", "dtype", "tensor", "fields"),
    [
        ("qwen3", "bfloat16", 1, {"intermediate_size": 128}),  # tied embeddings on both ends; compiled elementwise
        ("llama", "float32", 2, {"attention_bias": True, "mlp_bias": True}),
        ("qwen3_moe", "float16", 1, {}),  # experts in some layers
        ("mistral", "float32", 1, {"num_hidden_layers": 4}),
        ("mixtral", "bfloat16", 2, {}),
        ("gpt_oss", "float32", 2, {}),
    ],
)
def test_stages_have_the_bits_of_one_stage(
    tmp_path: Path, arch: str, dtype: Literal["float32", "bfloat16", "float16"], tensor: int, fields: dict[str, Any]
) -> None:
    """With two stages of different sizes, or with one for each layer."""
    engine = EngineConfig(model=str(lively_checkpoint(tmp_path, arch, **fields)), dtype=dtype, num_threads=1)
    expected = computed(engine, tensor, 1)
    assert expected[2].count_nonzero() > 0
    for pipeline in (2, 3) if tensor == 1 else (3,):
        for found, one in zip(computed(engine, tensor, pipeline), expected, strict=True):
            assert torch.equal(found, one)


def test_a_head_of_its_own_beside_a_tied_embedding_is_that_of_the_last_stage(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(lively_checkpoint(tmp_path, "qwen3")), dtype="float32", num_threads=1)
    shared = computed(engine, 1, 1)[1]
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    for tensor, pipeline in ((1, 1), (2, 2)):
        logits = computed(engine, tensor, pipeline)[1]
        torch.testing.assert_close(logits, shared.flip(1), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("arch", "size", "fields", "quantization"),
    [
        # The output layer shares the embedding's rows; compiled elementwise
        ("qwen3", 2, {"intermediate_size": 128}, "none"),
        ("llama", 2, {"attention_bias": True, "mlp_bias": True}, "none"),
        ("mixtral", 2, {}, "int8"),
        ("qwen3_moe", 2, {}, "none"),
        ("gpt_oss", 2, {}, "none"),  # attention sinks, and biases of experts
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


def mixed_step(vocab_size: int) -> tuple[StepInputs, int]:
    """Long prompts and single tokens, 484 in all; and the number of blocks."""
    metadata, positions, num_blocks = paged_step([(1, 20), (300, 390), (1, 1), (1, 33), (181, 181)], block_size=16)
    step = StepInputs(
        token_ids=np.arange(len(positions)) * 37 % vocab_size,
        positions=positions.numpy(),
        slot_mapping=metadata.slot_mapping.numpy(),
        query_start_loc=metadata.query_start_loc.numpy(),
        seq_lens=metadata.seq_lens.numpy(),
        block_tables=metadata.block_tables.numpy(),
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
    return step, num_blocks


@pytest.mark.parametrize("arch", ["qwen3_moe", "mistral"])
def test_micro_batches_and_needed_rows_have_the_bits_of_the_whole_step(tmp_path: Path, arch: str) -> None:
    """Cut within requests; and with the last tokens alone in the last layer, of some requests, of all or of none."""
    engine = EngineConfig(model=str(lively_checkpoint(tmp_path, arch)), dtype="bfloat16", num_threads=1)
    config = ModelConfig.from_folder(Path(engine.model))
    step, num_blocks = mixed_step(config.vocab_size)
    model, layout = load_model(config, engine), config.kv_layout(dtype="bfloat16", block_size=16)

    def compute(parts: Sequence[StepInputs]) -> tuple[torch.Tensor, torch.Tensor]:
        cache, hidden = torch.zeros(num_blocks, *layout.page_shape, dtype=torch.bfloat16), []
        for part in parts:
            tokens, places, plan = part.tensors(torch.device("cpu"))
            hidden.append(model.forward(tokens, places, cache, plan, part.last_tokens(plan)))
        return torch.cat(hidden), cache

    assert step.micro_batches(1) == [step]
    assert len(step.micro_batches(3)) == 6
    whole, expected_cache = compute([step])
    ends = step.query_start_loc[1:] - 1
    for needed in (None, np.array([0, 1, 3]), np.arange(5), np.array([4]), np.array([], np.int64)):
        chosen = replace(step, needed=needed)
        rows = np.arange(len(whole)) if needed is None else ends[needed]
        others = np.setdiff1d(np.arange(len(whole)), rows)
        for parts in ([chosen], chosen.micro_batches(3)):
            hidden, cache = compute(parts)
            assert torch.equal(hidden[rows], whole[rows])
            assert torch.equal(cache, expected_cache)
            assert hidden[others].count_nonzero(dim=1).bool().sum() <= len(parts), "one row at least in each"


def test_a_step_reaches_the_other_ranks_as_it_is() -> None:
    step, _ = mixed_step(100)
    for needed in (None, np.array([0, 3]), np.array([], np.int64)):
        sent = replace(step, needed=needed)
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(Step.of(sent)), type=Step)
        for one in fields(StepInputs):
            np.testing.assert_array_equal(getattr(message.inputs(16), one.name), getattr(sent, one.name), one.name)


def test_a_tensor_that_no_stage_takes_is_named(tmp_path: Path) -> None:
    """A layer beyond the last, while those of the other stages are left."""
    folder = lively_checkpoint(tmp_path, "qwen3", num_hidden_layers=3)
    config = msgspec.json.decode((folder / "config.json").read_bytes()) | {"num_hidden_layers": 2, "layer_types": None}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(InvalidCheckpoint, match=r"'model\.layers\.2\.[^']*' of model\.safetensors, .* and 6 more"):
        computed(EngineConfig(model=str(folder), dtype="float32"), 1, 2)
