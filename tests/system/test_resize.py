"""Pools of real processes grow and shrink while a dozen streams run: every token is the fault-free run's."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from engine import LLM
from tests.system.checker import wait_idle
from tests.system.load import Load
from tests.system.questions import Question, make_questions
from tests.system.resizing import ResizableStack, resizable
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
"""A dozen streams and starting processes share the machine's cores."""
NUM_CLIENTS = 12
NUM_TOKENS = 56
"""Enough that a drain finds streams which outlast it, also where all clients have begun theirs together."""
STEP_S = 0.1
"""Every step of a decode instance takes at least as long, so that a drain finds streams running. Long steps: the load
takes little of the cores while instances start."""
IDLE_S = 10.0
MOVES_WITHIN_S = 5.0
MAX_ROUNDS = 5


@pytest.fixture(scope="module")
def questions(llm: LLM) -> list[Question]:
    return make_questions(llm, 2 * NUM_CLIENTS, random.Random("resize"), num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def stack(checkpoint: Path) -> Iterator[ResizableStack]:
    """One prefill and one decode instance, and so again after each test."""
    slow = {f"decode-{number}": f"engine.step=sleep:{STEP_S}" for number in range(6)}
    with resizable(checkpoint, faults=slow) as stack:
        yield stack


class Loaded:
    """The load of one test on `stack`, and all processes and addresses that existed meanwhile."""

    def __init__(self, stack: ResizableStack, questions: list[Question]) -> None:
        self.stack = stack
        self.load = Load(stack.rig.address, questions, NUM_CLIENTS)
        self.pids: set[int] = set()
        self.addresses: set[str] = set()

    def note(self) -> None:
        """The processes that exist now must be gone at the end, or be in the stack still."""
        self.pids |= self.stack.processes().keys()
        self.addresses |= set(self.stack.rig.stack.instances.values())

    def wait_running(self, pool: str, count: int) -> None:
        """Returns when streams run at `count` instances of a pool."""
        wait_until(lambda: self._num_running(pool) == count, f"not all of the {pool} pool have requests")

    def wait_moved(self) -> None:
        """Returns when a stream has continued elsewhere, which it may do a moment after its instance has gone."""
        problem = "no stream ran at the instances that were removed: this proves nothing"
        wait_until(lambda: self.load.num_cut > 0, problem, within_s=20.0)

    def has_moved(self) -> bool:
        """Whether one does. None may where all clients began together: their streams end before a drain moves any."""
        deadline_s = time.monotonic() + MOVES_WITHIN_S
        while not self.load.num_cut and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return self.load.num_cut > 0

    def _num_running(self, pool: str) -> int:
        names = [name for name in self.stack.rig.stack.instances if name.startswith(pool)]
        return sum(one.num_running_here > 0 for one in self.stack.pools().instances if one.instance_id in names)

    def assert_exact_and_clean(self) -> None:
        """Every answer is the fault-free run's, all resources are free again, no removed process is left."""
        outcomes = self.load.finish()
        print(f"{len(outcomes)} answers, {self.load.num_cut} of them moved")
        assert len(outcomes) >= NUM_CLIENTS
        for outcome in outcomes:
            outcome.assert_exact()
        wait_idle(self.stack.rig, IDLE_S)
        self.stack.assert_nothing_is_left(self.pids, self.addresses)


@pytest.fixture
def loaded(stack: ResizableStack, questions: list[Question]) -> Iterator[Loaded]:
    stack.wait_ready(prefill=1, decode=1)
    stack.events.clear()
    loaded = Loaded(stack, questions)
    with loaded.load:
        loaded.wait_running("decode", 1)
        loaded.note()
        yield loaded


def test_both_pools_grow_and_shrink_under_load(stack: ResizableStack, loaded: Loaded) -> None:
    num_rounds, has_moved = 0, False
    while not has_moved and num_rounds < MAX_ROUNDS:
        num_rounds += 1
        # STEP: both grow
        changes = stack.resize(decode=2, prefill=2)
        assert {(change.previous_size, change.size, change.cause) for change in changes} == {(1, 2, "operator")}
        stack.wait_ready(decode=2, prefill=2)
        loaded.wait_running("prefill", 2)
        loaded.wait_running("decode", 2)
        loaded.note()
        # STEP: both shrink, while streams run at all instances
        stack.resize(decode=1, prefill=1)
        stack.wait_ready(decode=1, prefill=1)
        has_moved = loaded.has_moved()
    loaded.assert_exact_and_clean()
    assert has_moved, "no stream ran at the instances that were removed: this proves nothing"
    assert_drained(stack, 2 * num_rounds)


@pytest.mark.slow
def test_one_pool_after_the_other_grows_and_shrinks_under_load(stack: ResizableStack, loaded: Loaded) -> None:
    # STEP: decode 1 → 3
    started_s = time.monotonic()
    [change] = stack.resize(decode=3)
    assert (change.previous_size, change.size, change.cause) == (1, 3, "operator")
    stack.wait_ready(decode=3)
    print(f"1 → 3 decode instances in {time.monotonic() - started_s:.1f} s")
    loaded.wait_running("decode", 3)
    loaded.note()
    # STEP: decode 3 → 1, while streams run at all three
    started_s = time.monotonic()
    stack.resize(decode=1)
    stack.wait_ready(decode=1)
    print(f"3 → 1 decode instances in {time.monotonic() - started_s:.1f} s")
    loaded.wait_moved()
    # STEP: prefill 1 → 2 → 1
    stack.resize(prefill=2)
    stack.wait_ready(prefill=2)
    loaded.wait_running("prefill", 2)
    loaded.note()
    stack.resize(prefill=1)
    stack.wait_ready(prefill=1)
    loaded.assert_exact_and_clean()
    assert_drained(stack, 3)


def assert_drained(stack: ResizableStack, count: int) -> None:
    """So many instances were removed, each after its drain, and none was started again."""
    assert not stack.faults
    assert sum(line.endswith("is gone") for line in stack.messages) == count


@pytest.mark.slow
def test_a_resize_to_three_and_at_once_to_one_leaves_one(stack: ResizableStack, loaded: Loaded) -> None:
    [survivor] = [name for name in stack.rig.stack.instances if name.startswith("decode")]
    stack.resize(decode=3)
    wait_until(lambda: sum(" started at " in line for line in stack.messages) == 2, "no instance is started")
    loaded.note()
    [change] = stack.resize(decode=1)
    assert (change.previous_size, change.size) == (3, 1)
    stack.wait_ready(decode=1)
    assert survivor in stack.rig.stack.instances, "instances that are not ready are removed first"
    loaded.assert_exact_and_clean()


@pytest.mark.slow
def test_kills_during_a_resize_cost_no_token(stack: ResizableStack, loaded: Loaded) -> None:
    [first] = [name for name in stack.rig.stack.instances if name.startswith("decode")]
    stack.resize(decode=2)
    stack.wait_ready(decode=2)
    loaded.wait_running("decode", 2)
    loaded.note()
    # STEP: an instance dies while another one is being started; both start
    stack.resize(decode=3)
    os.killpg(stack.rig.stack.processes[first].pid, signal.SIGKILL)
    stack.wait_ready(decode=3)
    assert f"{first} was restarted" in stack.messages
    loaded.wait_running("decode", 3)
    loaded.note()
    # STEP: one that drains dies of it; it is not started again
    before = stack.rig.stack.instances
    stack.resize(decode=1)
    leaving = sorted(before.keys() - stack.rig.stack.instances.keys())
    wait_until(lambda: f"{leaving[0]} is draining" in stack.messages, "no instance drains")
    os.killpg(stack.rig.stack.processes[leaving[0]].pid, signal.SIGKILL)
    stack.wait_ready(decode=1)
    assert f"{leaving[0]} is gone before the end of its drain: it was killed by SIGKILL" in stack.messages
    assert f"{leaving[1]} is gone" in stack.messages
    loaded.assert_exact_and_clean()


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"decode": 0}, "decode must be between 1 and 64, is 0"),
        ({"decode": 65}, "decode must be between 1 and 64, is 65"),
        ({"prefill": -1}, "prefill must be between 1 and 64 with disaggregation 'always', is -1"),
        ({"prefill": 0}, "prefill must be between 1 and 64 with disaggregation 'always'"),
    ],
)
def test_invalid_sizes_are_rejected_and_change_nothing(
    stack: ResizableStack, sizes: dict[str, int], error: str
) -> None:
    before = stack.rig.stack.instances
    for wanted in (sizes, {"decode": 1, "prefill": 2, **sizes}):
        with pytest.raises(grpc.RpcError, match=error):
            stack.resize(**wanted)
    assert stack.rig.stack.instances == before
    assert [pool.size for pool in stack.pools().pools] == [1, 1]
