"""Mixtures of experts against their definition, and token by token: whatever the other tokens of a step are."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.config import Quantization
from engine.models import linear, quantized
from engine.models.elementwise import elementwise_for
from engine.models.experts import CompiledExperts, Experts, SeparateExperts
from engine.models.linear import Linear, PackedLinear, make_grouped_linear, make_linear
from engine.models.llama import GatedMLP, SparseMLP
from engine.models.quantized import QuantizedMatrix
from tests.engine.models.multiplied import LINEAR_KINDS, multiply_as

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_PER_TOKEN, NUM_TOKENS = 96, 64, 16, 4, 150
WAYS: tuple[tuple[str, Quantization], ...] = (
    ("float32", "none"),
    ("bfloat16, converted", "none"),
    ("bfloat16, in pairs", "none"),
    ("bfloat16, in tiles", "none"),
    ("float32", "int8"),
    ("bfloat16, in pairs", "int4"),
    ("float16", "int4"),
)
elementwise = partial(elementwise_for, torch.device("cpu"), row_sizes=(HIDDEN, INTERMEDIATE), head_dim=32)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the router, of every expert's gate and up projections, and of its down projection."""
    shapes = ((NUM_EXPERTS, HIDDEN), (NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), (NUM_EXPERTS, HIDDEN, INTERMEDIATE))
    router, gate_up, down = (_random(*shape, seed=seed) * 2 / shape[-1] ** 0.5 for seed, shape in enumerate(shapes))
    return router, gate_up, down


def _biases() -> tuple[torch.Tensor, torch.Tensor]:
    return _random(NUM_EXPERTS, 2 * INTERMEDIATE, seed=5), _random(NUM_EXPERTS, HIDDEN, seed=6)


def _separate(dtype: torch.dtype) -> SeparateExperts:
    _, gate_up, down = (matrix.to(dtype) for matrix in _matrices())
    layers = (map(PackedLinear, gate_up), map(PackedLinear, down))
    activation = elementwise(dtype).silu_and_mul
    return SeparateExperts([GatedMLP(up, activation, down) for up, down in zip(*layers, strict=True)])


def _compiled(dtype: torch.dtype, quantization: Quantization) -> CompiledExperts:
    _, gate_up, down = (matrix.to(dtype) for matrix in _matrices())
    up_bias, down_bias = (bias.to(dtype) for bias in _biases())
    assert CompiledExperts.supports(dtype, HIDDEN)
    return CompiledExperts(
        make_grouped_linear(gate_up, up_bias, quantization),
        elementwise(dtype).silu_and_mul,
        make_grouped_linear(down, down_bias, quantization),
        num_experts=NUM_EXPERTS,
    )


