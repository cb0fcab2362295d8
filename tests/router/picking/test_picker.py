"""Filter, score, pick: pure functions over one snapshot."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

from router.picking.picker import (
    NoPick,
    Pick,
    has_partner,
    not_excluded,
    pairs_with,
    pick,
    ready,
    rejection,
    same_identity,
    unsupported_constraint,
)
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport


def view(
    name: str, *, out: str | None = None, num_unreported: int = 0, num_ended: int = 0, **load: Any
) -> InstanceView:
    info = InstanceInfo(name, "e", "decode", name, Identity(fingerprint="f"))
    return InstanceView(InstanceKey(name, "e"), info, LoadReport("e", **load), out, num_unreported, num_ended)


def picked(views: list[InstanceView], **kwargs: Any) -> Pick:
    found = pick(views, [ready], rng=random.Random(0), **kwargs)
    assert isinstance(found, Pick)
    return found


def test_the_lowest_score_wins_and_says_why() -> None:
    found = picked([view("a", num_waiting=1), view("b", num_running=3), view("c", out="draining")])
    assert found.instance.instance_id == "b"
    assert found.why == "score 3, lowest of 2, 1 tied"


def test_ties_are_broken_evenly() -> None:
    rng, views = random.Random(0), [view("a"), view("b"), view("c", num_running=1)]
    wins = Counter(
        found.instance.instance_id for _ in range(400) if isinstance(found := pick(views, [], rng=rng), Pick)
    )
    assert 150 < wins["a"] < 250
    assert wins["a"] + wins["b"] == 400


def test_those_with_equally_much_in_their_caches_win_evenly() -> None:
    rng, views = random.Random(0), [view(name) for name in "abc"]
    views = [replace(one, info=replace(one.info, identity=Identity(fingerprint="f"))) for one in views]
    lacks: dict[str, int] = {"a": 0, "b": 0, "c": 1}
    picks = [pick(views, [], rng=rng, among_tied=lambda one: lacks[one.instance_id]) for _ in range(400)]
    wins = Counter(found.instance.instance_id for found in picks if isinstance(found, Pick))
    assert wins["a"] + wins["b"] == 400
    assert 150 < wins["a"] < 250


def test_a_preferred_instance_wins_while_it_passes_the_filters() -> None:
    views = [view("a"), view("b", num_running=9)]
    assert picked(views, preferred=views[1].key) == (views[1], "score 9, kept for its prefix cache")
    assert picked([views[0], replace(views[1], out="draining")], preferred=views[1].key).instance is views[0]


def test_no_pick_gives_a_reason_for_each_instance() -> None:
    found = pick(
        [view("a", out="silent"), view("b")], [ready, not_excluded({InstanceKey("b", "e")})], rng=random.Random(0)
    )
    assert isinstance(found, NoPick)
    assert found.why == "a: silent, b: has failed or refused this request"
    empty = pick([], [ready], rng=random.Random(0))
    assert isinstance(empty, NoPick)
    assert empty.why == "the pool is empty"


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
    null = [replace(decode.info, address=address, kv_connector="null") for address in ("a:1", "b:2")]
    ours, theirs = (replace(decode, info=info) for info in null)
    assert pairs_with(ours)(theirs) == "kv_connector is null at b:2, not null at a:1", "it would be computed twice"
    assert has_partner([theirs], [ready])(ours) is not None
    assert same_identity(other.identity)(decode) == "dtype is , not bfloat16"


def test_instances_of_different_engines_are_kept_apart_with_both_names() -> None:
    decode = view("d")
    ours = replace(decode, info=replace(decode.info, identity=Identity(fingerprint="f", engine="tandem")))
    theirs = replace(decode, info=replace(decode.info, identity=Identity(fingerprint="g", engine="vllm 0.32.0, CPU")))
    assert pairs_with(ours)(theirs) == "engine is vllm 0.32.0, CPU, not tandem"
    assert same_identity(ours.info.identity)(theirs) == "engine is vllm 0.32.0, CPU, not tandem"


def test_a_decode_instance_without_a_partner_is_left_out_with_the_difference() -> None:
    decode, old = view("d"), view("p")
    new = replace(old, info=replace(old.info, identity=Identity(fingerprint="g")))
    assert has_partner([new, old], [ready])(decode) is None
    assert has_partner([new], [ready])(decode) == "no prefill instance pairs with it (p: fingerprint is g, not f)"
    gone = replace(old, out="draining")
    assert has_partner([gone], [ready])(decode) == "no prefill instance pairs with it (none is available)"


def test_a_constraint_is_unsupported_where_no_instance_supports_it() -> None:
    views = [view("a"), view("b")]
    one = [views[0], replace(views[1], info=replace(views[1].info, constraints=frozenset({"regex"})))]
    assert unsupported_constraint("regex", one) is None
    assert unsupported_constraint("grammar", one) == "grammar"
    assert unsupported_constraint("regex", views) not in (None, "regex"), "it says what is missing for all of them"
    assert unsupported_constraint("regex", []) is None


def test_the_first_filter_that_rejects_an_instance_is_the_reason() -> None:
    filters = [ready, not_excluded({InstanceKey("a", "e")}), same_identity(Identity(fingerprint="g"))]
    views = [view("a"), view("b"), view("c", out="silent")]
    reasons = [rejection(one, filters) for one in views]
    assert reasons == ["has failed or refused this request", "fingerprint is f, not g", "silent"]


def test_a_scorer_decides() -> None:
    views = [view("a", num_running=1), view("b", num_running=9)]
    assert picked(views, scorer=lambda view: -float(view.load.num_running)).instance is views[1]


def test_a_preferred_instance_that_is_not_there_changes_nothing() -> None:
    found = picked([view("a"), view("b", num_running=9)], preferred=InstanceKey("c", "e"))
    assert (found.instance.instance_id, found.why) == ("a", "score 0, lowest of 2, 1 tied")
