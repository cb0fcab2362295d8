"""The sampler against the exact distribution, and the properties that make it a pure function."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.sampling import sampler
from engine.sampling.sampler import NonFiniteLogits, SamplingRow, philox4x32, sample, uniform
from tests.engine.sampling.margins import cdf_of, inverted, sample_with_margin, sampling_row

NUM_DRAWS = 20_000


# The uniform numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # Known answers published with Random123 (tests/kat_vectors): zeros, ones, digits of pi.
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


def test_the_uniform_is_the_upper_53_bits_of_the_first_two_words() -> None:
    assert uniform(0, 0, 0) == ((0xE169C58D << 32 | 0x6627E8D5) >> 11) / 2**53
    # STEP: the words of seed, position and choice lie where the docstring says
    seed, position = 0xA4093822 | 0x299F31D0 << 32, 0x243F6A88 | 0x85A308D3 << 32
    first, second, _, _ = philox4x32((0x243F6A88, 0x85A308D3, 0x13198A2E, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, 0x13198A2E, position) == ((second << 32 | first) >> 11) / 2**53


def test_uniforms_are_uniform_and_their_coordinates_independent() -> None:
    from scipy import stats  # a second of CPU, in one process

    by_position = np.array([uniform(7, 0, i) for i in range(NUM_DRAWS)])
    by_seed = np.array([uniform(i, 0, 7) for i in range(NUM_DRAWS)])
    by_choice = np.array([uniform(7, i, 7) for i in range(NUM_DRAWS)])
    neighbour = np.array([uniform(8, 0, i) for i in range(NUM_DRAWS)])
    for draws in (by_position, by_seed, by_choice):
        assert stats.kstest(draws, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / math.sqrt(NUM_DRAWS)
    assert abs(np.corrcoef(by_position, neighbour)[0, 1]) < 4 / math.sqrt(NUM_DRAWS)
    assert abs(np.corrcoef(by_position, by_choice)[0, 1]) < 4 / math.sqrt(NUM_DRAWS)


# The distribution


def test_the_tokens_that_reach_top_p_exactly_are_all_that_stay() -> None:
    """Weights 1, 1/2 and 0: the first alone has two thirds."""
    logits = torch.tensor([[0.0, -1.0, -1e4]])
    row = sampling_row(temperature=1 / math.log(2), top_p=2 / 3)
    positions = [position for position in range(200) if uniform(row.seed, row.choice, position) > 0.7]
    assert positions
    assert {sample(logits, [replace(row, position=position)])[0] for position in positions} == {0}
    more = replace(row, params=msgspec.structs.replace(row.params, top_p=0.667))
    assert {sample(logits, [replace(more, position=position)])[0] for position in positions} == {1}


def slow_probabilities(logits: torch.Tensor, row: SamplingRow) -> np.ndarray[Any, Any]:
    """The definition, one filter after the other, with Python's sort: what the sampler must agree with."""
    scaled = [x / row.params.temperature for x in logits.double().tolist()]
    weights = [math.exp(x - max(scaled)) for x in scaled]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    kept = [i for i in order if weights[i] >= row.params.min_p]
    if row.params.top_k > 0:
        kept = kept[: row.params.top_k]
    total, mass = sum(weights[i] for i in kept), 0.0
    for count, i in enumerate(kept, start=1):
        mass += weights[i]
        if mass >= row.params.top_p * total:
            kept = kept[:count]
            break
    probabilities = np.zeros(len(weights))
    probabilities[kept] = [weights[i] for i in kept]
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    "row",
    [
        sampling_row(),
        sampling_row(temperature=2.0, seed=2**64 - 1),
        *(
            pytest.param(sampling_row(**narrowed), marks=pytest.mark.slow)
            for narrowed in ({"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2})
        ),
        sampling_row(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05, choice=3),
    ],
)
def test_tokens_follow_the_exact_distribution(row: SamplingRow) -> None:
    from scipy import stats  # a second of CPU, in one process

    logits = torch.randn(40, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = slow_probabilities(logits, row)
    rows = [replace(row, position=i) for i in range(NUM_DRAWS)]
    counts = np.bincount(sample(logits.expand(NUM_DRAWS, -1), rows), minlength=40)
    assert counts[expected == 0].sum() == 0
    likely = expected * NUM_DRAWS >= 5
    observed = [*counts[likely], counts[~likely].sum()]
    predicted = [*expected[likely] * NUM_DRAWS, expected[~likely].sum() * NUM_DRAWS]
    if predicted[-1] == 0:
        observed, predicted = observed[:-1], predicted[:-1]
    assert stats.chisquare(observed, predicted).pvalue > 1e-3


def test_a_draw_is_the_inverse_of_the_cdf_in_vocabulary_order() -> None:
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    for position in range(300):
        # Few distinct values, as bfloat16 logits have: ties at every edge
        logits = (torch.randn(50, generator=generator) * 4).round() / 2
        row = sampling_row(
            temperature=rng.choice([0.3, 1.0, 1.7]),
            top_k=rng.choice([0, 1, 3, 20, 50]),
            top_p=rng.choice([1.0, 0.9, 0.5, 0.05]),
            min_p=rng.choice([0.0, 0.1, 0.6]),
            seed=rng.getrandbits(64),
            position=position,
        )
        cdf = np.cumsum(slow_probabilities(logits, row))
        point = uniform(row.seed, row.choice, row.position)
        expected = int(np.searchsorted(cdf, point, side="right"))
        [(token, margin)] = sample_with_margin(logits[None], [row])
        assert token == expected or margin < 1e-12
        if math.isfinite(margin):
            assert margin == pytest.approx(np.abs(cdf[(cdf > 1e-12) & (cdf < 1 - 1e-12)] - point).min(), abs=1e-12)


def drawn_by_torch(logits: torch.Tensor, row: SamplingRow) -> int:
    """The reference."""
    return int(inverted(cdf_of(logits, float(logits.max()), row), sampler._uniform_of(row)))


def vocabularies() -> dict[str, torch.Tensor]:
    """Logits [vocab] that lead to each place in the kernel: several blocks, part of one, buckets with many weights."""
    generator = torch.Generator().manual_seed(5)

    def normal(vocab: int, deviation: float) -> torch.Tensor:
        return torch.randn(vocab, generator=generator) * deviation

    with_gaps = normal(3000, 3.0)
    with_gaps[torch.rand(3000, generator=generator) < 0.7] = -math.inf
    return {
        "one token": torch.zeros(1),
        "two": torch.tensor([0.5, 0.0]),
        "flat": normal(10_007, 0.1),
        "broad": normal(4096, 1.0),
        "peaked": normal(40_003, 8.0),
        "all equal": torch.full((1001,), 3.25),
        "few values": normal(2000, 2.0).round(),
        "bfloat16": normal(5000, 4.0).bfloat16().float(),
        "falling far": torch.linspace(0, -900, 777),
        "one likely and many below the buckets": torch.cat(
            [torch.full((500,), -50.0), torch.zeros(1), normal(99, 1) - 45]
        ),
        "the last block without weight": torch.cat([normal(256, 1.0), torch.full((300,), -1e4)]),
        "with gaps": with_gaps,
    }


NARROWED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.01},
    {"temperature": 1e-5, "top_p": 0.9},
    {"temperature": 50.0, "top_p": 0.999},
    {"top_p": 0.95},
    {"top_p": 1e-9},
    {"top_p": 1 - 1e-15},
    {"top_k": 1, "top_p": 0.5},
    {"top_k": 20},
    {"top_k": 700, "top_p": 0.8},
    {"top_k": 999_999, "top_p": 0.3},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30, "top_k": 50, "top_p": 0.99, "temperature": 2.0},
]


