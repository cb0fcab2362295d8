"""Linear layers of float32 and bfloat16: correctly rounded sums, whose bits depend on their row alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.attention.compilation import has_wide_registers, multiplies_pairs, multiplies_tiles
from engine.models.linear import Linear, PackedLinear, PanelLinear, make_linear

NUM_RESULTS = 1 << 17
"""Another order of addition rounds one result in 2,000 to 20,000 to another bfloat16."""
NEEDS = {
    torch.float32: (has_wide_registers(), "AVX-512"),
    torch.bfloat16: (
        (multiplies_pairs() and not multiplies_tiles()) or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "AVX512_BF16 and no AMX, or no product of bfloat16 in oneDNN",
    ),
}
"""Whether this processor computes the type in panels, and what it takes."""
every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(
            dtype,
            marks=pytest.mark.skipif(not is_here, reason=f"the kernel needs {what}; here oneDNN computes the layers"),
            id=str(dtype),
        )
        for dtype, (is_here, what) in NEEDS.items()
    ],
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


@pytest.mark.parametrize("kind", [PackedLinear, make_linear])
@pytest.mark.parametrize("dtype", list(NEEDS), ids=str)
@pytest.mark.parametrize("in_features", [512, 1024, 1536, 4864])
def test_one_row_has_the_bits_that_it_has_among_others(
    kind: Callable[[torch.Tensor], Linear], dtype: torch.dtype, in_features: int
) -> None:
    """In bfloat16 oneDNN adds groups of 512 inputs for one row, and of 1024 for several."""
    layer = kind(numbers(512, in_features, dtype=dtype))
    x = numbers(NUM_RESULTS // 512, in_features, dtype=dtype)
    assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), layer(x))


@every_dtype
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 2), (16, 64), (100, 34), (192, 1000), (1000, 514)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_shape_any_rows_any_threads(
    dtype: torch.dtype, out_features: int, in_features: int, has_bias: bool
) -> None:
    weight = numbers(out_features, in_features, dtype=dtype)
    bias = numbers(out_features, dtype=dtype) if has_bias else None
    assert PanelLinear.supports(weight)
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


@every_dtype
def test_rows_of_a_wider_matrix_are_copied_and_no_row_is_no_result(dtype: torch.dtype) -> None:
    layer, wide = PanelLinear(numbers(64, 32, dtype=dtype), None), numbers(5, 40, dtype=dtype)
    assert torch.equal(layer(wide[:, :32]), layer(wide[:, :32].contiguous()))
    assert layer(wide[:0, :32]).shape == (0, 64)


def test_what_is_not_supported_is_left_to_torch() -> None:
    odd = numbers(8, 7, dtype=torch.bfloat16)
    assert not PanelLinear.supports(odd)
    assert isinstance(make_linear(odd), PackedLinear)
    assert not PanelLinear.supports(odd.double())
    assert not PanelLinear.supports(odd.float().to("meta"))
