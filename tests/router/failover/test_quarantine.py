"""A request that breaks whoever computes it costs two instances, and none that was merely there is taken for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.sampling_params import SamplingParams
from router.config import QuarantineSettings
from router.failover.quarantine import Quarantine, Quarantined, Suspect, content_digest
from router.pools.instances import InstanceKey, Role
from router.request import GenerationRequest
from tests.router.failover.test_ejection import Clock


class Evidence:
    """A quarantine and what happens: `died("x", "a")` is instance a's death right under request x."""

    def __init__(self, **settings: float) -> None:
        self.clock = Clock()
        self.quarantine = Quarantine(QuarantineSettings(**settings), self.clock)
        self.alive: set[str] = set()

    def died(
        self,
        who: str,
        where: str,
        *,
        role: Role = "decode",
        **facts: Any,
    ) -> None:
        key = InstanceKey(where, "e")
        self.quarantine.died(suspect(who), key, role, **{"began_s": 0.0, **facts})

    def is_guilty(self, who: str) -> bool:
        return self.quarantine.convict(suspect(who), lambda key: key.address not in self.alive) is not None

    def is_refused(self, who: str) -> bool:
        try:
            self.quarantine.check(suspect(who).digest)
        except Quarantined:
            return True
        return False


def suspect(who: str) -> Suspect:
    return Suspect(who.encode(), 0)


def test_the_second_death_convicts_and_the_content_is_refused_for_a_while() -> None:
    evidence = Evidence(ttl_s=100)
    evidence.died("x", "a")
    assert not evidence.is_guilty("x")
    evidence.died("x", "b")
    assert evidence.is_guilty("x")
    assert evidence.is_refused("x")
    assert not evidence.is_refused("y")
    evidence.clock.now_s += 101
    assert not evidence.is_refused("x")
    assert evidence.quarantine.is_empty


def test_a_death_without_a_word_under_a_stream_that_ran_takes_one_more() -> None:
    evidence = Evidence()
    evidence.died("x", "a", had_begun=True)
    assert evidence.quarantine.is_suspect(suspect("x"))
    assert not evidence.quarantine.is_prime(suspect("x"))
    evidence.died("x", "b")
    assert evidence.quarantine.is_prime(suspect("x"))
    assert not evidence.is_guilty("x")
    evidence.died("x", "c")
    assert evidence.is_guilty("x")


def test_a_death_that_is_told_is_clear_in_the_middle_and_among_many() -> None:
    evidence = Evidence()
    for who in ("x", "y"):
        evidence.died(who, "a", told=True, had_begun=True)
        assert evidence.quarantine.is_prime(suspect(who))
    evidence.died("x", "b", told=True)
    assert evidence.is_guilty("x")
    assert not evidence.is_guilty("y")


def test_a_death_without_a_word_when_several_had_just_begun_takes_one_more() -> None:
    evidence = Evidence()
    for who in ("x", "y"):
        evidence.died(who, "a")
    evidence.died("x", "b")
    assert not evidence.is_guilty("x")
    evidence.died("x", "c")
    assert evidence.is_guilty("x")


def test_who_came_when_the_instance_was_dying_already_is_not_struck() -> None:
    evidence = Evidence()
    evidence.died("x", "a")
    evidence.clock.now_s += 0.1
    evidence.died("y", "a", began_s=evidence.clock.now_s)
    assert not evidence.quarantine.is_suspect(suspect("y"))


def test_one_death_told_by_several_choices_or_clients_is_one() -> None:
    evidence = Evidence()
    evidence.died("x", "a")
    evidence.died("x", "a")
    assert not evidence.is_guilty("x")


def test_a_token_from_another_instance_acquits() -> None:
    evidence = Evidence()
    evidence.died("x", "a")
    evidence.quarantine.acquit(suspect("x"), "decode")
    assert not evidence.quarantine.is_suspect(suspect("x"))
    evidence.died("x", "b")
    assert not evidence.is_guilty("x")


