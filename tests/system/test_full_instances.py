"""More long streams than the decode pool has slots: the others wait, and waiting is no failure of an instance."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine_under_test import BLOCK_SIZE
from tests.lively import random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_same_answer, wait_idle
from tests.system.killable import PATIENT, killable_stack
from tests.system.reference import Reference
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STREAMS, NUM_SLOTS = 40, 8
"""Slots of each of two decode instances."""
STEP_S, NUM_TOKENS = 0.25, 100
"""Streams of 25 s, three rounds of them."""
HANG_S = 400
LONG: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.8, "seed": 7}
INSTANCES = ("--max-num-seqs", f"{NUM_SLOTS}", "--max-num-batched-tokens", "64", "--block-size", f"{BLOCK_SIZE}")


def test_forty_long_streams_on_sixteen_slots_are_exact_and_eject_no_instance(
    checkpoint: Path, reference: Reference, prompts: random.Random
) -> None:
    asked = [random_prompt(prompts, prompts.randrange(20, 160)) for _ in range(NUM_STREAMS)]
    router = (*PATIENT, "--admission-queue-timeout-s", f"{HANG_S}")
    fields: dict[str, Any] = {"disaggregation": "always", "router_args": router, "instance_args": INSTANCES}
    with killable_stack(checkpoint, num_prefill=2, num_decode=2, step_s=STEP_S, **fields) as stack:
        requests = [BackgroundRequest(stack.rig.address, prompt, timeout_s=HANG_S, **LONG) for prompt in asked]
        wait_until(lambda: min(map(stack.num_running, stack.decode)) >= NUM_SLOTS, "the slots are never full")
        for prompt, request in zip(asked, requests, strict=True):
            assert_same_answer(request.completion(), reference.answer(prompt, **LONG))
        assert [stack.num_broken(name) for name in stack.rig.stack.instances] == [0] * 4
        assert stack.num_ejections == 0
        wait_idle(stack.rig)
