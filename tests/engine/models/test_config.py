"""Old and new field names of config.json give the same ModelConfig; unsupported features are rejected by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.errors import InvalidCheckpoint, UnsupportedModel
from engine.models import read_config
from engine.models.config import SUPPORTED_ARCHITECTURES, ClampedGate, ModelConfig
from engine.models.llama import RotaryEmbedding

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "eos_token_id": [5, 6],
}


def _config(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return ModelConfig.from_folder(folder)


def test_old_and_new_spelling_mean_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    old = _config(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="float16")
    new = _config(
        tmp_path,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling},
        torch_dtype=None,
        dtype="float16",
    )
    assert old == new
    assert old.rope.theta == 5e5
    assert old.rope.original_max_position_embeddings == 512


def test_sizes_and_defaults(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 8, 2, 8)
    assert config.rope.rope_type == "default"
    assert config.rope.theta == 10000.0
    assert config.sliding_windows == (None,) * 4
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings))


def test_null_key_value_heads_are_one_for_each_head_and_missing_ones_the_families(tmp_path: Path) -> None:
    names, heads = {"architectures": ["Qwen3ForCausalLM"]}, {"num_attention_heads": 64, "head_dim": 8}
    config = _config(tmp_path, num_key_value_heads=None, **names, **heads)
    theirs = transformers.AutoConfig.for_model("qwen3", num_key_value_heads=None, **heads)
    assert config.num_kv_heads == theirs.num_key_value_heads == 64
    fields = {field: value for field, value in LLAMA.items() if field != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **names, **heads}))
    theirs = transformers.AutoConfig.for_model("qwen3", **heads)
    assert ModelConfig.from_folder(tmp_path).num_kv_heads == theirs.num_key_value_heads < 64


def test_the_epsilon_of_a_norm_has_its_architectures_default(tmp_path: Path) -> None:
    for name in SUPPORTED_ARCHITECTURES:
        theirs = getattr(transformers, name).config_class()
        assert _config(tmp_path, architectures=[name]).rms_norm_eps == theirs.rms_norm_eps, name


def test_an_empty_rope_scaling_is_none(tmp_path: Path) -> None:
    parameters = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = _config(tmp_path, rope_scaling={}, rope_parameters=parameters)
    assert config == _config(tmp_path, rope_parameters=parameters)
    assert config.rope.factor == 2.0


def test_layers_with_a_window_by_layer_types_and_by_max_window_layers(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "use_sliding_window": True}
    by_count = _config(tmp_path, **qwen, max_window_layers=3)
    by_name = _config(tmp_path, **qwen, layer_types=["full_attention"] * 3 + ["sliding_attention"])
    assert by_count.sliding_windows == by_name.sliding_windows == (None, None, None, 16)
    assert _config(tmp_path, **{**qwen, "use_sliding_window": False}).sliding_windows == (None,) * 4
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert _config(tmp_path, **mistral).sliding_windows == (4096,) * 4
    assert _config(tmp_path, **mistral, sliding_window=None).sliding_windows == (None,) * 4
    by_name = _config(tmp_path, **mistral, layer_types=["full_attention"] + ["sliding_attention"] * 3)
    assert by_name.sliding_windows == (None, 4096, 4096, 4096)
    assert _config(tmp_path, **mistral, layer_types=None).sliding_windows == (4096,) * 4


def test_yarn_stretches_the_model_length(tmp_path: Path) -> None:
    config = _config(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096})
    assert config.max_model_len == 16384
    assert _config(tmp_path).max_model_len == 4096


def test_truncate_of_yarn_is_true_where_it_is_missing_and_null_is_false(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    for fields, truncates in (({}, True), ({"truncate": True}, True), ({"truncate": None}, False)):
        config = _config(tmp_path, rope_parameters={**yarn, **fields})
        assert config.rope.truncate is truncates
        theirs = LlamaRotaryEmbedding(transformers.LlamaConfig.from_pretrained(tmp_path))
        ours = RotaryEmbedding(config.rope, head_dim=config.head_dim, device=torch.device("cpu"))
        position = torch.tensor([[500]])
        cos, _ = theirs(torch.zeros(1), position)
        torch.testing.assert_close(ours.cos_sin(position[0])[0], cos[0, :, : config.head_dim // 2])


def test_every_architecture_has_the_model_type_of_transformers(tmp_path: Path) -> None:
    for name in SUPPORTED_ARCHITECTURES:
        model_type = getattr(transformers, name).config_class.model_type
        assert _config(tmp_path, architectures=[name], model_type=model_type).architecture == name


def test_gpt_oss_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    fields = ("head_dim", "num_key_value_heads", "max_position_embeddings", "sliding_window", "intermediate_size")
    theirs = transformers.GptOssConfig()
    left = {name: value for name, value in LLAMA.items() if name not in (*fields, "rope_theta")}
    raw = {**left, "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 3, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_folder(tmp_path)
    assert config.sliding_windows == (theirs.sliding_window, None, theirs.sliding_window)
    assert (config.head_dim, config.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    assert (config.has_sinks, config.qkv_bias, config.o_bias) == (True, True, True)
    assert config.experts is not None
    assert config.experts.gate == ClampedGate(theirs.swiglu_alpha, theirs.swiglu_limit)
    assert (config.experts.num_experts, config.experts.num_per_token) == (
        theirs.num_local_experts,
        theirs.num_experts_per_tok,
    )
    rope = GptOssRotaryEmbedding(transformers.GptOssConfig(**{**raw, "head_dim": 64}))
    ours = RotaryEmbedding(config.rope, head_dim=config.head_dim, device=torch.device("cpu"))
    cos, _ = rope(torch.zeros(1), torch.tensor([[5000]]))
    torch.testing.assert_close(ours.cos_sin(torch.tensor([5000]))[0], cos[0, :, :32])


def test_dtype_and_page(tmp_path: Path) -> None:
    config = _config(tmp_path, dtype="float16")
    assert config.resolve_dtype("auto") == "float16"
    assert config.resolve_dtype("float32") == "float32"
    assert _config(tmp_path, dtype="float32").resolve_dtype("auto") == "float32"
    layout = config.kv_layout(dtype="auto", block_size=16)
    assert layout.page_shape == (4, 2, 2, 16, 8)
    assert layout.dtype == "float16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported; supported: GptOss"),
        ({"architectures": None}, "architecture None is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "RoPE type 'dynamic' is not supported; supported: default",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config ('mxfp4') is not supported"),
        ({"model_type": "granite"}, "model_type 'granite' is not supported for LlamaForCausalLM; supported: llama"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_theta": 100.0}}},
            "rope_parameters by type of layer ('full_attention, sliding_attention') is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "weights of dtype 'float8_e4m3fn' are not supported"),
        ({"num_key_value_heads": 3}, "8 attention heads do not divide evenly among 3"),
        ({"hidden_size": "big"}, "hidden_size is 'big'; it must be an integer"),
        ({"architectures": 3}, "architectures is 3; it must be a list"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": 3}, "layer_types is 3; it must be a list"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 3}, "mlp_only_layers is 3; it must be a list"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
            "original_max_position_embeddings is 0; it must be at least 1",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is None; it must be a number"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "head_dim": 8,
                "layer_types": ["full_attention"] * 3 + ["chunked_attention"],
            },
            "layer type 'chunked_attention' is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        read_config(tmp_path, "native")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidCheckpoint, match=r"config\.json of the checkpoint is not JSON"):
        ModelConfig.from_folder(tmp_path)
