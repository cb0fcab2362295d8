"""Mixtures of experts: against the definition, and row by row."""

from __future__ import annotations

import pytest
import torch

from engine.models.elementwise import elementwise_for
from engine.models.linear import PackedLinear
from engine.models.llama import GatedMLP, SparseMLP

HIDDEN, INTERMEDIATE, NUM_EXPERTS, NUM_PER_TOKEN = 64, 48, 16, 4
CPU = torch.device("cpu")


def _weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Matrices of the router, of every expert's gate and up projections, and of its down projection."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((NUM_EXPERTS, HIDDEN), (NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN), (NUM_EXPERTS, HIDDEN, INTERMEDIATE))
    router, gate_up, down = (torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5 for shape in shapes)
    return router, gate_up, down


def _sparse_mlp(dtype: torch.dtype, *, normalises: bool = True) -> SparseMLP:
    router, gate_up, down = (weight.to(dtype) for weight in _weights())
    elementwise = elementwise_for(CPU, dtype, row_sizes=(HIDDEN, INTERMEDIATE), head_dim=32)
    experts = [
        GatedMLP(PackedLinear(first), PackedLinear(last), elementwise)
        for first, last in zip(gate_up, down, strict=True)
    ]
    return SparseMLP(PackedLinear(router), experts, num_per_token=NUM_PER_TOKEN, normalises=normalises)


def _rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(70, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("normalises", [True, False])
def test_a_token_gets_the_weighted_sum_of_its_experts(normalises: bool) -> None:
    router, gate_up, down = (weight.double() for weight in _weights())
    x = _rows(torch.float32)
    for token, result in zip(x.double(), _sparse_mlp(torch.float32, normalises=normalises)(x), strict=True):
        weights, chosen = (router @ token).softmax(0).topk(NUM_PER_TOKEN)
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights / weights.sum() if normalises else weights, chosen, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            expected += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_token_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, mlp = _rows(dtype), _sparse_mlp(dtype)
    together = mlp(x)
    for size in (1, 2, 7, 33):
        assert torch.equal(torch.cat([mlp(part) for part in x.split(size)]), together), f"{size} tokens at a time"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(mlp(x[order]), together[order])
