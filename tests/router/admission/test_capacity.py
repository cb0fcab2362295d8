"""The capacity of the pools, the limits of one router, and the expected use of a request."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from engine.core.messages import StepCost
from router.admission.capacity import (
    Capacity,
    Charge,
    ExternalLoadEstimator,
    Limits,
    Usage,
    capacity_of,
    limits_of,
)
from router.admission.controller import OutputLengths
from router.admission.fair_queue import ServiceRate
from router.admission.settings import AdmissionSettings, TenantSettings
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport


def view(name: str, *, out: str | None = None, load: dict[str, Any] | None = None, **info: Any) -> InstanceView:
    identity = Identity(block_size=16)
    info = {"num_blocks": 100, "max_num_seqs": 8, "max_num_batched_tokens": 512, **info}
    return InstanceView(
        key=InstanceKey(name, "epoch"),
        info=InstanceInfo(name, "epoch", None, name, identity, **info),
        load=LoadReport("epoch", **{"free_blocks": 100, **(load or {})}),
        out=out,
    )


# Capacity


def test_capacity_is_the_sum_of_what_is_ready() -> None:
    capacity = capacity_of([view("a"), view("b"), view("c", out="draining")], [view("p")])
    assert capacity == Capacity(2, 16, 200, 16, 512, 0, 0, "prefill")


def test_late_prompts_are_last_where_all_that_compute_prompts_know_their_costs() -> None:
    """vLLM does not, and computes them in their turn."""

    def knowing(name: str) -> InstanceView:
        found = view(name)
        return replace(found, load=replace(found.load, step_cost=StepCost(0.004, 0.001, 0.0002)))

    assert capacity_of([knowing("a"), knowing("b")], []).puts_late_last
    assert not capacity_of([knowing("a"), view("b")], []).puts_late_last
    assert not capacity_of([knowing("a")], [view("p")]).puts_late_last
    assert capacity_of([view("a")], [knowing("p")]).puts_late_last


def test_capacity_follows_the_pools() -> None:
    assert capacity_of([view("a")], []).num_sequences == 8
    assert capacity_of([view("a"), view("b")], []).num_sequences == 16
    assert capacity_of([view("a", out="silent")], []) == Capacity()


def test_what_one_instance_does_not_tell_bounds_nothing() -> None:
    capacity = capacity_of([view("a"), view("b", max_num_seqs=0, num_blocks=0)], [])
    assert capacity.num_sequences is None
    limits = limits_of(capacity, Usage(), AdmissionSettings())
    assert math.isinf(limits.num_sequences)
    assert math.isinf(limits.num_blocks)


def test_without_a_ready_prefill_instance_the_decode_instances_prefill() -> None:
    decode = [view("a", max_num_batched_tokens=100)]
    for prefill, num_tokens, role in ((view("p"), 512, "prefill"), (view("p", out="silent"), 100, "decode")):
        capacity = capacity_of(decode, [prefill])
        assert (capacity.num_batched_tokens, capacity.prefilled_by) == (num_tokens, role)


def test_used_is_what_the_reports_say_corrected_by_what_is_on_its_way() -> None:
    load = {"num_running": 5, "num_waiting": 2, "num_loading": 1, "free_blocks": 30, "cached_blocks": 20}
    busy = replace(view("a", load=load), num_unreported=3, num_ended=2)
    capacity = capacity_of([busy], [])
    assert capacity.used_sequences == 9
    assert capacity.used_blocks == 50


# Limits


def test_a_router_alone_has_all_the_sequences_whatever_the_reports_say() -> None:
    settings = AdmissionSettings(sequence_fraction=1.0)
    limits = limits_of(Capacity(1, num_sequences=16), Usage(num_sequences=10), settings)
    assert limits.num_sequences == 16


def test_one_of_several_routers_takes_what_the_others_leave_and_is_sure_of_its_part() -> None:
    settings = AdmissionSettings(sequence_fraction=1.0)
    capacity = Capacity(1, num_sequences=16)
    assert limits_of(capacity, Usage(), settings, 4).num_sequences == 16
    assert limits_of(capacity, Usage(num_sequences=6), settings, 4).num_sequences == 10
    assert limits_of(capacity, Usage(num_sequences=16), settings, 4).num_sequences == 4


def test_one_of_several_routers_may_have_prompts_for_the_steps_that_the_others_leave() -> None:
    settings = AdmissionSettings(prefill_steps=4)
    capacity = Capacity(1, num_batched_tokens=100)
    for num_external, num_left in ((0, 400), (150, 250), (390, 100), (1000, 100)):
        limits = limits_of(capacity, Usage(num_prefill_tokens=num_external), settings, 4)
        assert limits.num_prefill_tokens == num_left
    assert limits_of(capacity, Usage(num_prefill_tokens=1000), settings).num_prefill_tokens == 400


COST = StepCost(0.004, 0.001, 0.0002)


def test_prompts_to_compute_are_those_of_the_prefilling_instances_sent_ones_too_where_none_is_overdue() -> None:
    computing = replace(view("p", load={"num_uncomputed_tokens": 70}), num_unreported_to_prefill=20)
    waiting = view("q", load={"num_waiting_tokens": 30})  # vLLM's report only those
    assert capacity_of([computing], [waiting]).used_prefill_tokens == 30
    assert capacity_of([computing, waiting], []).used_prefill_tokens == 120
    late = view("r", load={"num_uncomputed_tokens": 40, "num_waiting_tokens": 90, "step_cost": COST})
    late = replace(late, num_unreported_to_prefill=20)
    assert capacity_of([late], []).used_prefill_tokens == 40, "late prompts delay no other"


def test_blocks_used_beyond_the_expected_lower_the_limit_but_not_below_half() -> None:
    capacity = Capacity(1, num_blocks=100)
    assert limits_of(capacity, Usage(num_blocks=30), AdmissionSettings()).num_blocks == 70
    assert limits_of(capacity, Usage(num_blocks=90), AdmissionSettings()).num_blocks == 50


def test_foreign_load_counts_only_as_far_as_it_lasts() -> None:
    external, capacity = ExternalLoadEstimator(), Capacity(1, used_sequences=10, used_prefill_tokens=100)

    def observed(num_own: int, now_s: float) -> Usage:
        own = Usage(num_sequences=num_own, num_prefill_tokens=10 * num_own)
        return external.observe(capacity, own, now_s)

    assert observed(10, 0.0) == Usage()
    assert observed(4, 0.3) == Usage(), "six may have ended since the report"
    assert observed(7, 1.2) == Usage(num_sequences=3, num_prefill_tokens=30), "three were there all the second"
    assert observed(10, 1.3) == Usage()


def test_a_first_sample_is_foreign_load_where_the_router_itself_has_had_none() -> None:
    for idle_s, num_external in ((0.5, 0), (2.0, 10)):
        external, capacity = ExternalLoadEstimator(), Capacity(1, used_sequences=10)
        assert external.observe(capacity, Usage(), 0.0, idle_s) == Usage(num_sequences=num_external)
        assert external.observe(capacity, Usage(), 5.0, idle_s) == Usage(num_sequences=num_external), (
            "the window is empty"
        )


@pytest.mark.parametrize(
    ("num_reported", "num_overdue", "num_new"), [(60, 80, 0), (60, 80, 10), (0, 80, 0), (60, 0, 0)]
)
def test_prompts_that_no_report_counts_yet_are_no_foreign_load(
    num_reported: int, num_overdue: int, num_new: int
) -> None:
    """This router sent them. Its limits leave them out once they are overdue, which may be long before they are
    reported: they wait for a reservation."""
    own = Usage(num_prefill_tokens=num_reported + num_new)
    unreported = replace(view("q", load={"step_cost": COST}), num_unreported_to_prefill=num_overdue + num_new)
    for num_foreign, num_external in ((0, 0), (100, 100 - num_new)):
        reported = view("p", load={"num_uncomputed_tokens": num_reported + num_foreign, "step_cost": COST})
        external, capacity = ExternalLoadEstimator(), capacity_of([reported, unreported], [])
        external.observe(capacity, own, 0.0)
        assert external.observe(capacity, own, 0.5).num_prefill_tokens == num_external


def test_foreign_prompts_are_known_exactly_where_none_is_overdue() -> None:
    own = Usage(num_prefill_tokens=70)
    for num_foreign in (0, 100):
        reported = view("p", load={"num_uncomputed_tokens": 60 + num_foreign})
        capacity = capacity_of([replace(reported, num_unreported_to_prefill=10)], [])
        external = ExternalLoadEstimator()
        external.observe(capacity, own, 0.0)
        assert external.observe(capacity, own, 0.5).num_prefill_tokens == num_foreign


# Usage


def charge(num_sequences: int = 1, num_tokens: int = 10, num_blocks: int = 1, num_prefill_tokens: int = 5) -> Charge:
    return Charge(num_sequences, num_tokens, num_blocks, num_prefill_tokens)


@pytest.mark.parametrize(
    ("limits", "what"),
    [
        (Limits(num_requests=1), "requests"),
        (Limits(num_tokens=19), "tokens"),
        (Limits(num_sequences=1), "choices"),
        (Limits(num_blocks=1), "KV blocks"),
        (Limits(num_prefill_tokens=5), "prompt tokens"),
    ],
)
def test_a_request_does_not_fit_when_one_thing_is_short(limits: Limits, what: str) -> None:
    usage = Usage()
    assert usage.exceeded_limit(charge(), limits) is None, "a request alone is never too big"
    usage.add(charge())
    exceeded = usage.exceeded_limit(charge(), limits)
    assert exceeded is not None
    assert what in exceeded
    assert usage.exceeded_limit(charge(), Limits()) is None


def test_a_prompt_counts_as_work_until_its_first_token() -> None:
    usage, limits = Usage(), Limits(num_prefill_tokens=5)
    usage.add(charge())
    usage.prefilled(charge())
    assert usage.exceeded_limit(charge(), limits) is None
    usage.remove(charge())
    assert usage == Usage()


# Output lengths


def test_lengths_are_learned_for_requests_of_the_same_kind() -> None:
    lengths = OutputLengths(256)
    assert lengths.expected(4000) == 256
    assert lengths.expected(10) == 10
    for _ in range(200):
        lengths.observe(4000, 40)
        lengths.observe(16, 16)
    assert 38 <= lengths.expected(4000) <= 45
    assert lengths.expected(16) == 16
    assert lengths.expected(100_000) == 256, "nothing is known of those"


def test_no_more_is_expected_than_allowed_and_no_less_than_one() -> None:
    lengths = OutputLengths(256)
    for _ in range(500):
        lengths.observe(1023, 1023)
        lengths.observe(64, 0)
    assert lengths.expected(513) == 513
    assert lengths.expected(64) == 1


def test_a_short_answer_is_one_that_nine_of_ten_exceed() -> None:
    lengths = OutputLengths(256)
    assert lengths.short(4000) is None
    for length in range(1, 65):
        lengths.observe(4000, length)
    assert lengths.short(4000) == 7
    assert lengths.short(5) is None, "nothing is known of those"


# Rate


def test_a_rate_counts_only_what_was_served_while_requests_waited() -> None:
    rate = ServiceRate()
    for second in range(100):
        rate.observe(second, waiting=False, cost=1)
    assert rate.per_s() is None
    rate.observe(100.0, waiting=True)
    for step in range(1, 101):
        rate.observe(100 + step / 10, waiting=True, cost=5)
    assert rate.per_s() == pytest.approx(50)
    rate.observe(110.0, waiting=False)
    rate.observe(500.0, waiting=True)
    assert rate.per_s() == pytest.approx(50), "an idle hour is no slowness"


def test_a_rate_follows_a_change() -> None:
    rate = ServiceRate()
    rate.observe(0.0, waiting=True)
    for step in range(1, 1001):
        rate.observe(step / 10, waiting=True, cost=5)
    for step in range(1, 1001):
        rate.observe(100 + step / 10, waiting=True, cost=1)
    assert rate.per_s() == pytest.approx(10, rel=0.1)
    rate.reset()
    assert rate.per_s() is None


def test_a_guess_fades_as_more_is_seen() -> None:
    rate = ServiceRate()
    assert rate.per_s(100) == 100
    rate.observe(0.0, waiting=True)
    seen = []
    for step in range(1, 201):
        rate.observe(step / 10, waiting=True, cost=1)
        seen.append(rate.per_s(100) or 0.0)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 40


# Tenants


def test_shares_are_settings() -> None:
    settings = AdmissionSettings(
        tenants={"big": TenantSettings(weight=3, max_tokens=10)}, other_tenants=TenantSettings(max_requests=2)
    )
    assert (settings.share_of("big").weight, settings.share_of("big").max_tokens) == (3, 10)
    assert (settings.share_of("any").weight, settings.share_of("any").max_requests) == (1, 2)


@pytest.mark.parametrize("key", ["X-Tenant", "tenant-bin", "a b"])
def test_a_key_that_can_never_come_is_a_wrong_setting(key: str) -> None:
    with pytest.raises(ValidationError):
        AdmissionSettings(tenant_key=key)
