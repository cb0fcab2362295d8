"""Decoders that transformers computes over our paged KV: exact against transformers itself, or refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.errors import InvalidCheckpoint, UnsupportedModel
from engine.models import read_config
from tests.builders import lively_checkpoint
from tests.oracle import GreedyOracle, random_prompts

WINDOW = {"sliding_window": 24}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
STRETCHED = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0}
"""As Hunyuan's checkpoints have it: with an alpha the frequencies do not depend on the length."""
ATTENTION_ALONE = {
    "layer_types": ["attention"] * 3,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "position_embedding_type": "rope",
    "attention_multiplier": 0.2,
    "mamba_n_heads": 4,
}
"""Granite 4.0 Micro's way: of the layers of a hybrid architecture all have attention."""
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
}
LONG = {
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512},
    "gemma2": {},
    "phi3": WINDOW,
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 48},
    "gemma3_text": {**WINDOW, "tie_word_embeddings": False, "num_hidden_layers": 7},
    "gpt_neox": {},
    "olmo2": {},
    "starcoder2": WINDOW,
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "cohere2": WINDOW,
    # Latent attention: keys of 32 + 16 and values of 32 elements, experts from the second layer on.
    "deepseek_v2": {**LATENT, **EXPERTS, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**LATENT, **EXPERTS, "n_group": 2, "topk_group": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "rope_parameters": STRETCHED},
    "hunyuan_v1_dense": {"rope_parameters": STRETCHED},
    "granitemoehybrid": ATTENTION_ALONE,
    "gpt_oss": {"num_experts_per_tok": 2},
    "gemma3": {**WINDOW, "tie_word_embeddings": False, "num_hidden_layers": 7, "vision_config": IMAGES},
}
QUICK = ("gpt2", "gemma2", "phi3", "hunyuan_v1_moe", "granitemoehybrid", "gpt_oss", "gemma3")
"""Of each kind one: learned positions and biases; soft caps and windows by layer; fused projections; a router that
reads the type of its weights; a hybrid's attention; attention sinks; a decoder beside an encoder of images."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)


def _marked(names: dict[str, Any]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def _llm(folder: Path, **options: Any) -> LLM:
    options = {"dtype": "float32", "num_gpu_blocks_override": 256, "model_impl": "transformers", **options}
    return LLM(folder, skip_tokenizer_init=True, **options)


def _generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probabilities of each prompt's answer."""
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        (one.token_ids, [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)])
        for one in outputs
    ]


@pytest.mark.timeout(300)  # the first of them may compile the kernels: 90 s on a machine with eight times its work
@pytest.mark.parametrize("architecture", _marked(ARCHITECTURES))
def test_tokens_and_logprobs_equal_transformers_in_chunks_cached_and_preempted(
    architecture: str, tmp_path: Path
) -> None:
    folder = lively_checkpoint(tmp_path, architecture, **ARCHITECTURES[architecture])
    prompts = random_prompts(6, longest=150, vocab_size=1000)
    llm = _llm(folder, max_num_batched_tokens=33, num_gpu_blocks_override=12)
    answers = _generate(llm, prompts)
    assert llm.core.load.num_preemptions > 0
    assert len({token for token_ids, _ in answers for token in token_ids}) > 20, "the output does not vary"
    oracle = GreedyOracle(folder)
    for prompt, (token_ids, logprobs) in zip(prompts, answers, strict=True):
        oracle.check(prompt, token_ids, logprobs)
    computed = llm.core.load.num_prefilled_tokens
    [(token_ids, logprobs)] = _generate(llm, prompts[:1])
    assert token_ids == answers[0][0], "from the prefix cache"
    if any("num_experts" in field for field in ARCHITECTURES[architecture]):
        # torch computes the routers: in float32 a row's bits depend on its batch
        assert logprobs == pytest.approx(answers[0][1], abs=1e-4)
    else:
        assert logprobs == answers[0][1]
    again = llm.core.load.num_prefilled_tokens - computed
    assert again <= max(16, len(prompts[0])), "at most the last block is computed again"


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ["gemma2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_bits_of_an_answer_do_not_depend_on_the_batch(architecture: str, dtype: str, tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, architecture, **ARCHITECTURES[architecture])
    llm = _llm(folder, dtype=dtype, enable_prefix_caching=False)
    prompts = random_prompts(5, longest=60, vocab_size=1000)
    assert [_generate(llm, [prompt])[0] for prompt in prompts] == _generate(llm, prompts)


def test_the_shape_and_the_windows_come_from_what_the_layers_call(tmp_path: Path) -> None:
    config = read_config(lively_checkpoint(tmp_path, "gemma2", **ARCHITECTURES["gemma2"]))
    assert (config.backend, config.architecture) == ("transformers", "Gemma2ForCausalLM")
    assert (config.num_layers, config.num_kv_heads, config.head_dim, config.vocab_size) == (3, 2, 32, 1024)
    assert config.sliding_windows == (24, None, 24)
    assert (config.softcap, config.max_model_len, config.torch_dtype) == (5.0, 2048, "float32")


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3"])
def test_what_transformers_forward_returns_by_config_does_not_matter(architecture: str, tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, architecture, **ARCHITECTURES[architecture])
    expected = _generate(_llm(folder), [[5, 6, 7]])
    raw = json.loads((folder / "config.json").read_text())
    for part in (raw, raw.get("text_config", {})):
        part["return_dict"] = False
    (folder / "config.json").write_text(json.dumps(raw))
    assert _generate(_llm(folder), [[5, 6, 7]]) == expected


def test_dummy_weights_vary(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "gpt2", **ARCHITECTURES["gpt2"])
    (folder / "model.safetensors").unlink()
    [(token_ids, _)] = _generate(_llm(folder, load_format="dummy"), [[5, 6, 7]])
    assert len(set(token_ids)) > 1


CLASSES = {
    "gptj": "GPTJForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "modernbert-decoder": "ModernBertDecoderForCausalLM",
    "gemma3n": "Gemma3nForConditionalGeneration",
}


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("bloom", {}, "'BloomForCausalLM' is not supported by the transformers backend: transformers has no attention"),
        ("gptj", {}, "'GPTJForCausalLM' is not supported by the transformers backend: transformers has no attention"),
        ("mamba", {}, "'MambaForCausalLM' is not supported by the transformers backend"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            r"cannot build it \(.*'validate_rope': .*must be one of \['longrope'\], got dynamic\)",
        ),
        ("phi3", {"rope_scaling": LONG}, "RoPE type 'longrope'"),
        ("phi3", {"rope_scaling": {**LONG, "type": "yarn"}}, "RoPE type 'longrope'"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "head_dim": 128},
            "'HunYuanDenseV1ForCausalLM' is not supported by the transformers backend: RoPE type 'dynamic'",
        ),
        (
            "phi3",
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"quantization_config \('mxfp4'\) is not supported",
        ),
        ("roberta", {"is_decoder": True}, r"positions begin after the padding id \(RobertaEmbeddings\); supported: "),
        ("camembert", {"is_decoder": True}, r"positions begin after the padding id \(CamembertEmbeddings\)"),
        ("modernbert-decoder", {}, r"its decoder, as transformers names it \(Linear\), takes no position_ids"),
        ("phi4_multimodal", {"rope_scaling": LONG}, "RoPE type 'longrope'"),
        ("falcon_h1", {}, r"keep a state of recurrence or convolution \(Conv1d, hybrid\); supported: attention alone"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, r"recurrence or convolution \(Conv1d, conv\)"),
        ("bamba", {"attn_layer_indices": [1]}, r"recurrence or convolution \(Conv1d, linear_attention\)"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, r"\(Conv1d, linear_attention\)"),
        ("gemma3n", {}, "parts beside its text decoder, .*supported: .* and that of Gemma3ForConditionalGeneration"),
        ("unheard_of", {}, "is not supported: transformers .* cannot build it"),
        ("starcoder2", {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 4}, "6 attention heads do"),
        ("qwen2", {"num_attention_heads": 6, "hidden_size": 96}, "6 attention heads do not divide evenly among 32"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_name_of_the_architecture(
    architecture: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {
        "architectures": [CLASSES.get(architecture) or f"{architecture.title().replace('_', '')}ForCausalLM"],
        "model_type": architecture,
        "num_hidden_layers": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(UnsupportedModel, match=message):
        read_config(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "gpt2", **ARCHITECTURES["gpt2"])
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "n_layer": 4}))
    with pytest.raises(
        InvalidCheckpoint, match=r"missing_keys: transformer\.h\.3\.attn\.c_attn\.bias, .* and \d+ more"
    ):
        _llm(folder)


