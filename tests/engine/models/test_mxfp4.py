"""gpt-oss as it is published: its experts are MXFP4, two numbers of four bits in a byte and a power of two for 32."""

from __future__ import annotations

import json
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

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
PROJECTIONS = ("experts.gate_up_proj", "experts.down_proj")
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Of the codes 0 to 7; the eighth bit is the sign."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)


def _checkpoints(folder: Path) -> tuple[Path, Path]:
    """A checkpoint in MXFP4 of random codes, and the same one with their values."""
    coded, plain = folder / "coded", lively_checkpoint(folder / "plain", "gpt_oss", intermediate_size=96)
    tensors = load_file(plain / "model.safetensors")
    codes, generator = dict(tensors), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        del codes[name]
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = _values(blocks, scales)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    _write(coded, json.loads((plain / "config.json").read_text()), codes)
    return coded, plain


def _values(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[experts, inputs, outputs], number by number as the format defines them."""
    numbers = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)])
    values = torch.empty(*blocks.shape[:-1], 32)
    for place in range(16):
        byte = blocks[..., place].long()
        values[..., 2 * place], values[..., 2 * place + 1] = numbers[byte % 16], numbers[byte // 16]
    values *= 2.0 ** (scales.float() - 127)[..., None]
    return values.flatten(2).transpose(1, 2).contiguous()


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": MXFP4}))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"dtype": "float32", "num_gpu_blocks_override": 64, **options})


def _answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(3, longest=60, vocab_size=1000)]
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, GREEDY, use_tqdm=False)]
    return [
        (one.token_ids, [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)])
        for one in outputs
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_values(dtype: str, tmp_path: Path) -> None:
    coded, plain = _checkpoints(tmp_path)
    answers = _answers(_llm(coded, dtype=dtype))
    assert answers == _answers(_llm(plain, dtype=dtype))
    assert len({token for token_ids, _ in answers for token in token_ids}) > 10
    if dtype == "float32":
        oracle = GreedyOracle(plain)
        for prompt, answer in zip(random_prompts(3, longest=60, vocab_size=1000), answers, strict=True):
            oracle.check(prompt, *answer)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"down_proj_scales": None}, "transformers cannot load the checkpoint: "),
        ({"gate_up_proj_scales": (4, 192, 3)}, "transformers cannot load the checkpoint: "),
        ({"gate_up_proj_blocks": (4,)}, "transformers cannot load the checkpoint: "),
        (
            {"down_proj_blocks": (4, 64, 2, 16), "down_proj_scales": (4, 64, 2)},
            "transformers cannot load the checkpoint: ",
        ),
        (
            {"down_proj_blocks": None, "down_proj_scales": None},
            r"missing_keys: model\.layers\.1\.mlp\.experts\.down_proj$",
        ),
    ],
)
def test_codes_that_do_not_fit_are_an_invalid_checkpoint(
    shapes: dict[str, tuple[int, ...] | None], message: str, tmp_path: Path
) -> None:
    coded, _ = _checkpoints(tmp_path)
    tensors = load_file(coded / "model.safetensors")
    for name, shape in shapes.items():
        del tensors[name := f"model.layers.1.mlp.experts.{name}"]
        if shape is not None:
            tensors[name] = torch.ones(shape, dtype=torch.uint8)
    _write(coded, json.loads((coded / "config.json").read_text()), tensors)
    with pytest.raises(InvalidCheckpoint, match=message):
        _llm(coded)


def test_dummy_weights_are_values(tmp_path: Path) -> None:
    coded, _ = _checkpoints(tmp_path)
    (coded / "model.safetensors").unlink()
    assert _answers(_llm(coded, load_format="dummy"))


def test_mxfp4_of_other_decoders_is_refused_by_name(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "quantization_config": MXFP4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModel, match=r"^quantization_config \('mxfp4'\) is not supported; .*mxfp4 of gpt-oss"
    ):
        read_config(tmp_path)
