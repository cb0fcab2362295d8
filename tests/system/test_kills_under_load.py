"""Instances are killed under load: every answer is the fault-free run's, after a pause at most."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from tests.engine_under_test import BLOCK_SIZE
from tests.system.checker import wait_idle
from tests.system.killable import PATIENT, STEP_S, KillableStack, cut_under_load, killable_stack, percentile
from tests.system.load import Load
from tests.system.questions import Question, make_questions
from tests.system.reference import Reference
from tests.system.stacks import DRAFTS, Stack, on_stack
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(300)
NUM_TOKENS = 70
QUESTIONS = {"bfloat16": "b", "float32": "kills"}
"""By dtype the seed of prompts whose answers vary and end in both ways."""
AFTER_HAND_OVER = ("kv.save", "prefill.first_token")
"""Where a request may be while its first token is out already: then its instance's death costs the router nothing."""
FREED_WITHIN_S = 15.0
"""A lease, on a busy machine."""


@pytest.fixture(scope="module", params=QUESTIONS)
def dtype(request: pytest.FixtureRequest) -> str:
    """Of the weights and the KV; the default of instances is bfloat16."""
    return str(request.param)


@pytest.fixture(scope="module")
def questions(checkpoint: Path, dtype: str) -> list[Question]:
    source = random.Random(QUESTIONS[dtype])
    found = make_questions(Reference(checkpoint, dtype=dtype).llm, 60, source, num_tokens=NUM_TOKENS)
    ends = {output.finish_reason for question in found for output in question.expected}
    assert ends == {"length", "stop"}
    assert all(len(set(output.token_ids)) > 10 for question in found for output in question.expected)
    return found


@pytest.fixture(scope="module")
def modules_stack(checkpoint: Path, dtype: str) -> Iterator[KillableStack]:
    with killable_stack(checkpoint, num_prefill=2, num_decode=3, dtype=dtype, router_args=PATIENT) as stack:
        yield stack


@pytest.fixture
def large_stack(modules_stack: KillableStack) -> Iterator[KillableStack]:
    """Of the slow tests; all instances up before, nothing left behind after."""
    modules_stack.wait_up()
    yield modules_stack
    modules_stack.wait_up()
    wait_idle(modules_stack.rig, FREED_WITHIN_S)


@on_stack("killable shared_storage")
def test_killed_decode_instances_cost_a_pause_and_no_token(killable: Stack, llm: LLM) -> None:
    questions = make_questions(llm, 24, random.Random("two kills"), num_tokens=NUM_TOKENS)
    cut = cut_under_load(KillableStack(killable.rig), questions, num_strikes=1, num_cut=6, num_clients=12)
    assert percentile([outcome.stall_s for outcome in cut], 0.95) < 10.0


@pytest.fixture(scope="module")
def small_stack(checkpoint: Path) -> Iterator[KillableStack]:
    drain = ("--server-drain-accept-s", "0.1", "--server-drain-grace-s", "60", "--server-drain-move-s", "59.8")
    args = ("--max-num-batched-tokens", "64", "--block-size", str(BLOCK_SIZE), "--peers-ping-timeout-ms", "20000")
    settings: dict[str, Any] = {"disaggregation": "always", "instance_args": (*args, *drain, *DRAFTS)}
    with killable_stack(checkpoint, num_prefill=1, num_decode=2, router_args=PATIENT, **settings) as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("strike", [KillableStack.kill, KillableStack.drain], ids=["kill -9", "drain"])
def test_thirty_cut_streams_of_each_kind_of_end_have_no_wrong_token(
    small_stack: KillableStack, llm: LLM, strike: Callable[[KillableStack, str], int], turn: int
) -> None:
    """Every prompt is handed over, and the decode instance that takes the stream over computes or loads its KV. Both
    speculate."""
    small_stack.wait_up()
    questions = make_questions(llm, 24, random.Random("ends"), num_tokens=NUM_TOKENS)
    moments = random.Random(f"moments {turn}")

    def strike_at_any_token(stack: KillableStack, name: str) -> int:
        time.sleep(moments.uniform(0.0, NUM_TOKENS * STEP_S))
        return strike(stack, name)

    cut = cut_under_load(small_stack, questions, num_strikes=2, num_cut=30, num_clients=16, strike=strike_at_any_token)
    indices = sorted({index for outcome in cut for index in outcome.cut_after})
    print(f"cut after {indices} tokens")
    assert len(indices) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", range(3))
def test_hundred_cut_streams_have_no_wrong_token(
    large_stack: KillableStack, questions: list[Question], turn: int
) -> None:
    cut = cut_under_load(large_stack, questions, num_strikes=20, num_cut=100, num_clients=36)
    assert percentile([outcome.stall_s for outcome in cut], 0.95) < 10.0  # 1.7 s beside other work, 2.8 s beside a lot


def kill_prefill_at(stack: KillableStack, questions: list[Question], where: str) -> None:
    """Several requests run, one is stopped at `where` in a prefill instance, and that instance is killed."""
    rig = stack.rig
    with ExitStack() as armed, Load(rig.address, questions, num_clients=6) as load:
        failpoints = [armed.enter_context(rig.armed(name, where)) for name in stack.prefill]
        wait_until(lambda: any(failpoint.reached for failpoint in failpoints), f"no request reached {where}")
        victim = next(failpoint.member for failpoint in failpoints if failpoint.reached)
        stack.kill(victim, hits=where not in AFTER_HAND_OVER)
        for failpoint in failpoints:
            failpoint.release()
        wait_until(lambda: sum(outcome.is_over for outcome in load.outcomes) >= 6, "answers do not end")
        outcomes = load.finish()
    assert len(outcomes) >= 6
    for outcome in outcomes:
        outcome.assert_exact()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["prefill.accepted", "prefill.first_token", "engine.step", "kv.save"])
def test_a_prefill_instance_killed_at_any_phase_costs_a_pause_and_no_token(
    large_stack: KillableStack, questions: list[Question], where: str
) -> None:
    kill_prefill_at(large_stack, questions, where)


@pytest.mark.slow
def test_a_prefill_instance_killed_while_its_kv_goes_over_costs_no_token(
    large_stack: KillableStack, questions: list[Question]
) -> None:
    """The decode instance is stopped before the first page that it reads."""
    stack, rig = large_stack, large_stack.rig
    with ExitStack() as armed, Load(rig.address, questions, num_clients=6) as load:
        failpoints = [armed.enter_context(rig.armed(name, "kv.load")) for name in stack.decode]
        wait_until(lambda: any(failpoint.reached for failpoint in failpoints), "no request reads KV")
        rig.kill(*stack.prefill)
        for failpoint in failpoints:
            failpoint.release()
        for victim in stack.prefill:
            rig.stack.restart(victim)
        wait_until(lambda: sum(outcome.is_over for outcome in load.outcomes) >= 6, "answers do not end")
        outcomes = load.finish()
    for outcome in outcomes:
        outcome.assert_exact()
