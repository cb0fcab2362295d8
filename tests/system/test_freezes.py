"""Decode instances freeze under load and continue: their streams have moved to other instances by then, their late
tokens are dropped, and they get requests again. An engine core that stays frozen is replaced."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from engine import LLM
from tandem.local_stack.supervisor import StackEvent
from tests.lively import random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.checker import wait_idle
from tests.system.killable import KillableStack, killable_stack
from tests.system.load import Load, Outcome
from tests.system.questions import Question, make_questions
from tests.system.reference import Reference
from tests.system.stacks import DECODE_STEP_S, GREEDY, Model, started
from tests.waiting import wait_until

STREAM = {**GREEDY, "max_tokens": 100}
NUM_TOKENS = 160
"""Enough that most of what runs at a decode instance has begun, and does not wait for its prefill."""
BETWEEN_S = 3.0
"""From one freeze to the next, so that each finds streams."""
FREED_WITHIN_S = 20.0
UNDER_WAY_S = 1.0
"""How late a token may reach its client that the instance had sent when it froze: on a busy machine, not at once."""


@pytest.fixture(scope="module")
def questions(llm: LLM) -> list[Question]:
    return make_questions(llm, 40, random.Random("freezes"), num_tokens=NUM_TOKENS)


@pytest.fixture
def stack(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[KillableStack]:
    with killable_stack(checkpoint, num_prefill=1, num_decode=request.param) as stack:
        yield stack
        wait_idle(stack.rig, FREED_WITHIN_S)


def freeze_under_load(
    stack: KillableStack, questions: list[Question], rounds: Sequence[int], *, frozen_s: float
) -> list[float]:
    """Freezes so many instances in each round, one after the other, each for `frozen_s`; returns the resumption times.

    One instance is never frozen, so that there is an elsewhere. A frozen one that is back gets streams again before the
    round ends, and nothing is left of the old ones there.
    """
    freezes: list[tuple[str, float]] = []
    with Load(stack.rig.address, questions, num_clients=16) as load:
        for size in rounds:
            with ExitStack() as frozen:
                first_s = time.monotonic()
                victims = stack.decode[:size]
                for victim in victims:
                    wait_until(lambda victim=victim: _streams(stack, load, victim), f"too little runs at {victim}")  # type: ignore[misc]
                    num_before = stack.num_broken(victim)
                    frozen.enter_context(stack.rig.frozen(victim))
                    freezes.append((victim, time.monotonic()))
                    wait_until(lambda: stack.num_broken(victim) > num_before, f"no stream ran at {victim}")  # noqa: B023
                    time.sleep(BETWEEN_S)
                last_s = freezes[-1][1]
                time.sleep(max(0.0, last_s + frozen_s - time.monotonic()))  # the fault itself
                assert time.monotonic() - first_s >= frozen_s
            for victim in victims:
                wait_until(lambda: stack.rig.is_ready(victim), f"{victim} is not back")  # noqa: B023
                wait_until(lambda: stack.num_running(victim) > 0, f"{victim} gets no requests")  # noqa: B023
        outcomes = load.finish()
    for outcome in outcomes:
        outcome.assert_exact()  # a late token would be one too many
    return [resumed_s for _, at_s in freezes for resumed_s in [_slowest(outcomes, at_s)] if resumed_s is not None]


def _streams(stack: KillableStack, load: Load, member: str) -> bool:
    """Whether some stream has begun there for certain: more runs there than waits for a first token anywhere."""
    return stack.num_running(member) > 2 + load.num_waiting


def _slowest(outcomes: list[Outcome], at_s: float) -> float | None:
    """How long after this moment the last of the streams that it cut went on."""
    resumed = [
        later.at_s - at_s
        for outcome in outcomes
        for first, later in outcome.steps()
        if first.at_s <= at_s + UNDER_WAY_S and at_s < later.at_s and later.stream_epoch > first.stream_epoch
    ]
    return max(resumed, default=None)


def test_an_engine_core_that_hangs_is_replaced_and_its_stream_continued(
    checkpoint: Path, reference: Reference, prompts: random.Random, tmp_path: Path
) -> None:
    with started(
        Model(checkpoint, reference, tmp_path),
        size=2,
        num_prefill=0,
        disaggregation="auto",
        failpoints=False,
        instance_args=("--instance-core-unready-s", "1", "--instance-core-dead-s", "2"),
        faults={f"decode-{index}": f"engine.step=sleep:{DECODE_STEP_S}" for index in range(2)},
    ) as stack:
        prompt = random_prompt(prompts, 40)
        request = BackgroundRequest(stack.rig.address, prompt, **STREAM)
        request.wait_first_token()
        running: list[str] = []

        def is_decoded() -> bool:
            running[:] = [name for name in ("decode-0", "decode-1") if stack.rig.load(name).num_running]
            return bool(running)

        wait_until(is_decoded, "no stream is decoded")
        victim = running[0]
        process = stack.rig.stack.processes[victim]
        first_s = process.started_s
        for child in psutil.Process(process.pid).children():
            child.suspend()
        stack.assert_exact(request.completion(), prompt, STREAM)
        events: list[StackEvent] = []

        def is_replaced() -> bool:
            events.extend(stack.rig.stack.supervise())
            return process.started_s > first_s and process.ready

        wait_until(is_replaced, lambda: f"{victim} was not replaced: {events}", 60.0)
        assert [event.text for event in events if "exited with status 1" in event.text]
        wait_until(lambda: stack.rig.is_ready(victim), f"the router does not report {victim} ready")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stack", [2], indirect=True)
def test_a_frozen_decode_instance_is_left_and_comes_back(stack: KillableStack, questions: list[Question]) -> None:
    resumed = freeze_under_load(stack, questions, [1], frozen_s=4.0)
    assert len(resumed) == 1, "the freeze has cut no stream"
    print(f"\nresumed after {resumed[0]:.2f} s")
    assert resumed[0] < 15.0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stack", [5], indirect=True)
def test_ten_freezes_of_half_a_minute_deliver_no_late_token(stack: KillableStack, questions: list[Question]) -> None:
    # A freeze may have hit only what had no token yet: a few more than ten, so that ten cut streams.
    resumed = freeze_under_load(stack, questions, [4, 4, 4], frozen_s=30.0)
    print(f"\nresumed after {', '.join(f'{one:.2f}' for one in sorted(resumed))} s")
    assert len(resumed) >= 10
    assert max(resumed) <= 3.0
