"""Arrivals have the rate and the burstiness that were asked for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.serve.workload import all_at_once, cut, even_arrivals, filling, gamma_arrivals

NUM = 40_000


def gaps(rate: float, burstiness: float, seed: int = 3) -> np.ndarray[Any, Any]:
    series = gamma_arrivals(rate, burstiness, np.random.default_rng(seed))
    return np.diff(list(itertools.islice(series, NUM)), prepend=0.0)


@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_their_gamma_distribution(rate: float, burstiness: float) -> None:
    found, variation = gaps(rate, burstiness), 1 / np.sqrt(burstiness)
    # the mean of NUM gaps has a standard error of variation / sqrt(NUM) of the mean: 1 % at the most; five of them
    assert found.mean() * rate == pytest.approx(1, abs=5 * variation / np.sqrt(NUM))
    assert found.std() / found.mean() == pytest.approx(variation, rel=0.08)


def test_of_shape_one_they_are_a_poisson_process() -> None:
    # in windows of one mean gap each, a Poisson process has as much variance as mean, and leaves exp(-1) of them empty
    times = np.cumsum(gaps(1.0, 1.0))
    counts = np.bincount(times.astype(int), minlength=NUM)[: NUM - 1000]
    assert counts.var() / counts.mean() == pytest.approx(1, rel=0.05)
    assert (counts == 0).mean() == pytest.approx(np.exp(-1), rel=0.03)


def test_bursts_are_bursts() -> None:
    windows = {shape: np.bincount(np.cumsum(gaps(1.0, shape)).astype(int)).var() for shape in (0.25, 1.0, 4.0)}
    assert windows[0.25] > 2 * windows[1.0] > 4 * windows[4.0]


@given(st.floats(0.01, 1000), st.integers(1, 200))
def test_even_arrivals_are_even(rate: float, count: int) -> None:
    times = cut(even_arrivals(rate), num_requests=count, duration_s=None)
    assert times == pytest.approx([number / rate for number in range(count)])


@given(st.integers(0, 2**31), st.floats(0.1, 100), st.floats(0.2, 5))
def test_equal_seeds_give_equal_arrivals_that_never_go_back(seed: int, rate: float, shape: float) -> None:
    one, other = (
        cut(gamma_arrivals(rate, shape, np.random.default_rng(seed)), num_requests=50, duration_s=None) for _ in "ab"
    )
    assert one == other
    assert one == sorted(one)
    assert one[0] >= 0


def test_a_series_is_cut_by_number_by_time_or_by_whichever_is_first() -> None:
    assert cut(even_arrivals(2), num_requests=3, duration_s=None) == [0, 0.5, 1.0]
    assert cut(even_arrivals(2), num_requests=None, duration_s=1.5) == [0, 0.5, 1.0]
    assert cut(even_arrivals(2), num_requests=2, duration_s=1.5) == [0, 0.5]
    assert cut(even_arrivals(2), num_requests=9, duration_s=0.6) == [0, 0.5]
    assert cut(all_at_once(), num_requests=2, duration_s=None) == [0, 0]
    with pytest.raises(ValueError, match="give num_requests"):
        cut(even_arrivals(2), num_requests=None, duration_s=None)


def test_a_number_of_poisson_arrivals_that_fills_a_time_is_uniform_in_it() -> None:
    from scipy import stats  # a second of CPU, in one process

    rng = np.random.default_rng(5)
    runs = [filling(gamma_arrivals(3.0, 1.0, rng), num_requests=20, duration_s=10.0) for _ in range(2000)]
    assert all(run == sorted(run) and len(run) == 20 and 0 <= run[0] <= run[-1] < 10 for run in runs)
    assert stats.kstest(np.concatenate(runs) / 10, "uniform").pvalue > 1e-3
    # the k-th smallest of n uniform moments is at k / (n + 1) on average
    assert np.mean(runs, axis=0) == pytest.approx(10 * np.arange(1, 21) / 21, abs=0.1)


def test_filling_keeps_how_gaps_compare() -> None:
    drawn = cut(gamma_arrivals(3.0, 0.5, np.random.default_rng(1)), num_requests=21, duration_s=None)
    filled = filling(iter(drawn), num_requests=20, duration_s=4.0)
    assert filled == pytest.approx([at_s * 4.0 / drawn[20] for at_s in drawn[:20]])


def test_gaps_of_a_tiny_shape_are_all_zero_and_stay_so() -> None:
    drawn = gamma_arrivals(3.0, 1e-300, np.random.default_rng(1))
    assert filling(drawn, num_requests=3, duration_s=4.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_and_shapes_that_are_none_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="rate is"):
        even_arrivals(wrong)
    with pytest.raises(ValueError, match="burstiness is"):
        next(gamma_arrivals(1, wrong, np.random.default_rng(0)))
