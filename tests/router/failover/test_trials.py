"""Suspects are computed one at a time at an instance, and at one instance at a time, but none waits for long."""

from __future__ import annotations

import asyncio

from router.failover.quarantine import Suspect
from router.failover.trials import Trials
from router.pools.instances import InstanceKey

A, B = InstanceKey("a", "e"), InstanceKey("b", "e")
X, Y = Suspect(b"x", 0), Suspect(b"y", 0)


async def has_turn(trials: Trials, suspect: Suspect, key: InstanceKey) -> asyncio.Task[None]:
    task = asyncio.create_task(trials.wait_turn(suspect, key))
    await asyncio.sleep(0.02)
    return task


async def test_another_suspect_waits_for_the_end_of_the_trial() -> None:
    trials = Trials(20.0)
    trial = trials.begin(X, A, is_prime=True)
    waiting = await has_turn(trials, Y, A)
    assert not waiting.done()
    assert (await has_turn(trials, Y, B)).done()
    trial.end()
    await asyncio.wait_for(waiting, 20)
    assert trial.alone
    assert trials.begin(Y, A, is_prime=True).alone


async def test_the_same_suspect_is_tried_at_one_instance_only() -> None:
    trials = Trials(20.0)
    trial = trials.begin(X, A, is_prime=True)
    elsewhere = await has_turn(trials, X, B)
    assert not elsewhere.done()
    assert (await has_turn(trials, X, A)).done()
    assert trials.begin(X, A, is_prime=True).alone
    trial.end()
    trial.end()  # the other one still runs
    await asyncio.sleep(0.02)
    assert not elsewhere.done()
    assert trials.num_running == 1
    elsewhere.cancel()


async def test_who_has_waited_long_enough_is_tried_in_company_and_so_is_the_other() -> None:
    trials = Trials(0.05)
    first = trials.begin(X, A, is_prime=True)
    await asyncio.wait_for(trials.wait_turn(Y, A), 20)
    second = trials.begin(Y, A, is_prime=True)
    assert not first.alone
    assert not second.alone
    first.end()
    second.end()
    assert trials.num_running == 0


async def test_ordinary_suspects_are_nobodys_company_but_each_others() -> None:
    trials = Trials(20.0)
    first = trials.begin(Y, A, is_prime=False)
    assert (await has_turn(trials, X, A)).done()
    prime = trials.begin(X, A, is_prime=True)
    assert prime.alone
    assert not first.alone
    second = trials.begin(Suspect(b"z", 0), A, is_prime=False)
    assert prime.alone
    assert not second.alone
