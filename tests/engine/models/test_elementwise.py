"""The compiled steps, and on a GPU or in its interpreter Triton's, compute what the torch operations compute."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.models.config import ClampedGate
from engine.models.elementwise import CompiledElementwise, Elementwise, HeadNorm, HeadShape, elementwise_for

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ROWS = [1, 3, 700]  # the last is enough for several threads
Steps = tuple[Elementwise, torch.device]


def on_gpu() -> Steps:
    """Or in the interpreter."""
    from engine.models.triton_elementwise import TritonElementwise

    return TritonElementwise(), torch.device("cuda" if torch.cuda.is_available() else "cpu")


# The interpreter does not round to bfloat16, it cuts.
TRITON = [
    pytest.param("triton", 3, torch.float32, id="triton-float32"),
    pytest.param("triton", 3, torch.float16, id="triton-float16"),
    pytest.param("triton", 700, torch.bfloat16, id="triton-bfloat16", marks=pytest.mark.gpu),
]
each_kind = pytest.mark.parametrize(
    ("kind", "rows", "dtype"), [*(("compiled", rows, dtype) for rows in ROWS for dtype in TOLERANCE), *TRITON]
)


@pytest.fixture
def steps(kind: str) -> Steps:
    """The operations to test, and where their tensors are."""
    return on_gpu() if kind == "triton" else (CompiledElementwise(), torch.device("cpu"))


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3).to(dtype)


def on(device: torch.device, norm: HeadNorm | None) -> HeadNorm | None:
    return norm and HeadNorm(norm.query_weight.to(device), norm.key_weight.to(device), norm.eps)


@each_kind
def test_add_rms_norm(steps: Steps, rows: int, dtype: torch.dtype) -> None:
    tested, device = steps
    x, weight, residual = (_random(*shape, dtype=dtype) for shape in ((rows, 96), (96,), (rows, 96)))
    for addend in (None, x):
        found, expected = residual.to(device, copy=True), residual.clone()
        output = tested.add_rms_norm(None if addend is None else x.to(device), found, weight.to(device), 1e-5)
        expected_output = Elementwise().add_rms_norm(addend, expected, weight, 1e-5)
        assert torch.equal(found.cpu(), expected)
        torch.testing.assert_close(output.cpu(), expected_output, atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])


@each_kind
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate(steps: Steps, rows: int, has_norm: bool, dtype: torch.dtype) -> None:
    tested, device = steps
    shape = HeadShape(num_heads=4, num_kv_heads=2, head_dim=64)
    norm = HeadNorm(_random(64, dtype=dtype), _random(64, dtype=dtype).flip(0), 1e-6) if has_norm else None
    angles = torch.rand(rows, 32, generator=torch.Generator().manual_seed(0)) * 9
    given = _random(rows, 8 * 64, dtype=dtype)
    found, expected = given.to(device, copy=True), given.clone()
    tested.rotate(found, angles.cos().to(device), angles.sin().to(device), shape, on(device, norm))
    Elementwise().rotate(expected, angles.cos(), angles.sin(), shape, norm)
    assert torch.equal(found[:, 6 * 64 :].cpu(), given[:, 6 * 64 :])
    torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of numpy, in the interpreter
@each_kind
def test_silu_and_mul(steps: Steps, rows: int, dtype: torch.dtype) -> None:
    tested, device = steps
    gate_up = _random(rows, 2 * 80, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -90.0])
    output, expected = tested.silu_and_mul(gate_up.to(device)), Elementwise().silu_and_mul(gate_up)
    torch.testing.assert_close(output.cpu(), expected, atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])


@each_kind
def test_clamped_gate(steps: Steps, rows: int, dtype: torch.dtype) -> None:
    tested, device = steps
    gate_up, gate = _random(rows, 2 * 80, dtype=dtype), ClampedGate(alpha=1.702, limit=2.5)
    gate_up[0, :4], gate_up[0, 80:83] = torch.tensor([-200.0, 200.0, 0.0, -90.0]), torch.tensor([-9.0, 9.0, -1.0])
    output = tested.clamped_gate(gate_up.to(device), gate).cpu()
    first, second = gate_up.double().chunk(2, dim=-1)
    first, second = first.clamp(max=2.5), second.clamp(-2.5, 2.5)
    expected = (second + 1) * first / (1 + (-1.702 * first).exp())
    torch.testing.assert_close(output.double(), expected, atol=TOLERANCE[dtype], rtol=RELATIVE[dtype])


@each_kind
def test_a_gate_of_nan_is_nan_and_one_beyond_its_limits_is_at_them(steps: Steps, rows: int, dtype: torch.dtype) -> None:
    tested, device = steps
    gate_up = torch.ones(rows, 2 * 80, dtype=dtype)
    gate_up[0, 0] = gate_up[0, 81] = float("nan")
    gate_up[0, 2], gate_up[0, 83] = float("inf"), float("-inf")
    found = tested.clamped_gate(gate_up.to(device), ClampedGate(alpha=1.702, limit=2.5)).cpu()[0, :4]
    assert found.isnan().tolist() == [True, True, False, False]
    assert found[2] > 0 > found[3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_in_torch_has_its_bits_whatever_the_rows_beside_it(dtype: torch.dtype) -> None:
    steps, gate = Elementwise(), ClampedGate(alpha=1.702, limit=7.0)
    for rows, columns in ((50, 5), (50, 37), (999, 360)):  # the last ones on several threads
        gate_up = _random(rows, 2 * columns, dtype=dtype) * 3
        for activate in (steps.silu_and_mul, partial(steps.clamped_gate, gate=gate)):
            assert torch.equal(torch.cat([activate(row) for row in gate_up.split(1)]), activate(gate_up)), columns


def test_sizes_that_are_not_whole_vectors_run_in_torch() -> None:
    cpu = torch.device("cpu")
    fitting = elementwise_for(cpu, torch.float32, row_sizes=(64, 160), head_dim=32)
    assert isinstance(fitting, CompiledElementwise)
    for row_sizes, head_dim in (((64, 100), 32), ((64, 160), 16)):
        unfitting = elementwise_for(cpu, torch.float32, row_sizes=row_sizes, head_dim=head_dim)
        assert type(unfitting) is Elementwise
