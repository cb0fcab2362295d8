"""Requests that the decode pool has no room for, now or ever, are rejected and leave nothing at either side."""

from __future__ import annotations

import random

import pytest

from tandem import TandemError
from tests.engine_under_test import BLOCK_SIZE
from tests.lively import random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.stacks import GREEDY, Stack, on_stack
from tests.waiting import wait_until

pytestmark = on_stack("tight")
FILLING, TOO_LONG = 1100, 1000
"""Tokens of prompts of which each fits into the pool, and not both."""


def test_a_prompt_without_room_is_rejected_and_leaves_nothing(stack: Stack, prompts: random.Random) -> None:
    filling = {**GREEDY, "max_tokens": 300}
    first, second = random_prompt(prompts, FILLING), random_prompt(prompts, TOO_LONG)
    request = BackgroundRequest(stack.rig.address, first, **filling)
    request.wait_first_token()
    waiting = BackgroundRequest(stack.rig.address, second, **GREEDY)
    wait_until(lambda: stack.rig.load("decode-0").num_without_room == 1, "no request waits for room")
    with pytest.raises(TandemError) as caught:
        waiting.completion()
    assert caught.value.status == "RESOURCE_EXHAUSTED", "the wait is longer than that for a silent instance"
    assert caught.value.retry_after_s is not None
    # The running request is not disturbed, and once it is gone there is room.
    stack.assert_exact(request.completion(), first, filling)
    completion = stack.generate(second, GREEDY)
    stack.assert_exact(completion, second, GREEDY)
    stack.assert_moved(completion)


def test_a_prompt_longer_than_the_pool_is_rejected_before_anything_is_computed(
    stack: Stack, prompts: random.Random
) -> None:
    before = stack.settled()["prefill-0"]
    num_blocks = before.blocks.free + before.blocks.cached
    with pytest.raises(TandemError) as caught:
        stack.generate(random_prompt(prompts, 2 * num_blocks * BLOCK_SIZE), GREEDY)
    assert caught.value.status == "INVALID_ARGUMENT"
    assert stack.settled()["prefill-0"].num_steps == before.num_steps
