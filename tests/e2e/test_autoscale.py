"""The autoscaler with real processes: a ramp, a spike and a lull, and nobody loses a token by it."""

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
from tests.e2e.resizing import ResizableStack, resizable
from tests.faults.checker import wait_idle
from tests.faults.load import Load
from tests.faults.questions import Question, make_questions
from tests.lively import BLOCK_SIZE, CHUNK
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
"""Streams and processes that start share the machine's cores."""
NUM_TOKENS = 70
STEP_S = 0.03
MAX_NUM_SEQS = 8
SCALING = {
    "interval-s": 0.5,
    "stale-s": 4,
    "lead-ttl-s": 10,
    "prefill-min-size": 1,
    "prefill-max-size": 1,
    "decode-min-size": 1,
    "decode-warm-up-s": 0.5,
    "decode-scale-out-window-s": 0.4,
    "decode-scale-in-window-s": 3,
    "decode-cool-down-s": 1,
}
"""Short windows. What the sizes follow is the load alone: on this machine latencies tell of the other processes."""


@pytest.fixture(scope="module")
def questions(checkpoint: Path) -> list[Question]:
    llm = LLM(checkpoint, dtype="float32", num_threads=1, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=512)
    return make_questions(llm, 24, random.Random("kills"), num_tokens=NUM_TOKENS)


class Tide(Load):
    """A load of at most `num_clients`, of whom as many ask as `num_asking` says, which a test changes as it goes."""

    def __init__(self, address: str, questions: Sequence[Question], num_clients: int) -> None:
        super().__init__(address, questions, num_clients)
        self.num_asking = 0
        self._numbers = itertools.count()

    def wait_answers(self, count: int) -> None:
        """Returns when so many more questions have been asked."""
        wanted = len(self.outcomes) + count
        wait_until(lambda: len(self.outcomes) >= wanted, "the load does not move")

    async def _ask_in_turn(self, stub: Any) -> None:
        number = next(self._numbers)
        while not self._finishing.is_set():
            if number < self.num_asking:
                await self._ask_next(stub)
            else:
                await asyncio.sleep(0.05)


class Looks:
    """What the autoscaler of the decode pool has thought at each of its looks. A context manager, on a thread."""

    def __init__(self, stack: ResizableStack) -> None:
        self.found: list[tuple[float, int, int]] = []
        """When it looked, the size that it would have, and the size that was wanted after that."""
        self._watch = stack.stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=0.1))
        self._thread = threading.Thread(target=self._follow, name="looks")

    def __enter__(self) -> Looks:
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

    def num_looks_to_grow(self) -> int:
        """Looks from the one that first saw too few instances to the one that asked for more."""
        first = next(index for index, (_, desired, _) in enumerate(self.found) if desired > 1)
        grown = next(index for index, (_, _, size) in enumerate(self.found) if size > 1)
        return grown - first


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, 3])
def test_a_ramp_a_spike_and_a_lull(checkpoint: Path, questions: list[Question], most: int) -> None:
    flags = {**SCALING, "decode-max-size": most}
    stack_fields = {
        "router_args": (
            *("--autoscaler-enabled", *(f"--autoscaler-{name}={value}" for name, value in flags.items())),
            "--admission-queue-timeout-s=60",  # whoever comes while there are too few waits until there are enough
        ),
        "instance_args": (
            *("--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK_SIZE)),
            *("--max-num-seqs", str(MAX_NUM_SEQS)),
        ),
        "max_decode": most,
    }
    slow = {f"decode-{number}": f"engine.step=sleep:{STEP_S}" for number in range(6)}
    with resizable(checkpoint, faults=slow, **stack_fields) as stack, Looks(stack) as looks:
        with Tide(stack.rig.address, questions, 14) as tide:
            # STEP: a load that one instance carries
            tide.num_asking = 2
            tide.wait_answers(4)
            assert looks.sizes == [1]
            # STEP: it grows, and then there are far too many
            for num_asking in (3, 4, 5, 6):
                tide.num_asking = num_asking
                tide.wait_answers(2)
            tide.num_asking = 14
            stack.wait_ready(prefill=1, decode=most)
            pids, addresses = set(stack.processes()), set(stack.rig.stack.instances.values())
            tide.wait_answers(14)
            # STEP: a lull
            tide.num_asking = 2
            stack.wait_ready(prefill=1, decode=1)
            outcomes = tide.finish()
        print(f"{len(outcomes)} answers; sizes {looks.sizes}; {looks.num_looks_to_grow()} looks to grow")
        for outcome in outcomes:
            outcome.assert_exact()
        assert looks.num_looks_to_grow() <= 2
        turns = [size > before for before, size in itertools.pairwise(looks.sizes)]
        assert turns == sorted(turns, reverse=True), f"it grows, then it shrinks: {looks.sizes}"
        assert not [line for line in stack.told if "not as it should" in line or "again" in line]
        wait_idle(stack.rig, 10.0)
        stack.assert_nothing_is_left(pids, addresses)
