"""Scorers are pure functions of request and view; a scoring is what the settings say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from router.picking.scorers import (
    RequestFacts,
    Scoring,
    kv_pressure,
    other_domain,
    prefix,
    queue_now,
    queue_score,
    session,
    waiting_tokens,
)
from router.picking.settings import PickingSettings
from router.pools.instance_info import Identity, InstanceInfo, InstanceKey, InstanceView, LoadReport
from router.settings import RouterSettings
from serving.settings import SettingsError, load

NOTHING = RequestFacts()


def view(name: str = "a", *, num_blocks: int = 100, slots: int = 0, budget: int = 0, **fields: Any) -> InstanceView:
    """`fields` of the view by name, the others of its load report."""
    own = {key: fields.pop(key) for key in list(fields) if key in InstanceView.__dataclass_fields__}
    info = InstanceInfo(
        name, "e", "decode", name, Identity(block_size=16),
        num_blocks=num_blocks, max_num_seqs=slots, max_num_batched_tokens=budget,
    )  # fmt: skip
    return InstanceView(InstanceKey(name, "e"), info, LoadReport("e", **fields), **own)


# The queue


def test_waiting_counts_four_times_running() -> None:
    assert queue_score(view(num_waiting=2, num_running=3)) == 11
    assert queue_score(view(num_running=3, num_loading=2)) == 5


def test_what_was_sent_since_the_report_waits_and_what_ended_does_not_count() -> None:
    assert queue_score(view(num_running=3, num_unreported=2)) == 11
    assert queue_score(view(num_running=3, num_ended=2)) == 1
    assert queue_score(view(num_running=1, num_ended=2)) == 0


def test_what_was_sent_runs_where_there_are_free_places() -> None:
    assert queue_now(view(slots=4, num_running=3, num_unreported=1)) == (0, 4)
    assert queue_now(view(slots=4, num_running=3, num_unreported=3)) == (2, 4)


def test_an_ended_request_lets_the_next_of_the_queue_begin() -> None:
    assert queue_now(view(slots=4, num_waiting=2, num_running=4, num_ended=1)) == (1, 4)
    assert queue_now(view(slots=4, num_waiting=2, num_running=4, num_ended=3)) == (0, 3)


def test_where_others_waited_beside_free_places_there_is_no_more_room_than_was_used() -> None:
    assert queue_now(view(slots=16, num_waiting=1, num_running=2, num_unreported=1)) == (2, 2)


def test_more_tokens_than_a_step_takes_wait_whatever_the_places() -> None:
    assert queue_now(view(slots=16, budget=2048, num_unreported=2, num_unreported_to_prefill=2048)) == (0, 2)
    assert queue_now(view(slots=16, budget=2048, num_unreported=2, num_unreported_to_prefill=2049)) == (2, 0)
    assert queue_now(view(slots=16, num_unreported=2, num_unreported_to_prefill=2049)) == (0, 2), (
        "its steps are unknown"
    )


# The others


def test_waiting_tokens_count_what_was_sent_since() -> None:
    assert waiting_tokens(NOTHING, view(num_waiting_tokens=100, num_unreported_to_prefill=20)) == 120


def test_kv_pressure_is_the_part_in_use_with_this_request_and_cached_blocks_are_free() -> None:
    empty, half = view(free_blocks=60, cached_blocks=40), view(free_blocks=10, cached_blocks=40)
    assert kv_pressure(NOTHING, empty) == 0
    assert kv_pressure(NOTHING, half) == 0.5
    assert kv_pressure(RequestFacts(num_tokens=160), half) == 0.6
    assert kv_pressure(RequestFacts(num_tokens=1600), half) == 1.5
    assert kv_pressure(NOTHING, view(free_blocks=10, cached_blocks=40, num_unreported_tokens=320)) == 0.7
    assert kv_pressure(NOTHING, view(num_blocks=0)) == 0


def test_prefix_is_the_part_that_is_not_cached() -> None:
    facts = RequestFacts(num_tokens=100, num_cached_tokens=lambda view: 80 if view.instance_id == "a" else 0)
    assert prefix(facts, view("a")) == pytest.approx(0.2)
    assert prefix(facts, view("b")) == 1
    assert prefix(NOTHING, view("a")) == 0
    assert prefix(RequestFacts(num_tokens=100, num_cached_tokens=lambda view: 112), view("a")) == 0


def test_session_prefers_where_it_ran_and_no_instance_without_a_session() -> None:
    facts = RequestFacts(session_at=InstanceKey("a", "e"))
    assert (session(facts, view("a")), session(facts, view("b"))) == (0, 1)
    assert session(NOTHING, view("a")) == 0


def test_an_unknown_domain_is_no_other_one() -> None:
    def of(domain: str) -> InstanceView:
        there = view()
        return replace(there, info=replace(there.info, domain=domain))

    assert other_domain(of("a"), of("b")) == 1
    assert [other_domain(of(one), of(other)) for one, other in (("a", "a"), ("a", ""), ("", "a"), ("", ""))] == [0] * 4


# Scorings


def doubled(request: RequestFacts, view: InstanceView) -> float:
    return 2.0 * view.load.num_running


class WithoutItsFile:
    """Cannot be made."""

    def __init__(self) -> None:
        raise OSError("the file with its weights is missing")


class Offset:
    """A scorer may be a class."""

    def __call__(self, request: RequestFacts, view: InstanceView) -> float:
        return 7.0


def refusing(request: RequestFacts, view: InstanceView) -> float:
    raise AssertionError("must not be used")


def test_a_scoring_is_the_sum_of_its_weighted_scorers() -> None:
    scoring = Scoring.parse("queue=2, waiting_tokens=0.01 ,session")
    facts, there = RequestFacts(session_at=InstanceKey("b", "e")), view(num_running=3, num_waiting_tokens=50)
    assert scoring.score(facts, there) == scoring.for_request(facts)(there) == 2 * 3 + 0.5 + 1
    assert [(part.scorer, part.value, part.weight) for part in scoring.parts(facts, there)] == [
        ("queue", 3, 2), ("waiting_tokens", 50, 0.01), ("session", 1, 1),
    ]  # fmt: skip


def test_a_scorer_of_ones_own_is_named_by_its_module() -> None:
    scoring = Scoring.parse(f"{__name__}:doubled=0.5,{__name__}:Offset=1")
    assert scoring.score(NOTHING, view(num_running=3)) == 10


RETURNED: dict[str, object] = {}


def returning(request: RequestFacts, view: InstanceView) -> object:
    return RETURNED["value"]


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "7", [1.0]])
def test_what_is_no_finite_number_is_an_error_that_names_the_scorer(value: object) -> None:
    RETURNED["value"] = value
    scoring = Scoring.parse(f"queue=1,{__name__}:returning=1")
    with pytest.raises(TypeError, match=f"scorer {__name__}:returning returned .*; it must return a finite number"):
        scoring.score(NOTHING, view())


def test_a_number_of_another_kind_is_a_score() -> None:
    RETURNED["value"] = Fraction(2)
    assert Scoring.parse(f"{__name__}:returning=2").score(NOTHING, view()) == 4


def test_prompts_are_not_hashed_for_scorers_that_ignore_prefixes() -> None:
    asked: Callable[[InstanceView], int] = lambda view: pytest.fail("must not be used")  # noqa: E731
    facts = RequestFacts(num_tokens=10, num_cached_tokens=asked)
    assert Scoring.parse("queue=1,kv_pressure=1").score(facts, view(num_running=1)) > 0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("prefx=3", "did you mean prefix?"),
        ("zzz=1", "known: queue, waiting_tokens, kv_pressure, prefix, session, and module:Name"),
        ("queue=fast", "a weight is a number above 0, as in queue=1"),
        ("queue=0", "above 0"),
        ("queue=nan", "above 0"),
        ("queue=-1", "above 0"),
        ("queue=inf", "above 0"),
        ("queue=1,queue=2", "names queue twice"),
        ("", "for example queue=1"),
        ("no_such_module:Name=1", "No module named 'no_such_module'"),
        (f"{__name__}:missing=1", "missing"),
        ("router.picking.scorers:SCORERS=1", "is not a function of"),
        (f"{__name__}:WithoutItsFile=1", "OSError: the file with its weights is missing"),
        ("router.picking.scorers:Term=1", "Term: TypeError: "),
    ],
)
def test_a_wrong_scoring_is_refused_with_what_to_write(text: str, hint: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is looked at below
        Scoring.parse(text)
    assert hint in str(caught.value)


def test_a_wrong_scorer_in_the_settings_is_named_with_its_setting() -> None:
    flags: dict[tuple[str, ...], object] = {("router", "model"): "m", ("picking", "decode_scorers"): "queue=1,prefx=3"}
    with pytest.raises(SettingsError, match=r"picking\.decode_scorers .* did you mean prefix\?"):
        load(RouterSettings, flags=flags)


def test_the_default_is_the_queue_alone() -> None:
    assert PickingSettings().decode_scorers == PickingSettings().prefill_scorers == "queue=1"
