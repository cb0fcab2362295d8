"""What one observation says of a pool, and what makes it say nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.autoscaler.observation import InstanceSample, Problem, observe
from router.autoscaler.router_signals import EMPTY_QUEUE, QueueSample
from router.autoscaler.settings import PoolPolicy
from router.pools.instance import State
from tests.router.autoscaler.builders import (
    BLOCK_SIZE,
    NOW_S,
    NUM_BLOCKS,
    NUM_SEQS,
    SPEED,
    STALE_S,
    instance,
    policy_of,
    pool,
    starting,
)

REPORTED = (
    *("num_waiting", "num_running", "num_loading", "num_waiting_tokens"),
    *("free_blocks", "cached_blocks", "held_blocks", "quarantined_blocks"),
)


def test_a_look_tells_what_each_instance_carries() -> None:
    [load] = pool(instance(num_waiting=2, num_running=3, num_loading=1, num_waiting_tokens=500, used_blocks=250)).warm
    assert load.score == (4 * 2 + 3 + 1) / NUM_SEQS
    assert load.waiting_s == 500 / SPEED
    assert load.kv_use == 250 / NUM_BLOCKS


def test_tokens_at_an_instance_of_unknown_speed_go_by_the_others_speed() -> None:
    first, second = pool(instance("a", speed=2000.0), instance("b", speed=None, num_waiting_tokens=1000)).warm
    assert (first.waiting_s, second.waiting_s) == (0.0, 0.5)
    [alone] = pool(instance(speed=None, num_waiting_tokens=1000)).warm
    assert alone.waiting_s is None
    assert pool(instance(speed=None)).warm[0].waiting_s == 0.0


def test_samples_of_an_instance_that_is_still_warming_up_are_no_reason_to_grow() -> None:
    observation = pool(instance("a", num_running=2), instance("b", up_s=1.0, num_waiting=50), size=2)
    assert [load.name for load in observation.warm] == ["a"]
    assert [load.name for load in observation.others] == ["b"]
    assert observation.num_pending == 1
    assert observation.problem is None


def test_draining_and_ejected_instances_carry_load_and_are_no_warm_ones() -> None:
    observation = pool(
        instance("a"), instance("b", state="draining"), instance("c", out="ejected for 9 s more"), size=2
    )
    assert [load.name for load in observation.warm] == ["a"]
    assert [load.name for load in observation.others] == ["b", "c"]
    assert observation.num_ending == 1


def test_what_is_to_go_and_has_not_begun_to_counts_as_ending() -> None:
    assert pool(instance("a"), instance("b"), instance("c"), size=1).num_ending == 2


def test_instances_that_end_count_whatever_the_others_report() -> None:
    observation = pool(instance("a", state="draining"), instance("b", num_waiting=-3), instance("c"), size=1)
    assert observation.problem is not None
    assert observation.problem.kind == "nonsense"
    assert observation.num_ending == 2


@pytest.mark.parametrize("num_waiting", [0, -3], ids=["valid", "nonsense"])
def test_of_a_pool_of_unknown_size_what_stays_is_present_and_no_surplus(num_waiting: int) -> None:
    instances = instance("a", num_waiting=num_waiting), starting("b"), instance("c", state="leaving")
    observation = observe("decode", NOW_S, None, instances, EMPTY_QUEUE, None, policy_of(), STALE_S)
    assert (observation.num_present, observation.num_ending) == (2, 1)


def test_a_second_address_of_a_process_is_no_second_process_that_is_to_go() -> None:
    assert pool(instance("a"), InstanceSample("a", "ready", 0.1, None), size=1).num_ending == 0


def test_an_instance_that_was_never_heard_of_is_pending_and_not_silent() -> None:
    observation = pool(instance("a"), starting(), size=2)
    assert (observation.num_pending, observation.num_silent, observation.problem) == (1, 0, None)


@pytest.mark.parametrize("state", ["lost", "wedged"])
def test_what_a_silent_instance_carries_is_not_known_for_a_while(state: State) -> None:
    policy: PoolPolicy = policy_of(start_timeout_s=60.0)
    assert pool(instance("a"), instance("b", state=state, report_age_s=20.0), policy=policy).num_silent == 1
    assert pool(instance("a"), instance("b", state=state, report_age_s=61.0), policy=policy).num_silent == 0


def test_a_pool_without_reports_decides_nothing() -> None:
    assert pool(size=2).problem == Problem("missing", "no instance is warm and reports")
    problem = pool(instance("a", state="lost"), instance("b", state="lost"), size=2).problem
    assert problem == Problem("missing", "none of 2 instances is warm and reports; 2 fell silent")


def test_a_stale_report_decides_nothing() -> None:
    problem = pool(instance("a"), instance("b", report_age_s=13.0)).problem
    assert problem == Problem("stale", "b reported 13.0 s ago, 12 s are too long")
    assert pool(instance(report_age_s=math.nan)).problem is not None


@pytest.mark.parametrize("field", REPORTED)
def test_a_negative_number_decides_nothing(field: str) -> None:
    negative: dict[str, Any] = {field: -3}
    problem = pool(instance("a"), instance("b", **negative)).problem
    assert problem == Problem("nonsense", f"b: {field} = -3, which is invalid")


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf, -1.0])
def test_a_number_that_is_not_finite_decides_nothing(nonsense: float) -> None:
    for observation in (
        pool(instance(step_s=nonsense)),
        pool(instance(core_silence_s=nonsense)),
        pool(instance(speed=nonsense, num_waiting_tokens=10)),
        pool(instance(), latency_s=nonsense),
        pool(instance(), queue=QueueSample(1, nonsense)),
        pool(instance("a"), instance("cold", up_s=0.0, step_s=nonsense)),
    ):
        assert observation.problem is not None
        assert observation.problem.kind == "nonsense"


def test_more_blocks_than_there_are_decide_nothing() -> None:
    problem = pool(instance(cached_blocks=1)).problem
    assert problem == Problem("nonsense", f"decode-0 reports {NUM_BLOCKS + 1} blocks and has {NUM_BLOCKS}")


def test_an_instance_that_does_not_tell_what_it_can_run_decides_nothing() -> None:
    problem = pool(instance(num_seqs=0)).problem
    assert problem is not None
    assert problem.message == "decode-0 reports max_num_seqs = 0, which must be positive"


def test_held_kv_is_no_prefill_load() -> None:
    held: dict[str, Any] = {"used_blocks": 600, "held_blocks": 500}
    [prefill] = pool(instance(**held), role="prefill").warm
    assert prefill.kv_use == 100 / NUM_BLOCKS
    [decode] = pool(instance(**held)).warm
    assert decode.kv_use == 600 / NUM_BLOCKS


def test_a_prefill_queue_that_stands_still_for_held_kv_is_no_prefill_load() -> None:
    stuck: dict[str, Any] = {"num_waiting": 9, "num_waiting_tokens": 9000, "used_blocks": 500, "held_blocks": 500}
    observation = pool(instance(**stuck), role="prefill", queue=QueueSample(5, 3.0))
    [load] = observation.warm
    assert load.is_blocked
    assert (load.score, load.waiting_s, observation.queue.delay_s) == (0.0, 0.0, 0.0)
    [working] = pool(instance(**stuck, num_running=1, num_prefilling=1), role="prefill").warm
    assert not working.is_blocked
    assert working.score > 3
    [decoding] = pool(instance(**stuck, num_running=1), role="prefill").warm
    assert decoding.is_blocked, "streams that it serves alone are no prompts"


def test_a_prefill_queue_that_moves_is_prefill_load_whatever_is_held() -> None:
    """Between two steps no prompt is begun, and KV that was just computed is held."""
    busy: dict[str, Any] = {"num_waiting": 9, "num_waiting_tokens": 9000, "used_blocks": 100, "held_blocks": 100}
    observation = pool(instance(**busy, num_recent=100 * BLOCK_SIZE), role="prefill", queue=QueueSample(5, 3.0))
    [load] = observation.warm
    assert not load.is_blocked
    assert (load.num_waiting, load.waiting_s, observation.queue.delay_s) == (9, 9000 / SPEED, 3.0)
    [trickling] = pool(instance(**busy, num_recent=100 * BLOCK_SIZE - 1), role="prefill").warm
    assert trickling.is_blocked, "what it holds is older than what it has computed lately"


@given(
    report=st.fixed_dictionaries({field: st.integers(-(2**63), 2**63 - 1) for field in REPORTED}),
    floats=st.fixed_dictionaries({field: st.floats() for field in ("step_s", "core_silence_s")}),
    speed=st.none() | st.floats(),
)
def test_whatever_an_instance_tells_a_look_is_sane_or_says_what_is_wrong(
    report: dict[str, Any], floats: dict[str, Any], speed: float | None
) -> None:
    observation = pool(instance(**report, **floats, speed=speed))
    if observation.problem is not None:
        assert observation.problem.message
        return
    [load] = observation.warm
    assert math.isfinite(load.score)
    assert load.score >= 0
    assert 0 <= load.kv_use <= 1
    assert load.waiting_s is None or (math.isfinite(load.waiting_s) and load.waiting_s >= 0)
