"""While instances with several weights run, each gets its share of the new requests; what has begun stays."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

import pytest

from engine.sampling.params import SamplingParams
from router.picking.affinity import Affinity, RequestAffinity
from router.picking.picker import WeightsShares
from router.picking.placement import AimSource, Plan
from router.picking.plan import explain, make_plan
from router.picking.settings import DisaggregationSettings, PickingSettings, SloSettings
from router.pools.instance_info import InstanceView, Role
from router.request.choice_state import Choice
from router.request.generation_request import GenerationRequest
from tests.router.picking.test_plan import IDENTITY, view
from tests.router.picking.test_plan_by_step_costs import AIMS, measured

NUM_REQUESTS = 4000
OLD, NEW = "01d0f4e3", "7e57ab1e"
Mode = Literal["always", "auto", "never"]


def of(weights: str, role: Role, name: str, **fields: Any) -> InstanceView:
    return view(role, name, identity=replace(IDENTITY, weights_digest=weights), **fields)


DECODE = [of(OLD, "decode", "old-0"), of(OLD, "decode", "old-1"), of(NEW, "decode", "new-0")]
PREFILL = [of(OLD, "prefill", "old-p"), of(NEW, "prefill", "new-p")]


def asked(name: str, *, session: str = "") -> Choice:
    sampling = SamplingParams(max_tokens=100)
    return Choice(GenerationRequest("mine", name, "model", tuple(range(200)), sampling, session=session), 0)


def weights_of(
    choice: Choice,
    shares: str,
    decode: list[InstanceView] = DECODE,
    prefill: list[InstanceView] = PREFILL,
    *,
    mode: Mode = "always",
    excluded: tuple[str, ...] = (),
) -> str:
    """Where it would run, with both halves of one version."""
    affinity = Affinity(PickingSettings(weights_shares=shares))
    criteria = RequestAffinity(affinity, choice.request).criteria(choice.num_tokens)
    keys = frozenset(one.key for one in (*decode, *prefill) if one.instance_id in excluded)
    made = make_plan(decode, prefill, choice, keys, DisaggregationSettings(mode=mode), random.Random(0), criteria)
    assert isinstance(made, Plan)
    if made.prefill is not None:
        assert made.prefill.info.identity == made.decode.info.identity
    return made.decode.info.identity.weights_digest


@pytest.mark.parametrize(
    ("shares", "of_new"), [(f"{OLD}=0.95", 0.05), ("7e57=0.05", 0.05), (f"{OLD[:4]}=0.2,{NEW}=0.8", 0.8), ("7e57=0", 0)]
)
def test_new_requests_are_divided_by_the_shares_and_the_rest_is_the_others(shares: str, of_new: float) -> None:
    """With 4000 draws the standard deviation is at most 0.8 %."""
    drawn = WeightsShares.parse(shares)
    found = Counter(drawn.filter_for(asked(f"{n}").request)(DECODE[2]) is None for n in range(NUM_REQUESTS))
    assert found[True] / NUM_REQUESTS == pytest.approx(of_new, abs=0.025)


def test_shares_may_sum_to_one_though_their_floats_sum_to_more() -> None:
    assert 0.33 + 0.56 + 0.11 > 1
    assert len(WeightsShares.parse("abcd=0.33,1234=0.56,5678=0.11").shares) == 3


@pytest.mark.parametrize("mode", ["always", "auto", "never"])
def test_a_plan_follows_the_share_and_not_the_number_of_instances(mode: Mode) -> None:
    served = Counter(weights_of(asked(f"{n}"), f"{NEW}=0.1", mode=mode) for n in range(200))
    assert set(served) == {OLD, NEW}
    assert 5 <= served[NEW] <= 40  # a third without shares


def test_a_session_keeps_its_weights_and_a_larger_share_only_adds_sessions() -> None:
    sessions = [f"session-{n}" for n in range(300)]

    def of_new(share: str) -> set[str]:
        return {one for one in sessions if weights_of(asked("first", session=one), f"{NEW}={share}") == NEW}

    few, more = of_new("0.1"), of_new("0.4")
    assert few < more
    assert {one for one in sessions if weights_of(asked("second", session=one), f"{NEW}=0.1") == NEW} == few


def test_all_choices_and_attempts_of_a_request_draw_the_same() -> None:
    first, retried = asked("one"), asked("one")
    retried.index, retried.stream_epoch = 2, 3
    assert len({weights_of(one, f"{NEW}=0.5") for one in (first, retried)}) == 1


def test_a_stream_that_has_begun_stays_with_its_weights() -> None:
    begun = asked("one")
    begun.at(DECODE[2], None)
    begun.token_ids = [5]
    assert weights_of(begun, f"{NEW}=0") == NEW


@pytest.mark.parametrize("out", ["draining", None])
def test_weights_without_an_instance_that_can_take_it_leave_their_share_to_the_others(out: str | None) -> None:
    gone = [*DECODE[:2], replace(DECODE[2], out=out)] if out else DECODE[:2]
    assert weights_of(asked("one"), f"{NEW}=1", gone) == OLD
    assert weights_of(asked("one"), f"{NEW}=1") == NEW
    assert weights_of(asked("one"), f"{NEW}=1", excluded=("new-0",)) == OLD
    assert weights_of(asked("one"), f"{NEW}=1", prefill=PREFILL[:1]) == OLD
    full = replace(DECODE[2], info=replace(DECODE[2].info, max_num_seqs=2))
    assert weights_of(asked("one"), f"{NEW}=1", [*DECODE[:2], replace(full, num_unreported=2)]) == OLD


def test_weights_that_no_instance_has_are_no_obstacle() -> None:
    assert weights_of(asked("one"), "abcd=1") in (OLD, NEW)


def test_by_objectives_the_share_holds_in_both_pools() -> None:
    """An idle prefill instance may serve a request alone."""

    def one(role: Role, name: str, weights: str) -> InstanceView:
        found = measured(role, name)
        return replace(found, info=replace(found.info, identity=replace(IDENTITY, weights_digest=weights)))

    decode, prefill = [one("decode", "d", OLD), one("decode", "e", NEW)], [one("prefill", "p", OLD)]
    for n in range(20):
        choice = asked(f"{n}")
        affinity = Affinity(PickingSettings(weights_shares=f"{NEW}=1"))
        criteria = RequestAffinity(affinity, choice.request).criteria(choice.num_tokens)
        criteria = replace(criteria, aims=AIMS.of(choice.request, is_first=True))
        made = make_plan(decode, prefill, choice, frozenset(), DisaggregationSettings(), random.Random(n), criteria)
        assert isinstance(made, Plan)
        assert made.decode.instance_id == "e"


def test_the_share_is_explained() -> None:
    affinity, settings = Affinity(PickingSettings(weights_shares=f"{OLD}=1")), DisaggregationSettings(mode="always")
    explained = explain(
        DECODE, PREFILL, asked("one").request, affinity, settings, AimSource(SloSettings()), random.Random(0)
    )
    (rejected,) = (one for one in explained.decode if one.rejected)
    assert rejected.instance_id == "new-0"
    assert rejected.rejected == f"this request was drawn for other weights than {NEW} (picking.weights_shares)"
    assert [one.instance_id for one in explained.prefill if one.picked] == ["old-p"]


@pytest.mark.parametrize(
    ("shares", "why"),
    [
        ("0ld=0.5", "'0ld' is no digest of weights: at least 4 hexadecimal digits, as `tandem pools --json` shows"),
        ("abc=0.5", "'abc' is no digest"),
        ("abcd", "'abcd' has no share; write for example abcd=0.05"),
        ("abcd=1.5", "abcd=1.5: a share is a number from 0 to 1"),
        ("abcd=nan", "a share is a number from 0 to 1"),
        ("abcd=0.6,1234=0.5", "the shares sum to 1.1; at most 1 is allowed"),
        ("abcd=0.1,abcdef=0.1", "abcdef continues abcd: one instance would have two shares"),
        ("abcdef=0.1,1234=0.1,abcd=0.1", "abcdef continues abcd"),
    ],
)
def test_a_wrong_share_is_rejected(shares: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        PickingSettings(weights_shares=shares)
