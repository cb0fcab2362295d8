"""The native decoder against transformers, whole and in pieces, and its parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config import EngineConfig
from engine.models import load_model
from engine.models.config import ModelConfig
from engine.models.linear import Linear, PackedLinear, make_linear
from engine.models.llama import LlamaModel, RotaryEmbedding
from tests.builders import hf_config, lively_checkpoint
from tests.engine.attention.paged_step import paged_step

BLOCK_SIZE = 16
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 rope, GQA": ("llama", {}),
    "llama, linear rope, all biases": (
        "llama",
        {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama, yarn rope": ("llama", {"rope_parameters": YARN}),
    "qwen2, biases": ("qwen2", {}),
    "qwen2, window in some layers, tied": ("qwen2", {**WINDOWS, "tie_word_embeddings": True}),
    "qwen3, q/k norm, own head_dim, tied": ("qwen3", {}),
    "qwen3, window in some layers": ("qwen3", {**WINDOWS, "head_dim": 64}),
    "mistral, window, odd sizes": ("mistral", {"intermediate_size": 100}),
    "qwen3-moe, experts beside an MLP": ("qwen3_moe", {}),
    "qwen3-moe, weights as the router gives them, window": (
        "qwen3_moe",
        {
            "norm_topk_prob": False,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 20,
            "num_experts_per_tok": 1,
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, window, odd sizes": ("mixtral", {"sliding_window": 24, "intermediate_size": 100}),
    "mistral, window in some layers": (  # Ministral 8B's
        "mistral",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 32, "num_key_value_heads": 1}),
}


class _Case:
    def __init__(self, folder: Path, arch: str, overrides: dict[str, Any]) -> None:
        lively_checkpoint(folder, arch, **overrides)
        self.folder = folder
        self.config = ModelConfig.from_folder(folder)
        self.oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")

    def model(self, **options: Any) -> LlamaModel:
        options = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, **options}
        model = load_model(self.config, EngineConfig(model=str(self.folder), **options))
        assert isinstance(model, LlamaModel)
        return model

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.oracle(tokens[None]).logits[0]
        return logits


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Case]:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return {name: _Case(tmp_path_factory.mktemp("model"), *model) for name, model in MODELS.items()}


def _cache(config: ModelConfig, num_blocks: int) -> torch.Tensor:
    page = config.kv_layout(dtype="float32", block_size=BLOCK_SIZE).page_shape
    return torch.full((num_blocks, *page), float("nan"))


def _assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 where logits reach 10; the larger ones of tied embeddings carry proportionally more rounding."""
    torch.testing.assert_close(logits, expected, atol=1e-5 * max(10.0, expected.abs().max().item()), rtol=0)


def _prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 1000, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_whole_prompt_equal_transformers(cases: dict[str, _Case], name: str) -> None:
    case = cases[name]
    tokens = _prompt(150)
    model = case.model()
    metadata, positions, num_blocks = paged_step([(150, 150)], block_size=BLOCK_SIZE)

    logits = model.compute_logits(model.forward(tokens, positions, _cache(case.config, num_blocks), metadata))

    assert logits.dtype == torch.float32
    assert len(set(logits.argmax(-1).tolist())) > 50  # lively, or equality would prove little
    _assert_close(logits, case.expected(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_and_decode_over_shuffled_blocks_equal_the_full_forward(cases: dict[str, _Case], name: str) -> None:
    """Two requests of different lengths share steps of odd chunk sizes, then decode together."""
    case = cases[name]
    tokens = [_prompt(97, seed=1), _prompt(120, seed=2)]
    chunks = [[31, 1, 17, 40, 2, 1, 1, 1, 1, 1, 1], [3, 70, 5, 16, 19, 1, 1, 1, 1, 1, 2]]
    model = case.model()
    tables, _, num_blocks = paged_step([(1, len(one)) for one in tokens], block_size=BLOCK_SIZE, seed=5)
    cache = _cache(case.config, num_blocks)
    done = [0, 0]
    seen: list[list[torch.Tensor]] = [[], []]
    for sizes in zip(*chunks, strict=True):
        reach = [start + size for start, size in zip(done, sizes, strict=True)]
        metadata, positions, token_ids = _step(tables.block_tables, tokens, done, reach)
        logits = model.compute_logits(model.forward(token_ids, positions, cache, metadata))
        for request, part in enumerate(logits.split(list(sizes))):
            seen[request].append(part)
        done = reach
    for request, whole in enumerate(tokens):
        assert done[request] == len(whole)
        _assert_close(torch.cat(seen[request]), case.expected(whole))


def _step(
    tables: torch.Tensor, tokens: list[torch.Tensor], done: list[int], reach: list[int]
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The step that takes each request from `done` to `reach` tokens, over the tables of the finished requests."""
    metadata, positions, _ = paged_step(
        [(end - start, end) for start, end in zip(done, reach, strict=True)], block_size=BLOCK_SIZE
    )
    slots = []
    for request, (start, end) in enumerate(zip(done, reach, strict=True)):
        own = torch.arange(start, end)
        slots.append(tables[request, own // BLOCK_SIZE].long() * BLOCK_SIZE + own % BLOCK_SIZE)
    step = type(metadata)(
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
    )
    token_ids = torch.cat([one[start:end] for one, start, end in zip(tokens, done, reach, strict=True)])
    return step, positions, token_ids


def test_backends_agree_through_a_whole_model(cases: dict[str, _Case]) -> None:
    case = cases["llama3 rope, GQA"]
    tokens = _prompt(90)
    metadata, positions, num_blocks = paged_step([(90, 90)], block_size=BLOCK_SIZE)
    fast, slow = (
        model.compute_logits(model.forward(tokens, positions, _cache(case.config, num_blocks), metadata))
        for model in (case.model(attention_backend="cpu"), case.model(attention_backend="reference"))
    )
    torch.testing.assert_close(fast, slow, atol=1e-4, rtol=0)


def test_bfloat16_stays_near_float32(cases: dict[str, _Case]) -> None:
    case = cases["qwen3, q/k norm, own head_dim, tied"]
    tokens = _prompt(60)
    metadata, positions, num_blocks = paged_step([(60, 60)], block_size=BLOCK_SIZE)
    model = case.model(dtype="bfloat16")
    cache = _cache(case.config, num_blocks).to(torch.bfloat16)
    logits = model.compute_logits(model.forward(tokens, positions, cache, metadata))
    expected = case.expected(tokens)
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=-1).min() > 0.99


# A linear layer computes what torch's computes, whatever the number of rows.


@pytest.mark.parametrize("make", [PackedLinear, make_linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_a_plain_linear_layer_for_any_number_of_rows(
    make: Callable[..., Linear], dtype: torch.dtype, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 160, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    layer = make(weight, bias)
    x = torch.randn(70, 160, generator=generator).to(dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for rows in (1, 2, 7, 32, 70):
        result = layer(x[:rows])
        assert result.dtype == dtype
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(result.double(), exact[:rows], atol=tolerance, rtol=0)


# Cosines and sines equal those of transformers to the last bit.

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
    config = hf_config("llama", rope_parameters=dict(parameters), head_dim=64, max_position_embeddings=2048)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    positions = torch.tensor([0, 1, 2, 17, 1000, 2047])
    expected_cos, expected_sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])

    rope = RotaryEmbedding(ModelConfig.from_folder(tmp_path).rope, head_dim=64, device=torch.device("cpu"))
    cos, sin = rope.cos_sin(positions)

    assert torch.equal(cos, expected_cos[0, :, :32])
    assert torch.equal(sin, expected_sin[0, :, :32])
