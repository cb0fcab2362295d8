"""Instances of several ranks and stages among others: pages go between any two of them, and a rank that is killed costs
a pause and no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lively import PATIENT_PEERS, PATIENT_POOLS, random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.reference import Reference
from tests.system.stacks import DECODE_STEP_S, SEEDED, Model, Ranks, Stack, started
from tests.waiting import Stopwatch, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
MIXED: dict[str, Ranks] = {"prefill-0": (1, 2), "decode-1": (2, 2)}
STREAM = {**SEEDED, "max_tokens": 200}


@pytest.fixture(params=["shared_storage", "redis", "nixl"])
def mixed(request: pytest.FixtureRequest, checkpoint: Path, reference: Reference, tmp_path: Path) -> Iterator[Stack]:
    """Two instances per role, one of each in parts."""
    model = Model(checkpoint, reference, tmp_path)
    args: dict[str, Any] = {"instance_args": PATIENT_PEERS, "router_args": PATIENT_POOLS}
    with started(model, request.param, size=2, ranks=MIXED, failpoints=False, **args) as stack:
        yield stack


def test_any_two_instances_exchange_kv(mixed: Stack, prompts: random.Random) -> None:
    pairs: set[tuple[str, ...]] = set()

    def all_pairs_met() -> bool:
        batch = [random_prompt(prompts, length) for length in (150, 40, 90, 17)]
        requests = [BackgroundRequest(mixed.rig.address, prompt, **SEEDED) for prompt in batch]
        for prompt, completion in zip(batch, [request.completion() for request in requests], strict=True):
            mixed.assert_exact(completion, prompt, SEEDED)
            mixed.assert_moved(completion)
            pairs.add((*completion.route.prefill, *completion.route.decode))
        return len(pairs) == 4

    with mixed.leaves_nothing():
        wait_until(all_pairs_met, lambda: f"only these exchanged KV: {pairs}")


@pytest.fixture(scope="module")
def slow_decode(checkpoint: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two decode instances in parts, with steps that are long enough to be hit."""
    model = Model(checkpoint, reference, tmp_path_factory.mktemp("stack"))
    faults = {f"decode-{index}": f"engine.step=sleep:{DECODE_STEP_S}" for index in range(2)}
    ranks = {"decode-0": (2, 1), "decode-1": (1, 2)}
    args: dict[str, Any] = {"instance_args": PATIENT_PEERS, "router_args": PATIENT_POOLS}
    with started(model, size=2, ranks=ranks, failpoints=False, faults=faults, **args) as stack:
        yield stack


@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
def test_a_killed_rank_ends_its_instance_and_its_streams_go_on(
    slow_decode: Stack, prompts: random.Random, victim: str
) -> None:
    rig = slow_decode.rig
    batch = [random_prompt(prompts, length) for length in (150, 40, 90, 17)]
    requests = [BackgroundRequest(rig.address, prompt, **STREAM) for prompt in batch]
    for request in requests:
        request.wait_first_token()
    rank = rank_of(slow_decode, victim)
    watch = Stopwatch()
    rank.kill()
    wait_until(lambda: not rig.stack.processes[victim].running, f"{victim} goes on without a rank")
    assert watch.s < 2.0
    completions = [request.completion() for request in requests]
    for prompt, completion in zip(batch, completions, strict=True):
        slow_decode.assert_exact(completion, prompt, STREAM)
    moved = [completion.route.decode for completion in completions if len(completion.route.decode) > 1]
    assert moved, "no stream was hit"
    assert all(route[0] == victim for route in moved)
    rig.restart(victim)


def rank_of(stack: Stack, name: str) -> psutil.Process:
    """The process of a rank other than the core's."""
    processes = psutil.Process(stack.rig.stack.processes[name].pid).children(recursive=True)
    (rank,) = (process for process in processes if "engine.executor.process" in process.cmdline())
    return rank
