"""Filter, score, pick: pure functions over one snapshot."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from router.disaggregation import Decision, decide
from router.inflight import Inflight
from router.instances import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport
from router.picker import NoPick, Pick, not_excluded, pairs_with, pick, queue_score, ready, same_identity


def view(
    name: str, *, out: str | None = None, num_unreported: int = 0, num_ended: int = 0, **load: Any
) -> InstanceView:
    info = InstanceInfo(name, "e", "decode", name, Identity(fingerprint="f"))
    return InstanceView(InstanceKey(name, "e"), info, LoadReport("e", **load), out, num_unreported, num_ended)


def picked(views: list[InstanceView], **kwargs: Any) -> Pick:
    found = pick(views, [ready], rng=random.Random(0), **kwargs)
    assert isinstance(found, Pick)
    return found


def test_waiting_counts_four_times_running() -> None:
    assert queue_score(view("a", num_waiting=2, num_running=3)) == 11
    assert queue_score(view("a", num_running=3, num_loading=2)) == 5


def test_what_was_sent_since_the_report_counts_as_waiting_and_what_ended_does_not_count() -> None:
    assert queue_score(view("a", num_running=3, num_unreported=2)) == 11
    assert queue_score(view("a", num_running=3, num_ended=2)) == 1
    assert queue_score(view("a", num_running=1, num_ended=2)) == 0


def test_the_lowest_score_wins_and_says_why() -> None:
    found = picked([view("a", num_waiting=1), view("b", num_running=3), view("c", out="draining")])
    assert found.instance.instance_id == "b"
    assert (found.score, found.num_candidates) == (3, 2)
    assert [(one.instance_id, one.reason) for one in found.rejected] == [("c", "draining")]
    assert found.why == "score 3, lowest of 2, 1 tied"


def test_ties_are_broken_evenly() -> None:
    rng, views = random.Random(0), [view("a"), view("b"), view("c", num_running=1)]
    wins = Counter(
        found.instance.instance_id for _ in range(400) if isinstance(found := pick(views, [], rng=rng), Pick)
    )
    assert 150 < wins["a"] < 250
    assert wins["a"] + wins["b"] == 400


def test_a_preferred_instance_wins_while_it_passes_the_filters() -> None:
    views = [view("a"), view("b", num_running=9)]
    assert picked(views, preferred=views[1].key).preferred
    assert picked([views[0], replace(views[1], out="draining")], preferred=views[1].key).instance is views[0]


def test_nobody_left_says_why_for_each() -> None:
    found = pick(
        [view("a", out="silent"), view("b")], [ready, not_excluded({InstanceKey("b", "e")})], rng=random.Random(0)
    )
    assert isinstance(found, NoPick)
    assert found.why == "a: silent, b: has failed or refused this request"
    assert NoPick(()).why == "the pool is empty"


def test_a_restarted_instance_is_not_the_one_that_failed() -> None:
    assert not_excluded({InstanceKey("a", "old")})(view("a")) is None


def test_instances_pair_only_when_identity_and_connector_are_equal() -> None:
    decode = view("d")
    other = replace(decode.info, identity=Identity(fingerprint="f", dtype="bfloat16"))
    assert pairs_with(decode)(view("p")) is None
    assert pairs_with(decode)(replace(decode, info=other)) == "dtype is bfloat16, not "
    assert (
        pairs_with(decode)(replace(decode, info=replace(decode.info, kv_connector="nixl")))
        == "kv_connector is nixl, not "
    )
    assert same_identity(None)(decode) is None
    assert same_identity(other.identity)(decode) == "dtype is , not bfloat16"


def test_auto_splits_long_prompts_while_it_can() -> None:
    def auto(num_tokens: int, available: bool = True) -> Decision:
        return decide("auto", num_tokens=num_tokens, prefill_available=available, min_tokens=64).decision

    assert (auto(64), auto(65), auto(1000, available=False)) == (Decision.LOCAL, Decision.DISAGGREGATE, Decision.LOCAL)


def test_always_refuses_and_never_ignores() -> None:
    assert decide("always", num_tokens=1, prefill_available=False, min_tokens=64).decision is Decision.REFUSE
    assert decide("always", num_tokens=1, prefill_available=True, min_tokens=64).decision is Decision.DISAGGREGATE
    assert decide("never", num_tokens=999, prefill_available=True, min_tokens=64).decision is Decision.LOCAL


def test_a_request_is_unreported_until_a_report_follows_its_answer() -> None:
    inflight = Inflight(report_lag_s=0.5)
    inflight.sent(1, 0.0)
    inflight.reported(0.1)  # may have left before the request came
    assert inflight.num_unreported == 1
    inflight.acknowledged(1)
    assert inflight.num_unreported == 1
    inflight.reported(0.2)
    assert inflight.num_unreported == 0


def test_a_request_without_an_answer_is_reported_after_the_lag() -> None:
    inflight = Inflight(report_lag_s=0.5)
    inflight.sent(1, 0.0)
    inflight.reported(0.6)
    assert inflight.num_unreported == 0


def test_an_end_corrects_the_report_that_counted_it_once() -> None:
    inflight = Inflight(report_lag_s=0.5)
    inflight.sent(1, 0.0)
    inflight.ended(1)
    assert (inflight.num_unreported, inflight.num_ended) == (0, 0)  # no report ever counted it
    inflight.sent(2, 0.0)
    inflight.reported(1.0)
    inflight.ended(2)
    inflight.ended(2)
    assert inflight.num_ended == 1
    inflight.reported(1.1)
    assert inflight.num_ended == 0
