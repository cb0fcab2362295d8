"""Instances are killed under load, again and again: every answer is the fault-free run's, after a pause at the most."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine import LLM
from tests.faults.checker import wait_idle
from tests.faults.load import Load, Outcome
from tests.faults.mortal import PATIENT, MortalStack, mortal_stack
from tests.faults.questions import Question, make_questions
from tests.waiting import wait_until

NUM_TOKENS = 70
GAP_S = 1.0
"""Between two kills, at the least."""
AFTER_HAND_OVER = ("kv.save", "prefill.first_token")
"""Where a request may stand while its first token is out already: then its death costs the router nothing."""
FREED_WITHIN_S = 15.0
"""A lease, and a machine with more to do."""


@pytest.fixture(scope="module")
def questions(llm: LLM) -> list[Question]:
    found = make_questions(llm, 60, random.Random("kills"), num_tokens=NUM_TOKENS)
    ends = {output.finish_reason for question in found for output in question.expected}
    assert ends == {"length", "stop"}
    assert all(len(set(output.token_ids)) > 10 for question in found for output in question.expected)
    return found


@pytest.fixture(scope="module")
def modules_stack(checkpoint: Path) -> Iterator[MortalStack]:
    with mortal_stack(checkpoint, num_prefill=2, num_decode=3, router_args=PATIENT) as stack:
        yield stack


@pytest.fixture
def stack(modules_stack: MortalStack) -> Iterator[MortalStack]:
    """Everybody up before, nothing left behind after."""
    modules_stack.wait_up()
    yield modules_stack
    modules_stack.wait_up()
    wait_idle(modules_stack.rig, FREED_WITHIN_S)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def kill_under_load(
    stack: MortalStack, questions: list[Question], *, num_kills: int, num_cut: int, num_clients: int
) -> list[Outcome]:
    """Kills decode instances in turn until that many kills and cut streams are reached; returns the cut ones."""
    with Load(stack.rig.address, questions, num_clients) as load:
        victims = itertools.cycle(stack.decode)
        kills_s: list[float] = []
        while len(kills_s) < num_kills or load.num_cut < num_cut:
            victim = next(victims)
            others = [name for name in stack.decode if name != victim]
            wait_until(lambda victim=victim: stack.is_up(victim), f"{victim} is not back")  # type: ignore[misc]
            wait_until(lambda others=others: any(map(stack.is_up, others)), "nobody else is up")  # type: ignore[misc]
            wait_until(lambda: load.bears_another_kill(kills_s), "answers do not end")
            wait_until(lambda victim=victim: stack.num_running(victim) > 0, f"nothing runs at {victim}")  # type: ignore[misc]
            kills_s.append(time.monotonic())
            assert stack.kill(victim) > 0
            time.sleep(GAP_S)
        outcomes = load.finish()
    for outcome in outcomes:
        outcome.assert_exact()
    cut = [outcome for outcome in outcomes if outcome.was_cut]
    stalls = [outcome.stall_s for outcome in cut]
    kinds = {outcome.question.kind for outcome in cut}
    print(
        f"\n{len(kills_s)} kills under {num_clients} clients: "
        f"{len(outcomes)} streams, {len(cut)} cut of {len(kinds)} kinds; "
        f"stall p50 {percentile(stalls, 0.5):.2f} s, p95 {percentile(stalls, 0.95):.2f} s, max {max(stalls):.2f} s"
    )
    assert len(cut) >= num_cut
    assert kinds == {question.kind for question in questions}
    return cut


@pytest.mark.timeout(300)
def test_killed_decode_instances_cost_a_pause_and_no_token(stack: MortalStack, questions: list[Question]) -> None:
    cut = kill_under_load(stack, questions, num_kills=4, num_cut=60, num_clients=36)
    assert percentile([outcome.stall_s for outcome in cut], 0.95) < 10.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_hundred_cut_streams_have_no_wrong_token(stack: MortalStack, questions: list[Question]) -> None:
    cut = kill_under_load(stack, questions, num_kills=20, num_cut=300, num_clients=36)
    assert percentile([outcome.stall_s for outcome in cut], 0.95) <= 2.0


def kill_prefill_at(stack: MortalStack, questions: list[Question], where: str) -> None:
    """Several requests are asked, one stands at `where` in a prefill instance, and that instance is killed."""
    rig = stack.rig
    with ExitStack() as armed, Load(rig.address, questions, num_clients=6) as load:
        failpoints = [armed.enter_context(rig.armed(name, where)) for name in stack.prefill]
        wait_until(lambda: any(failpoint.reached for failpoint in failpoints), f"nobody came to {where}")
        victim = next(failpoint.member for failpoint in failpoints if failpoint.reached)
        stack.kill(victim, hits=where not in AFTER_HAND_OVER)
        for failpoint in failpoints:
            failpoint.release()
        wait_until(lambda: sum(outcome.is_over for outcome in load.outcomes) >= 6, "answers do not end")
        outcomes = load.finish()
    assert len(outcomes) >= 6
    for outcome in outcomes:
        outcome.assert_exact()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "where",
    [
        "prefill.accepted",
        pytest.param("prefill.first_token", marks=pytest.mark.slow),
        pytest.param("engine.step", marks=pytest.mark.slow),
        pytest.param("kv.save", marks=pytest.mark.slow),
    ],
)
def test_a_prefill_instance_killed_at_any_phase_costs_a_pause_and_no_token(
    stack: MortalStack, questions: list[Question], where: str
) -> None:
    kill_prefill_at(stack, questions, where)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_prefill_instance_killed_while_its_kv_goes_over_costs_no_token(
    stack: MortalStack, questions: list[Question]
) -> None:
    """The decode instance stands before the first page that it reads."""
    rig = stack.rig
    with ExitStack() as armed, Load(rig.address, questions, num_clients=6) as load:
        failpoints = [armed.enter_context(rig.armed(name, "kv.load")) for name in stack.decode]
        wait_until(lambda: any(failpoint.reached for failpoint in failpoints), "nobody reads KV")
        for victim in stack.prefill:
            rig.kill(victim)
        for failpoint in failpoints:
            failpoint.release()
        for victim in stack.prefill:
            stack.restart(victim)
        wait_until(lambda: sum(outcome.is_over for outcome in load.outcomes) >= 6, "answers do not end")
        outcomes = load.finish()
    for outcome in outcomes:
        outcome.assert_exact()
