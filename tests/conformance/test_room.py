"""Requests that the decode pool has no room for, now or ever, are refused, and leave nothing at either side."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import TandemError
from tests.conformance.stacks import GREEDY, PATIENT_LEASE_S, Stack, running
from tests.conformance.subjects import Backing, on
from tests.e2e.asking import Asked
from tests.faults.reference import Reference
from tests.lively import random_prompt

NUM_BLOCKS = 128
FILLING, TOO_BIG = 1100, 1000
"""Prompts of which each fits into the pool, and not both."""
RESERVATION_S = 3.0
STEP_S = 0.02
"""Each step of the decode instance: so slow that the filling request runs for longer than a reservation waits."""


@pytest.fixture(scope="module")
def modules_tight_stack(checkpoint: Path, reference: Reference, subject: Backing) -> Iterator[Stack]:
    with running(
        checkpoint,
        reference,
        subject,
        lease_s=PATIENT_LEASE_S,
        num_blocks=NUM_BLOCKS,
        # The instance is to refuse, not the router before it.
        router_args=("--disaggregation-reservation-s", str(RESERVATION_S), "--admission-block-fraction", "100"),
        faults={"decode-0": f"engine.step=sleep:{STEP_S}"},
    ) as stack:
        yield stack


@pytest.fixture
def tight_stack(modules_tight_stack: Stack) -> Iterator[Stack]:
    with modules_tight_stack.leaves_nothing():
        yield modules_tight_stack


@on("shared_storage")
def test_a_prompt_without_room_is_refused_and_leaves_nothing(tight_stack: Stack, prompts: random.Random) -> None:
    filling = {**GREEDY, "max_tokens": 300}
    first, second = random_prompt(prompts, FILLING), random_prompt(prompts, TOO_BIG)
    asked = Asked(tight_stack.rig.address, first, **filling)
    asked.wait_first_token(30.0)
    with pytest.raises(TandemError) as caught:
        tight_stack.ask(second, GREEDY)
    assert caught.value.status == "RESOURCE_EXHAUSTED"
    assert caught.value.retry_after_s is not None, "a client is not told when to come again"
    # Who was there is not disturbed, and once it is gone there is room.
    tight_stack.assert_exact(asked.completion(), first, filling)
    completion = tight_stack.ask(second, GREEDY)
    tight_stack.assert_exact(completion, second, GREEDY)
    tight_stack.assert_moved(completion)


@on("shared_storage")
def test_a_prompt_longer_than_the_pool_is_refused_before_anything_is_computed(
    tight_stack: Stack, prompts: random.Random
) -> None:
    before = tight_stack.settled()["prefill-0"]
    with pytest.raises(TandemError) as caught:
        tight_stack.ask(random_prompt(prompts, 2 * NUM_BLOCKS * 16), GREEDY)
    assert caught.value.status == "INVALID_ARGUMENT"
    assert tight_stack.settled()["prefill-0"].num_steps == before.num_steps