@pytest.mark.parametrize("narrowed", NARROWED, ids=str)
def test_the_kernel_draws_what_torch_draws(narrowed: dict[str, Any]) -> None:
    for name, logits in vocabularies().items():
        rows = [sampling_row(**narrowed, seed=3, position=position) for position in range(40)]
        tokens = sample(logits.expand(len(rows), -1), rows)
        assert tokens == [drawn_by_torch(logits, row) for row in rows], name


def test_weights_are_exact_to_the_last_bits() -> None:
    logits = torch.cat([torch.linspace(0, -689, 30_011), torch.randn(5001, generator=torch.Generator().manual_seed(1))])
    logits[0] = best = 5.0
    sample(logits[None], [sampling_row(temperature=0.9)])
    weights = sampler._scratch.memory[: len(logits)]
    exact = np.exp((logits.double().numpy() - best) / 0.9)
    is_kept = exact > 1e-299
    assert np.abs(weights[is_kept] / exact[is_kept] - 1).max() < 5e-16
    assert weights[0] == 1.0
    assert weights[~is_kept].max() < 1e-298


def test_rows_may_lie_anywhere_in_memory() -> None:
    logits = torch.randn(9, 1000, generator=torch.Generator().manual_seed(2))
    rows = [sampling_row(position=i, temperature=i % 3) for i in range(9)]
    expected = sample(logits, rows)
    assert sample(logits.T.contiguous().T, rows) == expected
    assert sample(torch.cat([torch.zeros(9, 7), logits], dim=1)[:, 7:], rows) == expected


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_share_rows_and_change_none(num_threads: int) -> None:
    logits = torch.randn(7, 9000, generator=torch.Generator().manual_seed(2))
    rows = [sampling_row(position=i, top_p=(1.0, 0.9)[i % 2]) for i in range(7)]
    expected, before = sample(logits, rows), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert sample(logits, rows) == expected
        assert sample(logits[:1], rows[:1]) == expected[:1]
    finally:
        torch.set_num_threads(before)