def test_a_prefill_instances_token_says_nothing_of_decode_instances() -> None:
    evidence = Evidence()
    evidence.died("x", "a", role="decode")
    evidence.quarantine.acquit(suspect("x"), "prefill")
    evidence.died("x", "b", role="decode")
    assert evidence.is_guilty("x")
    evidence.died("y", "p", role="prefill")
    evidence.quarantine.acquit(suspect("y"), "prefill")
    assert not evidence.quarantine.is_suspect(suspect("y"))


def test_a_second_death_in_company_blames_nobody() -> None:
    evidence = Evidence()
    for who in ("x", "y"):
        evidence.died(who, "a", alone=False)
    for who in ("x", "y"):
        evidence.died(who, "b", alone=False)
        assert not evidence.is_guilty(who)
    evidence.died("x", "c", alone=True)
    assert evidence.is_guilty("x")
    assert not evidence.is_guilty("y")


def test_an_instance_that_lives_has_not_been_killed() -> None:
    evidence = Evidence()
    evidence.alive = {"b"}
    evidence.died("x", "a")
    evidence.died("x", "b")
    assert not evidence.is_guilty("x")
    evidence.alive = set()
    assert evidence.is_guilty("x")


def test_deaths_that_nobody_explains_raise_the_bar() -> None:
    evidence = Evidence(memory_s=60)
    evidence.died("y", "a")
    evidence.quarantine.acquit(suspect("y"), "decode")  # something else has killed a
    evidence.died("x", "b")
    evidence.died("x", "c")
    assert not evidence.is_guilty("x")
    evidence.died("x", "d")
    assert evidence.is_guilty("x"), "one more than the unexplained"
    evidence.clock.now_s += 61
    evidence.died("z", "e")
    evidence.died("z", "f")
    assert evidence.is_guilty("z"), "what was long ago says nothing of now"


def test_a_poison_does_not_excuse_itself_nor_another() -> None:
    evidence = Evidence()
    for who in ("x", "y"):
        evidence.died(who, f"{who}1")
        evidence.died(who, f"{who}2")
    assert evidence.is_guilty("x")
    assert evidence.is_guilty("y")


def test_answers_of_internal_name_the_request_whatever_else_dies() -> None:
    evidence = Evidence()
    evidence.died("y", "a")
    evidence.quarantine.acquit(suspect("y"), "decode")
    for where in ("b", "c"):
        evidence.quarantine.failed(suspect("x"), InstanceKey(where, "e"), "decode")
    evidence.alive = {"b", "c"}
    assert evidence.is_guilty("x")


def test_old_evidence_and_too_much_of_it_is_forgotten() -> None:
    evidence = Evidence(memory_s=60, max_entries=3)
    evidence.died("x", "a")
    evidence.clock.now_s += 61
    evidence.died("x", "b")
    assert not evidence.is_guilty("x")
    for number in range(10):
        evidence.died(f"y{number}", "c")
    assert not evidence.quarantine.is_suspect(suspect("x"))
    assert sum(evidence.quarantine.is_suspect(suspect(f"y{number}")) for number in range(10)) == 3


def test_the_digest_is_of_the_content_and_not_of_who_asks() -> None:
    def params(**fields: Any) -> SamplingParams:
        return SamplingParams(**{"max_tokens": 5, "temperature": 0.5, "logit_bias": {3: 1.0, 4: 2.0}, **fields})

    request = GenerationRequest("label", "id", "model", (1, 2, 3), params(seed=1), seed=1)
    same = replace(request, label="other", request_id="o", params=params(seed=2), seed=2, session="s")
    assert content_digest(same) == content_digest(request)
    for other in (
        replace(request, prompt_token_ids=(1, 2, 4)),
        replace(request, params=params(temperature=0.6)),
        replace(request, params=params(logit_bias={3: 1.0, 4: 2.5})),
    ):
        assert content_digest(other) != content_digest(request)
