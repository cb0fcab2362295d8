"""What adapters add to a linear layer: correctly rounded sums, whose bits depend on the row and its adapter alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from engine.models import adapters
from engine.models.adapter_kernels import order_address
from engine.models.adapters import Adapters, CompiledAdapters, GroupedAdapters
from tests.engine.models.multiplied import KINDS, multiply_as

Pairs = list[list[tuple[torch.Tensor, torch.Tensor]] | None]


@pytest.fixture(params=KINDS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """As on a processor that multiplies numbers of this type in this way."""
    return multiply_as(request.param, adapters, monkeypatch)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def make_pairs(ranks: list[list[int] | None], sizes: list[int], in_features: int, dtype: torch.dtype) -> Pairs:
    """Random A and B of each adapter and projection."""

    def pair(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return numbers(rank, in_features, dtype=dtype), numbers(size, rank, dtype=dtype)

    return [None if of_one is None else [*map(pair, of_one, sizes)] for of_one in ranks]


class Step:
    """The adapters of a step's tokens, without files. The layer beneath adds nothing."""

    def __init__(self, pairs: Pairs, kind: type = CompiledAdapters) -> None:
        self._adapters = Adapters.__new__(Adapters)
        self._adapters._num_adapters = len(pairs)
        self._num_outputs = sum(len(up) for up in (up for _, up in next(filter(None, pairs))))
        self._layer = kind(self._base, pairs, self._adapters)

    @property
    def low_dtype(self) -> torch.dtype:
        return cast(CompiledAdapters, self._layer)._low_dtype

    def _base(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1].expand(-1, self._num_outputs).contiguous()

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        self._adapters.tokens = tokens
        return cast(torch.Tensor, self._layer(x))


