"""Drafts without a model: what is predicted, how much of it a step computes, and that streams stay what they are."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.messages import EngineRequest, HoldKV, StepCost, TokensEvent
from engine.sampling.params import SamplingParams
from engine.scheduling.drafts import Drafter, PromptLookup, draft_lengths
from engine.scheduling.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_output import Sampled, ScheduledRequest, SchedulerOutput
from tests.engine.scheduling.test_scheduler import add, check_blocks, make_scheduler

FREE = StepCost(1.0, 0.0, 0.0)

# What is predicted

# The bytes of some are found at odd places as well; others are surrogates, a byte order mark, the last code point.
TOKENS = st.sampled_from([0, 1, 256, 65536, 257, 0xD800, 0xDC00, 0xFEFF, 0x10FFFF])


def looked_up(tokens: list[int], most: int) -> list[int]:
    """The definition."""
    for first in range(len(tokens) - 4, -1, -1):
        if tokens[first : first + 3] == tokens[-3:]:
            followed = tokens[first + 3 :]
            return [followed[index % len(followed)] for index in range(most)]
    return []


@settings(max_examples=300)
@given(st.lists(TOKENS, min_size=1, max_size=40), st.lists(st.lists(TOKENS, max_size=5), max_size=8), st.integers(0, 6))
def test_the_prediction_is_what_followed_the_same_tokens_last(
    prompt: list[int], increments: list[list[int]], most: int
) -> None:
    lookup, tokens = PromptLookup(), list(prompt)
    for increment in [[], *increments]:
        tokens += increment
        assert lookup.predict(tokens, most) == looked_up(tokens, most)


def test_ids_beyond_all_code_points_are_predicted_as_well() -> None:
    lookup, tokens = PromptLookup(), [2**24 + number for number in range(8)]
    assert lookup.predict(tokens + tokens[:3], 4) == tokens[3:7]
    assert lookup.predict(tokens + tokens[:4], 4) == tokens[4:]


@pytest.mark.parametrize("tokens", [[0, 0, 256], [0], [0, 1]], ids=str)
def test_a_search_takes_few_calls_however_often_the_bytes_of_two_tokens_look_like_one(tokens: list[int]) -> None:
    lookup, tokens = PromptLookup(), [*tokens * 1000, 7, 0, 0, 1]
    lookup.predict(tokens, 5)
    calls: list[str] = []
    sys.setprofile(lambda _, event, function: calls.append(function.__name__) if event == "c_call" else None)
    try:
        lookup.predict(tokens, 5)
    finally:
        sys.setprofile(None)
    assert "rfind" in calls
    assert len(calls) < 30


# How much of it is computed


def proportional(base: float, each: float, num_streams: int, most: int = 64) -> list[float]:
    """The times of steps, by how many tokens of drafts they have."""
    return [base + each * (num_streams + num_drafted) for num_drafted in range(most + 1)]


def test_a_step_bound_by_memory_computes_what_is_probably_right() -> None:
    times = proportional(20.0, 1.0, num_streams=1)
    assert draft_lengths(times, 1, [(0.95, 5)]) == [5]
    assert draft_lengths(times, 1, [(0.5, 5)]) == [3]
    assert draft_lengths(times, 1, [(0.2, 5)]) == [1]
    assert draft_lengths(times, 1, [(0.05, 5)]) == [0]
    assert draft_lengths(times[:3], 1, [(0.95, 5)]) == [2], "more than there is room for"
    assert draft_lengths(times, 1, []) == []


def test_the_best_tokens_of_all_drafts_go_first() -> None:
    assert draft_lengths(proportional(20.0, 1.0, 3, most=4), 3, [(0.5, 5), (0.9, 5), (0.9, 1)]) == [0, 3, 1]


def test_a_step_bound_by_compute_has_no_drafts() -> None:
    assert draft_lengths(proportional(1.0, 1.0, 32), 32, [(0.9, 5)] * 32) == [0] * 32


@pytest.mark.parametrize(("num_streams", "length"), [(1, 3), (2, 2), (4, 0), (5, 3)])
def test_a_step_ends_before_a_leap_in_its_time(num_streams: int, length: int) -> None:
    """Kernels that take four rows at once."""
    times = [10.0 * -(-(num_streams + num_drafted) // 4) for num_drafted in range(9)]
    assert draft_lengths(times, num_streams, [(0.7, 3)]) == [length]


@pytest.mark.parametrize(("itl_s", "length"), [(math.inf, 7), (30.0, 7), (17.5, 4), (11.5, 0), (10.0, 7)])
def test_drafts_keep_to_the_objective_and_to_twice_the_step(itl_s: float, length: int) -> None:
    """A bare step takes 11; with an objective that it misses anyway, drafts get streams on."""
    assert draft_lengths([11.0, 12.5, 14.0, 15.5, 17.0, 18.5, 20.0, 21.5, 23.0], 1, [(0.99, 8)], itl_s) == [length]


@given(
    st.lists(st.floats(0.5, 1.0), min_size=10, max_size=10),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 3)), min_size=1, max_size=3),
)
def test_no_other_choice_has_more_tokens_per_second(times: list[float], candidates: list[tuple[float, int]]) -> None:
    chosen = draft_lengths(times, len(candidates), candidates)
    allowed = (
        lengths
        for lengths in itertools.product(*(range(length + 1) for _, length in candidates))
        if all(not length or rate**length >= 0.1 for length, (rate, _) in zip(lengths, candidates, strict=True))
    )
    best = max(speed_of(lengths, times, candidates) for lengths in allowed if times[sum(lengths)] <= 2 * times[0])
    assert speed_of(chosen, times, candidates) >= best / 1.0500001


def speed_of(lengths: Sequence[int], times: list[float], candidates: list[tuple[float, int]]) -> float:
    """Tokens per second: of each draft the first i are right with the i-th power of its rate."""
    drafts = zip(lengths, candidates, strict=True)
    num_right = sum(rate**place for length, (rate, _) in drafts for place in range(1, length + 1))
    return (len(candidates) + num_right) / times[sum(lengths)]


# Streams stay what they are


def next_token(tokens: list[int]) -> int:
    """The model: something that follows from all tokens."""
    return (31 * sum(tokens) + len(tokens)) % 1000


class Oracle:
    """Predicts what the model says, with errors."""

    def __init__(self, rng: Random, hit_rate: float) -> None:
        self._rng, self._hit_rate = rng, hit_rate

    def predict(self, token_ids: list[int], most: int) -> list[int]:
        known = list(token_ids)
        for _ in range(self._rng.randint(0, max(most, 0))):
            known.append(next_token(known) + (self._rng.random() > self._hit_rate))
        return known[len(token_ids) :]


def sampled(output: SchedulerOutput) -> Sampled:
    token_ids: dict[str, list[int]] = {}
    for share in output.scheduled:
        if not share.samples:
            assert not share.draft
            continue
        known = list(share.request.token_ids)
        tokens = token_ids[share.request.request_id] = [next_token(known)]
        for drafted in share.draft:
            if drafted != tokens[-1]:
                break
            tokens.append(next_token([*known, *tokens]))
    return Sampled(token_ids)


def nothing_but(num_tokens: int) -> SchedulerOutput:
    """A step of so many streams."""
    request: Any = None
    return SchedulerOutput([ScheduledRequest(request, 0, 1)] * num_tokens)


def step(scheduler: Scheduler) -> SchedulerOutput:
    scheduler.step_cost = FREE
    for num_tokens in range(1, 10):
        scheduler.drafter.record(nothing_but(num_tokens), 1.0)
    output = scheduler.schedule()
    check_blocks(scheduler)
    for share in output.scheduled:
        blocks = scheduler.kv.block_ids(share.request.request_id)
        assert len(blocks) * scheduler.kv.block_size >= share.start + share.num_tokens + len(share.draft)
    scheduler.update_from_output(output, sampled(output))
    check_blocks(scheduler)
    return output


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=12),
    st.integers(16, 40),
    st.integers(1, 30),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(0, 1 << 30),
)
def test_streams_get_the_models_tokens_whatever_is_predicted(
    shapes: list[tuple[int, int, int]], num_blocks: int, budget: int, most: int, hit_rate: float, seed: int
) -> None:
    scheduler = make_scheduler(num_blocks, budget=budget)
    rng, longest = Random(seed), scheduler.max_model_len
    scheduler.drafter = Drafter(most, max_num_rows=6, max_model_len=longest, predictor=lambda _: Oracle(rng, hit_rate))
    requests = [add(scheduler, [fill] * length, max_tokens=tokens) for length, tokens, fill in shapes]
    while scheduler.requests:
        output = step(scheduler)
        assert output.num_tokens <= budget
        assert output.num_streams <= 6
    for request, (length, tokens, fill) in zip(requests, shapes, strict=True):
        expected = [fill] * length
        while len(expected) < min(length + tokens, longest):
            expected.append(next_token(expected))
        assert request.token_ids == expected
        assert request.finish_reason == "length"
    assert scheduler.kv.pool.num_available == num_blocks
    counters = scheduler.counters
    assert counters.num_generated_tokens == sum(request.num_output_tokens for request in requests)
    assert counters.num_accepted_tokens <= counters.num_draft_tokens
    if hit_rate == 0.0:
        assert counters.num_accepted_tokens == 0


def start(prompt: list[int], *, eos: int = 999, **params: Any) -> tuple[Scheduler, Request]:
    """A stream with its first token. Its predictions are right, and it drafts three tokens, since that is not known."""
    scheduler = make_scheduler(num_blocks=32)
    most, longest = 4, scheduler.max_model_len
    scheduler.drafter = Drafter(most, max_num_rows=8, max_model_len=longest, predictor=lambda _: Oracle(Most(), 1.0))
    fields = {"max_tokens": 60, "ignore_eos": True, **params}
    spec = EngineRequest(request_id="r", prompt_token_ids=prompt, params=SamplingParams(**fields), eos_token_ids=(eos,))
    request = Request.from_spec(spec, arrival=0, fingerprint="f")
    scheduler.add_request(request, now=0.0)
    while not request.num_output_tokens:
        step(scheduler)
    scheduler.take_events()
    return scheduler, request


class Most(Random):
    """Every prediction is as long as it may be."""

    def randint(self, a: int, b: int) -> int:
        del a
        return b


def drafted(scheduler: Scheduler) -> list[int]:
    """Of each share of the next step, how many tokens."""
    return [len(share.draft) for share in step(scheduler).scheduled]


def continued(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens


def test_a_right_draft_is_one_event_whose_last_token_may_end_the_request() -> None:
    scheduler, request = start([1, 2, 3], max_tokens=8)
    assert drafted(scheduler) == [3]
    [event] = scheduler.take_events()
    assert isinstance(event, TokensEvent)
    assert event.token_ids == request.token_ids[4:8]
    assert request.num_uncomputed_tokens == 1
    assert drafted(scheduler) == [2], "the last token needs no draft behind it"
    [event] = scheduler.take_events()
    assert isinstance(event, TokensEvent)
    assert (len(event.token_ids), event.finish_reason) == (3, "length")


@pytest.mark.parametrize("is_eos", [False, True])
def test_a_draft_ends_before_what_ends_the_output(*, is_eos: bool) -> None:
    tokens = continued([1, 2, 3], 3)
    ends: dict[str, Any] = {"ignore_eos": False} if is_eos else {"stop_token_ids": [tokens[-1]]}
    scheduler, request = start([1, 2, 3], eos=tokens[-1] if is_eos else 999, **ends)
    assert drafted(scheduler) == [1]
    [event] = scheduler.take_events()
    assert isinstance(event, TokensEvent)
    stop_token_id = None if is_eos else tokens[-1]
    assert (event.token_ids, event.finish_reason, event.stop_token_id) == (tokens[-2:], "stop", stop_token_id)
    assert request.token_ids == tokens
    assert scheduler.counters.num_accepted_tokens == 1


def test_blocks_of_accepted_tokens_are_found_by_others_after_the_end() -> None:
    scheduler, request = start([1, 2, 3], max_tokens=14)
    while scheduler.requests:
        step(scheduler)
    again = add(scheduler, [*request.token_ids, 5])
    step(scheduler)
    assert again.num_cached_tokens == 16


@pytest.mark.parametrize("num_admitted", range(4))
def test_a_draft_ends_before_what_a_constraint_does_not_admit(num_admitted: int) -> None:
    scheduler, request = start([1, 2, 3])
    asked = list[tuple[Request, list[int]]]()

    def admitted(one: Request, token_ids: list[int]) -> int:
        asked.append((one, token_ids))
        return num_admitted

    most, longest = 4, scheduler.max_model_len
    scheduler.drafter = Drafter(
        most, max_num_rows=8, max_model_len=longest, predictor=lambda _: Oracle(Most(), 1.0), num_admitted=admitted
    )
    predicted = continued(request.token_ids, 4)[-4:]
    assert drafted(scheduler) == [min(num_admitted, 3)]
    assert asked == [(request, predicted)]
    [event] = scheduler.take_events()
    assert isinstance(event, TokensEvent)
    assert event.token_ids == predicted[: min(num_admitted, 3) + 1]


class Late:
    """Predicts nothing, then what the model says."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.asked_at = list[int]()

    def predict(self, token_ids: list[int], most: int) -> list[int]:
        self.asked_at.append(len(token_ids))
        return continued(token_ids, most)[len(token_ids) :] if len(token_ids) >= self._first else []


