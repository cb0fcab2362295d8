"""A request that makes its instances fail, through a router: what it costs, and that no other request is rejected."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from tests.fakes.behaviour import Behaviour
from tests.router.conftest import Run
from tests.router.failing import decodes, prefills, status_of
from tests.router.rig import PROMPT, Rig, request_of
from tests.waiting import until

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