def exact(
    pairs: Pairs, x: torch.Tensor, tokens: torch.Tensor, *, low_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the sum of magnitudes, float64; what A gives is rounded to `low_dtype`."""
    results = []
    for given, one in zip(x.double(), tokens.tolist(), strict=True):
        pair = pairs[one] if one < len(pairs) else None
        if pair is None:
            pair = [(torch.zeros(0, len(given)), torch.zeros(len(up), 0)) for _, up in next(filter(None, pairs))]
        low = [down.double() @ given for down, _ in pair]
        of_low = [down.double().abs() @ given.abs() for down, _ in pair]
        added = [up.double() @ one.to(low_dtype).double() for one, (_, up) in zip(low, pair, strict=True)]
        of_added = [up.double().abs() @ one for one, (_, up) in zip(of_low, pair, strict=True)]
        results.append((given[0] + torch.cat(added), given[0].abs() + torch.cat(of_added)))
    wanted, of_all = zip(*results, strict=True)
    return torch.stack(wanted), torch.stack(of_all)


RANKS: list[list[int] | None] = [[4, 2, 8], None, [16, 16, 16], [1, 0, 3], [64, 7, 24], [0, 33, 0]]
"""Of three projections, by adapter."""
SIZES = [576, 16, 208]


@pytest.mark.parametrize("in_features", [32, 544])
def test_any_ranks_any_rows_any_threads(dtype: torch.dtype, in_features: int) -> None:
    pairs = make_pairs(RANKS, SIZES, in_features, dtype)
    step, x = Step(pairs), numbers(150, in_features, dtype=dtype) / in_features**0.5
    tokens = torch.randint(0, len(RANKS) + 1, (150,), generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(1)
    y = step(x, tokens)
    assert (y.shape, y.dtype) == ((150, sum(SIZES)), dtype)
    is_pairs = step.low_dtype == torch.bfloat16
    wanted, magnitudes = exact(pairs, x, tokens, low_dtype=step.low_dtype)
    eps = torch.finfo(dtype).eps
    low_eps = torch.finfo(torch.bfloat16).eps / 64 if is_pairs else torch.finfo(torch.float32).eps * 24
    assert (y.double() - wanted).abs().le(eps / 2 * wanted.abs() + low_eps * magnitudes).all()
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for rows in (1, 2, 3, 5, 16, 129, 150):
            parts = [step(*part) for part in zip(x.split(rows), tokens.split(rows), strict=True)]
            assert torch.equal(torch.cat(parts), y), rows


def test_rows_have_the_same_bits_beside_any_others(dtype: torch.dtype) -> None:
    """One by one, in any order, and with other adapters loaded."""
    pairs = make_pairs(RANKS, SIZES, 64, dtype)
    x = numbers(700, 64, dtype=dtype) / 8
    of_one = [torch.full((700,), index) for index in range(len(RANKS) + 1)]
    alone = [
        Step([pair] if pair else [pairs[0]])(x, one * 0 + (pair is None))
        for pair, one in zip([*pairs, None], of_one, strict=True)
    ]
    for num_alike in (1, 2, 4, 7, 300):
        tokens = (torch.arange(700) // num_alike) % (len(RANKS) + 1)
        wanted = torch.stack(alone).gather(0, tokens[None, :, None].expand(-1, -1, sum(SIZES)))[0]
        assert torch.equal(Step(pairs)(x, tokens), wanted), num_alike


def test_a_row_without_an_adapter_stays_as_it_is_and_no_row_is_no_result(dtype: torch.dtype) -> None:
    step, x = Step(make_pairs(RANKS, SIZES, 32, dtype)), numbers(9, 32, dtype=dtype)
    plain = step(x, None)
    for index in (1, len(RANKS)):
        assert torch.equal(step(x, torch.full((9,), index)), plain)
    assert step(x[:0], torch.zeros(0, dtype=torch.int64)).shape == (0, sum(SIZES))


def test_numbers_that_are_not_finite_stay_in_their_row(dtype: torch.dtype) -> None:
    step, x = Step(make_pairs(RANKS, SIZES, 32, dtype)), numbers(9, 32, dtype=dtype)
    tokens = torch.tensor([2, 2, 2, 2, 2, 0, 4, 2, 6])
    wanted = step(x, tokens)
    x[1] = float("nan")
    found = step(x, tokens)
    assert found[1].isnan().all()
    found[1] = wanted[1]
    assert torch.equal(found, wanted)


def test_adapters_have_their_own_size() -> None:
    pairs = make_pairs([[3, 1], [5, 0], None], [48, 272], 96, torch.float32)
    layer = CompiledAdapters(lambda x: x, pairs, Adapters.__new__(Adapters))
    size = sum(matrix.nbytes for pair in pairs if pair for matrices in pair for matrix in matrices)
    assert sum(matrix.nbytes for matrix in layer._matrices) == size


def test_all_kernels_are_compiled_before_the_first_step() -> None:
    order_address.cache_clear()
    Step(make_pairs([[3]], [48], 96, torch.float32))
    assert order_address.cache_info().currsize == 1


def test_tokens_are_ordered_by_adapter() -> None:
    step = Adapters.__new__(Adapters)
    step._num_adapters = 5
    tokens = torch.randint(0, 6, (300,), generator=torch.Generator().manual_seed(1))
    step.tokens = tokens
    assert step.order.tolist() == tokens.argsort(stable=True).tolist()
    step.tokens = tokens[:7]
    assert step.order.tolist() == tokens[:7].argsort(stable=True).tolist()


def test_torch_computes_the_same_where_sizes_are_no_whole_vectors() -> None:
    for sizes, in_features, is_ours in (([48, 16], 32, True), ([48, 17], 32, False), ([48, 16], 34, False)):
        pairs = make_pairs([[2, 3], None, [5, 0]], sizes, in_features, torch.float32)
        assert CompiledAdapters.supports(pairs) == is_ours
        x, tokens = numbers(9, in_features), torch.tensor([0, 3, 2, 1, 0, 0, 2, 0, 2])
        wanted, magnitudes = exact(pairs, x, tokens, low_dtype=torch.float32)
        for kind in [GroupedAdapters, *([CompiledAdapters] if is_ours else [])]:
            assert (Step(pairs, kind)(x, tokens).double() - wanted).abs().le(1e-6 * magnitudes).all()
