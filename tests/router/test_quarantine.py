"""A request that breaks whoever computes it costs two instances, and none that was merely there is taken for one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from engine.sampling_params import SamplingParams
from router.config import QuarantineSettings
from router.instances import InstanceKey, Role
from router.quarantine import Quarantine, Quarantined, Suspect, content_digest
from router.request import GenerationRequest
from tests.fakes.behaviour import Behaviour
from tests.router.conftest import Run
from tests.router.failing import decodes, prefills, status_of
from tests.router.rig import PROMPT, Rig, request_of
from tests.router.test_ejection import Clock

POISON = 5
POISONED = [POISON, *PROMPT]
PATIENT = {"beat_timeout_s": 20.0}
"""A death here is a broken connection; silence is what a busy machine makes of the living."""


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


# Through a router


def num_killed(rig: Rig) -> int:
    return sum(len(fake.recorded("died")) for fake in [*rig.prefill, *rig.decode])


async def assert_poison_costs(rig: Rig, *, num_instances: int = 2, num_others: int = 12, max_tokens: int = 40) -> None:
    """A poison in a crowd: so many die, the crowd is served whole, and the poison is refused, then and after."""
    prompts = [[20 + i, *PROMPT] for i in range(num_others)]
    asking = [asyncio.create_task(rig.generate(request_of(p, max_tokens=max_tokens))) for p in prompts]
    await _until_some_tokens(rig)
    error = await status_of(rig, request=request_of(POISONED, max_tokens=max_tokens, seed=3))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "refused" in str(error.details())
    for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
        assert answer.is_exactly(max_tokens, prompt=prompt)
    assert num_killed(rig) == num_instances
    again = await status_of(rig, request=request_of(POISONED, max_tokens=max_tokens, seed=4))
    assert again.code() is grpc.StatusCode.INTERNAL
    assert num_killed(rig) == num_instances


async def _until_some_tokens(rig: Rig) -> None:
    async with asyncio.timeout(20):
        while sum(len(fake.recorded("token")) for fake in rig.decode) < 100:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("num_decode", [3, 5])
@pytest.mark.parametrize(("poison_at", "tells"), [(0, False), (0, True), (1, True), (7, True)])
async def test_a_poison_in_a_crowd_costs_two_decode_instances(
    run: Run, poison_at: int, tells: bool, num_decode: int
) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, poison_at=poison_at, tells=tells) for _ in range(num_decode)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        await assert_poison_costs(rig)


async def test_a_poison_that_strikes_late_and_leaves_no_word_costs_three(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, poison_at=7) for _ in range(5)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        await assert_poison_costs(rig, num_instances=3)


async def test_an_instance_whose_engine_is_gone_leaves_no_strike_on_who_comes_later(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, tells=True) for _ in range(3)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        poisoned = asyncio.create_task(status_of(rig, request=request_of(POISONED)))
        asking = []
        while not poisoned.done():  # some are sent where the engine has just crashed
            asking.append(asyncio.create_task(rig.generate(request_of([20 + len(asking) % 80, *PROMPT]))))
            await asyncio.sleep(0.005)
        assert (await poisoned).code() is grpc.StatusCode.INTERNAL
        for number, answer in enumerate(await asyncio.gather(*asking)):
            assert answer.is_exactly(12, prompt=[20 + number % 80, *PROMPT])
        assert num_killed(rig) == 2


async def test_a_poison_in_a_crowd_costs_two_prefill_instances(run: Run) -> None:
    pool = [Behaviour(prefill_s=0.02, poison=POISON) for _ in range(3)]
    decode = decodes(*[Behaviour(token_s=0.01)] * 2)
    async with run(prefill=prefills(*pool), decode=decode, disaggregation={"mode": "always"}, pools=PATIENT) as rig:
        await assert_poison_costs(rig)


async def test_a_poison_for_decode_instances_alone_costs_two_though_prefill_gets_on_with_it(run: Run) -> None:
    decode = decodes(*[Behaviour(token_s=0.01, poison=POISON, poison_at=1) for _ in range(4)])
    async with run(prefill=2, decode=decode, disaggregation={"mode": "always"}, pools=PATIENT) as rig:
        await assert_poison_costs(rig)


async def test_the_same_poison_asked_for_at_once_costs_two(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON, poison_at=3) for _ in range(5)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        asking = [status_of(rig, request=request_of(POISONED, seed=seed)) for seed in range(2)]
        # The first two are computed side by side before anything is known of them.
        errors = await asyncio.gather(*asking)
        assert {error.code() for error in errors} == {grpc.StatusCode.INTERNAL}
        assert num_killed(rig) <= 3


async def test_a_poison_of_two_choices_costs_two(run: Run) -> None:
    pool = [Behaviour(token_s=0.01, poison=POISON) for _ in range(4)]
    async with run(prefill=0, decode=decodes(*pool), pools=PATIENT) as rig:
        error = await status_of(rig, request=request_of(POISONED, n=2))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert num_killed(rig) == 2


async def test_what_breaks_two_instances_without_killing_them_is_refused_as_well(run: Run) -> None:
    failing = [Behaviour(fail_at=0) for _ in range(4)]
    async with run(prefill=0, decode=decodes(*failing), quarantine={"ttl_s": 1.0}) as rig:
        assert (await status_of(rig)).code() is grpc.StatusCode.INTERNAL
        assert "refused" in str((await status_of(rig)).details())
        assert sum(len(fake.recorded("decode")) for fake in rig.decode) == 2
        for fake in rig.decode:
            fake.behaviour.fail_at = None
        await asyncio.sleep(1.1)
        assert (await rig.generate()).is_exactly(12)


async def test_streams_that_are_cut_again_and_again_are_not_called_poison(run: Run) -> None:
    """Every stream is on several instances that an operator kills, some of them twice in short order."""
    async with run(prefill=1, decode=4, pools=PATIENT, failover={"max_resumptions": 100}) as rig:
        for fake in rig.decode:
            fake.behaviour = Behaviour(token_s=0.01)
        prompts = [[20 + i, *PROMPT] for i in range(12)]
        asking = [asyncio.create_task(rig.generate(request_of(p, max_tokens=150))) for p in prompts]
        num_kills = 0
        while not all(task.done() for task in asking) and num_kills < 12:
            victim = rig.decode[num_kills % 4]
            await victim.until("token", len(victim.recorded("token")) + 10, timeout_s=20)
            await victim.kill()
            num_kills += 1
            await asyncio.sleep(0.05)
            await victim.restart()
            await rig.until_ready()
        for prompt, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
            assert answer.is_exactly(150, prompt=prompt)
        assert num_kills >= 8
        visited = [fake.recorded("decode") for fake in rig.decode]
        assert sum(map(len, visited)) > len(prompts) + num_kills, "each kill cut streams"
        assert rig.app.safeguards.quarantine.num_refused == 0
