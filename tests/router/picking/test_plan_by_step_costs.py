"""Where an attempt runs by measured step costs: with objectives, and without."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from engine.core.messages import StepCost
from router.picking.affinity import Affinity
from router.picking.disaggregation import Decision, Reason
from router.picking.placement import STEP_STRETCH, AimSource, Plan
from router.picking.plan import explain, make_plan
from router.picking.scorers import Criteria
from router.picking.settings import DisaggregationSettings, PickingSettings, SloSettings
from router.pools.instance_info import Identity, InstanceView, Role
from router.pools.throughput import ThroughputEstimate, Work
from router.request.choice_state import Choice
from tests.router.picking.test_plan import choice, view

COST = StepCost(0.0035, 0.0006, 1 / 4500)
AIMS = AimSource(SloSettings(ttft_ms=1000, itl_ms=12))


def measured(role: Role, name: str = "", **fields: Any) -> InstanceView:
    found = view(role, name, **{"step_cost": COST} | fields)
    return replace(found, info=replace(found.info, max_num_batched_tokens=2048))


def planned_by_objectives(
    decode: list[InstanceView],
    prefill: list[InstanceView],
    wanted: Choice | None = None,
    aims: AimSource = AIMS,
    *,
    keeps_place: bool = False,
    cached: dict[str, int] | None = None,
    **settings: Any,
) -> Plan:
    chosen = wanted or choice()
    criteria = Criteria(
        aims=aims.of(chosen.request, is_first=True),
        keeps_place=keeps_place,
        num_cached_tokens=lambda instance: (cached or {}).get(instance.key.address, 0),
    )
    found = make_plan(
        decode, prefill, chosen, frozenset(), DisaggregationSettings(**settings), random.Random(0), criteria
    )
    assert isinstance(found, Plan)
    return found


def test_with_objectives_an_idle_prefill_instance_serves_alone() -> None:
    found = planned_by_objectives([measured("decode", num_running=10)], [measured("prefill")])
    assert found.decode.instance_id == "prefill"
    assert found.prefill is None
    assert (found.disaggregation.decision, found.disaggregation.reason) == (Decision.LOCAL, Reason.ESTIMATE)
    assert "alone at prefill 0.2" in found.disaggregation.explanation
    assert found.disaggregation.explanation.endswith("of 1 s and 12 ms")
    assert "split" not in found.disaggregation.explanation


def test_why_is_the_comparison_and_what_chose_the_two_that_were_compared() -> None:
    decode, prefill = (
        [measured("decode", "d1", num_running=9), measured("decode", "d2", num_running=2)],
        [measured("prefill")],
    )
    assert planned_by_objectives(decode, prefill).why == "by step costs, of 3"
    scores = "decode: score 2, lowest of 2, 1 tied; prefill: score 0, lowest of 1, 1 tied"
    assert planned_without(decode, prefill).why == f"{scores}; by step costs, of 2"


def test_without_a_prefill_instance_the_reason_is_that_also_with_objectives() -> None:
    out = replace(measured("prefill"), out="draining")
    for prefill in ([], [out]):
        found = planned_by_objectives([measured("decode")], prefill)
        assert (found.decode.instance_id, found.prefill) == ("decode", None)
        assert found.disaggregation[:2] == (Decision.LOCAL, Reason.NO_PREFILL)
        assert found.disaggregation.explanation.startswith("no prefill instance is available: alone at decode")


def test_a_split_by_objectives_names_both_and_the_work() -> None:
    busy = ThroughputEstimate(hand_over_per_s=1e6, recent_prefill_per_s=0.7 * 4500)
    found = planned_by_objectives(
        [measured("decode", num_running=4, throughput=ThroughputEstimate(hand_over_per_s=1e6))],
        [measured("prefill", throughput=busy)],
        choice(4000),
    )
    assert found.prefill is not None
    assert (found.decode.instance_id, found.prefill.instance_id) == ("decode", "prefill")
    assert found.work == Work(4000, 0, 4000)
    assert found.disaggregation.explanation.startswith("split over prefill and decode ")


def test_by_step_costs_a_context_with_room_for_one_token_only_is_not_split() -> None:
    busy = ThroughputEstimate(hand_over_per_s=1e6, recent_prefill_per_s=0.9 * 4500)
    decode = measured("decode", num_running=4, throughput=ThroughputEstimate(hand_over_per_s=1e6))
    prefill = [measured("prefill", throughput=busy)]
    for length, is_split in ((4001, False), (4002, True)):
        limited = replace(decode, info=replace(decode.info, max_model_len=length))
        wanted = choice(3900, emitted=100, max_tokens=length - 3900)
        for others in ([], [replace(limited, info=replace(limited.info, max_model_len=64))]):  # cannot get it
            for planned in (planned_by_objectives, planned_without):
                assert (planned([limited, *others], prefill, wanted).prefill is not None) == is_split


def test_by_step_costs_only_what_is_not_cached_counts() -> None:
    decode = [measured("decode", "d0"), measured("decode", "d1", num_uncomputed_tokens=400), measured("decode", "d2")]
    found = planned_by_objectives(decode, [measured("prefill")], choice(1000), cached={"d1": 900})
    assert (found.decode.instance_id, found.prefill) == ("d1", None)
    assert found.work == Work(100, 400)


def test_each_instance_counts_by_its_own_step_costs_and_a_new_one_by_anothers() -> None:
    slow = measured("decode", "slow", step_cost=StepCost(0.008, 0.0006, 1 / 1500))
    fast = measured("decode", "fast", num_uncomputed_tokens=300)
    for decode in ([slow, fast], [fast, slow]):
        assert planned_by_objectives(decode, []).decode.instance_id == "fast"
    new = measured("decode", "new", step_cost=None)
    assert planned_by_objectives([fast, new], []).decode.instance_id == "new"


@pytest.mark.parametrize(
    ("num_short", "share", "reason", "why"),
    [
        (None, 0.7, Reason.ESTIMATE, "split over prefill and decode"),
        (16, 0.7, Reason.OBJECTIVE, "does not hold the objectives with a tenth left"),
        (None, 0.3, Reason.MARGIN, "not better by a fifth"),
    ],
)
def test_a_split_is_better_by_a_fifth_and_holds_its_objectives_with_a_short_answer_too(
    num_short: int | None, share: float, reason: Reason, why: str
) -> None:
    aims = AimSource(AIMS.slo, expected_tokens=lambda _: 136, short_tokens=lambda _: num_short)
    decode = measured("decode", num_running=4, throughput=ThroughputEstimate(hand_over_per_s=4000 / 0.069))
    prefill = measured("prefill", throughput=ThroughputEstimate(recent_prefill_per_s=share * 4500))
    found = planned_by_objectives([decode], [prefill], choice(4000), aims)
    assert (found.disaggregation.reason, found.prefill is None) == (reason, reason is not Reason.ESTIMATE)
    assert why in found.disaggregation.explanation


@pytest.mark.parametrize(
    ("own_per_s", "others_per_s", "is_split"),
    [(None, None, True), (None, 1e6, True), (None, 1000.0, False), (1000.0, 1e6, False)],
)
def test_a_hand_over_that_was_not_measured_takes_as_long_as_to_other_instances(
    own_per_s: float | None, others_per_s: float | None, is_split: bool
) -> None:
    own, others = (ThroughputEstimate(hand_over_per_s=per_s) for per_s in (own_per_s, others_per_s))
    decode = [
        measured("decode", "other", num_running=30, throughput=others),
        measured("decode", "own", num_running=4, throughput=own),
    ]
    prefill = measured("prefill", throughput=ThroughputEstimate(recent_prefill_per_s=0.7 * 4500))
    found = planned_by_objectives(decode, [prefill], choice(4000))
    assert (found.decode.instance_id, found.prefill is not None) == ("own" if is_split else "prefill", is_split)


@pytest.mark.parametrize("partly", [StepCost(0.0035, 0.0006, 0.0), StepCost(0.0, 0.0006, 1 / 4500)])
def test_step_costs_of_which_a_part_was_not_observed_are_unknown(partly: StepCost) -> None:
    """As of an instance that has only continued streams so far."""
    unknown = measured("decode", step_cost=partly)
    assert "step costs" not in planned_by_objectives([unknown], []).why
    found = planned_by_objectives([unknown, measured("decode", "busy", num_uncomputed_tokens=9000)], [])
    assert (found.decode.instance_id, found.why) == ("decode", "by step costs, of 2")


def test_the_time_that_goes_to_prompts_lengthens_the_time_of_a_token() -> None:
    busy = measured("decode", throughput=ThroughputEstimate(recent_prefill_per_s=0.5 * 4500))
    assert "s to the first token, 8.2 ms a token" in planned_by_objectives([busy], []).disaggregation.explanation


def test_what_was_sent_since_the_report_counts_and_a_budget_that_is_not_reported_is_no_error() -> None:
    decode = [measured("decode", "sent", num_unreported_to_prefill=900), measured("decode", "reported")]
    decode[1] = replace(decode[1], load=replace(decode[1].load, num_uncomputed_tokens=300))
    assert planned_by_objectives(decode, []).decode.instance_id == "reported"
    assert "by step costs" in planned_by_objectives([view("decode", step_cost=COST)], []).why


def test_what_waits_becomes_a_stream_at_a_decode_instance_and_leaves_a_prefill_instance() -> None:
    decode = measured("decode", num_running=3, num_waiting=2)
    assert "s to the first token, 7.1 ms a token" in planned_by_objectives([decode], []).disaggregation.explanation
    prefill = measured("prefill", num_running=3, num_prefilling=2, num_waiting=5)
    busy = measured("decode", num_running=30)
    explanation = planned_by_objectives([busy], [prefill]).disaggregation.explanation
    assert explanation.startswith("alone at prefill")
    assert "s to the first token, 4.7 ms a token" in explanation


def test_an_answer_without_expected_tokens_has_a_place() -> None:
    aims = AimSource(AIMS.slo, expected_tokens=lambda _: 0)
    assert planned_by_objectives([measured("decode")], [measured("prefill")], aims=aims).prefill is None


def test_a_request_is_overdue_when_its_ttft_and_the_wait_after_it_have_passed() -> None:
    aims = AimSource(SloSettings(ttft_ms=1000, itl_ms=12), late_wait_s=5.0)
    assert (aims.is_overdue(5.9), aims.is_overdue(6.1), AIMS.is_overdue(1e9)) == (False, True, False)
    left = aims.of(choice().request, 0.4, is_first=False).objectives
    assert (left.ttft_s, left.begin_s) == pytest.approx((0.6, 5.6))
    assert AIMS.of(choice().request, 0.4, is_first=False).objectives.ttft_s == pytest.approx(0.6)


def test_overload_and_its_reason() -> None:
    full: dict[str, Any] = {"num_uncomputed_tokens": 90_000, "num_running": 30}
    found = planned_by_objectives([measured("decode", **full)], [measured("prefill", **full)])
    assert found.disaggregation.reason is Reason.OVERLOAD
    assert "no instance holds the objectives: the least loaded" in found.disaggregation.explanation


def test_without_costs_or_in_other_modes_step_costs_do_not_decide() -> None:
    pools = [measured("decode")], [measured("prefill")]
    assert planned_by_objectives([view("decode")], [view("prefill")]).disaggregation.reason is Reason.UNMEASURED
    assert planned_by_objectives(*pools, mode="never").disaggregation.reason is Reason.OFF
    assert planned_by_objectives(*pools, mode="always").disaggregation.reason is Reason.ON


# By step costs, without objectives


def planned_without(
    decode: list[InstanceView], prefill: list[InstanceView], wanted: Choice | None = None, **settings: Any
) -> Plan:
    return planned_by_objectives(decode, prefill, wanted, AimSource(SloSettings()), **settings)


def test_without_objectives_a_long_prompt_goes_where_less_waits() -> None:
    behind: dict[str, Any] = {"num_uncomputed_tokens": 9000}
    found = planned_without([measured("decode", **behind)], [measured("prefill")])
    assert found.decode.instance_id == "prefill"
    assert found.prefill is None
    assert "of 12.3 ms (assumed)" in found.disaggregation.explanation
    found = planned_without([measured("decode")], [measured("prefill", **behind)])
    assert found.decode.instance_id == "decode"


def test_without_objectives_prompts_are_split_where_the_prefill_pool_is_busy_with_prompts() -> None:
    fast = ThroughputEstimate(hand_over_per_s=1e6)
    busy = ThroughputEstimate(hand_over_per_s=1e6, recent_prefill_per_s=0.9 * 4500)
    pools = [measured("decode", num_running=4, throughput=fast)], [measured("prefill", throughput=busy)]
    found = planned_without(*pools, choice(4000))
    assert found.prefill is not None
    assert found.prefill.instance_id == "prefill"
    assert found.disaggregation.decision is Decision.DISAGGREGATE
    another = choice(4000)
    another.decode_key, another.prefill_key = pools[0][0].key, pools[1][0].key
    assert planned_without(*pools, another).prefill is not None, "a further choice is split as the first one was"


def test_the_assumed_objective_follows_the_number_of_streams() -> None:
    for running in (0, 10, 100):
        found = planned_without([measured("decode", num_running=running)], [measured("prefill")])
        assert f"of {3e3 * COST.seconds(running + 1):.3g} ms (assumed)" in found.disaggregation.explanation
        assert found.step_stretch == STEP_STRETCH


def test_a_prefill_instance_takes_streams_for_half_of_its_batch_and_prompts_beyond() -> None:
    fast = ThroughputEstimate(hand_over_per_s=1e6)

    def prefill(running: int) -> InstanceView:
        found = measured("prefill", num_running=running, throughput=fast)
        return replace(found, info=replace(found.info, max_num_seqs=16))

    decode = measured("decode", num_running=40, num_uncomputed_tokens=20_000, throughput=fast)
    found = planned_without([decode], [prefill(7)])
    assert (found.decode.instance_id, found.prefill) == ("prefill", None)
    found = planned_without([decode], [prefill(8)])
    assert found.decode.instance_id == "decode"
    assert found.prefill is not None, "it still computes prompts"
    assert "by step costs" in found.why
    more_than_half = measured("decode", num_running=30)
    more_than_half = replace(more_than_half, info=replace(more_than_half.info, max_num_seqs=40))
    assert planned_by_objectives([more_than_half], []).why == "by step costs, of 1", "decode instances fill theirs"
    full = replace(decode, info=replace(decode.info, max_num_seqs=40))
    assert planned_without([full], [prefill(7)]).decode.instance_id == "prefill"
    found = planned_without([full], [prefill(8)])
    assert found.decode.instance_id == "decode", "rather than filling the rest of the batch, it waits there"
    assert found.prefill is not None


def test_prompts_of_at_most_min_tokens_go_where_less_waits_and_are_not_split() -> None:
    behind: dict[str, Any] = {"num_uncomputed_tokens": 9000}
    found = planned_without([measured("decode", **behind)], [measured("prefill")], choice(64))
    assert found.decode.instance_id == "prefill"
    fast = ThroughputEstimate(hand_over_per_s=1e6)
    busy = ThroughputEstimate(hand_over_per_s=1e6, recent_prefill_per_s=0.9 * 4500)
    pools = [measured("decode", num_running=4, throughput=fast)], [measured("prefill", throughput=busy)]
    assert planned_without(*pools, choice(4000), min_tokens=3999).prefill is not None
    found = planned_without(*pools, choice(4000), min_tokens=4000)
    assert found.prefill is None
    assert found.step_stretch == STEP_STRETCH


def test_without_objectives_scores_pick_the_two_instances() -> None:
    decode = [measured("decode", f"d{number}", num_running=4 - number) for number in range(4)]
    prefill = [measured("prefill", f"p{number}", num_waiting=number) for number in range(3)]
    picked = {planned_without(decode, prefill).decode.instance_id for _ in range(5)}
    assert picked <= {"d3", "p0"}


def test_nothing_is_assumed_with_objectives_and_without_a_prefill_instance_or_measurements() -> None:
    pools = [measured("decode")], [measured("prefill")]
    assert planned_by_objectives(*pools).step_stretch is None
    assert planned_by_objectives(*pools, aims=AimSource(SloSettings(ttft_ms=1000))).step_stretch is None
    assert planned_without([measured("decode")], []).step_stretch is None
    assert planned_without([view("decode")], [view("prefill")]).step_stretch is None
    for mode in ("always", "never"):
        assert planned_without(*pools, mode=mode).step_stretch is None
    unmeasured = planned_without(*pools, speed_smoothing=0)
    assert unmeasured.step_stretch is None
    assert unmeasured.disaggregation.reason is Reason.UNMEASURED


def test_without_objectives_choices_of_one_request_stay_where_the_first_runs() -> None:
    """Also where that is a prefill instance, which serves it alone."""
    second = choice()
    second.decode_key = view("prefill", "p1").key
    prefill = [measured("prefill", "p0"), measured("prefill", "p1", num_running=8)]
    assert planned_without([measured("decode")], prefill, second).decode.instance_id == "p1"


def test_choices_of_one_request_stay_where_the_first_runs() -> None:
    second = choice()
    second.decode_key = view("decode", "d1").key
    for num_running in (0, 8):
        pools = [measured("decode", "d0"), measured("decode", "d1", num_running=num_running)], [measured("prefill")]
        assert planned_by_objectives(*pools, second).decode.instance_id == "d1"


@pytest.mark.parametrize(
    ("emitted", "num_attempts", "goes_to"),
    [(0, 0, "d1"), (5, 1, "d0"), (0, 1, "d0")],
    ids=["shares its blocks", "paused", "failed before its first token"],
)
def test_a_further_choice_needs_no_blocks_for_its_prompt_where_the_first_one_runs(
    emitted: int, num_attempts: int, goes_to: str
) -> None:
    used = measured("decode", "d1", free_blocks=30, info={"num_blocks": 100})
    wanted = choice(1000, emitted)  # 62 blocks
    wanted.decode_key, wanted.stream_epoch = used.key, num_attempts
    pools = [measured("decode", "d0"), used], [measured("prefill", num_uncomputed_tokens=9000)]
    for planned in (planned_by_objectives, planned_without):
        assert planned(*pools, wanted).decode.instance_id == goes_to
    assert planned_without(*pools, wanted, mode="never").decode.instance_id == goes_to


def test_a_request_that_keeps_its_place_needs_no_further_slot_there() -> None:
    full = measured("decode", "full", num_running=4)
    decode = [replace(full, info=replace(full.info, max_num_seqs=4)), measured("decode", "free")]
    moving = choice()
    moving.decode_key = full.key
    assert planned_by_objectives(decode, [], moving).decode.instance_id == "free"
    assert planned_by_objectives(decode, [], moving, keeps_place=True).decode.instance_id == "full"
    leaving, busy = replace(measured("decode", "old"), out="draining"), measured("decode", "busy", num_running=9)
    moving.decode_key = leaving.key
    elsewhere = planned_by_objectives([leaving, decode[0], busy], [], moving, keeps_place=True)
    assert elsewhere.decode.instance_id == "busy", "its place is at the instance that it leaves alone"


def test_an_instance_without_room_is_no_candidate() -> None:
    small = measured("prefill")
    small = replace(small, info=replace(small.info, num_blocks=10))
    assert planned_by_objectives([measured("decode", num_running=10)], [small]).decode.instance_id == "decode"
    unknown = replace(small, info=replace(small.info, identity=Identity()))
    assert planned_by_objectives([measured("decode", num_running=10)], [unknown]).decode.instance_id == "prefill"


def test_explain_says_what_is_decided() -> None:
    affinity, settings = Affinity(PickingSettings()), DisaggregationSettings()
    for running in (0, 4, 10, 30):
        pools = [measured("decode", num_running=running)], [measured("prefill", num_running=running // 2)]
        found = planned_by_objectives(*pools)
        shown = explain(*pools, choice().request, affinity, settings, AIMS, random.Random(0))
        assert shown.reason == found.disaggregation.explanation
        picked = {one.instance_id for one in (*shown.decode, *shown.prefill) if one.picked}
        split = [] if found.prefill is None else [found.prefill]
        assert picked == {one.instance_id for one in (found.decode, *split)}
