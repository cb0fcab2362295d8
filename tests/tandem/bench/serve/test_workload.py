"""What is sent: lengths, prefixes, ordinary tokens only, and the same again from the same seed; when: arrivals of the
rate and the burstiness that were asked for."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.bench.serve.endpoint import PlannedRequest
from tandem.bench.serve.traces import TraceRow, TraceUse
from tandem.bench.serve.workload import (
    MAX_REQUESTS,
    Lengths,
    RandomWorkload,
    Schedule,
    TooManyRequests,
    TraceWorkload,
    Vocabulary,
    cut,
    even_arrivals,
    filling,
    gamma_arrivals,
)
from tandem.demo import MODEL_DIR

VOCABULARY = Vocabulary.middle(4000, end_ids=frozenset({600}))
TEN = Schedule(num_requests=10)
ROWS = [TraceRow(0.0, 700, 5, (1, 2)), TraceRow(1.0, 30, 6), TraceRow(3.0, 520, 7, (1, 3)), TraceRow(4.0, 9, 8)]


def workload(seed: int = 1, **fields: object) -> RandomWorkload:
    defaults: dict[str, object] = {"prompt": Lengths(20, 20), "output": Lengths(5, 5), "schedule": TEN}
    return RandomWorkload(VOCABULARY, seed=seed, **{**defaults, **fields})  # type: ignore[arg-type]


def trace(schedule: Schedule | None = None, **use: object) -> TraceWorkload:
    return TraceWorkload(VOCABULARY, schedule or Schedule(), 1, ROWS, TraceUse(**use))  # type: ignore[arg-type]


def prompts(requests: list[PlannedRequest]) -> list[tuple[int, ...]]:
    return [one.prompt_token_ids for one in requests]


@given(st.integers(0, 2**31), st.integers(1, 50), st.integers(0, 50))
def test_lengths_lie_in_their_range_and_tokens_are_ordinary(seed: int, low: int, more: int) -> None:
    planned = list(workload(seed, prompt=Lengths(low, low + more), output=Lengths(low, low + more)).plan(1, 5.0))
    assert len(planned) == 10
    for one in planned:
        assert low <= len(one.prompt_token_ids) <= low + more
        assert low <= one.max_tokens <= low + more
        assert set(one.prompt_token_ids) <= set(VOCABULARY.ids)


def test_both_ends_of_a_range_occur() -> None:
    planned = list(workload(schedule=Schedule(num_requests=200), prompt=Lengths(3, 5)).plan(1, 5.0))
    assert {len(one.prompt_token_ids) for one in planned} == {3, 4, 5}


@given(st.integers(0, 2**31))
def test_equal_seeds_send_equal_requests_and_other_seeds_and_runs_others(seed: int) -> None:
    first = list(workload(seed).plan(1, 5.0))
    assert first == list(workload(seed).plan(1, 5.0))
    others = [
        list(workload(seed + 1).plan(1, 5.0)),
        list(workload(seed).plan(2, 5.0)),
        list(workload(seed).warm_up(1, 10)),
    ]
    for other in others:
        assert not set(prompts(first)) & set(prompts(other))


def test_twice_the_rate_is_the_same_series_at_twice_the_speed() -> None:
    slow, fast = list(workload().plan(1, 2.0)), list(workload().plan(2, 4.0))
    assert [one.at_s for one in slow] == pytest.approx([2 * one.at_s for one in fast])


def test_a_schedule_is_all_at_once_even_or_drawn() -> None:
    assert TEN.times_s(float("inf"), 1) == [0.0] * 10
    assert Schedule(None, num_requests=3).times_s(4.0, 1) == [0, 0.25, 0.5]
    assert Schedule(2.0, num_requests=10).times_s(4.0, 1) != TEN.times_s(4.0, 1)
    assert 60 < len(Schedule(duration_s=10).times_s(10.0, 1)) < 140


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_a_number_of_requests_has_the_requested_rate_for_every_seed(burstiness: float) -> None:
    for seed in range(50):
        times_s = Schedule(burstiness, num_requests=200).times_s(10.0, seed)
        assert len(times_s) == 200
        assert 17 < times_s[-1] < 20


def num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Tokens with which both begin."""
    same = (one == other for one, other in zip(first, second, strict=False))
    return sum(itertools.takewhile(bool, same))


BY_CHANCE = 2
"""Tokens that two prompts may have in common beyond those that they share."""


