"""An instance that dies or freezes while KV moves, at each state of the request: the answer continues on another
instance without a wrong token, and what the survivor held for the dead one is free when the lease is over.

Two instances in each pool, so that there is always another one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from typing import Any

import pytest

from kv_transfer.transfer.connector import TransferOptions
from tests.lively import random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.connectors import THOROUGH
from tests.system.deaths import FREED_WITHIN_S, choose, kill_at
from tests.system.stacks import BEAT_TIMEOUT_S, GREEDY, REPETITIVE, SEEDED, SHORT_LEASE_S, STATES, Stack, on, on_stack
from tests.waiting import Stopwatch, wait_until

pytestmark = pytest.mark.timeout(300)
FROZEN_STALL_S = BEAT_TIMEOUT_S + 3.0
BACK_WITHIN_S = 30.0

Case = tuple[str, str]
"""State of the request, and role of the instance that dies."""
QUICK_DEATHS: list[Case] = [("saving", "prefill"), ("loading", "decode")]
MAIN_DEATHS: list[Case] = [*QUICK_DEATHS, ("loading", "prefill"), ("decoding", "decode")]
ONCE_DEATHS: list[Case] = [("prefill step", "prefill"), ("first token", "prefill"), ("decoding", "decode")]
"""On one connector alone: no KV moves at that moment. test_constraints.py kills at "decoding" in each run."""
ALL_DEATHS: list[Case] = [(state, victim) for state in STATES for victim in ("prefill", "decode")]
MAIN_FREEZES: list[Case] = [("loading", "prefill"), ("decoding", "decode")]
ALL_FREEZES: list[Case] = [
    *MAIN_FREEZES,
    ("saving", "prefill"),
    ("first token", "decode"),
    ("reserved", "decode"),
    ("loading", "decode"),
]


def at(cases: list[Case], quick: Collection[Case], *, but: Collection[Case] = ()) -> pytest.MarkDecorator:
    """Runs a test at each of the cases, `but` for those; the ones that are not `quick` are slow tests."""
    params: list[Any] = [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases if case not in but
    ]
    return pytest.mark.parametrize(("state", "victim"), params)


@on("shared_storage", kind="killable")
@at(MAIN_DEATHS, QUICK_DEATHS)
def test_a_killed_instance_costs_a_pause_and_no_token(
    killable: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    kill_at(killable, random_prompt(prompts, 150), state, victim)


@on_stack("killable shared_storage")
@at(ONCE_DEATHS, ())
def test_an_instance_killed_before_or_after_kv_moves_costs_a_pause_and_no_token(
    killable: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    kill_at(killable, random_prompt(prompts, 150), state, victim)


@on(kind="killable", names=THOROUGH)
@at(ALL_DEATHS, (), but=MAIN_DEATHS)
def test_an_instance_killed_at_any_other_state_costs_no_token(
    killable: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    kill_at(killable, random_prompt(prompts, 150), state, victim)


@on("shared_storage", kind="killable")
@at(MAIN_FREEZES, [("decoding", "decode")])
def test_an_instance_frozen_for_longer_than_a_lease_is_replaced_and_comes_back(
    killable: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    freeze_at(killable, random_prompt(prompts, 150), state, victim)


@on(kind="killable", names=THOROUGH)
@at(ALL_FREEZES, (), but=MAIN_FREEZES)
def test_an_instance_frozen_at_any_other_state_is_replaced_and_comes_back(
    killable: Stack, prompts: random.Random, state: str, victim: str
) -> None:
    freeze_at(killable, random_prompt(prompts, 150), state, victim)


def freeze_at(stack: Stack, prompt: list[int], state: str, victim: str) -> None:
    """SIGSTOP to the victim while a request is at `state`, SIGCONT when the lease is over."""
    rig, private = stack.rig, stack.private()
    with stack.stopped_at(state) as stop:
        request = BackgroundRequest(rig.address, prompt, **SEEDED)
        name = choose(stack, stop.wait(), victim)
        with rig.frozen(name):
            frozen_s, watch = time.monotonic(), Stopwatch()
            stop.release()
            completion = request.completion()
            one_read_s = TransferOptions().load_timeout_s if stack.backing.reads_memory else 0.0  # docs/critiques.md
            assert watch.s < FROZEN_STALL_S + one_read_s
            stack.assert_exact(completion, prompt, SEEDED)
            survivors = [instance for instance in rig.stack.instances if instance != name]
            kept = ("quarantined blocks", "held blocks") if stack.backing.reads_memory else ()
            stack.wait_idle(survivors, FREED_WITHIN_S, but=kept)
            # The fault itself: longer than the lease, and long enough for the router to notice.
            wait_until(lambda: time.monotonic() > frozen_s + max(SHORT_LEASE_S, BEAT_TIMEOUT_S) + 1.0)
    wait_until(lambda: rig.is_ready(name), f"{name} is not ready again", BACK_WITHIN_S)
    stack.wait_idle()
    stack.wait_clean(private)
    stack.assert_exact(stack.generate(prompt, GREEDY), prompt, GREEDY)


@on_stack("killable shared_storage")
def test_an_instance_killed_while_it_verifies_drafts_costs_a_pause_and_no_token(
    killable: Stack, prompts: random.Random
) -> None:
    before = killable.settled()
    kill_at(killable, random_prompt(prompts, 150), "decoding", "decode", REPETITIVE)
    for name in killable.rig.stack.instances:
        wait_until(lambda: killable.rig.is_ready(name), f"{name} is not ready again")  # noqa: B023
    for name, load in killable.settled().items():
        if name.startswith("decode") and load.instance_epoch == before[name].instance_epoch:
            num_tokens = load.num_generated_tokens - before[name].num_generated_tokens
            assert num_tokens > load.num_steps - before[name].num_steps, "nothing was drafted"