# The promises


def test_a_row_is_the_same_alone_and_in_any_batch() -> None:
    for vocab in (7, 1001, 40_003):
        logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
        rows = [
            sampling_row(
                temperature=(0.0, 0.7, 1.0, 1.5)[i % 4],
                top_k=(0, 0, 5, 0)[i // 4 % 4],
                top_p=(1.0, 0.9)[i // 8 % 2],
                seed=i,
                position=i * 31,
                forbidden_ids=(i % 7,) if i % 5 == 0 else (),
            )
            for i in range(24)
        ]
        together = sample_with_margin(logits, rows)
        alone = [sample_with_margin(logits[i : i + 1], rows[i : i + 1])[0] for i in range(24)]
        backwards = sample_with_margin(logits.flip(0), rows[::-1])[::-1]
        assert together == alone == backwards
        assert [token for token, _ in together] == sample(logits, rows)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(logits, [sampling_row(temperature=0.0), sampling_row(temperature=1e-45)]) == [1, 0]
    # STEP: top_k=1 is greedy by another name
    assert sample(logits, [sampling_row(top_k=1, seed=s) for s in (1, 2)]) == [1, 0]


def test_the_margin_of_a_greedy_row_is_the_gap_of_its_logits() -> None:
    [(token, margin)] = sample_with_margin(torch.tensor([[0.5, 3.0, 2.25]]), [sampling_row(temperature=0.0)])
    assert (token, margin) == (1, 0.75)
    assert sample_with_margin(torch.zeros(1, 1), [sampling_row()]) == [(0, math.inf)]


def test_forbidden_tokens_are_never_drawn_and_the_logits_stay_as_they_were() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(500, 1)
    before = logits.clone()
    rows = [sampling_row(temperature=i % 2, position=i, forbidden_ids=(1,)) for i in range(500)]
    tokens = sample(logits, rows)
    assert 1 not in tokens
    assert set(tokens) == {0, 2}
    assert torch.equal(logits, before)


def test_the_lowest_temperature_that_samples_does_not_overflow() -> None:
    assert sample(torch.tensor([[-1e4, 1e4, 3e4]]), [sampling_row(temperature=1e-5)]) == [2]


def test_a_token_with_no_probability_is_never_drawn() -> None:
    logits = torch.full((2000, 64), -math.inf)
    logits[:, 17] = 0.0
    logits[:, 40] = -1.0
    assert set(sample(logits, [sampling_row(position=i) for i in range(2000)])) == {17, 40}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named(bad: float) -> None:
    logits = torch.zeros(3, 8)
    logits[1, 4] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLogits) as error:
            sample(logits, [sampling_row(temperature=temperature)] * 3)
        assert error.value.rows == (1,)


def test_forbidding_every_token_is_an_error_not_a_token() -> None:
    with pytest.raises(NonFiniteLogits):
        sample(torch.zeros(1, 2), [sampling_row(forbidden_ids=(0, 1))])