def test_a_damaged_file_is_an_invalid_checkpoint(tmp_path: Path) -> None:
    file = lively_checkpoint(tmp_path, "gpt2", **ARCHITECTURES["gpt2"]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(InvalidCheckpoint, match=r"cannot load the checkpoint: .*file not fully covered"):
        _llm(tmp_path)


@pytest.mark.parametrize("architecture", ["gpt2", "hunyuan_v1_moe"])
def test_a_file_that_is_overwritten_after_the_load_changes_nothing(architecture: str, tmp_path: Path) -> None:
    """gpt2's output layer is tied to its embedding."""
    folder = lively_checkpoint(tmp_path, architecture, **ARCHITECTURES[architecture])
    llm = _llm(folder, enable_prefix_caching=False)
    prompts = random_prompts(2, longest=20, vocab_size=1000)
    before = _generate(llm, prompts)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert _generate(llm, prompts) == before


def test_the_encoder_of_images_is_neither_loaded_nor_quantised(tmp_path: Path) -> None:
    """Weights of more than two dimensions cannot be quantised; the encoder has one."""
    folder = lively_checkpoint(tmp_path, "gemma3", **ARCHITECTURES["gemma3"])
    assert any(
        "vision" in name and tensor.dim() > 2 for name, tensor in load_file(folder / "model.safetensors").items()
    )
    for options in ({"quantization": "int8"}, {"load_format": "dummy", "quantization": "int8"}):
        [(token_ids, _)] = _generate(_llm(folder, **options), [[5, 6, 7]])
        assert len(set(token_ids)) > 1


def test_constants_of_masks_that_old_releases_saved_are_ignored(tmp_path: Path) -> None:
    folder = lively_checkpoint(tmp_path, "gpt2", **ARCHITECTURES["gpt2"])
    expected = _generate(_llm(folder), [[5, 6, 7]])
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert _generate(_llm(folder), [[5, 6, 7]]) == expected
    tensors["transformer.h.0.attn.unknown"] = torch.tensor(-1e4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidCheckpoint, match=r"unexpected_keys: transformer\.h\.0\.attn\.unknown$"):
        _llm(folder)


def test_a_quantised_checkpoint_is_refused_for_that_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra would not help."""
    config = {"architectures": ["Gemma2ForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, "engine.models.transformers_backend", None)
    with pytest.raises(UnsupportedModel, match=r"^quantization_config \('mxfp4'\) is not supported"):
        read_config(tmp_path)


def test_without_transformers_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    monkeypatch.setitem(sys.modules, "engine.models.transformers_backend", None)
    with pytest.raises(UnsupportedModel, match=r"'GPT2LMHeadModel' is not supported.*pip install .* -e '\.\[models\]'"):
        read_config(tmp_path)
