"""Pools of real processes that grow and shrink while a dozen streams run: every token as if nothing had happened."""

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
from tests.e2e.resizing import ResizableStack, resizable
from tests.faults.checker import wait_idle
from tests.faults.load import Load
from tests.faults.questions import Question, make_questions
from tests.lively import CHUNK
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
"""A dozen streams and processes that start share the machine's cores."""
NUM_CLIENTS = 12
NUM_TOKENS = 120
STEP_S = 0.03
"""Every step of a decode instance takes at least as long, so that a drain finds streams running."""
IDLE_S = 10.0


@pytest.fixture(scope="module")
def questions(checkpoint: Path) -> list[Question]:
    llm = LLM(checkpoint, dtype="float32", num_threads=1, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=512)
    return make_questions(llm, 2 * NUM_CLIENTS, random.Random("resize"), num_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def stack(checkpoint: Path) -> Iterator[ResizableStack]:
    """One prefill and one decode instance, and so again after each test."""
    slow = {f"decode-{number}": f"engine.step=sleep:{STEP_S}" for number in range(6)}
    with resizable(checkpoint, faults=slow) as stack:
        yield stack


class Loaded:
    """The load of one test on `stack`, and everything that was there meanwhile."""

    def __init__(self, stack: ResizableStack, questions: list[Question]) -> None:
        self.stack = stack
        self.load = Load(stack.rig.address, questions, NUM_CLIENTS)
        self.pids: set[int] = set()
        self.addresses: set[str] = set()

    def note(self) -> None:
        """Whoever is there now must be gone at the end, or be somebody who stays."""
        self.pids |= self.stack.processes().keys()
        self.addresses |= set(self.stack.rig.stack.instances.values())

    def wait_running(self, pool: str, count: int) -> None:
        """Returns when streams run at `count` instances of a pool."""
        wait_until(lambda: self._num_running(pool) == count, f"not all of the {pool} pool have something to do")

    def _num_running(self, pool: str) -> int:
        names = [name for name in self.stack.rig.stack.instances if name.startswith(pool)]
        return sum(one.num_running_here > 0 for one in self.stack.pools().instances if one.instance_id in names)

    def assert_nobody_noticed(self) -> None:
        """Every answer is the fault-free run's, everything that was taken is given back, nobody who went is left."""
        outcomes = self.load.finish()
        print(f"{len(outcomes)} answers, {self.load.num_cut} of them went on elsewhere")
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
    assert loaded.load.num_cut > 0, "nobody was at those that went: this proves nothing"
    # STEP: prefill 1 → 2 → 1
    stack.resize(prefill=2)
    stack.wait_ready(prefill=2)
    loaded.wait_running("prefill", 2)
    loaded.note()
    stack.resize(prefill=1)
    stack.wait_ready(prefill=1)
    loaded.assert_nobody_noticed()
    assert not [line for line in stack.told if "not as it should" in line or "again" in line]
    assert sum(line.endswith("is gone") for line in stack.told) == 3


def test_who_asks_for_three_and_at_once_for_one_has_one(stack: ResizableStack, loaded: Loaded) -> None:
    [survivor] = [name for name in stack.rig.stack.instances if name.startswith("decode")]
    stack.resize(decode=3)
    wait_until(lambda: sum("was started" in line for line in stack.told) == 2, "nobody is started")
    loaded.note()
    [change] = stack.resize(decode=1)
    assert (change.previous_size, change.size) == (3, 1)
    stack.wait_ready(decode=1)
    assert survivor in stack.rig.stack.instances, "who is not ready goes first"
    loaded.assert_nobody_noticed()


@pytest.mark.slow
def test_kills_while_a_resize_runs_cost_nobody_a_token(stack: ResizableStack, loaded: Loaded) -> None:
    [first] = [name for name in stack.rig.stack.instances if name.startswith("decode")]
    stack.resize(decode=2)
    stack.wait_ready(decode=2)
    loaded.wait_running("decode", 2)
    loaded.note()
    # STEP: a member dies while another one is being started; both come
    stack.resize(decode=3)
    os.killpg(stack.rig.stack.members[first].pid, signal.SIGKILL)
    stack.wait_ready(decode=3)
    assert f"{first} was started again" in stack.told
    loaded.wait_running("decode", 3)
    loaded.note()
    # STEP: one that drains dies of it; it is not started again
    before = stack.rig.stack.instances
    stack.resize(decode=1)
    leaving = sorted(before.keys() - stack.rig.stack.instances.keys())
    wait_until(lambda: f"{leaving[0]} was told to go and drains" in stack.told, "nobody drains")
    os.killpg(stack.rig.stack.members[leaving[0]].pid, signal.SIGKILL)
    stack.wait_ready(decode=1)
    assert f"{leaving[0]} is gone, not as it should: it was ended by SIGKILL" in stack.told
    assert f"{leaving[1]} is gone" in stack.told
    loaded.assert_nobody_noticed()


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [({"decode": 0}, "1..64"), ({"decode": 65}, "1..64"), ({"prefill": -1}, "0..64"), ({"prefill": 0}, "1..64")],
)
def test_nonsense_is_refused_and_changes_nothing(stack: ResizableStack, sizes: dict[str, int], allowed: str) -> None:
    before = stack.rig.stack.instances
    with pytest.raises(grpc.RpcError, match=allowed.replace(".", r"\.")):
        stack.resize(**sizes)
    with pytest.raises(grpc.RpcError, match=allowed.replace(".", r"\.")):
        stack.resize(**{**{"decode": 1, "prefill": 2}, **sizes})
    assert stack.rig.stack.instances == before
    assert [pool.size for pool in stack.pools().pools] == [1, 1]
