"""Linear layers of float32 and bfloat16: correctly rounded sums, whose bits depend on their row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.attention.compilation import has_wide_registers
from engine.models import linear
from engine.models.linear import Linear, PackedLinear, PanelLinear, make_linear
from engine.models.panel_linear_kernels import runs_of
from tests.engine.models.multiplied import LINEAR_KINDS, multiply_as

NUM_RESULTS = 1 << 17
"""Another order of addition rounds one result in 2,000 to 20,000 to another bfloat16."""


@pytest.fixture(params=[kind for kind in LINEAR_KINDS if kind != "float16"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """As on a processor that multiplies numbers of this type in this way."""
    return multiply_as(request.param, linear, monkeypatch)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("kind", [PackedLinear, make_linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_features", [512, 1024, 1536, 4864])
def test_one_row_has_the_bits_that_it_has_among_others(
    kind: Callable[[torch.Tensor], Linear], dtype: torch.dtype, in_features: int
) -> None:
    """In bfloat16 oneDNN adds groups of 512 inputs for one row, and of 1024 for several."""
    layer = kind(numbers(512, in_features, dtype=dtype))
    x = numbers(NUM_RESULTS // 512, in_features, dtype=dtype)
    assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), layer(x))


@pytest.mark.parametrize(
    ("out_features", "in_features"), [(64, 2), (16, 64), (100, 34), (192, 1000), (1000, 514), (100, 32), (1000, 1056)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_shape_any_rows_any_threads(
    dtype: torch.dtype, out_features: int, in_features: int, has_bias: bool
) -> None:
    weight = numbers(out_features, in_features, dtype=dtype)
    bias = numbers(out_features, dtype=dtype) if has_bias else None
    layer, x = PanelLinear(weight, bias), numbers(150, in_features, dtype=dtype)
    torch.set_num_threads(1)
    y = layer(x)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((150, out_features), dtype, True)
    given = [one.double() for one in (x, weight, torch.zeros(out_features) if bias is None else bias)]
    exact = torch.nn.functional.linear(*given)
    of_magnitudes = torch.nn.functional.linear(*(one.abs() for one in given))
    rounded = torch.finfo(dtype).eps / 2 * exact.abs()
    summed = torch.finfo(torch.float32).eps * in_features**0.5 * of_magnitudes
    assert (y.double() - exact).abs().le(rounded + summed).all()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for rows in (1, 2, 3, 5, 7, 16, 129, 150):
            assert torch.equal(torch.cat([layer(part) for part in x.split(rows)]), y)


@pytest.mark.parametrize("second_level_bytes", [1 << 30, 1])
def test_any_number_of_rows_with_and_without_the_next_panel_prefetched(
    dtype: torch.dtype, second_level_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = numbers(320, 34, dtype=dtype), numbers(270, 34, dtype=dtype)
    monkeypatch.setattr(linear, "second_level_bytes", lambda: second_level_bytes)
    layer = PanelLinear(weight, None)
    torch.set_num_threads(2)
    one_by_one = torch.cat([layer(row) for row in x.split(1)])
    for rows in (*range(1, 34), 48, 127, 128, 129, 140, 270):
        assert torch.equal(layer(x[:rows]), one_by_one[:rows])


def test_threads_prefetch_the_next_panel_only_where_each_has_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first thread would take the other's panel."""
    monkeypatch.setattr(linear, "second_level_bytes", lambda: 1 << 30)
    monkeypatch.setattr(
        linear, "launcher_for", lambda address, dtype: lambda threads, arguments: seen.append(arguments)
    )
    seen: list[list[int]] = []
    torch.set_num_threads(2)
    for out_features, rows in ((128, 8), (128, 129), (192, 4), (192, 5)):
        PanelLinear(numbers(out_features, 64, dtype=torch.float32), None)(numbers(rows, 64, dtype=torch.float32))
    assert [arguments[8] for arguments in seen] == [0, 1, 0, 1]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_few_rows_read_the_panels_in_runs_and_none_is_left_out(dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    x = numbers(5, 130, dtype=dtype)  # five rows take the panels one by one
    for num_panels in (*range(1, 40), 100, 201):
        layer = PanelLinear(numbers(num_panels * 64 - 16, 130, dtype=dtype), None)
        one_by_one = layer(x)
        for rows in (1, 2, 3, 4):
            assert torch.equal(layer(x[:rows]), one_by_one[:rows]), f"{num_panels} panels, {rows} rows"


def test_runs_leave_single_tasks_so_that_threads_end_together() -> None:
    assert [runs_of(tasks, 2, 1) for tasks in (0, 15, 16, 64, 96, 2374)] == [
        (1, 0),
        (1, 0),
        (2, 7),
        (8, 7),
        (8, 11),
        (8, 295),
    ]
    assert runs_of(64, 2, 5) == (1, 0)
    assert runs_of(64, 16, 1) == (1, 0)


def test_rows_of_a_wider_matrix_are_copied_and_no_row_is_no_result(dtype: torch.dtype) -> None:
    layer, wide = PanelLinear(numbers(64, 32, dtype=dtype), None), numbers(5, 40, dtype=dtype)
    assert torch.equal(layer(wide[:, :32]), layer(wide[:, :32].contiguous()))
    assert layer(wide[:0, :32]).shape == (0, 64)
    assert PanelLinear(numbers(0, 32, dtype=dtype), None)(wide[:, :32]).shape == (5, 0)


def test_what_is_not_supported_or_is_slower_is_left_to_torch() -> None:
    in_bfloat16 = has_wide_registers() or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for dtype, is_ours in ((torch.float32, has_wide_registers()), (torch.bfloat16, in_bfloat16)):
        assert isinstance(make_linear(numbers(8, 8, dtype=dtype)), PanelLinear) == is_ours
    odd = numbers(8, 7, dtype=torch.bfloat16)
    assert not PanelLinear.supports(odd)
    assert isinstance(make_linear(odd), PackedLinear)
    assert not PanelLinear.supports(odd.double())
    assert not PanelLinear.supports(odd.float().to("meta"))