def test_streams_without_drafts_are_rarely_looked_at_until_there_is_one() -> None:
    scheduler, request = start([1, 2, 3], max_tokens=100)
    late, first = Late(50), request.num_tokens
    scheduler.drafter = Drafter(4, max_num_rows=8, max_model_len=scheduler.max_model_len, predictor=lambda _: late)
    with_drafts = [request.num_tokens for _ in range(60) if any(drafted(scheduler))]
    before = [num_tokens for num_tokens in late.asked_at if num_tokens < 50]
    assert before == [*range(first, first + 8), *range(first + 11, 50, 4)]
    behind = late.asked_at[len(before) :]
    assert behind[0] < 54
    assert len(with_drafts) == len(behind) > 3, "each time"


def test_a_request_that_is_handed_over_has_no_draft() -> None:
    scheduler = make_scheduler(num_blocks=32)
    scheduler.drafter = Drafter(4, max_num_rows=8, max_model_len=100, predictor=lambda _: Oracle(Most(), 1.0))
    add(scheduler, [1], hold_kv=HoldKV(transfer_id="t", lease_s=10.0))
    assert drafted(scheduler) == [0]


def test_a_draft_ends_where_the_context_does() -> None:
    scheduler, request = start([7] * 123)
    assert drafted(scheduler) == [3]
    assert drafted(scheduler) == []
    assert (request.num_tokens, request.finish_reason) == (128, "length")


@pytest.mark.parametrize(("num_rows", "num_streams"), [(1, 3), (6, 6), (20, 15)])
def test_drafts_take_only_the_rows_that_are_left(num_rows: int, num_streams: int) -> None:
    scheduler = make_scheduler(num_blocks=32, budget=20)
    most = 4
    scheduler.drafter = Drafter(most, max_num_rows=num_rows, max_model_len=100, predictor=lambda _: Oracle(Most(), 1.0))
    for fill in range(3):
        add(scheduler, [fill], max_tokens=40)
    step(scheduler)
    assert step(scheduler).num_streams == num_streams


def test_drafts_take_only_the_tokens_that_are_left() -> None:
    scheduler, _ = start([1])
    add(scheduler, [2] * 100)
    assert [(share.num_tokens, len(share.draft)) for share in step(scheduler).scheduled] == [(1, 0), (7, 0)]
