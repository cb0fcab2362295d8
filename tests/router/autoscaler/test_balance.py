"""What both pools may get together: the limits of their sum and of their ratio, and which of them goes first."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from router.autoscaler.decide import ScaleDecision, balance
from router.autoscaler.settings import AutoscalerSettings
from router.pools.instance_info import Role
from tests.router.autoscaler.builders import settings_of


def wants(role: Role, size: int, new_size: int) -> ScaleDecision:
    return ScaleDecision(role, 0.0, size, new_size, new_size, "steady" if size == new_size else None, "as it is")


def balanced(
    prefill: tuple[int, int], decode: tuple[int, int], settings: AutoscalerSettings, num_ending: int = 0
) -> tuple[ScaleDecision, ScaleDecision]:
    return balance(wants("prefill", *prefill), wants("decode", *decode), num_ending, settings)


def sizes(decisions: tuple[ScaleDecision, ScaleDecision]) -> tuple[int, int]:
    prefill, decode = decisions
    return prefill.new_size, decode.new_size


def test_without_a_budget_both_get_what_they_want() -> None:
    wanted = wants("prefill", 1, 2), wants("decode", 4, 8)
    assert balance(*wanted, 0, settings_of()) == wanted


def test_the_budget_goes_to_the_pool_that_is_worst_off() -> None:
    _, decode = both = balanced((2, 4), (2, 3), settings_of(max_instances=5))
    assert sizes(both) == (3, 2)
    assert decode.hold == "budget"
    assert decode.reason == "as it is; 5 instances are allowed in both pools together"
    assert sizes(balanced((2, 4), (2, 3), settings_of(max_instances=6))) == (3, 3)
    assert sizes(balanced((2, 4), (2, 4), settings_of(max_instances=5))) == (2, 3)
    assert sizes(balanced((1, 3), (2, 5), settings_of(max_instances=6))) == (2, 4)


def test_a_rebalance_beyond_the_total_budget_takes_two_steps() -> None:
    """What one pool gives up still runs, drains, and holds its place, until it has ended."""
    settings = settings_of(max_instances=6)
    prefill, decode = both = balanced((2, 1), (4, 5), settings)
    assert sizes(both) == (1, 4)
    assert prefill == wants("prefill", 2, 1)
    assert decode.hold == "budget"
    assert sizes(balanced((4, 5), (2, 1), settings)) == (4, 1)
    assert sizes(balanced((1, 1), (4, 5), settings, num_ending=1)) == (1, 4)
    assert sizes(balanced((1, 1), (4, 5), settings)) == (1, 5)


def test_a_pool_shrinks_though_both_remain_beyond_a_budget_that_was_lowered() -> None:
    settings = settings_of(max_instances=6)
    assert sizes(balanced((4, 3), (4, 4), settings)) == (3, 4)
    assert sizes(balanced((4, 4), (4, 3), settings)) == (4, 3)
    assert sizes(balanced((4, 3), (4, 5), settings)) == (3, 4), "none grows meanwhile"


def test_processes_that_start_take_places_and_are_no_reason_to_hold_what_is_ordered() -> None:
    settings = settings_of(max_instances=5)
    wanted = wants("prefill", 1, 1), wants("decode", 2, 4)
    assert sizes(balance(*wanted, 0, settings, (1, 4))) == (1, 4)
    assert sizes(balance(*wanted, 0, settings, (3, 2))) == (1, 2)
    assert sizes(balance(*wanted, 1, settings, (1, 4))) == (1, 4)


def test_the_additional_process_of_a_rollout_is_kept_by_no_order() -> None:
    settings = settings_of(max_instances=8)
    assert sizes(balance(wants("prefill", 4, 4), wants("decode", 4, 5), 0, settings, (4, 5))) == (4, 4)
    assert sizes(balance(wants("prefill", 4, 4), wants("decode", 3, 4), 1, settings, (4, 4))) == (4, 4)


def test_a_process_that_a_rollout_has_just_replaced_counts_in_the_ratio() -> None:
    settings = settings_of(max_ratio=1.0)
    assert sizes(balance(wants("prefill", 4, 5), wants("decode", 3, 4), 1, settings, (4, 4))) == (4, 4)
    assert sizes(balance(wants("prefill", 4, 5), wants("decode", 4, 4), 0, settings, (5, 4))) == (4, 4)


def test_a_pool_that_still_starts_may_grow_towards_the_ratio() -> None:
    settings = settings_of(min_ratio=1.0)
    assert sizes(balance(wants("prefill", 1, 3), wants("decode", 4, 4), 0, settings, (4, 4))) == (3, 4)
    assert sizes(balance(wants("prefill", 1, 1), wants("decode", 4, 6), 0, settings, (4, 4))) == (1, 4)


def test_a_drifting_ratio_of_prefill_to_decode_is_stopped_at_its_bounds() -> None:
    settings = settings_of(min_ratio=0.5, max_ratio=2.0)
    assert sizes(balanced((2, 4), (1, 1), settings)) == (2, 1)
    held, _ = balanced((2, 4), (1, 1), settings)
    assert (held.hold, held.reason) == (
        "ratio",
        "as it is; the ratio of prefill to decode must stay within 0.5..2",
    )
    assert sizes(balanced((2, 4), (1, 2), settings)) == (4, 2)
    assert sizes(balanced((2, 1), (4, 4), settings)) == (2, 4)
    assert sizes(balanced((4, 1), (4, 4), settings)) == (2, 4)


def test_beside_a_decode_pool_that_an_operator_has_set_to_0_there_is_no_ratio() -> None:
    assert sizes(balanced((1, 2), (0, 0), settings_of(min_ratio=0.5, max_ratio=2.0))) == (2, 0)


def test_a_pair_that_is_balanced_again_gives_each_reason_once() -> None:
    settings = settings_of(max_ratio=1.5)
    prefill, decode = balanced((3, 6), (2, 3), settings)
    assert (prefill.new_size, decode.new_size) == (4, 3)
    prefill, decode = balance(prefill, decode.held("no_room", "no node takes 1 of 3 pods"), 0, settings)
    assert (prefill.new_size, prefill.hold) == (3, "ratio")
    assert prefill.reason == "as it is; the ratio of prefill to decode must stay within 0..1.5"


def test_a_ratio_that_has_drifted_may_go_back_and_no_further() -> None:
    settings = settings_of(max_ratio=1.0)
    assert sizes(balanced((4, 3), (1, 1), settings)) == (3, 1)
    assert sizes(balanced((4, 5), (1, 1), settings)) == (4, 1)
    assert sizes(balanced((4, 4), (1, 2), settings)) == (4, 2)


def test_a_change_that_is_allowed_in_part_goes_as_far_as_it_may() -> None:
    less, _ = balanced((1, 4), (2, 2), settings_of(max_ratio=1.0))
    assert (less.new_size, less.hold, less.desired) == (2, None, 4)
    assert sizes(balanced((4, 4), (4, 2), settings_of(max_ratio=1.4))) == (4, 3)


SIZES = st.integers(1, 12)


@given(
    prefill=st.tuples(SIZES, SIZES),
    decode=st.tuples(SIZES, SIZES),
    num_ending=st.integers(0, 3),
    budget=st.none() | st.integers(2, 24),
    ratios=st.none() | st.tuples(st.floats(0.1, 1.0), st.floats(1.0, 10.0)),
)
def test_never_beyond_the_budget_nor_out_of_ratio_nor_past_what_is_wanted(
    prefill: tuple[int, int],
    decode: tuple[int, int],
    num_ending: int,
    budget: int | None,
    ratios: tuple[float, float] | None,
) -> None:
    low, high = ratios or (None, None)
    policy: AutoscalerSettings = settings_of(max_instances=budget, min_ratio=low, max_ratio=high)
    decisions = balanced(prefill, decode, policy, num_ending)
    for decision, (size, wanted) in zip(decisions, (prefill, decode), strict=True):
        assert min(size, wanted) <= decision.new_size <= max(size, wanted)
        assert (decision.hold is None) == (decision.new_size != size)
    if budget is not None and any(one.direction == "out" for one in decisions):
        running = max(sizes(decisions)[0], prefill[0]) + max(sizes(decisions)[1], decode[0]) + num_ending
        assert running <= budget
    if ratios is not None:
        assume(ratios[0] <= prefill[0] / decode[0] <= ratios[1])
        assert ratios[0] <= sizes(decisions)[0] / sizes(decisions)[1] <= ratios[1]