@given(st.integers(0, 2**31))
def test_every_run_and_its_warm_up_share_the_prefixes_and_nothing_else(seed: int) -> None:
    shared = workload(seed, prefix_len=8, num_prefixes=3)
    planned = prompts([*shared.plan(1, 5.0), *shared.plan(2, 5.0), *shared.warm_up(1, 10)])
    heads = [prompt[:8] for prompt in planned]
    assert len(set(heads)) == 3
    for begin in (0, 3, 6, 10, 13, 16, 20, 23, 26):
        assert set(heads[begin : begin + 3]) == set(heads), "each round has all of them"
    assert {len(prompt) for prompt in planned} == {28}
    for first, second in itertools.combinations(planned, 2):
        num_shared = 8 if first[:8] == second[:8] else 0
        assert num_shared <= num_common(first, second) <= num_shared + BY_CHANCE
    others = list(workload(seed + 1, prefix_len=8, num_prefixes=3).plan(1, 5.0))
    assert not set(heads) & {prompt[:8] for prompt in prompts(others)}


def test_prefixes_do_not_keep_step_with_instances_that_are_picked_in_turns() -> None:
    planned = list(workload(prefix_len=8, num_prefixes=4, schedule=Schedule(num_requests=400)).plan(1, 5.0))
    heads = [one.prompt_token_ids[:8] for one in planned]
    assert {heads.count(head) for head in set(heads)} == {100}
    for head in set(heads):
        assert 30 < heads[::2].count(head) < 70, "one of two instances would have it alone"


@given(st.integers(0, 2**31), st.integers(2, 4))
def test_each_turn_repeats_its_conversation_and_adds_a_prompt(seed: int, turns: int) -> None:
    # 10 requests: 5, 4 or 3 conversations; the last one of these has one turn less where 10 is no multiple
    talks = workload(seed, prefix_len=8, num_prefixes=2, turns=turns)
    planned, num_talks = list(talks.plan(1, 5.0)), -(-10 // turns)
    assert planned == list(workload(seed, prefix_len=8, num_prefixes=2, turns=turns).plan(1, 5.0))
    assert [len(one.prompt_token_ids) for one in planned] == [
        8 + 20 + number // num_talks * (5 + 20) for number in range(10)
    ]
    for number, later in enumerate(prompts(planned)):
        for other, earlier in enumerate(prompts(planned[:number])):
            is_same, has_prefix = number % num_talks == other % num_talks, later[:8] == earlier[:8]
            num_shared = len(earlier) if is_same else 8 if has_prefix else 0
            assert num_shared <= num_common(earlier, later) <= num_shared + BY_CHANCE
    assert {len(prompt) for prompt in prompts(list(talks.warm_up(1, 4)))} == {28}, (
        "each prefix once, without conversations"
    )
    assert f"in conversations of at most {turns} turns" in str(talks)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (Schedule(duration_s=1.0), 1e300),
        (Schedule(None, duration_s=3e6), 1.0),
        (Schedule(1e-300, duration_s=1.0), 1.0),  # all gaps are 0
        (Schedule(num_requests=MAX_REQUESTS + 1), 1.0),
        (Schedule(num_requests=10**30), float("inf")),
    ],
)
def test_a_schedule_of_too_many_requests_is_rejected_with_the_limit(schedule: Schedule, rate: float) -> None:
    with pytest.raises(TooManyRequests, match=r"more than 1000000 requests.* lower --rate, --duration"):
        schedule.times_s(rate, 1)
    assert len(Schedule(num_requests=MAX_REQUESTS).times_s(rate, 1)) == MAX_REQUESTS


