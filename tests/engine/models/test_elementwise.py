"""The compiled steps compute what the torch operations compute."""

from __future__ import annotations

import pytest
import torch

from engine.models.elementwise import CompiledElementwise, Elementwise, HeadNorm, HeadShape, elementwise_for

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ROWS = [1, 3, 700]  # the last is enough for several threads


@pytest.fixture(params=[*TOLERANCE], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3).to(dtype)


@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(rows: int, dtype: torch.dtype) -> None:
    x, weight = _random(rows, 96, dtype=dtype), _random(96, dtype=dtype)
    for addend in (None, x):
        residuals = [_random(rows, 96, dtype=dtype) for _ in range(2)]
        outputs = [
            steps.add_rms_norm(addend, residual, weight, 1e-5)
            for steps, residual in zip((CompiledElementwise(), Elementwise()), residuals, strict=True)
        ]
        assert torch.equal(*residuals)
        torch.testing.assert_close(*outputs, atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate(rows: int, has_norm: bool, dtype: torch.dtype) -> None:
    shape = HeadShape(num_heads=4, num_kv_heads=2, head_dim=64)
    norm = HeadNorm(_random(64, dtype=dtype), _random(64, dtype=dtype).flip(0), 1e-6) if has_norm else None
    angles = torch.rand(rows, 32, generator=torch.Generator().manual_seed(0)) * 9
    results = [_random(rows, 8 * 64, dtype=dtype) for _ in range(2)]
    for steps, qkv in zip((CompiledElementwise(), Elementwise()), results, strict=True):
        steps.rotate(qkv, angles.cos(), angles.sin(), shape, norm)
    assert torch.equal(results[0][:, 6 * 64 :], _random(rows, 8 * 64, dtype=dtype)[:, 6 * 64 :])
    torch.testing.assert_close(*results, atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])


@pytest.mark.parametrize("rows", ROWS)
def test_silu_and_mul(rows: int, dtype: torch.dtype) -> None:
    gate_up = _random(rows, 2 * 80, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    outputs = [steps.silu_and_mul(gate_up) for steps in (CompiledElementwise(), Elementwise())]
    torch.testing.assert_close(*outputs, atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])


def test_sizes_that_are_not_whole_vectors_run_in_torch() -> None:
    cpu = torch.device("cpu")
    fitting = elementwise_for(cpu, torch.float32, row_sizes=(64, 160), head_dim=32)
    assert isinstance(fitting, CompiledElementwise)
    for row_sizes, head_dim in (((64, 100), 32), ((64, 160), 16)):
        unfitting = elementwise_for(cpu, torch.float32, row_sizes=row_sizes, head_dim=head_dim)
        assert type(unfitting) is Elementwise