def _multiply_as(kind: str, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    for module in (linear, quantized):
        multiply_as(kind, module, monkeypatch)
    return LINEAR_KINDS[kind][0]


def _choices(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts of tokens. Expert 2 has most tokens and expert 3 none."""
    scores = _random(num_tokens, NUM_EXPERTS, seed=7)
    scores[:, 2] += 3
    scores[:, 3] -= 30
    weights, chosen = scores.softmax(-1).topk(NUM_PER_TOKEN)
    return weights, chosen


def _weighted_sum(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, up: list[torch.Tensor], down: list[torch.Tensor]
) -> torch.Tensor:
    """Of one token, by the definition, in float64. `up`, `down`: of each expert, with the biases last."""
    expected = torch.zeros(HIDDEN, dtype=torch.float64)
    for weight, expert in zip(weights.double(), chosen, strict=True):
        gate, value = (up[expert] @ torch.cat((x.double(), torch.ones(1)))).chunk(2)
        activated = torch.cat((torch.nn.functional.silu(gate) * value, torch.ones(1)))
        expected += weight * (down[expert] @ activated)
    return expected


@pytest.mark.parametrize(("kind", "quantization"), WAYS)
def test_a_token_gets_the_weighted_sum_of_its_experts(
    kind: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = _multiply_as(kind, monkeypatch)
    x, (weights, chosen) = _random(NUM_TOKENS, HIDDEN, seed=3).to(dtype), _choices(NUM_TOKENS)
    results = _compiled(dtype, quantization)(x, weights, chosen)
    assert results.dtype == dtype
    tolerance = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
    layers = []
    for matrices, biases in zip(_matrices()[1:], _biases(), strict=True):
        numbers = [matrix.to(dtype) for matrix in matrices]
        if quantization != "none":
            numbers = [QuantizedMatrix.of(matrix, quantization).values() for matrix in numbers]
        layers.append(
            [
                torch.cat((one.double(), bias.to(dtype).double()[:, None]), 1)
                for one, bias in zip(numbers, biases, strict=True)
            ]
        )
    for token, result in enumerate(results):
        expected = _weighted_sum(x[token], weights[token], chosen[token], *layers)
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


def _check_that_tokens_are_alone(experts: Experts, dtype: torch.dtype) -> None:
    x, (weights, chosen) = _random(NUM_TOKENS, HIDDEN, seed=3).to(dtype), _choices(NUM_TOKENS)
    together = experts(x, weights, chosen)
    for size in (1, 2, 7, 33):
        parts = zip(x.split(size), weights.split(size), chosen.split(size), strict=True)
        assert torch.equal(torch.cat([experts(*part) for part in parts]), together), f"{size} tokens at a time"
    order = torch.randperm(NUM_TOKENS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(experts(x[order], weights[order], chosen[order]), together[order])
    turned = experts(x, weights.flip(1), chosen.flip(1))
    assert torch.equal(turned, together), "the order of a token's experts shows"
    assert experts(x[:0], weights[:0], chosen[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(("kind", "quantization"), WAYS)
def test_the_bits_of_a_token_do_not_depend_on_the_others_or_on_threads(
    kind: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = _multiply_as(kind, monkeypatch)
    experts = _compiled(dtype, quantization)
    _check_that_tokens_are_alone(experts, dtype)
    x, choices, num_threads = (
        _random(NUM_TOKENS, HIDDEN, seed=3).to(dtype),
        _choices(NUM_TOKENS),
        torch.get_num_threads(),
    )
    expected = experts(x, *choices)
    try:
        torch.set_num_threads(3 - min(num_threads, 2))
        assert torch.equal(experts(x, *choices), expected)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_separate_experts_compute_each_token_alone(dtype: torch.dtype) -> None:
    _check_that_tokens_are_alone(_separate(dtype), dtype)


@pytest.mark.parametrize("normalises", [True, False])
def test_a_router_weighs_the_most_probable_experts(normalises: bool) -> None:
    router, *layers = _matrices()
    mlp = SparseMLP(PackedLinear(router), _separate(torch.float32), num_per_token=NUM_PER_TOKEN, normalises=normalises)
    up, down = ([torch.nn.functional.pad(one.double(), (0, 1)) for one in matrices] for matrices in layers)
    x = _random(20, HIDDEN, seed=3)
    for token, result in zip(x, mlp(x), strict=True):
        weights, chosen = (router.double() @ token.double()).softmax(0).topk(NUM_PER_TOKEN)
        expected = _weighted_sum(token, weights / weights.sum() if normalises else weights, chosen, up, down)
        torch.testing.assert_close(result.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("num_experts", "num_per_token"), [(4, 1), (37, 5), (128, 8), (6, 6)])
@pytest.mark.parametrize("normalises", [True, False])
def test_compiled_choices_are_those_of_torch(num_experts: int, num_per_token: int, normalises: bool) -> None:
    logits = _random(NUM_TOKENS, num_experts, seed=8) * 4
    weights, chosen = CompiledExperts.choose(logits, num_per_token, normalises=normalises)
    expected_weights, expected = SeparateExperts.choose(logits.double(), num_per_token, normalises=normalises)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, atol=1e-6, rtol=1e-5)


def test_equal_logits_and_such_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.zeros(4, 5)
    logits[1, 3], logits[2], logits[3, 1] = float("inf"), float("nan"), float("nan")
    weights, chosen = CompiledExperts.choose(logits, 3, normalises=True)
    assert chosen[0].tolist() == [0, 1, 2]
    assert chosen[1].tolist() == [3, 0, 1]
    assert ((chosen >= 0) & (chosen < 5)).all()
    assert weights[2].isnan().all(), "a token whose logits are no numbers shows it"


@pytest.mark.parametrize("num_rows", [1, 5, 130, 600])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_layers_of_a_group_are_those_by_themselves(quantization: Quantization, num_rows: int) -> None:
    """All rows at one layer, or spread over some; outputs that do not fill a panel."""
    weight, bias = _random(5, 70, 64) / 8, _random(5, 70, seed=1)
    layers: list[Linear] = [make_linear(*both, quantization) for both in zip(weight, bias, strict=True)]
    grouped, x = make_grouped_linear(weight, bias, quantization), _random(num_rows, 64, seed=2)
    for counts in ([num_rows, 0, 0, 0, 0], [0, num_rows // 2, 0, num_rows - num_rows // 2, 0]):
        starts = torch.tensor([0, *counts]).cumsum(0)
        expected = torch.cat([layer(part) for layer, part in zip(layers, x.split(counts), strict=True) if len(part)])
        assert torch.equal(grouped(x, starts), expected)
