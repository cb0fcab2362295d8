"""An instance that dies or freezes while KV moves, at each state of the request: the answer goes on elsewhere without a
wrong token, and what the survivor held for the dead one is free when the lease is over.

Two instances in each pool, so that there is always an elsewhere.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from tests.conformance.stacks import (
    GREEDY,
    NUM_BLOCKS,
    SEEDED,
    SETTLE_S,
    SHORT_LEASE_S,
    STATES,
    Stack,
    running,
)
from tests.conformance.subjects import THOROUGH, Backing, on
from tests.e2e.asking import Asked
from tests.faults.reference import Reference
from tests.lively import random_prompt
from tests.waiting import wait_until

FREED_WITHIN_S = SHORT_LEASE_S + 1.0 + 2.0
"""The lease and a second, and time for load reports to tell on a machine with more to do."""
BACK_WITHIN_S = 30.0

Case = tuple[str, str]
"""State of the request, and role of the one that dies."""
QUICK_DEATHS: list[Case] = [("saving", "prefill"), ("loading", "prefill"), ("loading", "decode")]
MAIN_DEATHS: list[Case] = [*QUICK_DEATHS, ("decoding", "decode")]
ALL_DEATHS: list[Case] = [(state, victim) for state in STATES for victim in ("prefill", "decode")]
QUICK_FREEZES: list[Case] = [("loading", "prefill")]
MAIN_FREEZES: list[Case] = [*QUICK_FREEZES, ("decoding", "decode")]
ALL_FREEZES: list[Case] = [
    *MAIN_FREEZES,
    ("saving", "prefill"),
    ("first token", "decode"),
    ("reserved", "decode"),
    ("loading", "decode"),
]


def at(cases: list[Case], quick: Collection[Case] = (), *, but: Collection[Case] = ()) -> pytest.MarkDecorator:
    """Runs a test at each of the cases, `but` for those; what is not `quick` is for the full run."""
    return pytest.mark.parametrize(
        ("state", "victim"),
        [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases if case not in but],
    )


@pytest.fixture(scope="module")
def modules_mortal_stack(checkpoint: Path, reference: Reference, subject: Backing) -> Iterator[Stack]:
    with running(checkpoint, reference, subject, size=2, lease_s=SHORT_LEASE_S) as stack:
        yield stack


@pytest.fixture
def mortal_stack(modules_mortal_stack: Stack) -> Iterator[Stack]:
    """All alive and idle before; after it, who was dead lives again, and every block is free or cached."""
    stack = modules_mortal_stack
    members = {name: stack.rig.stack.members[name] for name in stack.rig.stack.instances}
    before = {name: (member.num_starts, stack.num_announced(name)) for name, member in members.items()}
    stack.wait_idle()
    yield stack
    for name, member in members.items():
        if not member.running:
            stack.rig.stack.restart(name)
    for name, (num_starts, num_announced) in before.items():
        if members[name].num_starts > num_starts:
            wait_announced(stack, name, num_announced)
    stack.warm_up()
    for name, load in stack.settled().items():
        assert load.blocks.free + load.blocks.cached == NUM_BLOCKS, f"{name}: {load.blocks}"


def choose(stack: Stack, parked: str, role: str) -> str:
    """The instance of `role` that takes part in the request which stands in `parked`; if none has yet, or none does any
    more, any."""
    if parked.startswith(role):
        return parked
    members = [member for member in stack.rig.stack.instances if member.startswith(role)]
    deadline_s = time.monotonic() + 0.6  # two load reports
    while time.monotonic() < deadline_s:
        for member in members:
            if stack.busy(member):
                return member
    return members[0]


def wait_announced(stack: Stack, member: str, num_before: int) -> None:
    """Returns when the router has counted the instance in once more."""
    problem = f"{member} is not counted in again"
    wait_until(lambda: stack.num_announced(member) > num_before, problem, BACK_WITHIN_S)


@on("shared_storage", "nixl")
@at(MAIN_DEATHS, QUICK_DEATHS)
def test_killed_instance_costs_a_pause_and_no_token(
    mortal_stack: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    kill_and_look(mortal_stack, random_prompt(prompts, 150), state, victim)


@on(names=THOROUGH)
@at(ALL_DEATHS, but=MAIN_DEATHS)
def test_killed_instance_costs_no_token_at_any_other_state(
    mortal_stack: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    kill_and_look(mortal_stack, random_prompt(prompts, 150), state, victim)


@on("nixl")
@at(MAIN_FREEZES, QUICK_FREEZES)
def test_instance_frozen_for_longer_than_a_lease_is_left_behind_and_comes_back(
    mortal_stack: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    freeze_and_look(mortal_stack, random_prompt(prompts, 150), state, victim)


@on(names=THOROUGH)
@at(ALL_FREEZES, but=MAIN_FREEZES)
def test_instance_frozen_at_any_other_state_is_left_behind_and_comes_back(
    mortal_stack: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    freeze_and_look(mortal_stack, random_prompt(prompts, 150), state, victim)


def kill_and_look(stack: Stack, prompt: list[int], state: str, victim: str) -> None:
    """SIGKILL to the victim while a request stands at `state`."""
    rig, private = stack.rig, stack.private()
    with stack.stopped_at(state) as stop:
        asked = Asked(rig.address, prompt, **SEEDED)
        member = choose(stack, stop.wait(), victim)
        rig.kill(member)
    completion = asked.completion()
    stack.assert_exact(completion, prompt, SEEDED)
    rig.stack.restart(member)  # it needs a while, and nobody waits for it here
    survivors = [name for name in rig.stack.instances if name != member]
    stack.wait_idle(survivors, FREED_WITHIN_S)
    if victim == "decode":
        stack.wait_clean(private)
    else:
        sweep(stack, private)


def sweep(stack: Stack, private: set[str]) -> None:
    """Remove the tail that a dead prefill instance left. Age would, too, but other stacks look into the same store."""
    if stack.pages is None:
        return
    wait_until(lambda: len(stack.private() - private) <= 1, "more is left than one tail", SETTLE_S)
    for name in stack.private() - private:
        stack.pages.remove(name)


def freeze_and_look(stack: Stack, prompt: list[int], state: str, victim: str) -> None:
    """SIGSTOP to the victim while a request stands at `state`, SIGCONT when the lease is over."""
    rig, private = stack.rig, stack.private()
    with stack.stopped_at(state) as stop:
        asked = Asked(rig.address, prompt, **SEEDED)
        member = choose(stack, stop.wait(), victim)
        num_before = stack.num_announced(member)
        with rig.frozen(member):
            frozen_s = time.monotonic()
            stop.release()
            completion = asked.completion()
            stack.assert_exact(completion, prompt, SEEDED)
            survivors = [name for name in rig.stack.instances if name != member]
            kept = ("quarantined blocks", "held blocks") if stack.backing.reads_memory else ()
            stack.wait_idle(survivors, FREED_WITHIN_S, but=kept)
            time.sleep(max(0.0, frozen_s + SHORT_LEASE_S + 1.0 - time.monotonic()))  # the fault itself
    wait_announced(stack, member, num_before)
    stack.wait_idle()
    stack.wait_clean(private)
    stack.assert_exact(stack.ask(prompt, GREEDY), prompt, GREEDY)