def test_prompts_are_drawn_one_by_one() -> None:
    huge = workload(prompt=Lengths(50, 50), schedule=Schedule(num_requests=MAX_REQUESTS // 10)).plan(1, 5.0)
    assert len(next(huge).prompt_token_ids) == 50
    long = TraceRow(0.0, 1 << 60, 1)
    assert next(TraceWorkload(VOCABULARY, Schedule(), 1, [ROWS[0], long], TraceUse()).plan(1, None)).max_tokens == 5


def test_a_trace_of_too_many_requests_is_rejected_unless_a_part_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.bench.serve.workload.MAX_REQUESTS", 1000)
    rows = [ROWS[1]] * 1001
    with pytest.raises(TooManyRequests, match="--trace-for"):
        TraceWorkload(VOCABULARY, Schedule(), 1, rows, TraceUse()).plan(1, None)
    for schedule, rate in (
        (Schedule(num_requests=1), None),
        (Schedule(duration_s=1.0), None),
        (Schedule(num_requests=1), 5.0),
    ):
        later = [ROWS[0], *rows] if schedule.duration_s else rows
        assert len(list(TraceWorkload(VOCABULARY, schedule, 1, later, TraceUse()).plan(1, rate))) == 1


def test_a_trace_is_replayed_at_its_own_times_or_at_a_rate() -> None:
    assert [one.at_s for one in list(trace(speed=2.0).plan(1, None))] == [0, 0.5, 1.5, 2.0]
    assert [one.at_s for one in list(trace(Schedule(None)).plan(1, 2.0))] == [0, 0.5, 1.0, 1.5]
    planned = list(trace(Schedule(None, num_requests=3)).plan(1, 2.0))
    assert [(one.at_s, len(one.prompt_token_ids), one.max_tokens) for one in planned] == [
        (0.0, 700, 5), (0.5, 30, 6), (1.0, 520, 7)
    ]  # fmt: skip


def test_a_trace_is_cut_to_the_requested_number_and_duration() -> None:
    assert len(list(trace(Schedule(num_requests=2)).plan(1, None))) == 2
    assert len(list(trace(Schedule(duration_s=3.5)).plan(1, None))) == 3
    assert len(list(trace(Schedule(num_requests=2)).warm_up(1, 9))) == 4


def test_a_traces_prompts_are_ordinary_shared_by_hash_id_and_new_in_every_run() -> None:
    first, second = prompts(list(trace().plan(1, None))), prompts(list(trace().plan(2, None)))
    assert first[0][:512] == first[2][:512]
    assert first[0][512:520] != first[2][512:520]
    assert first[0][:512] != second[0][:512]
    assert {one for prompt in first for one in prompt} <= set(VOCABULARY.ids)


def test_cut_and_skipped_rows_of_a_trace_are_reported() -> None:
    assert "1 skipped as too long" in str(trace(max_input_len=600, too_long="skip"))
    assert "4 of 4 rows, 1 cut to the cap; ids" in str(trace(max_input_len=600))
    limited = Schedule(num_requests=2, duration_s=3.5)
    assert "4 of 4 rows, 1 cut to the cap, before --num-requests and --duration; ids" in str(
        trace(limited, max_input_len=600)
    )


def test_a_length_is_a_number_or_a_range() -> None:
    assert (Lengths.parse("5"), Lengths.parse("2:7")) == (Lengths(5, 5), Lengths(2, 7))


@pytest.mark.parametrize("text", ["0", "", "9:3", "a", "1:2:3", "-4", "1.5"])
def test_what_is_no_length_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="like 512, a range like 256:1024"):
        Lengths.parse(text)


# Vocabulary


def test_special_and_added_tokens_are_never_drawn() -> None:
    from engine.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(MODEL_DIR)
    vocabulary = Vocabulary.of_tokenizer(MODEL_DIR, end_ids=frozenset({100}))
    assert tokenizer.special_ids
    assert not set(vocabulary.ids) & (tokenizer.special_ids | {100})
    assert len(vocabulary.ids) > 0.9 * tokenizer.vocab_size
    assert vocabulary.ids == Vocabulary.of_tokenizer(MODEL_DIR / "tokenizer.json", end_ids=frozenset({100})).ids


def test_ids_that_the_model_does_not_have_are_never_drawn() -> None:
    assert max(Vocabulary.of_tokenizer(MODEL_DIR, vocab_size=300, end_ids=frozenset()).ids) < 300


def test_without_a_tokenizer_ids_come_from_the_middle() -> None:
    assert VOCABULARY.ids[0] == 500
    assert VOCABULARY.ids[-1] == 1999
    assert 600 not in VOCABULARY.ids
    with pytest.raises(ValueError, match="no ordinary token is left"):
        Vocabulary.middle(1, end_ids=frozenset())


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer.json is not a readable tokenizer.json"):
        Vocabulary.of_tokenizer(tmp_path, end_ids=frozenset())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a readable"):
        Vocabulary.of_tokenizer(tmp_path, end_ids=frozenset())


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
    assert cut(even_arrivals(2), num_requests=MAX_REQUESTS, duration_s=1.5) == [0, 0.5, 1.0]
    assert cut(even_arrivals(2), num_requests=2, duration_s=1.5) == [0, 0.5]
    assert cut(even_arrivals(2), num_requests=9, duration_s=0.6) == [0, 0.5]


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
