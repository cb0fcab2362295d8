"""Pools of two: whichever pair of instances a request meets, its KV moves between them and its answer is exact."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import AsyncClient
from tests.conformance.stacks import GREEDY, SEEDED, Stack, running
from tests.conformance.subjects import Backing, on
from tests.faults.reference import Reference
from tests.lively import random_prompt

NUM_REQUESTS = 32


@pytest.fixture
def wide_stack(checkpoint: Path, reference: Reference, subject: Backing) -> Iterator[Stack]:
    """Two prefill and two decode instances in which nobody dies."""
    with running(checkpoint, reference, subject, size=2) as stack, stack.leaves_nothing():
        yield stack


@on()
async def test_requests_over_two_pools_of_two_are_exact_and_all_kv_moved(
    wide_stack: Stack, prompts: random.Random
) -> None:
    asked = [
        (random_prompt(prompts, prompts.randrange(1, 400)), {**SEEDED, "seed": seed} if seed % 2 else GREEDY)
        for seed in range(NUM_REQUESTS)
    ]
    before = wide_stack.settled()
    async with AsyncClient(wide_stack.rig.address) as client:
        completions = await asyncio.gather(*(client.generate(prompt, **how) for prompt, how in asked))
    for (prompt, how), completion in zip(asked, completions, strict=True):
        wide_stack.assert_exact(completion, prompt, how)
        wide_stack.assert_moved(completion)
    after = wide_stack.settled()
    for name in after:
        assert after[name].num_generated_tokens > before[name].num_generated_tokens, f"{name} had nothing to do"
    decode = [name for name in after if name.startswith("decode")]
    assert sum(after[name].num_prefilled_tokens - before[name].num_prefilled_tokens for name in decode) == 0
    num_tokens = sum(after[name].num_generated_tokens - before[name].num_generated_tokens for name in decode)
    assert num_tokens == NUM_REQUESTS * (GREEDY["max_tokens"] - 1)
