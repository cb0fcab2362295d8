"""Where an attempt runs: what a plan takes from the views, and what it leaves to the decision."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest

from engine.sampling.constraints import CONSTRAINTS
from engine.sampling.params import SamplingParams
from protos.tandem.v1 import instance_pb2
from router.picking.affinity import Affinity
from router.picking.disaggregation import Decision, Reason
from router.picking.placement import AimSource, Plan
from router.picking.plan import NoPlan, explain, make_plan, servable
from router.picking.scorers import Criteria
from router.picking.settings import DisaggregationSettings, PickingSettings, SloSettings
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport, Role
from router.pools.throughput import UNMEASURED, ThroughputEstimate, Work
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest

IDENTITY = Identity(fingerprint="f", block_size=16)


def view(role: Role, name: str = "", throughput: ThroughputEstimate = UNMEASURED, **fields: Any) -> InstanceView:
    key = InstanceKey(name or role, f"{name or role}-epoch")
    load = {one: fields.pop(one) for one in list(fields) if one in LoadReport.__dataclass_fields__}
    info = InstanceInfo(
        key.address, key.epoch, role, key.address, fields.pop("identity", IDENTITY), **fields.pop("info", {})
    )
    return InstanceView(key, info, LoadReport(key.epoch, **load), throughput=throughput, **fields)


def choice(num_tokens: int = 1000, emitted: int = 0, **params: Any) -> Choice:
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    request = GenerationRequest("mine", "id", "model", tuple(range(num_tokens)), sampling)
    return Choice(request, 0, token_ids=[5] * emitted)


def plan(
    decode: list[InstanceView],
    prefill: list[InstanceView],
    wanted: Choice | None = None,
    cached: dict[str, int] | None = None,
    *,
    keeps_place: bool = False,
    **settings: Any,
) -> Plan | NoPlan:
    criteria = Criteria(
        num_cached_tokens=lambda instance: (cached or {}).get(instance.key.address, 0), keeps_place=keeps_place
    )
    chosen = wanted or choice()
    return make_plan(
        decode, prefill, chosen, frozenset(), DisaggregationSettings(**settings), random.Random(0), criteria
    )


def planned(*args: Any, **kwargs: Any) -> Plan:
    found = plan(*args, **kwargs)
    assert isinstance(found, Plan)
    return found


QUICK = ThroughputEstimate(prefill_per_s=1000.0, hand_over_per_s=1e5, since_prefill_s=1.0)


def test_a_split_plan_names_both_instances_and_their_work() -> None:
    found = planned([view("decode")], [view("prefill", num_waiting_tokens=70)], cached={"decode": 160, "prefill": 320})
    assert found.prefill is not None
    assert found.prefill.info.role == "prefill"
    assert found.work == Work(num_to_prefill=680, num_ahead=70, num_to_move=840)
    assert found.disaggregation.decision is Decision.DISAGGREGATE


def test_a_local_plan_s_work_is_the_decode_instance_s() -> None:
    found = planned([view("decode", num_waiting_tokens=30)], [], choice(100), cached={"decode": 48})
    assert found.prefill is None
    assert found.work == Work(num_to_prefill=52, num_ahead=30)
    assert found.disaggregation.reason is Reason.NO_PREFILL


def test_what_was_sent_since_the_report_waits_too() -> None:
    found = planned([view("decode")], [view("prefill", num_waiting_tokens=70, num_unreported_to_prefill=500)])
    assert found.work.num_ahead == 570


def test_all_requests_at_the_decode_instance_are_held_up_by_a_prefill_there() -> None:
    decode = view("decode", num_running=3, num_loading=2, num_waiting=4, num_unreported=1, throughput=QUICK)
    found = planned([decode], [view("prefill", throughput=QUICK)])
    assert "10 streams" in found.disaggregation.explanation


@pytest.mark.parametrize("wanted", [choice(max_tokens=1), choice(max_tokens=1, n=2), choice(max_tokens=9, emitted=8)])
@pytest.mark.parametrize("mode", ["always", "auto"])
def test_a_request_with_one_token_left_runs_at_the_prefill_instance_alone(wanted: Choice, mode: str) -> None:
    fast = replace(UNMEASURED, prefill_per_s=1000.0)
    found = planned([view("decode", throughput=fast)], [view("prefill")], wanted, mode=mode, min_tokens=10)
    assert (found.decode.key.address, found.prefill) == ("prefill", None)
    assert (found.disaggregation.decision, found.disaggregation.reason) == (Decision.LOCAL, Reason.LAST_TOKEN)
    wanted = choice(max_tokens=wanted.request.max_tokens + 1, emitted=wanted.num_emitted)
    assert planned([view("decode", throughput=fast)], [view("prefill")], wanted, mode=mode, min_tokens=10).prefill


@pytest.mark.parametrize(
    ("slots", "num_running", "free_blocks", "goes_to"),
    [
        ((2, 2), (1, 1), (99, 99), "kept"),
        ((2, 2), (2, 1), (99, 99), "other"),
        ((1, 2), (1, 1), (99, 99), "other"),
        ((2, 2), (2, 2), (99, 99), "kept"),
        ((2, 16), (2, 9), (99, 99), "other"),
        ((2, 2), (1, 1), (6, 99), "other"),
        ((2, 2), (2, 1), (6, 6), "kept"),
    ],
)
def test_a_stream_goes_on_at_its_instance_unless_another_alone_has_a_place(
    slots: tuple[int, int], num_running: tuple[int, int], free_blocks: tuple[int, int], goes_to: str
) -> None:
    views = [
        view("decode", name, num_running=running, free_blocks=free, info={"max_num_seqs": most, "num_blocks": 99})
        for name, most, running, free in zip(("kept", "other"), slots, num_running, free_blocks, strict=True)
    ]
    paused, sibling = choice(100, emitted=5), choice(100)
    paused.decode_key = sibling.decode_key = views[0].key
    assert planned(views, [], paused).decode.instance_id == goes_to
    assert planned(views, [], paused, keeps_place=True).decode.instance_id == "kept", "its slot is its own"
    leaving = [views[0], replace(views[1], out="draining")]
    assert planned(leaving, [], paused).decode.instance_id == "kept", "the other one takes none"
    has_slot = num_running[0] < slots[0]
    assert planned(views, [], sibling).decode.instance_id == ("kept" if has_slot else goes_to), "it shares its blocks"


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (("d-1", "p-1"), ("d-1", "p-1")),
        (("p-1", None), ("d-0", "p-1")),  # it ran there alone
        (("p-1", "p-2"), ("d-0", "p-1")),
    ],
)
def test_a_further_choice_prefers_the_instances_of_the_first(
    kept: tuple[str, str | None], expected: tuple[str, str]
) -> None:
    decode = [view("decode", f"d-{number}", num_running=number) for number in range(2)]
    prefill = [view("prefill", f"p-{number}", num_running=number) for number in range(3)]
    keys = {one.instance_id: one.key for one in (*decode, *prefill)}
    sibling = choice()
    sibling.decode_key, sibling.prefill_key = keys[kept[0]], keys[kept[1]] if kept[1] else None
    found = planned(decode, prefill, sibling, mode="always")
    assert found.prefill is not None
    assert (found.decode.instance_id, found.prefill.instance_id) == expected


@pytest.mark.parametrize(("num_cached", "is_preferred"), [(0, False), (240, False), (250, True), (999, True)])
def test_between_equal_scores_a_cached_quarter_decides(num_cached: int, is_preferred: bool) -> None:
    names = [f"decode-{number}" for number in range(4)]
    decode = [view("decode", name) for name in names]
    wheres = set()
    for seed in range(40):
        criteria = Criteria(num_cached_tokens=lambda one: num_cached if one.key.address == "decode-2" else 0)
        found = make_plan(
            decode, [], choice(1000), frozenset(), DisaggregationSettings(), random.Random(seed), criteria
        )
        assert isinstance(found, Plan)
        wheres.add(found.decode.key.address)
        assert "lowest of 4, 4 tied" in found.why
        assert ("by what is cached" in found.why) == is_preferred
    assert wheres == ({"decode-2"} if is_preferred else set(names))


def test_a_cache_does_not_keep_requests_from_other_weights() -> None:
    """They are to get their part by load alone, as while a rollout is paused."""
    new = replace(IDENTITY, fingerprint="new")
    decode = [view("decode", "cached"), view("decode", "old"), view("decode", "new", identity=new)]
    criteria = Criteria(num_cached_tokens=lambda one: 999 if one.key.address == "cached" else 0)
    picked = Counter[str]()
    for seed in range(60):
        rng = random.Random(seed)
        found = make_plan(decode, [], choice(1000), frozenset(), DisaggregationSettings(), rng, criteria)
        assert isinstance(found, Plan)
        picked[found.decode.key.address] += 1
    assert picked.keys() == {"cached", "new"}
    assert 10 <= picked["new"] <= 30


def test_a_cache_does_not_outweigh_a_request() -> None:
    decode = [view("decode", "cached", num_running=1), view("decode", "idle")]
    assert planned(decode, [], cached={"cached": 999}).decode.key.address == "idle"


def test_tokens_emitted_before_a_failover_are_prefilled_as_well() -> None:
    found = planned([view("decode")], [view("prefill")], choice(1000, emitted=50))
    assert found.work.num_to_prefill == 1050


def test_the_last_token_is_never_cached() -> None:
    found = planned([view("decode")], [], choice(64), cached={"decode": 64})
    assert found.work.num_to_prefill == 1


def test_prompt_logprobs_take_nothing_from_caches() -> None:
    found = planned([view("decode")], [view("prefill")], choice(1000, prompt_logprobs=0), cached={"decode": 999})
    assert found.work == Work(1000, 0, 1000)


def test_an_instance_that_was_not_measured_is_as_fast_as_the_rest_of_its_pool() -> None:
    # Only the picked ones are unmeasured: the others of their pools are busy, and known.
    others = replace(QUICK, prefill_per_s=500.0)
    decode = [view("decode", "new"), view("decode", "known", num_waiting=9, throughput=QUICK)]
    prefill = [
        view("prefill", "fresh"),
        view("prefill", "one", num_waiting=9, throughput=QUICK),
        view("prefill", "two", num_waiting=9, throughput=others),
    ]
    found = planned(decode, prefill)
    assert found.decode.key.address == "new"
    assert found.disaggregation.reason is Reason.ESTIMATE
    assert "decode: 1000 tokens/s" in found.disaggregation.explanation
    assert "prefill: 750 tokens/s" in found.disaggregation.explanation
    assert "hand-over: 100000 tokens/s" in found.disaggregation.explanation


def test_an_instance_that_was_measured_goes_by_its_own_speeds() -> None:
    own = ThroughputEstimate(prefill_per_s=400.0, hand_over_per_s=2e4, since_prefill_s=1.0)
    decode = [view("decode", "own", own), view("decode", "busy", QUICK, num_waiting=9)]
    prefill = [view("prefill", "own", replace(own, prefill_per_s=800.0)), view("prefill", "busy", QUICK, num_waiting=9)]
    explanation = planned(decode, prefill).disaggregation.explanation
    for speed in ("decode: 400 tokens/s", "prefill: 800 tokens/s", "hand-over: 20000 tokens/s"):
        assert speed in explanation


@pytest.mark.parametrize(("since_prefill_s", "reason"), [(29.0, Reason.ESTIMATE), (31.0, Reason.PROBE)])
def test_speeds_that_speak_against_a_split_are_measured_again(since_prefill_s: float, reason: Reason) -> None:
    slow = replace(QUICK, hand_over_per_s=1.0, since_prefill_s=since_prefill_s)
    found = planned([view("decode", throughput=slow)], [view("prefill", throughput=slow)])
    assert (found.disaggregation.reason, found.prefill is not None) == (reason, reason is Reason.PROBE)


def test_a_queue_at_prefill_keeps_it_local_and_the_settings_weigh() -> None:
    decode, prefill = (
        [view("decode", num_running=1, throughput=QUICK)],
        [view("prefill", num_waiting_tokens=1500, throughput=QUICK)],
    )
    assert planned(decode, prefill).disaggregation[:2] == (Decision.DISAGGREGATE, Reason.ESTIMATE)
    assert planned(decode, prefill, expected_streams=0.0).disaggregation[:2] == (Decision.LOCAL, Reason.QUEUE)
    assert planned(decode, prefill, interruption_weight=0.0).prefill is None
    assert planned(decode, prefill, min_tokens=1000).disaggregation.reason is Reason.SHORT


def test_always_without_a_prefill_instance_is_no_plan_and_says_why() -> None:
    found = plan([view("decode")], [view("prefill", out="draining")], mode="always")
    assert isinstance(found, NoPlan)
    assert "no prefill instance" in found.message
    assert "draining" in found.why
    assert found.disaggregation is not None
    assert found.disaggregation.decision is Decision.REFUSE


ENGINES = {name: replace(IDENTITY, engine=name) for name in ("tandem/1", "tandem/2", "vllm 0.32.0", "vllm 0.33.0")}


@pytest.mark.parametrize(("ours", "theirs"), [*itertools.permutations(ENGINES, 2)])
def test_a_client_is_sent_both_engines_where_they_keep_all_instances_apart(ours: str, theirs: str) -> None:
    mine, other = view("decode", identity=ENGINES[ours]), view("prefill", identity=ENGINES[theirs])
    found = plan([mine], [other], mode="always")
    assert isinstance(found, NoPlan)
    assert found.message == f"no prefill instance is available: engine of prefill is {theirs}, of decode {ours}"
    begun = choice(emitted=3)
    begun.at(view("decode", identity=ENGINES[theirs]), None)
    found = plan([mine], [], begun)
    assert isinstance(found, NoPlan)
    assert found.message == f"no decode instance is available: engine of decode is {ours}, of the stream {theirs}"


def test_engines_are_not_the_reason_where_an_equal_instance_is_unavailable_too() -> None:
    mine, other = view("decode", identity=ENGINES["tandem/1"]), view("prefill", "p", identity=ENGINES["vllm 0.32.0"])
    equal = view("prefill", "equal", identity=ENGINES["tandem/1"])
    for prefill in ([replace(other, out="draining")], [other, equal]):
        excluded = frozenset(one.key for one in prefill)
        found = make_plan([mine], prefill, choice(), excluded, DisaggregationSettings(mode="always"), random.Random(0))
        assert isinstance(found, NoPlan)
        assert found.message == "no prefill instance is available"


def test_incompatible_instances_are_never_paired() -> None:
    odd = view("prefill", identity=replace(IDENTITY, dtype="bfloat16"))
    assert planned([view("decode")], [odd]).prefill is None
    assert isinstance(plan([view("decode")], [odd], mode="always"), NoPlan)


NEW = replace(IDENTITY, weights_digest="new")


def test_always_picks_the_best_decode_instance_that_has_a_partner() -> None:
    decode = [view("decode", "alone", identity=NEW), view("decode", "busy", num_waiting=9), view("decode", "paired")]
    found = planned(decode, [view("prefill", "old")], mode="always")
    assert found.prefill is not None
    assert (found.decode.instance_id, found.prefill.instance_id) == ("paired", "old")
    assert found.why == "decode: score 0, lowest of 2, 1 tied; prefill: score 0, lowest of 1, 1 tied"


def near(role: Role, name: str, domain: str, **fields: Any) -> InstanceView:
    found = view(role, name, QUICK, **fields)
    return replace(found, info=replace(found.info, domain=domain))


@pytest.mark.parametrize(
    ("domain", "queues", "weight", "picked"),
    [
        ("a", (0, 0), 0.5, {"prefill-a"}),
        ("b", (0, 0), 0.5, {"prefill-b"}),
        ("b", (0, 1), 0.5, {"prefill-a"}),  # a shorter queue is worth more
        ("b", (0, 1), 2.0, {"prefill-b"}),
        ("b", (0, 0), 0.0, {"prefill-a", "prefill-b"}),
        ("", (0, 0), 0.5, {"prefill-a", "prefill-b"}),
        ("c", (0, 0), 0.5, {"prefill-a", "prefill-b"}),
    ],
)
def test_a_prefill_instance_of_the_decode_instances_domain_is_preferred(
    domain: str, queues: tuple[int, int], weight: float, picked: set[str]
) -> None:
    prefill = [
        near("prefill", "prefill-a", "a", num_running=queues[0]),
        near("prefill", "prefill-b", "b", num_running=queues[1]),
    ]
    criteria, settings = Criteria(domain_weight=weight), DisaggregationSettings(mode="always")
    found = set()
    for seed in range(20):
        made = make_plan(
            [near("decode", "decode", domain)], prefill, choice(), frozenset(), settings, random.Random(seed), criteria
        )
        assert isinstance(made, Plan)
        assert made.prefill is not None
        found.add(made.prefill.key.address)
    assert found == picked


def test_the_domain_is_explained() -> None:
    decode, near_one, far = near("decode", "decode", "a"), near("prefill", "near", "a"), near("prefill", "far", "b")
    affinity, settings = Affinity(PickingSettings()), DisaggregationSettings(mode="always")
    explained = explain(
        [decode], [far, near_one], choice().request, affinity, settings, AimSource(SloSettings()), random.Random(0)
    )
    assert [(one.instance_id, one.score, one.picked) for one in explained.prefill] == [
        ("near", 0.0, True),
        ("far", 0.5, False),
    ]
    [part] = (one for one in explained.prefill[1].parts if one.scorer == "other_domain")
    assert (part.value, part.weight) == (1.0, 0.5)


def test_of_equal_scores_the_picked_instance_is_shown_first() -> None:
    decode, affinity, shown = [view("decode", f"d{number}") for number in range(3)], Affinity(PickingSettings()), set()
    for seed in range(20):
        rng, aims = random.Random(seed), AimSource(SloSettings())
        explained = explain(decode, [], choice().request, affinity, DisaggregationSettings(), aims, rng)
        assert [one.picked for one in explained.decode] == [True, False, False]
        shown.add(explained.decode[0].instance_id)
    assert len(shown) == 3


def test_a_partner_that_may_not_be_picked_is_none() -> None:
    decode = [view("decode", "old"), view("decode", "new", identity=NEW, num_waiting=9)]
    prefill = [view("prefill", "gone", out="draining"), view("prefill", "stays", identity=NEW)]
    assert planned(decode, prefill, mode="always").decode.instance_id == "new"


def test_where_decode_instances_prefill_too_the_best_one_needs_no_partner() -> None:
    decode = [view("decode", "alone", identity=NEW), view("decode", "paired", num_waiting=1)]
    for mode in ("auto", "never"):
        found = planned(decode, [view("prefill")], mode=mode)
        assert (found.decode.instance_id, found.prefill) == ("alone", None)


def test_a_stream_that_has_begun_goes_on_with_a_partner_of_its_version_or_else_alone() -> None:
    begun = choice(1000, emitted=3)
    begun.at(view("decode", "gone"), None)
    decode = [view("decode", "new", identity=NEW), view("decode", "old", num_waiting=9)]
    prefill = [view("prefill", "p-new", identity=NEW)]
    alone = planned(decode, prefill, begun, mode="always")
    assert (alone.decode.instance_id, alone.disaggregation.reason) == ("old", Reason.ALONE)
    paired = planned(decode, [*prefill, view("prefill", "p-old")], begun, mode="always")
    assert paired.prefill is not None
    assert (paired.decode.instance_id, paired.prefill.instance_id) == ("old", "p-old")


def test_only_what_has_a_partner_is_servable_where_every_request_is_split() -> None:
    decode = [view("decode", "a"), view("decode", "b", identity=NEW), view("decode", "c", out="draining")]

    def names(mode: Literal["always", "auto"]) -> list[str]:
        settings = DisaggregationSettings(mode=mode)
        return [one.instance_id for one in servable(decode, [view("prefill")], settings)]

    assert names("always") == ["a"]
    assert names("auto") == ["a", "b"]


def test_without_a_decode_instance_nothing_is_decided() -> None:
    found = plan([view("decode", out="silent")], [view("prefill")])
    assert isinstance(found, NoPlan)
    assert found.disaggregation is None


def test_a_constrained_request_goes_only_to_instances_that_support_it() -> None:
    decode, wanted = [view("decode", "old"), able("decode", "new")], choice(regex="a")
    found = planned(decode, [view("prefill", "old"), able("prefill", "new")], wanted, mode="always")
    assert found.prefill is not None
    assert (found.decode.key.address, found.prefill.key.address) == ("new", "new")
    none = plan(decode[:1], [able("prefill")], wanted)
    assert isinstance(none, NoPlan)
    assert "does not support constraints" in none.why
    assert "structured-output" in none.message
    assert planned(decode[:1], [], choice()).decode.key.address == "old"


def with_adapters(*names: str) -> Any:
    return {"lora_adapters": frozenset(names)}


def test_a_request_for_an_adapter_goes_only_to_instances_that_have_it() -> None:
    idle = [view(role, "idle", info=with_adapters("clerk")) for role in ("decode", "prefill")]
    able = [view(role, "able", num_waiting=9, info=with_adapters("clerk", "poet")) for role in ("decode", "prefill")]
    wanted = choice()
    wanted.request = replace(wanted.request, lora="poet")
    found = planned([idle[0], able[0]], [idle[1], able[1]], wanted, mode="always")
    assert found.prefill is not None
    assert (found.decode.instance_id, found.prefill.instance_id) == ("able", "able")
    assert planned([idle[0], able[0]], [idle[1]], wanted).prefill is None
    none = plan(idle[:1], able[1:], wanted)
    assert isinstance(none, NoPlan)
    assert (none.why, none.message) == (
        "idle: does not have the adapter poet",
        "no decode instance has the adapter poet",
    )
    lost = plan([idle[0], replace(able[0], out="silent")], [], wanted)
    assert isinstance(lost, NoPlan)
    assert lost.message == "no decode instance is available"
    assert planned([idle[0], able[0]], [], choice()).decode.instance_id == "idle"


def of_length(max_model_len: int, one: InstanceView) -> InstanceView:
    return replace(one, info=replace(one.info, max_model_len=max_model_len))


@pytest.mark.parametrize("emitted", [0, 3])
def test_a_request_goes_only_to_instances_whose_context_holds_its_prompt_and_all_its_output(emitted: int) -> None:
    short, long = of_length(1099, view("decode", "short")), of_length(1100, view("decode", "long", num_waiting=9))
    wanted = choice(1000, emitted)  # and at most 100 tokens
    wanted.at(long, None)
    few, many = of_length(1099, view("prefill", "short")), of_length(1100, view("prefill", "long", num_waiting=9))
    found = planned([short, long], [few, many], wanted)
    assert found.prefill is not None
    assert (found.decode.instance_id, found.prefill.instance_id) == ("long", "long")
    assert planned([short, long], [few], wanted).prefill is None
    none = plan([short], [], wanted)
    assert isinstance(none, NoPlan)
    assert none.why == "short: its context of 1099 tokens is too short"
    assert planned([view("decode", "unknown")], [], wanted).decode.instance_id == "unknown"


def test_a_context_that_is_too_short_is_explained() -> None:
    decode = [of_length(1000, view("decode", "short")), of_length(1100, view("decode", "long"))]
    affinity, settings = Affinity(PickingSettings()), DisaggregationSettings()
    explained = explain(decode, [], choice().request, affinity, settings, AimSource(SloSettings()), random.Random(0))
    assert [(one.instance_id, one.rejected) for one in explained.decode] == [
        ("long", ""),
        ("short", "its context of 1000 tokens is too short"),
    ]


def able(role: Role, name: str = "", constraints: Sequence[str] = CONSTRAINTS) -> InstanceView:
    one = view(role, name)
    message = instance_pb2.GetInstanceInfoResponse(supports_constraints=True, constraints=constraints)
    return replace(one, info=replace(one.info, constraints=InstanceInfo.from_wire(message).constraints))


@pytest.mark.parametrize("constraints", [[], ["regex", "grammar"]], ids=["an older version", "a list"])
def test_a_constraint_goes_only_to_instances_that_name_it(constraints: list[str]) -> None:
    """An instance that does not know a field of the request ignores it in silence."""
    old, wanted = able("decode", "old", constraints), choice(structural_tag="{}")
    found = planned([old, able("decode", "new")], [able("prefill", "old", constraints)], wanted)
    assert (found.decode.key.address, found.prefill) == ("new", None)
    assert planned([old], [], choice(regex="a")).decode.key.address == "old"
    none = plan([old], [able("prefill")], wanted)
    assert isinstance(none, NoPlan)
    assert none.why == "old: does not support structural_tag"
    assert none.message == "no decode instance supports structural_tag"
