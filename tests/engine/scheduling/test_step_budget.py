"""The prompt tokens of a step: bounded by the streams' objective, by nothing where there is none, and never so low that
prompts miss theirs without need."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.core.messages import StepCost
from engine.scheduling.step_budget import (
    MIN_TOKENS,
    PACE,
    Prompt,
    Stream,
    entering_bound,
    entering_tokens,
    late,
    may_begin,
    num_entering,
    prompt_budget,
    replay_s,
    slack_s,
    stretched_tokens,
)

COST = StepCost(0.0035, 0.0006, 1 / 4500)
ITL_S = 0.012
MAX = 2048

costs = st.builds(StepCost, st.floats(1e-4, 0.1), st.floats(0, 1e-3), st.floats(1e-6, 1e-2))
streams = st.lists(st.builds(Stream, st.floats(0.001, 0.2), st.floats(-1, 1)), min_size=1, max_size=8)
prompts = st.lists(st.builds(Prompt, st.integers(1, 10_000), st.floats(-1, 5) | st.just(math.inf)), max_size=8)


def budget(streams: list[Stream], prompts: list[Prompt] | None = None, cost: StepCost | None = COST) -> int:
    return prompt_budget(cost, streams, len(streams), prompts or [], MAX)


def test_streams_on_time_leave_what_their_objective_allows() -> None:
    allowed_s = PACE * ITL_S - COST.seconds(4)
    assert budget([Stream(ITL_S, PACE * ITL_S)] * 4, [Prompt(1500, 1.0)]) == int(allowed_s * 4500)
    hurried = [Prompt(9000, math.inf)]
    ahead = budget([Stream(ITL_S, 1.0)] * 4, hurried)
    assert ahead == int((2 * ITL_S - COST.seconds(4)) * 4500), "streams that are ahead allow longer steps, twice"
    assert budget([*[Stream(ITL_S, 1.0)] * 3, Stream(ITL_S, 0.0)], hurried) < ahead, "the one that is not ahead decides"


def test_steps_that_no_prompt_needs_longer_leave_room_in_the_objective() -> None:
    def step_s(base_s: float) -> float:
        cost = StepCost(base_s, 0.0002, 1 / 4500)
        return cost.seconds(2, budget([Stream(ITL_S, 1.0)] * 2, [Prompt(1500, 10.0)], cost))

    assert step_s(0.001) == pytest.approx(0.5 * ITL_S, abs=1 / 4500)
    assert step_s(0.003) == pytest.approx(2.5 * 0.0034, abs=1 / 4500), "three fifths of the time for prompts"
    assert step_s(0.006) == pytest.approx(ITL_S, abs=1 / 4500), "never longer than the objective"


@pytest.mark.parametrize(("prefill_per_s", "step_s"), [(500, 0.5 * ITL_S), (2400, None), (3000, ITL_S), (4000, ITL_S)])
def test_unhurried_steps_are_long_enough_for_half_as_many_prompts_again(
    prefill_per_s: float, step_s: float | None
) -> None:
    cost, streams = StepCost(0.001, 0.0002, 1 / 4500), [Stream(ITL_S, 1.0)] * 2
    chosen = prompt_budget(cost, streams, 2, [Prompt(1500, 10.0)], MAX, prefill_per_s=prefill_per_s)
    if step_s is not None:
        assert chosen == int((step_s - cost.seconds(2)) * 4500)
    else:
        per_s = chosen / cost.seconds(2, chosen)
        assert per_s == pytest.approx(1.5 * prefill_per_s, rel=0.02)
        assert chosen > int((0.5 * ITL_S - cost.seconds(2)) * 4500)


def test_an_unhurried_step_has_tokens_where_half_of_the_objective_has_none() -> None:
    slow = StepCost(0.001, 0.0002, 1 / 2000)  # 9 tokens in half of the objective, 21 in all of it
    assert budget([Stream(ITL_S, 1.0)] * 2, [Prompt(1500, 10.0)], slow) == MIN_TOKENS


def test_steps_beside_streams_that_are_ahead_are_as_long_as_prompts_need_them() -> None:
    ahead = [Stream(ITL_S, 1.0)] * 2
    longest, unhurried = int((2 * ITL_S - COST.seconds(2)) * 4500), int(1.5 * COST.seconds(2) * 4500)
    assert budget(ahead, [Prompt(1500, 1.0)]) == unhurried
    assert budget(ahead, [Prompt(1500, 0.46)]) == longest
    chosen = budget(ahead, [Prompt(1500, 0.55)])
    assert unhurried < chosen < longest
    assert budget(ahead, [Prompt(500, 0.55), Prompt(1000, 0.55)]) == chosen, "with what is before it"
    assert budget(ahead, [Prompt(1500, 0.55), Prompt(10, 10.0)]) == chosen, "whatever time those behind it have"
    assert budget(ahead, [Prompt(10, math.inf)]) == longest, "without an objective of its own it takes what it can get"
    assert prompt_budget(COST, ahead, 2, [Prompt(1500, 1.0)], MAX, are_late=True) == longest, "beside late ones too"


@given(st.integers(1, 3000), st.floats(0.05, 3.0), st.integers(1, 6))
def test_a_prompt_with_time_is_computed_in_it(num_tokens: int, left_s: float, num_streams: int) -> None:
    """Where the longest steps are fast enough, so are those that are chosen, but for the last one."""
    running = [Stream(ITL_S, 10.0)] * num_streams
    longest = budget(running, [Prompt(1, math.inf)])
    assume(-(-num_tokens // longest) * COST.seconds(num_streams, longest) <= 0.75 * left_s)
    used_s = 0.0
    while num_tokens > 0:
        chosen = budget(running, [Prompt(num_tokens, left_s - used_s)])
        assert chosen <= longest, "full speed was not needed"
        used_s += COST.seconds(num_streams, min(chosen, num_tokens))
        num_tokens -= chosen
    assert used_s <= left_s


@pytest.mark.parametrize("slowness", [1.0, 1.2, 1.3])
def test_steps_that_take_longer_than_planned_still_hold_the_objective(slowness: float) -> None:
    now_s, num_tokens = 0.0, 1
    while num_tokens < 16:
        slack = slack_s(ITL_S, 0.0, num_tokens, now_s)
        now_s += slowness * COST.seconds(1, budget([Stream(ITL_S, slack)]))
        num_tokens += 1
    assert now_s <= (num_tokens - 1) * ITL_S


def test_streams_far_behind_still_leave_tokens_for_prompts() -> None:
    behind = budget([Stream(ITL_S, -0.1)])
    assert behind == int((0.7 * ITL_S - COST.seconds(1)) * 4500) > MIN_TOKENS


def test_streams_that_can_catch_up_are_not_held_up_by_a_few_tokens() -> None:
    """A step of 16 tokens often takes more than twice as long as one without."""
    cost = StepCost(0.007, 0.0, 0.0004)
    assert budget([Stream(0.018, -0.1)], cost=cost) == 0
    assert budget([Stream(0.018, 0.0142)], cost=cost) == 18
    assert budget([Stream(0.012, 0.0)], cost=cost) == MIN_TOKENS, "a step with so many is never short enough"
    assert budget([Stream(0.009, -0.1)], cost=cost) == MIN_TOKENS, "they cannot: prompts must get on all the same"
    slow = StepCost(0.0085, 0.0, 0.00005)
    assert budget([Stream(0.012, -0.1)], cost=slow) == MIN_TOKENS, "nor where 16 tokens fit into their objective"


def test_without_an_objective_or_a_measured_cost_nothing_is_bounded() -> None:
    assert budget([]) == MAX
    assert budget([Stream(ITL_S, 0.0)], cost=None) == MAX
    assert budget([Stream(ITL_S, 0.0)], cost=StepCost(0.01, 0.001, 0.0)) == MAX


def test_streams_that_cannot_meet_the_objective_still_leave_some_tokens() -> None:
    assert budget([Stream(0.004, 0.0)] * 30) == MIN_TOKENS


def test_a_stream_that_is_lost_does_not_shorten_steps() -> None:
    assert budget([Stream(ITL_S, -0.3), Stream(ITL_S, 1.0)]) == budget([Stream(ITL_S, 1.0), Stream(ITL_S, 1.0)])
    lost, hurried = [Stream(ITL_S, -0.3), Stream(2 * ITL_S, -0.3)], [Prompt(9000, math.inf)]
    assert budget(lost, hurried) == budget([Stream(ITL_S, 1.0)] * 2, hurried), "all of them: steps stay bounded"


def test_a_prompt_waits_while_it_can_and_then_gets_all_that_it_needs() -> None:
    running = [Stream(ITL_S, 0.0)]
    calm = budget(running)
    assert budget(running, [Prompt(1500, 1.0)]) == calm
    assert budget(running, [Prompt(1500, 0.4)]) == 1500
    assert budget(running, [Prompt(500, 1.0), Prompt(1500, 0.5)]) == 2000, "with what is before it"
    assert budget(running, [Prompt(1500, 0.2)]) == calm, "a prompt that nothing can save lengthens no step"
    assert budget(running, [Prompt(3000, 0.75)]) == MAX


def test_full_speed_costs_no_more_streams_than_it_saves_prompts() -> None:
    prompt, far_ahead, lost = Prompt(1500, 0.4), Stream(ITL_S, 1.0), Stream(ITL_S, -0.5)
    soon_back = Stream(ITL_S, 0.2)  # not later than 0.2 s after a step of 0.34 s
    two = [Stream(ITL_S, 0.0)] * 2
    assert budget(two, [prompt]) == budget(two)
    assert budget(two, [Prompt(700, 0.18), Prompt(800, 0.4)]) == 1500, "two prompts for two streams"
    for spared in (far_ahead, lost, soon_back):
        assert budget([two[0], spared], [prompt]) == 1500


def test_streams_take_half_of_what_the_objective_leaves_and_beside_late_prompts_a_quarter() -> None:
    allowed = [n for n in range(40) if may_begin(COST, ITL_S, n, is_late=False)]
    room_s = ITL_S - COST.base_s
    assert allowed == list(range(int(room_s / 2 / COST.per_stream_s)))
    assert [n for n in allowed if may_begin(COST, ITL_S, n, is_late=True)] == list(range(3))
    slow = StepCost(0.0108, 0.0009, 1 / 4500)  # one stream holds the objective, two do not
    assert [may_begin(slow, ITL_S, n, is_late=False) for n in range(3)] == [True, False, False]


@given(costs, st.floats(0.001, 0.2), st.integers(0, 40), st.booleans())
def test_a_prompt_begins_alone_and_where_no_stream_could_hold_the_objective(
    cost: StepCost, itl_s: float, num_streams: int, is_late: bool
) -> None:
    assert may_begin(cost, itl_s, 0, is_late=is_late)
    assert may_begin(None, itl_s, num_streams, is_late=is_late)
    assert may_begin(cost, cost.seconds(1) / 2, num_streams, is_late=is_late)
    if may_begin(cost, itl_s, num_streams + 1, is_late=is_late):
        assert may_begin(cost, itl_s, num_streams, is_late=is_late), "more streams never let more begin"


def test_on_time_at_full_speed_it_is_on_time_in_fact() -> None:
    left, left_s = 6000, 1.6
    running = [Stream(ITL_S, 0.0)]
    while left > 0:
        num_tokens = min(left, budget(running, [Prompt(left, left_s)]))
        left, left_s = left - num_tokens, left_s - COST.seconds(1, num_tokens)
    assert left_s >= 0


@given(costs, streams, prompts)
def test_the_budget_stays_within_its_bounds(cost: StepCost, streams: list[Stream], prompts: list[Prompt]) -> None:
    chosen, itl_s = budget(streams, prompts, cost), min(stream.itl_s for stream in streams)
    assert chosen == 0 or MIN_TOKENS <= chosen <= MAX
    assert chosen or cost.seconds(len(streams), MIN_TOKENS) <= itl_s, "some tokens where they never fit"


@given(costs, st.floats(0.005, 0.2), st.integers(1, 8))
def test_prompts_get_on_beside_streams_that_have_fallen_behind(cost: StepCost, itl_s: float, num_streams: int) -> None:
    slack, waits_s = -0.2, 0.0
    while (chosen := budget([Stream(itl_s, slack)] * num_streams, [Prompt(1000, math.inf)], cost)) == 0:
        waits_s += cost.seconds(num_streams)
        slack += PACE * itl_s - cost.seconds(num_streams)
        assert waits_s < 1.0
    assert chosen >= MIN_TOKENS


@given(costs, streams, prompts, st.integers(0, 7))
def test_a_tighter_objective_never_raises_the_budget(
    cost: StepCost, streams: list[Stream], prompts: list[Prompt], which: int
) -> None:
    which %= len(streams)
    tighter = [
        stream._replace(itl_s=stream.itl_s / 2) if index == which else stream for index, stream in enumerate(streams)
    ]
    looser = budget(streams, [], cost)
    assert budget(tighter, [], cost) <= max(looser, MIN_TOKENS), "some tokens where the streams cannot catch up anyway"


@given(costs, streams, st.integers(1, 5000), st.floats(0.1, 5))
def test_a_prompt_that_can_be_on_time_never_lowers_the_budget(
    cost: StepCost, streams: list[Stream], num_tokens: int, left_s: float
) -> None:
    assert budget(streams, [Prompt(num_tokens, left_s)], cost) >= budget(streams, [], cost)


@given(costs, streams, prompts)
def test_only_prompts_with_an_objective_are_late(cost: StepCost, streams: list[Stream], prompts: list[Prompt]) -> None:
    assert all(prompts[index].left_s < math.inf for index in late(cost, len(streams), prompts, MAX))


@pytest.mark.parametrize(("last", "found"), [(2000, [1]), (2600, [1, 2])], ids=["fits", "fits only alone"])
def test_the_prompt_that_does_not_fit_is_late_and_not_those_behind_it(last: int, found: list[int]) -> None:
    queue = [Prompt(2000, 1.0), Prompt(8000, 1.0), Prompt(last, 1.0)]
    assert list(late(COST, 0, queue, MAX)) == found
    assert list(late(None, 0, queue, MAX)) == []
    assert list(late(StepCost(1.0, 0.001, 0.0), 0, queue, MAX)) == [], "no step had prompt tokens yet"


def test_slack_is_what_a_steady_pace_leaves() -> None:
    assert slack_s(0.01, first_s=5.0, num_tokens=10, now_s=5.0) == pytest.approx(PACE * 0.1)
    assert slack_s(0.01, first_s=5.0, num_tokens=10, now_s=6.0) < 0


def test_compiled_requests_enter_as_long_as_they_lengthen_the_step_of_streams_by_a_quarter() -> None:
    assert num_entering(COST, 0, [1000] * 5) == 5
    assert (num_entering(None, 1, [1]), num_entering(None, 0, [1] * 3)) == (1, 3)
    cost = StepCost(0.020, 0.001, 0.0005)
    assert num_entering(cost, 4, [0] * 9) == 6, "a quarter of 24 ms"
    assert num_entering(cost, 4, [2] * 9) == 3
    assert num_entering(cost, 4, [5000, 1]) == 1, "one always enters"


def test_replays_lengthen_the_step_of_streams_by_a_quarter_within_bounds() -> None:
    assert replay_s(StepCost(0.020, 0.001, 0.0005), 4) == pytest.approx(0.006), "a quarter of 24 ms"
    assert (replay_s(None, 1), replay_s(StepCost(1.0, 0.001, 0.0005), 4), replay_s(None, 0)) == (0.005, 0.05, 0.05)


def test_prompts_that_enter_lengthen_the_step_of_streams_by_a_quarter() -> None:
    cost = StepCost(0.020, 0.001, 0.0001)
    assert entering_tokens(cost, 4, 100) == 60, "a quarter of 24 ms"
    assert entering_tokens(StepCost(0.020, 0.001, 0.001), 4, 100) == MIN_TOKENS
    assert entering_tokens(None, 4, 100) == MIN_TOKENS
    assert entering_tokens(cost, 4, 4000) == 500, "an eighth of what is left"
    assert entering_tokens(cost, 0, 100) is None
    assert entering_tokens(StepCost(0.020, 0.001, 0.0), 4, 100) == MIN_TOKENS, "no step had prompt tokens yet"


@pytest.mark.parametrize(
    ("prompts", "bound"),
    [
        ([], None),
        ([(60, True), (40, True)], 60),
        ([(60, True), (40, False)], None),
        ([(4 * MAX, True), (4 * MAX, True)], MAX),
        ([(4 * MAX, True), (4 * MAX + 1, True)], None),
    ],
    ids=["none", "entering", "another one", "eight steps", "more than eight steps"],
)
def test_prompts_that_enter_are_bounded_while_there_are_no_others_and_not_too_many(
    prompts: list[tuple[int, bool]], bound: int | None
) -> None:
    assert entering_bound(StepCost(0.020, 0.001, 0.0001), 4, prompts, MAX) == bound


@given(costs | st.none(), st.integers(1, 8), st.integers(1, 400))
def test_no_backlog_of_entering_prompts_grows(cost: StepCost | None, num_streams: int, arriving: int) -> None:
    left = 0
    for _ in range(100):
        left += arriving
        left -= min(left, entering_tokens(cost, num_streams, left) or left)
        assert left <= 8 * arriving


def test_urgent_prompts_exceed_the_pace_of_entering_ones() -> None:
    ahead, calm = [Stream(ITL_S, 1.0)], 20
    assert prompt_budget(COST, ahead, 1, [Prompt(500, 1.0)], MAX, calm) == calm
    assert prompt_budget(COST, ahead, 1, [Prompt(500, 0.13)], MAX, calm) == 500
    assert prompt_budget(COST, [], 1, [Prompt(500, 0.13)], MAX, calm) == 500
    assert prompt_budget(COST, [Stream(ITL_S, 0.0)], 1, [], MAX, MAX) == budget([Stream(ITL_S, 0.0)])
    assert prompt_budget(None, ahead, 1, [Prompt(500, 0.13)], MAX, calm) == calm
    assert prompt_budget(None, ahead, 1, [Prompt(500, 0.13)], MAX, 2 * MAX) == MAX


@given(costs, st.integers(0, 200), st.floats(1, 10))
def test_a_stretched_step_is_as_long_as_asked_for_or_takes_the_least_prompt_tokens(
    cost: StepCost, num_streams: int, stretch: float
) -> None:
    num_tokens = stretched_tokens(cost, num_streams, 1, stretch)
    assert num_tokens is not None
    assert num_tokens >= MIN_TOKENS
    assert (
        num_tokens == MIN_TOKENS or cost.seconds(num_streams, num_tokens) <= stretch * cost.seconds(num_streams) * 1.001
    )
    assert cost.seconds(num_streams, num_tokens + 1) >= stretch * cost.seconds(num_streams) * 0.999
    assert stretched_tokens(None, num_streams, 1, stretch) is None
    assert stretched_tokens(StepCost(0.01, 0.001, 0.0), num_streams, 1, stretch) is None


@given(costs, st.integers(0, 200), st.floats(1, 10), st.integers(2, 100))
def test_prompts_behind_others_lengthen_a_stretched_step_further(
    cost: StepCost, num_streams: int, stretch: float, num_prompts: int
) -> None:
    longer = stretched_tokens(cost, num_streams, num_prompts, stretch)
    assert longer == stretched_tokens(cost, num_streams, 1, 6 * stretch)


@pytest.mark.parametrize("stretch", [1e305, 1e308, math.inf])
def test_a_stretch_beyond_all_numbers_is_no_bound(stretch: float) -> None:
    """An infinite number of tokens has no integer."""
    assert stretched_tokens(StepCost(0.01, 0.001, 1e-5), 4, 2, stretch) is None
