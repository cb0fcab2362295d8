"""Linear layers of bfloat16: correctly rounded sums, whose bits depend on their row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.attention.compilation import multiplies_pairs, multiplies_tiles
from engine.models.linear import Linear, PackedLinear, make_linear
from engine.models.pair_linear import PairLinear

NUM_RESULTS = 1 << 17
"""Another order of addition rounds one result in 2,000 to 20,000 to another bfloat16."""
on_pairs = pytest.mark.skipif(not multiplies_pairs() or multiplies_tiles(), reason="another processor's kernel")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", [PackedLinear, make_linear])
@pytest.mark.parametrize("in_features", [512, 1024, 1536, 4864])
def test_one_row_has_the_bits_that_it_has_among_others(kind: type[Linear], in_features: int) -> None:
    """oneDNN adds groups of 512 inputs for one row, and of 1024 for several."""
    layer = kind(numbers(512, in_features))
    x = numbers(NUM_RESULTS // 512, in_features)
    assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), layer(x))


@on_pairs
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 2), (16, 64), (100, 34), (192, 1000), (1000, 514)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_any_shape_any_rows_any_threads(out_features: int, in_features: int, has_bias: bool) -> None:
    weight, bias = numbers(out_features, in_features), numbers(out_features) if has_bias else None
    assert PairLinear.supports(weight)
    layer, x = PairLinear(weight, bias), numbers(45, in_features)
    torch.set_num_threads(1)
    y = layer(x)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((45, out_features), torch.bfloat16, True)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    rounding = exact.abs() * 2**-8  # half of the last digit, and what float32 sums lose
    torch.testing.assert_close(y.double(), exact, rtol=0, atol=float(rounding.max()) + 1e-3)
    assert (y.double() - exact).abs().le(rounding + 1e-3 * in_features**0.5).all()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for rows in (1, 2, 3, 5, 7, 16, 45):
            assert torch.equal(torch.cat([layer(part) for part in x.split(rows)]), y)


@on_pairs
def test_rows_of_a_wider_matrix_are_read_where_they_lie() -> None:
    layer, wide = PairLinear(numbers(64, 32), None), numbers(5, 40)
    assert torch.equal(layer(wide[:, :32]), layer(wide[:, :32].contiguous()))
    assert layer(wide[:0, :32]).shape == (0, 64)


@on_pairs
def test_what_is_not_supported_is_left_to_torch() -> None:
    assert not PairLinear.supports(numbers(8, 7))
    assert not PairLinear.supports(numbers(8, 8).float())
    assert isinstance(make_linear(numbers(8, 7)), PackedLinear)
