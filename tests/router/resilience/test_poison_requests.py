"""A request that makes its instances fail costs two of them, and no other request is rejected for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from engine.sampling.params import SamplingParams
from router.pools.instance_info import InstanceKey, Role
from router.request.generation_request import GenerationRequest
from router.resilience.poison_requests import (
    Incident,
    PoisonDetection,
    PoisonRequestRejected,
    Probations,
    QuarantineSettings,
    Suspect,
    content_digest,
)
from tests.router.resilience.test_safeguards import Clock

KNOWN_GONE_AFTER_S = 2.5


class Evidence:
    """A detection and what happens: `died("x", "a")` is instance a's death right under request x."""

    def __init__(self, **settings: Any) -> None:
        self.clock = Clock()
        self.detection = PoisonDetection(QuarantineSettings(**settings), KNOWN_GONE_AFTER_S, self.clock)
        self.alive: set[str] = set()

    def died(self, name: str, where: str, *, role: Role = "decode", began_s: float = 0.0, **facts: Any) -> None:
        self.detection.died(suspect(name), InstanceKey(where, "e"), Incident(role, **facts), began_s)

    def is_rejected_now(self, name: str) -> bool:
        return self.detection.reject_if_proven(suspect(name), lambda key: key.address not in self.alive) is not None

    def is_rejected(self, name: str) -> bool:
        try:
            self.detection.check(suspect(name).digest)
        except PoisonRequestRejected:
            return True
        return False


def suspect(name: str) -> Suspect:
    return Suspect(name.encode(), 0)


def test_after_the_second_death_the_content_is_rejected_for_a_while() -> None:
    evidence = Evidence(ttl_s=100)
    evidence.died("x", "a")
    assert not evidence.is_rejected_now("x")
    evidence.died("x", "b")
    assert evidence.is_rejected_now("x")
    assert evidence.is_rejected("x")
    assert not evidence.is_rejected("y")
    evidence.clock.now_s += 101
    assert not evidence.is_rejected("x")
    assert evidence.detection.is_empty


def test_a_process_that_was_lost_for_a_moment_and_dies_later_has_died_once() -> None:
    """Its token stream broke, or it froze and came back."""
    evidence = Evidence()
    for where in ("a", "b"):
        for cleared in ("y", "z"):
            evidence.died(cleared, where, had_token=True)
        evidence.detection.clear(suspect("y"), "decode")
    evidence.clock.now_s += 10
    for where in ("a", "b"):
        evidence.clock.now_s += 1
        evidence.died("x", where, began_s=evidence.clock.now_s)
    assert evidence.is_rejected_now("x")
    assert not evidence.is_rejected_now("z")
    assert not evidence.detection.is_suspect(suspect("z")), "both of its instances survived it"


def test_an_error_of_an_instance_stays_evidence_when_another_request_ends_it() -> None:
    evidence = Evidence()
    evidence.died("x", "a")
    evidence.detection.failed(suspect("x"), InstanceKey("a", "e"), "decode")
    evidence.clock.now_s += 10
    evidence.died("y", "a", began_s=evidence.clock.now_s)
    assert evidence.detection.num_incidents(suspect("x")) == 1


def test_a_content_that_is_rejected_again_keeps_no_other_one_rejected() -> None:
    evidence = Evidence(ttl_s=100)
    for name in ("x", "y", "x"):
        for where in ("a", "b"):
            evidence.detection.failed(suspect(name), InstanceKey(where, "e"), "decode")
        assert evidence.is_rejected_now(name)
        evidence.clock.now_s += 40
    assert evidence.is_rejected("y")
    evidence.clock.now_s += 30
    assert not evidence.is_rejected("y"), "since 10 s"
    assert evidence.is_rejected("x")
    assert evidence.detection.num_rejected == 1


def test_an_unreported_death_under_a_running_stream_takes_one_more() -> None:
    evidence = Evidence()
    evidence.died("x", "a", had_token=True)
    assert evidence.detection.is_suspect(suspect("x"))
    assert not evidence.detection.is_prime_suspect(suspect("x"))
    evidence.died("x", "b")
    assert evidence.detection.is_prime_suspect(suspect("x"))
    assert not evidence.is_rejected_now("x")
    evidence.died("x", "c")
    assert evidence.is_rejected_now("x")


def test_a_reported_death_is_clear_evidence_after_tokens_and_among_many() -> None:
    evidence = Evidence()
    for name in ("x", "y"):
        evidence.died(name, "a", reported=True, had_token=True)
        assert evidence.detection.is_prime_suspect(suspect(name))
    evidence.died("x", "b", reported=True)
    assert evidence.is_rejected_now("x")
    assert not evidence.is_rejected_now("y")


def test_an_unreported_death_under_several_new_requests_takes_one_more() -> None:
    evidence = Evidence()
    for name in ("x", "y"):
        evidence.died(name, "a")
    evidence.died("x", "b")
    assert not evidence.is_rejected_now("x")
    evidence.died("x", "c")
    assert evidence.is_rejected_now("x")


def test_a_request_that_came_when_the_instance_was_dying_is_no_suspect() -> None:
    evidence = Evidence()
    evidence.died("x", "a")
    evidence.clock.now_s += 0.1
    evidence.died("y", "a", began_s=evidence.clock.now_s)
    assert not evidence.detection.is_suspect(suspect("y"))


def test_one_death_under_several_choices_or_clients_is_one() -> None:
    evidence = Evidence()
    evidence.died("x", "a")
    evidence.died("x", "a")
    assert not evidence.is_rejected_now("x")


