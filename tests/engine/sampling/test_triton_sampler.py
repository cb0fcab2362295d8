"""The draw on a GPU, or in Triton's interpreter, is that of torch operations in vocabulary order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling import sampler
from tests.engine.sampling.margins import sampling_row
from tests.engine.sampling.test_sampler import NARROWED, drawn_by_torch, vocabularies

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sample_on_device(logits: torch.Tensor, rows: list[sampler.SamplingRow]) -> list[int]:
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    return sampler._sample_on_device(logits.to(DEVICE), rows, drawn)


MANY = 40 if torch.cuda.is_available() else 8
QUICK = [one for one in NARROWED if one in ({}, {"top_p": 0.95}) or "min_p" in one]


@pytest.mark.parametrize(
    ("narrowed", "num_draws"),
    [*((one, 1) for one in QUICK), *(pytest.param(one, MANY, marks=pytest.mark.slow) for one in NARROWED)],
    ids=str,
)
def test_the_kernel_draws_what_torch_draws(narrowed: dict[str, Any], num_draws: int) -> None:
    for name, logits in vocabularies().items():
        if DEVICE.type == "cpu" and len(logits) > 5001:
            continue  # the interpreter takes a second for each
        rows = [sampling_row(**narrowed, seed=3, position=position) for position in range(num_draws)]
        tokens = sample_on_device(logits.expand(len(rows), -1), rows)
        assert tokens == [drawn_by_torch(logits, row) for row in rows], name


def test_rows_with_and_without_filters_share_a_launch() -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(4)) * 3
    logits[:, ::7] = -0.0
    logits[:, 1::7] = 0.0
    rows = [
        sampling_row(temperature=(0.0, 0.7, 3.0)[i % 3], top_k=(0, 400, 9)[i // 2], top_p=(1.0, 0.8)[i % 2], seed=i)
        for i in range(6)
    ]
    together = sample_on_device(logits, rows)
    assert together == [sample_on_device(one[None], [row])[0] for one, row in zip(logits, rows, strict=True)]
    assert together == sampler.sample(logits, rows)


def test_rows_that_are_not_finite_are_named() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(sampler.NonFiniteLogits) as error:
            sample_on_device(logits, [sampling_row(temperature=temperature)] * 3)
        assert error.value.rows == (1,)
