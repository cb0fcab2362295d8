"""A request that makes its instances fail costs two of them, and no other request is rejected for it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import grpc
import pytest

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
from tests.fakes.behaviour import Behaviour
from tests.router.conftest import Run
from tests.router.failing import decodes, prefills, status_of
from tests.router.resilience.test_safeguards import Clock
from tests.router.rig import PROMPT, Rig, request_of
from tests.waiting import until

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

    request = GenerationRequest("label", "id", "model", (1, 2, 3), params(seed=1))
    same = replace(request, label="other", request_id="o", params=params(seed=2), session="s")
    assert content_digest(same) == content_digest(request)
    for other in (
        replace(request, prompt_token_ids=(1, 2, 4)),
        replace(request, lora="poet"),
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


# Through a router


POISON = 5
POISONED = [POISON, *PROMPT]
PATIENT = {"beat_timeout_s": 20.0}
"""A death here is a broken connection; silence is what a busy machine makes of the living."""


def num_killed(rig: Rig) -> int:
    return sum(len(fake.recorded("died")) for fake in [*rig.prefill, *rig.decode])


async def assert_poison_costs(rig: Rig, *, num_instances: int = 2, num_others: int = 12, max_tokens: int = 40) -> None:
    """So many instances die, other requests are served whole, and the poison request is rejected, then and after."""
    prompts = [[20 + i, *PROMPT] for i in range(num_others)]
    pending = [asyncio.create_task(rig.generate(request_of(p, max_tokens=max_tokens))) for p in prompts]
    await _until_some_tokens(rig)
    error = await status_of(rig, request=request_of(POISONED, max_tokens=max_tokens, seed=3))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "rejected" in str(error.details())
    for prompt, answer in zip(prompts, await asyncio.gather(*pending), strict=True):
        assert answer.is_exactly(max_tokens, prompt=prompt)
    assert num_killed(rig) == num_instances
    again = await status_of(rig, request=request_of(POISONED, max_tokens=max_tokens, seed=4))
    assert again.code() is grpc.StatusCode.INTERNAL
    assert num_killed(rig) == num_instances


def permit(permits: asyncio.Semaphore, num_tokens: int) -> None:
    for _ in range(num_tokens):
        permits.release()


async def _until_some_tokens(rig: Rig) -> None:
    await until(lambda: sum(len(fake.recorded("token")) for fake in rig.decode) >= 100)


@pytest.mark.parametrize("num_decode", [3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("poison_at", "tells"), [(0, False), (0, True), (1, True), (7, True)])
async def test_a_poison_in_a_crowd_costs_two_decode_instances(
    run: Run, poison_at: int, tells: bool, num_decode: int
) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, poison_at=poison_at, tells=tells) for _ in range(num_decode)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        await assert_poison_costs(rig)


async def test_a_poison_that_acts_late_and_unreported_costs_three(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, poison_at=7) for _ in range(5)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        await assert_poison_costs(rig, num_instances=3)


async def test_an_instance_whose_engine_is_gone_is_no_incident_for_later_requests(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, tells=True) for _ in range(3)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        poisoned = asyncio.create_task(status_of(rig, request=request_of(POISONED)))
        pending = []
        while not poisoned.done():  # some are sent where the engine has just crashed
            pending.append(asyncio.create_task(rig.generate(request_of([20 + len(pending) % 80, *PROMPT]))))
            await asyncio.sleep(0.005)
        assert (await poisoned).code() is grpc.StatusCode.INTERNAL
        for number, answer in enumerate(await asyncio.gather(*pending)):
            assert answer.is_exactly(12, prompt=[20 + number % 80, *PROMPT])
        assert num_killed(rig) == 2


async def test_a_poison_in_a_crowd_costs_two_prefill_instances(run: Run) -> None:
    pool = [Behaviour(prefill_s=0.02, poison=POISON) for _ in range(3)]
    decode = decodes(*[Behaviour(token_s=0.01)] * 2)
    async with run(prefill=prefills(*pool), decode=decode, disaggregation={"mode": "always"}, pools=PATIENT) as rig:
        await assert_poison_costs(rig)


async def test_a_poison_for_decode_instances_alone_costs_two_though_prefill_succeeds(run: Run) -> None:
    decode = decodes(*[Behaviour(token_s=0.01, poison=POISON, poison_at=1) for _ in range(4)])
    async with run(prefill=2, decode=decode, disaggregation={"mode": "always"}, pools=PATIENT) as rig:
        await assert_poison_costs(rig)


async def test_the_same_poison_sent_twice_at_once_costs_two(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, poison_at=3) for _ in range(5)]
    quarantine = {"trial_wait_s": 20.0}
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT, quarantine=quarantine) as rig:
        pending = [status_of(rig, request=request_of(POISONED, seed=seed)) for seed in range(2)]
        # The first two are computed side by side before anything is known of them.
        errors = await asyncio.gather(*pending)
        assert {error.code() for error in errors} == {grpc.StatusCode.INTERNAL}
        assert num_killed(rig) <= 3


async def test_a_poison_of_two_choices_costs_two(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON) for _ in range(4)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        error = await status_of(rig, request=request_of(POISONED, n=2))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert num_killed(rig) == 2


async def test_what_breaks_two_instances_without_killing_them_is_rejected_as_well(run: Run) -> None:
    failing = [Behaviour(fail_at=0) for _ in range(4)]
    async with run(prefill=0, decode=decodes(*failing), quarantine={"ttl_s": 5.0}) as rig:
        assert (await status_of(rig)).code() is grpc.StatusCode.INTERNAL
        assert "rejected" in str((await status_of(rig)).details())
        assert sum(len(fake.recorded("decode")) for fake in rig.decode) == 2
        for fake in rig.decode:
            fake.behaviour.fail_at = None
        await until(lambda: not rig.app.safeguards.poison.num_rejected)
        assert (await rig.generate()).is_exactly(12)


async def test_streams_that_are_cut_again_and_again_are_not_rejected(run: Run) -> None:
    """Every stream is on several instances that an operator kills, some of them twice in short order."""
    permits, num_kills, prompts = asyncio.Semaphore(0), 12, [[20 + i, *PROMPT] for i in range(12)]
    decode = decodes(*[Behaviour(token_s=0.01, permits=permits)] * 4)
    async with run(prefill=1, decode=decode, pools=PATIENT, failover={"max_resumptions": 100}) as rig:
        pending = [asyncio.create_task(rig.generate(request_of(p, max_tokens=150))) for p in prompts]
        for number in range(num_kills):
            in_turn = [decode[(number + i) % 4] for i in range(4)]
            victim = next((fake for fake in in_turn if fake.is_busy), in_turn[0])
            num_before = len(victim.recorded("token"))
            permit(permits, 10 * len(prompts))  # in all fewer than the streams have tokens
            with contextlib.suppress(TimeoutError):  # other instances' streams may take them
                await victim.until("token", num_before + 10, timeout_s=1)
            await victim.kill()
            await asyncio.sleep(0.05)
            await victim.restart()
            await rig.until_ready()
        assert not all(task.done() for task in pending)
        permit(permits, 150 * len(prompts))
        for prompt, answer in zip(prompts, await asyncio.gather(*pending), strict=True):
            assert answer.is_exactly(150, prompt=prompt)
        visited = [fake.recorded("decode") for fake in rig.decode]
        assert sum(map(len, visited)) > len(prompts) + num_kills, "each kill cut streams"
        assert rig.app.safeguards.poison.num_rejected == 0