def test_a_token_from_another_instance_clears() -> None:
    evidence = Evidence()
    evidence.died("x", "a")
    evidence.detection.clear(suspect("x"), "decode")
    assert not evidence.detection.is_suspect(suspect("x"))
    evidence.died("x", "b")
    assert not evidence.is_rejected_now("x")


def test_a_prefill_instances_token_clears_no_decode_incident() -> None:
    evidence = Evidence()
    evidence.died("x", "a", role="decode")
    evidence.detection.clear(suspect("x"), "prefill")
    evidence.died("x", "b", role="decode")
    assert evidence.is_rejected_now("x")
    evidence.died("y", "p", role="prefill")
    evidence.detection.clear(suspect("y"), "prefill")
    assert not evidence.detection.is_suspect(suspect("y"))


def test_a_second_death_under_several_suspects_rejects_none() -> None:
    evidence = Evidence()
    for name in ("x", "y"):
        evidence.died(name, "a", alone=False)
    for name in ("x", "y"):
        evidence.died(name, "b", alone=False)
        assert not evidence.is_rejected_now(name)
    evidence.died("x", "c", alone=True)
    assert evidence.is_rejected_now("x")
    assert not evidence.is_rejected_now("y")


def test_an_instance_that_is_alive_counts_for_nothing() -> None:
    evidence = Evidence()
    evidence.alive = {"b"}
    evidence.died("x", "a")
    evidence.died("x", "b")
    assert not evidence.is_rejected_now("x")
    evidence.alive = set()
    assert evidence.is_rejected_now("x")


def test_unexplained_deaths_raise_the_threshold() -> None:
    evidence = Evidence(memory_s=60)
    evidence.died("y", "a")
    evidence.detection.clear(suspect("y"), "decode")  # something else has killed a
    evidence.died("x", "b")
    evidence.died("x", "c")
    assert not evidence.is_rejected_now("x")
    evidence.died("x", "d")
    assert evidence.is_rejected_now("x"), "one more than the unexplained"
    evidence.clock.now_s += 61
    evidence.died("z", "e")
    evidence.died("z", "f")
    assert evidence.is_rejected_now("z"), "what was long ago says nothing of now"


def test_two_poison_requests_do_not_hide_each_other() -> None:
    evidence = Evidence()
    for name in ("x", "y"):
        evidence.died(name, f"{name}1")
        evidence.died(name, f"{name}2")
    assert evidence.is_rejected_now("x")
    assert evidence.is_rejected_now("y")


def test_answers_of_internal_count_whatever_else_dies() -> None:
    evidence = Evidence()
    evidence.died("y", "a")
    evidence.detection.clear(suspect("y"), "decode")
    for where in ("b", "c"):
        evidence.detection.failed(suspect("x"), InstanceKey(where, "e"), "decode")
    evidence.alive = {"b", "c"}
    assert evidence.is_rejected_now("x")


def test_old_evidence_and_too_much_of_it_is_forgotten() -> None:
    evidence = Evidence(memory_s=60, max_entries=3)
    evidence.died("x", "a")
    evidence.clock.now_s += 61
    evidence.died("x", "b")
    assert not evidence.is_rejected_now("x")
    for number in range(10):
        evidence.died(f"y{number}", "c")
    assert not evidence.detection.is_suspect(suspect("x"))
    assert sum(evidence.detection.is_suspect(suspect(f"y{number}")) for number in range(10)) == 3


def test_the_digest_is_of_the_content_and_not_of_the_client() -> None:
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


# Probation


A, B = InstanceKey("a", "e"), InstanceKey("b", "e")
X, Y = Suspect(b"x", 0), Suspect(b"y", 0)


async def wait_briefly(probations: Probations, suspect: Suspect, key: InstanceKey) -> asyncio.Task[None]:
    task = asyncio.create_task(probations.wait_free(suspect, key))
    await asyncio.sleep(0.02)
    return task


async def test_another_suspect_waits_for_the_end_of_the_probation() -> None:
    probations = Probations(20.0)
    probation = probations.begin(X, A, is_prime=True)
    waiting = await wait_briefly(probations, Y, A)
    assert not waiting.done()
    assert (await wait_briefly(probations, Y, B)).done()
    probations.end(probation)
    await asyncio.wait_for(waiting, 20)
    assert probation.alone
    assert probations.begin(Y, A, is_prime=True).alone


async def test_the_same_suspect_is_on_probation_at_one_instance_only() -> None:
    probations = Probations(20.0)
    probation = probations.begin(X, A, is_prime=True)
    elsewhere = await wait_briefly(probations, X, B)
    assert not elsewhere.done()
    assert (await wait_briefly(probations, X, A)).done()
    assert probations.begin(X, A, is_prime=True).alone
    probations.end(probation)
    probations.end(probation)  # the other one still runs
    await asyncio.sleep(0.02)
    assert not elsewhere.done()
    assert probations.num_running == 1
    elsewhere.cancel()


async def test_after_a_bounded_wait_two_suspects_are_on_probation_together() -> None:
    probations = Probations(0.05)
    first = probations.begin(X, A, is_prime=True)
    await asyncio.wait_for(probations.wait_free(Y, A), 20)
    second = probations.begin(Y, A, is_prime=True)
    assert not first.alone
    assert not second.alone
    probations.end(first)
    probations.end(second)
    assert probations.num_running == 0


async def test_ordinary_suspects_do_not_count_beside_a_prime_one() -> None:
    probations = Probations(20.0)
    first = probations.begin(Y, A, is_prime=False)
    assert (await wait_briefly(probations, X, A)).done()
    prime = probations.begin(X, A, is_prime=True)
    assert prime.alone
    assert not first.alone
    second = probations.begin(Suspect(b"z", 0), A, is_prime=False)
    assert prime.alone
    assert not second.alone
