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
from engine.models import quantized, read_config
from engine.models.fused_experts import mxfp4_matrix
from engine.models.quantized import QuantizedLinear, QuantizedMatrix, stacked
from tests.builders import lively_checkpoint
from tests.engine.models.multiplied import KINDS, multiply_as
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


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_answers_are_those_of_the_values(model_impl: str, tmp_path: Path) -> None:
    coded, plain = _checkpoints(tmp_path)
    answers = _answers(_llm(coded, model_impl=model_impl))
    assert len({token for token_ids, _ in answers for token in token_ids}) > 10
    oracle = GreedyOracle(plain)
    for prompt, answer in zip(random_prompts(3, longest=60, vocab_size=1000), answers, strict=True):
        oracle.check(prompt, *answer)


def test_values_of_transformers_are_exact_in_bfloat16(tmp_path: Path) -> None:
    coded, plain = _checkpoints(tmp_path)
    of_codes, of_values = (_answers(_llm(one, dtype="bfloat16", model_impl="transformers")) for one in (coded, plain))
    assert of_codes == of_values


def test_codes_take_the_memory_that_they_have_in_the_file() -> None:
    """And stand for the numbers that the format says, whatever the power of two, also in parts of a matrix."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (70, 4, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(0, 255, (70, 4), generator=generator, dtype=torch.uint8)
    blocks[0, 0], exponents[:4, 0] = torch.arange(16, dtype=torch.uint8) * 17, torch.tensor([0, 1, 2, 254])
    matrix = mxfp4_matrix("layer", (70, 128), blocks, exponents)
    expected = _values(blocks[None], exponents[None])[0].t()
    assert torch.equal(matrix.values(), expected)
    assert torch.equal(matrix.narrow(0, 3, 40).values(), expected[3:43])
    assert torch.equal(matrix.narrow(1, 48, 64).values(), expected[:, 48:112])
    wide = stacked([matrix, QuantizedMatrix.of(expected[:2].nan_to_num(0, 0, 0).clamp(-9, 9), "int4")])
    assert torch.equal(wide.values()[:70], expected), "beside other codes it takes eight bits"
    layer = QuantizedLinear(matrix, None, torch.bfloat16)
    assert layer._codes.nbytes == 128 * 128 // 2, "two panels of 64 outputs"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outputs", [64, 150])
def test_products_are_those_with_the_numbers(kind: str, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, generator = multiply_as(kind, quantized, monkeypatch), torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (outputs, 3, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 126, (outputs, 3), generator=generator, dtype=torch.uint8)
    layer = QuantizedLinear(mxfp4_matrix("layer", (outputs, 96), blocks, exponents), None, dtype)
    x = torch.randn(70, 96, generator=generator).to(dtype)
    together = layer(x)
    expected = x.double() @ _values(blocks[None], exponents[None])[0].double()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(together.double(), expected, atol=tolerance * 10, rtol=tolerance)
    assert torch.equal(torch.cat([layer(part) for part in x.split(7)]), together)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"down_proj_scales": None},
            r"tensor 'model\.layers\.1\.mlp\.experts\.down_proj_scales' is missing from the checkpoint$",
        ),
        (
            {"gate_up_proj_scales": (4, 192, 3)},
            r"MXFP4 of 'model\.layers\.1\.mlp\.experts\.0\.gate_proj' is torch\.uint8 of shape \[96, 3\]; "
            r"config\.json requires uint8 of shape \[96, 2\]$",
        ),
        ({"gate_up_proj_blocks": (4,)}, "'model.layers.1.mlp.experts.0.gate_proj.weight' is missing"),
        (
            {"down_proj_blocks": (4, 64, 2, 16), "down_proj_scales": (4, 64, 2)},
            r"down_proj' is torch\.uint8 of shape \[64, 2, 16\]; config\.json requires uint8 of shape \[64, 3, 16\]$",
        ),
        (
            {"down_proj_blocks": None, "down_proj_scales": None},
            "'model.layers.1.mlp.experts.0.down_proj.weight' is missing",
        ),
        ({"router.bias": (5,)}, r"router\.bias' .* has shape \[5\]; config.json requires \[4\]"),
    ],
)
def test_codes_that_do_not_fit_are_an_invalid_checkpoint(
    shapes: dict[str, tuple[int, ...] | None], message: str, tmp_path: Path
) -> None:
    coded, _ = _checkpoints(tmp_path)
    tensors = load_file(coded / "model.safetensors")
    for name, shape in shapes.items():
        prefix = "model.layers.1.mlp." if name.startswith("router") else "model.layers.1.mlp.experts."
        del tensors[prefix + name]
        if shape is not None:
            tensors[prefix + name] = torch.ones(shape, dtype=torch.uint8)
    _write(coded, json.loads((coded / "config.json").read_text()), tensors)
    with pytest.raises(InvalidCheckpoint, match=message):
        _llm(coded)
    with pytest.raises(InvalidCheckpoint):
        _llm(coded, model_impl="transformers")


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_without_a_type_in_its_config_it_is_bfloat16(model_impl: str, tmp_path: Path) -> None:
    """As gpt-oss is published; a type that it names is its own."""
    coded, _ = _checkpoints(tmp_path)
    config = json.loads((coded / "config.json").read_text())
    assert read_config(coded, model_impl).torch_dtype == config.pop("dtype") == "float32"
    (coded / "config.json").write_text(json.dumps(config))
    assert read_config(coded, model_impl).torch_dtype == "bfloat16"


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
