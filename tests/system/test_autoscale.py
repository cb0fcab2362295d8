"""The autoscaler with real processes: a ramp, a spike and a lull, without a wrong token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from protos.tandem.v1 import pools_pb2
from tests.engine_under_test import PATIENCE
from tests.system.checker import wait_idle
from tests.system.load import Load
from tests.system.questions import Question, make_questions
from tests.system.resizing import ResizableStack, resizable
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
"""Streams and starting processes share the machine's cores."""
NUM_TOKENS = 70
STEP_S = 0.03
MAX_NUM_SEQS = 8
SCALING = {
    "interval-s": 0.5,
    "stale-s": 4 * PATIENCE,
    "lead-ttl-s": 10 * PATIENCE,
    "prefill-min-size": 1,
    "prefill-max-size": 1,
    "decode-min-size": 1,
    "decode-warm-up-s": 0.5,
    "decode-scale-out-window-s": 0.4,
    "decode-scale-in-window-s": 3,
    "decode-cool-down-s": 1,
}
"""Short windows. The sizes follow the load alone: on this machine latencies depend on the other processes."""


@pytest.fixture(scope="module")
def questions(llm: LLM) -> list[Question]:
    return make_questions(llm, 24, random.Random("kills"), num_tokens=NUM_TOKENS)


class VariableLoad(Load):
    """At most `num_clients` clients, of which `num_asking` send requests; a test changes that number."""

    def __init__(self, address: str, questions: Sequence[Question], num_clients: int) -> None:
        super().__init__(address, questions, num_clients)
        self.num_asking = 0
        self._numbers = itertools.count()

    def wait_answers(self, count: int) -> None:
        """Returns when so many more questions have been sent."""
        wanted = len(self.outcomes) + count
        wait_until(lambda: len(self.outcomes) >= wanted, "no more requests are sent")

    async def _ask_in_turn(self, stub: Any) -> None:
        number = next(self._numbers)
        while not self._finishing.is_set():
            if number < self.num_asking:
                await self._ask_next(stub)
            else:
                await asyncio.sleep(0.05)


class Evaluations:
    """Every evaluation of the decode pool's autoscaler. A context manager, on a thread."""

    def __init__(self, stack: ResizableStack) -> None:
        self.found: list[tuple[float, int, int]] = []
        """Its time, the size that it computed, and the size that the pool was to have after it."""
        self._watch = stack.stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=0.1))
        self._thread = threading.Thread(target=self._follow, name="evaluations")

    def __enter__(self) -> Evaluations:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.cancel()
        self._thread.join(20)

    def _follow(self) -> None:
        with contextlib.suppress(Exception):  # the end of a stream that was cancelled
            for answer in self._watch:
                pool = answer.pools.pools[1]
                at_s = time.monotonic() - pool.autoscaler.age_s
                if self.found and at_s - self.found[-1][0] < SCALING["interval-s"] / 2:
                    self.found[-1] = (self.found[-1][0], pool.autoscaler.desired_size, pool.size)
                else:
                    self.found.append((at_s, pool.autoscaler.desired_size, pool.size))

    @property
    def sizes(self) -> list[int]:
        """One after the other, without repeats."""
        return [size for size, _ in itertools.groupby(size for _, _, size in self.found)]

    def num_until_growth(self) -> int:
        """Evaluations from the first that computed more instances to the one after which the pool was to have more."""
        first = next(index for index, (_, desired, _) in enumerate(self.found) if desired > 1)
        grown = next(index for index, (_, _, size) in enumerate(self.found) if size > 1)
        return grown - first


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 3])
def test_a_ramp_a_spike_and_a_lull(checkpoint: Path, questions: list[Question], most: int) -> None:
    flags = {**SCALING, "decode-max-size": most}
    stack_fields: dict[str, Any] = {
        "router_args": (
            *("--autoscaler-enabled", *(f"--autoscaler-{name}={value}" for name, value in flags.items())),
            "--admission-queue-timeout-s=60",  # requests wait until there are enough instances
        ),
        "instance_args": ("--max-num-seqs", str(MAX_NUM_SEQS)),
        "max_decode": most,
    }
    slow = {f"decode-{number}": f"engine.step=sleep:{STEP_S}" for number in range(6)}
    with resizable(checkpoint, faults=slow, **stack_fields) as stack, Evaluations(stack) as evaluations:
        with VariableLoad(stack.rig.address, questions, 14) as load:
            # STEP: a load that one instance carries
            load.num_asking = 2
            load.wait_answers(4)
            assert evaluations.sizes == [1]
            # STEP: it grows, and then there are far too many
            for num_asking in (3, 4, 5, 6):
                load.num_asking = num_asking
                load.wait_answers(2)
            load.num_asking = 14
            stack.wait_ready(prefill=1, decode=most)
            pids, addresses = set(stack.processes()), set(stack.rig.stack.instances.values())
            load.wait_answers(14)
            # STEP: a lull
            load.num_asking = 2
            stack.wait_ready(prefill=1, decode=1)
            outcomes = load.finish()
        num_to_grow = evaluations.num_until_growth()
        print(f"{len(outcomes)} answers; sizes {evaluations.sizes}; {num_to_grow} evaluations to grow")
        for outcome in outcomes:
            outcome.assert_exact()
        assert num_to_grow <= 2
        turns = [size > before for before, size in itertools.pairwise(evaluations.sizes)]
        assert turns == sorted(turns, reverse=True), f"it grows, then it shrinks: {evaluations.sizes}"
        assert not stack.faults
        wait_idle(stack.rig, 10.0)
        stack.assert_nothing_is_left(pids, addresses)
