"""An instance that dies or freezes while KV moves, at each state of the request: the answer goes on elsewhere without a
wrong token, and what the survivor held for the dead one is free when the lease is over.

Two instances in each pool, so that there is always an elsewhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.stacks import GREEDY, NUM_BLOCKS, SEEDED, SHORT_LEASE_S, STATES, Stack, running, wait_until
from tests.conformance.subjects import Backing, on
from tests.e2e.asking import Asked
from tests.e2e.conftest import random_prompt
from tests.faults.checker import busy
from tests.faults.reference import Reference

FREED_WITHIN_S = SHORT_LEASE_S + 2.0
"""The lease and a second, and load reports that have to tell."""
BACK_WITHIN_S = 30.0
QUICK = {("saving", "prefill"), ("loading", "prefill"), ("loading", "decode")}
"""State and victim's role that are tried in each run on some subjects; the others are for the full one."""


@pytest.fixture(scope="module")
def modules_mortal_stack(checkpoint: Path, reference: Reference, subject: Backing) -> Iterator[Stack]:
    with running(checkpoint, reference, subject, size=2, lease_s=SHORT_LEASE_S) as stack:
        yield stack


@pytest.fixture
def mortal_stack(modules_mortal_stack: Stack) -> Iterator[Stack]:
    """All alive and idle before; after it, who is dead is started again, and every block is free or cached."""
    stack = modules_mortal_stack
    stack.wait_idle()
    yield stack
    for name in stack.rig.stack.instances:
        if not stack.rig.stack.members[name].running:
            stack.rig.restart(name)
    stack.warm_up()
    for name, load in stack.settled().items():
        assert load.blocks.free + load.blocks.cached == NUM_BLOCKS, f"{name}: {load.blocks}"


def cases() -> Iterator[object]:
    """Every state with every victim."""
    for state in STATES:
        for victim in ("prefill", "decode"):
            marks = () if (state, victim) in QUICK else pytest.mark.slow
            yield pytest.param(state, victim, marks=marks, id=f"{victim} at {state}")


def choose(stack: Stack, parked: str, role: str) -> str:
    """The instance of `role` that takes part in the request which stands in `parked`; if none has yet, or none does any
    more, any."""
    if parked.startswith(role):
        return parked
    members = [member for member in stack.rig.stack.instances if member.startswith(role)]
    deadline_s = time.monotonic() + 0.6  # two load reports
    while time.monotonic() < deadline_s:
        for member in members:
            if busy(stack.rig.load(member)):
                return member
    return members[0]


def num_announced(stack: Stack, member: str) -> int:
    """How often the router has counted this instance in."""
    log = stack.rig.stack.members["router"].spec.log_file.read_text()
    return log.count(f"is ready address={stack.rig.stack.instances[member]}")


@on("shared_storage", "nixl")
@pytest.mark.parametrize(("state", "victim"), list(cases()))
def test_killed_instance_costs_a_pause_and_no_token(
    mortal_stack: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    stack, rig = mortal_stack, mortal_stack.rig
    private = stack.private()
    prompt = random_prompt(prompts, 150)
    with stack.stopped_at(state) as stop:
        asked = Asked(rig.address, prompt, **SEEDED)
        member = choose(stack, stop.wait(), victim)
        rig.kill(member)
    completion = asked.completion()
    stack.assert_exact(completion, prompt, SEEDED)
    survivors = [name for name in rig.stack.instances if name != member]
    stack.wait_idle(survivors, FREED_WITHIN_S)
    if victim == "decode":  # a dead prefill instance leaves its tails to the store's sweep, or their time to live
        stack.wait_clean(private)


@on("nixl")
@pytest.mark.parametrize(
    ("state", "victim"),
    [
        pytest.param("saving", "prefill", marks=pytest.mark.slow),
        pytest.param("first token", "decode", marks=pytest.mark.slow),
        pytest.param("reserved", "decode", marks=pytest.mark.slow),
        pytest.param("loading", "prefill"),
        pytest.param("loading", "decode", marks=pytest.mark.slow),
        pytest.param("decoding", "decode", marks=pytest.mark.slow),
    ],
)
def test_instance_that_is_frozen_for_longer_than_a_lease_is_left_behind_and_comes_back(
    mortal_stack: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    stack, rig = mortal_stack, mortal_stack.rig
    private = stack.private()
    prompt = random_prompt(prompts, 150)
    with stack.stopped_at(state) as stop:
        asked = Asked(rig.address, prompt, **SEEDED)
        member = choose(stack, stop.wait(), victim)
        num_before = num_announced(stack, member)
        with rig.frozen(member):
            frozen_s = time.monotonic()
            stop.release()
            completion = asked.completion()
            stack.assert_exact(completion, prompt, SEEDED)
            survivors = [name for name in rig.stack.instances if name != member]
            kept = ("quarantined blocks", "held blocks") if stack.backing.quarantines else ()
            stack.wait_idle(survivors, FREED_WITHIN_S, but=kept)
            time.sleep(max(0.0, frozen_s + SHORT_LEASE_S + 1.0 - time.monotonic()))  # the fault itself
    wait_until(lambda: num_announced(stack, member) > num_before, f"{member} is not counted in again", BACK_WITHIN_S)
    stack.wait_idle()
    stack.wait_clean(private)
    other = random_prompt(prompts, 100)
    stack.assert_exact(stack.ask(other, GREEDY), other, GREEDY)
