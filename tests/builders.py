"""Small random models for tests.

With the usual initialisation greedy output is one token repeated, whatever attention computes, and a test on it proves
nothing. These models are "lively": matrices with std 2/sqrt(fan_in), embeddings with std 1, so that the output varies
and near-ties are rare.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

_SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "head_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_PER_ARCHITECTURE: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    # Untied: scaled up, an embedding would dominate its own logits. The caps are as wide as these weights' numbers.
    "gemma2": {
        "sliding_window": 24,
        "tie_word_embeddings": False,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 200.0,
    },
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 96},
}


def hf_config(arch: str, **overrides: Any) -> transformers.PretrainedConfig:
    """The transformers config of a tiny `arch`, any transformers model type; with `vision_config` the other fields are
    those of its text decoder."""
    fields = {**_SMALL, **_PER_ARCHITECTURE.get(arch, {}), **overrides}
    if (vision := fields.pop("vision_config", None)) is not None:
        tied = fields["tie_word_embeddings"]
        return transformers.AutoConfig.for_model(
            arch, text_config=fields, vision_config=vision, tie_word_embeddings=tied
        )
    return transformers.AutoConfig.for_model(arch, **fields)


def make_lively(model: torch.nn.Module, seed: int) -> None:
    """Redraws every weight of `model` in place: matrices 2/sqrt(fan_in), embeddings 1, biases 0.1, norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "embed" in name:
                weight.copy_(noise)
            elif weight.dim() >= 2:
                weight.copy_(noise * (2.0 / weight.shape[-1] ** 0.5))
            elif name.endswith("bias"):
                weight.copy_(noise * 0.1)
            else:
                weight.copy_(1.0 + noise * 0.1)


def lively_model(arch: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A transformers causal LM with lively weights, in eval mode: the oracle of the tests."""
    config = hf_config(arch, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    make_lively(model, seed)
    return model.to(dtype).eval()


def lively_checkpoint(
    folder: Path | str,
    arch: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Writes config.json and safetensors of a tiny lively `arch` to `folder` and returns it.

    `overrides` are fields of the transformers config (`num_hidden_layers=2`, `vocab_size=512`, ...). The folder holds
    no tokenizer. Load the same weights in transformers with `AutoModelForCausalLM.from_pretrained(folder)`.
    """
    folder = Path(folder)
    model = lively_model(arch, seed=seed, dtype=dtype, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def dequantised(folder: Path, target: Path, quantization: str) -> Path:
    """A float32 copy of a checkpoint, without a tokenizer, with the numbers that the codes of its linear layers stand
    for: one row, or 32 inputs of one, at a time, as the definition says."""
    shutil.copytree(folder, target)
    for path in target.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(path).items()}
        for name, weight in tensors.items():
            if name.endswith(_LINEAR):
                is_transposed = "c_" in name  # GPT-2
                tensors[name] = _dequantised(weight.t() if is_transposed else weight, quantization)
                if is_transposed:
                    tensors[name] = tensors[name].t().contiguous()
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # gpt-oss: [experts, inputs, outputs]
                matrices = [_dequantised(matrix.t(), quantization).t() for matrix in weight]
                tensors[name] = torch.stack(matrices)
        save_file(tensors, path, metadata={"format": "pt"})
    return target


_LINEAR = tuple(f"{name}.weight" for name in ("_proj", "w1", "w2", "w3", "c_attn", "c_fc", "fc1", "fc2"))


def _dequantised(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    size = weight.shape[1] if quantization == "int8" else 32
    rows = []
    for row in weight:
        parts = []
        for part in row.split(size):
            if quantization == "int8":
                scale, lowest, highest = part.abs().max() / 127, -127, 127
            else:
                scale, lowest, highest = part[part.abs().argmax()] / -8, -8, 7
            step = scale.bfloat16().float()
            parts.append((part / step).round().clamp(lowest, highest) * step)
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def write_adapter(
    folder: Path,
    model: Path,
    *,
    rank: int = 4,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    seed: int = 0,
    **config: Any,
) -> Path:
    """A LoRA adapter of the checkpoint `model` in PEFT's form, with numbers as large as those of the weights. `config`:
    fields of adapter_config.json."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(model / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer.endswith(tuple(modules)):
            for letter, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                std = weight.shape[1] ** -0.5 if letter == "A" else 0.5
                numbers = torch.randn(shape, generator=generator) * std
                tensors[f"base_model.model.{layer}.lora_{letter}.weight"] = numbers
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": [*modules], "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged(model: Path, adapter: Path, target: Path, scale: float) -> Path:
    """A copy of the checkpoint `model` whose weights have what the adapter adds to them."""
    shutil.copytree(model, target)
    weights, added = load_file(target / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in added if ".lora_A." in name]:
        weight = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        weights[weight] += scale * added[name.replace(".lora_A.", ".lora_B.")] @ added[name]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target
