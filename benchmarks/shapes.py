"""The random-weight model shapes that the benchmarks run on: Qwen3, at sizes that real models have, and Qwen3-MoE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "33m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
}
_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_config(folder: Path, shape: str) -> Path:
    """A checkpoint folder with config.json alone, for `load_format="dummy"`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[shape]}, indent=2))
    return folder


def layer_weights(shape: str) -> int:
    """Elements of the weights that every token is multiplied with, without the vocabulary's."""
    sizes = SHAPES[shape]
    intermediate = sizes.get("num_experts_per_tok", 0) * sizes.get("moe_intermediate_size", 0)
    heads = 2 * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])  # query and output; key and value
    of_a_layer = (
        heads * sizes["head_dim"] + 3 * (intermediate or sizes["intermediate_size"]) + sizes.get("num_experts", 0)
    )
    return int(sizes["num_hidden_layers"] * sizes["hidden_size"] * of_a_layer)


def bytes_of_step(shape: str, num_requests: int, context_len: int) -> int:
    """What a decode step has to read in bfloat16: each weight once, and the KV of every request. Of a mixture of
    experts those of one token, the least."""
    sizes = SHAPES[shape]
    weights = layer_weights(shape) + sizes["vocab_size"] * sizes["hidden_size"]
    kv = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    return int(2 * (weights + num_requests * context_len * kv))


def operations_of_prefill(shape: str, num_requests: int, input_len: int) -> int:
    """Multiplications and additions of the prompts: matrix products, and causal attention without what is masked."""
    sizes = SHAPES[shape]
    products = 2 * layer_weights(shape) * input_len
    width = sizes["num_hidden_layers"] * sizes["num_attention_heads"] * sizes["head_dim"]
    return int(num_requests * (products + 2 * width * input_len * (input_len + 1)))
