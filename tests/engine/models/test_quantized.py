"""Weights of 8-bit and 4-bit codes: the nearest ones, products that are exact row by row, answers as transformers gives
them with the same numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import Quantization
from engine.errors import UnsupportedModel
from engine.models import quantized, transformers_backend
from engine.models.quantized import QuantizedLinear, QuantizedMatrix, stacked
from tests.builders import dequantised, lively_checkpoint
from tests.engine.models.multiplied import KINDS, multiply_as
from tests.oracle import GreedyOracle, random_prompts

GPT2: dict[str, Any] = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
METHODS: tuple[Quantization, ...] = ("int8", "int4")
CHECKPOINTS = {"4 bits, zero points": (4, 64, torch.float16), "8 bits, zero points": (8, 24, torch.float32)}
"""Bits, inputs of a group, dtype of scales."""


def numbers_of(matrix: QuantizedMatrix) -> torch.Tensor:
    """What the codes stand for."""
    zeros = torch.zeros_like(matrix.scales) if matrix.zeros is None else matrix.zeros
    by_input = [numbers.double().repeat_interleave(matrix.group, dim=1) for numbers in (matrix.scales, zeros)]
    scales, zeros = (numbers[:, : matrix.codes.shape[1]] for numbers in by_input)
    return (matrix.codes.double() - zeros) * scales


def matrix_of(outputs: int, inputs: int, kind: str) -> QuantizedMatrix:
    """Of random weights, in codes made here or as checkpoints have them."""
    if kind in METHODS:
        return QuantizedMatrix.of(random(outputs, inputs) / inputs**0.5, kind)
    bits, group, scale_dtype = CHECKPOINTS[kind]
    groups, generator = -(-inputs // group), torch.Generator().manual_seed(3)
    half = 1 << bits - 1
    codes, zeros = (
        torch.randint(-half, half, (outputs, size), generator=generator, dtype=torch.int8) for size in (inputs, groups)
    )
    scales = torch.rand((outputs, groups), generator=generator) / (half * inputs**0.5)
    return QuantizedMatrix(codes, scales.to(scale_dtype), bits, group, zeros)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("outputs", "inputs"), [(100, 97), (192, 160), (1300, 32)])
@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        *itertools.product(METHODS, KINDS),
        ("4 bits, zero points", "bfloat16, in pairs"),
        ("4 bits, zero points", "float32"),
        ("8 bits, zero points", "float32"),
    ],
)
def test_a_row_is_the_product_with_the_numbers_and_has_the_same_bits_among_any_others(
    codes: str, kind: str, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = multiply_as(kind, quantized, monkeypatch)
    matrix = matrix_of(outputs, inputs, codes)
    bias, x = random(outputs, seed=1), random(70, inputs, seed=2).to(dtype)
    layer = QuantizedLinear(matrix, bias, dtype)
    together = layer(x)
    assert together.dtype == dtype
    expected = x.double() @ numbers_of(matrix).T + bias.double()
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(together.double(), expected, atol=tolerance, rtol=0)
    for size in (1, 3, 4, 7, 33):
        assert torch.equal(torch.cat([layer(part) for part in x.split(size)]), together), f"{size} rows at a time"
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(num_threads, 2))
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("method", METHODS)
def test_codes_take_few_bits_and_err_by_half_a_step(method: Quantization) -> None:
    weight = random(256, 512)
    weight[3], weight[4, :32] = 0.0, 0.0
    matrix = QuantizedMatrix.of(weight, method)
    error = (numbers_of(matrix) - weight.double()).abs()
    half_step = matrix.scales.double().abs().repeat_interleave(matrix.group, dim=1) / 2
    is_clamped = matrix.codes == 7 if method == "int4" else matrix.codes.abs() == 127
    assert (error <= half_step * 1.001 + is_clamped * half_step * 1.1).all()
    assert not numbers_of(matrix)[3].any()
    layer = QuantizedLinear(matrix, None, torch.bfloat16)
    num_bytes = layer._codes.nbytes + layer._scales.nbytes
    assert num_bytes / weight.numel() == pytest.approx({"int8": 1.0, "int4": 0.5625}[method], rel=0.01)


@pytest.mark.parametrize("codes", [*METHODS, *CHECKPOINTS])
def test_a_rank_has_the_numbers_of_the_whole(codes: str) -> None:
    whole = matrix_of(12, 160, codes)
    assert torch.equal(whole.values().double(), numbers_of(whole).float().double())
    for dim, start, length in ((0, 3, 5), (1, 0, 80), (1, 80, 80), (1, 50, 37)):
        part = whole.narrow(dim, start, length)
        assert torch.equal(numbers_of(part), numbers_of(whole).narrow(dim, start, length))
    halves = [whole.narrow(0, 0, 5), whole.narrow(0, 5, 7)]
    assert torch.equal(numbers_of(stacked(halves)), numbers_of(whole))


def test_matrices_of_all_kinds_are_stacked() -> None:
    parts = [matrix_of(12, 160, codes) for codes in (*METHODS, *CHECKPOINTS)]
    assert torch.equal(numbers_of(stacked(parts)), torch.cat([numbers_of(part) for part in parts]))


def generate(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probabilities of each prompt's answer."""
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    outputs = [answer.outputs[0] for answer in answers]
    return [
        (one.token_ids, [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs or [], strict=True)])
        for one in outputs
    ]


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, skip_tokenizer_init=True, **{"dtype": "float32", "num_gpu_blocks_override": 64, **options})


@pytest.mark.parametrize(
    ("architecture", "method", "model_impl"),
    [
        ("qwen2", "int8", "auto"),
        ("qwen2", "int4", "auto"),
        ("gpt2", "int4", "auto"),
        ("gpt_oss", "int4", "auto"),
        pytest.param("gpt2", "int8", "auto", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "int8", "auto", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "int8", "auto", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "int4", "transformers", marks=pytest.mark.slow),
        pytest.param("mixtral", "int4", "auto", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_transformers_with_the_same_numbers(
    architecture: str, method: Quantization, model_impl: str, tmp_path: Path
) -> None:
    """In chunks, preempted, from the prefix cache."""
    folder = lively_checkpoint(tmp_path / "model", architecture, **(GPT2 if architecture == "gpt2" else {}))
    prompts = random_prompts(5, longest=150, vocab_size=1000)
    llm = make_llm(
        folder, quantization=method, model_impl=model_impl, max_num_batched_tokens=33, num_gpu_blocks_override=12
    )
    answers = generate(llm, prompts)
    assert llm.core.load.num_preemptions > 0
    assert generate(llm, prompts) == answers
    oracle = GreedyOracle(dequantised(folder, tmp_path / "numbers", method))
    for prompt, (token_ids, logprobs) in zip(prompts, answers, strict=True):
        oracle.check(prompt, token_ids, logprobs)
    assert len({token for token_ids, _ in answers for token in token_ids}) > 20, "the output does not vary"
    assert answers != generate(make_llm(folder), prompts), "nothing was quantised"


def test_experts_that_stay_as_they_are_are_named() -> None:
    model = torch.nn.ModuleDict({"experts": torch.nn.Module()})
    model["experts"].register_parameter("weight", torch.nn.Parameter(torch.zeros(2, 3, 4)))
    with pytest.raises(UnsupportedModel, match=r"quantization int8 .* for these experts \(experts.weight\); set none"):
        transformers_backend._pack_linear_layers(model, "int8")
