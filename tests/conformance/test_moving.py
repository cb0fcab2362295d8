"""KV that moves through the connector: all of it, block by block while it is computed, and never a wrong token."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from tandem import AsyncClient
from tests.conformance.stacks import GREEDY, SEEDED, Stack
from tests.conformance.subjects import on
from tests.e2e.asking import Asked
from tests.lively import BLOCK_SIZE, CHUNK, random_prompt
from tests.waiting import wait_until

pytestmark = on("shared_storage", "nixl", "redis", "third-party")
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, 100, 257)
DELAY_S = 1.0
NUM_CHUNKS = 28
"""So many that the test can stop the prefill instance before the last one: a chunk takes milliseconds."""
NUM_TRIES = 5


def test_answers_equal_those_of_the_aggregated_engine_and_all_kv_moved(stack: Stack, prompts: random.Random) -> None:
    before = stack.settled()["decode-0"]
    num_asked = 0
    for sampling in (GREEDY, SEEDED):
        for length in LENGTHS:
            prompt = random_prompt(prompts, length)
            completion = stack.ask(prompt, sampling)
            stack.assert_exact(completion, prompt, sampling)
            stack.assert_moved(completion)
            num_asked += 1
    after = stack.settled()["decode-0"]
    assert after.num_external_tokens - before.num_external_tokens == 2 * sum(LENGTHS)
    assert after.num_generated_tokens - before.num_generated_tokens == num_asked * (GREEDY["max_tokens"] - 1)
    assert after.num_prefilled_tokens == before.num_prefilled_tokens, "the decode instance computed prompt tokens"
    assert after.num_recomputed_blocks == before.num_recomputed_blocks


def test_a_known_prefix_is_not_moved_again(stack: Stack, prompts: random.Random) -> None:
    shared = random_prompt(prompts, 6 * BLOCK_SIZE)
    stack.ask(shared + random_prompt(prompts, 20), GREEDY)
    before = stack.settled()["decode-0"]
    for num_other_tokens in (1, 20, 3 * BLOCK_SIZE):
        prompt = shared + random_prompt(prompts, num_other_tokens)
        completion = stack.ask(prompt, GREEDY)
        stack.assert_exact(completion, prompt, GREEDY)
        stack.assert_moved(completion, num_local_tokens=len(shared))
    after = stack.settled()["decode-0"]
    assert after.num_external_tokens - before.num_external_tokens == 1 + 20 + 3 * BLOCK_SIZE


def test_blocks_arrive_while_later_chunks_are_computed(stack: Stack, prompts: random.Random) -> None:
    """The prefill instance is stopped in the middle of a prompt: what it has computed is read meanwhile. A connector
    that moves everything at the end leaves the decode side's failpoint unvisited, and this test waiting."""
    for _ in range(NUM_TRIES):
        prompt = random_prompt(prompts, NUM_CHUNKS * CHUNK)
        with stack.rig.armed("prefill-0", "engine.step") as step, stack.rig.armed("decode-0", "kv.load") as load:
            load.release()  # it is to count, not to stop
            asked = Asked(stack.rig.address, prompt, **GREEDY)
            step.wait()
            step.release()
            wait_until(lambda: step.num_arrivals >= 3, "no third chunk was begun")
            step.hold()
            # From a store each page is read by itself, from memory many at once.
            num_reads = 1 if stack.backing.reads_memory else 2 * CHUNK // BLOCK_SIZE
            wait_until(lambda: load.num_arrivals >= num_reads, "no blocks are read")  # noqa: B023
            num_begun = step.num_arrivals  # after the reads: what is true now was true then
        completion = asked.completion()
        stack.assert_exact(completion, prompt, GREEDY)
        stack.assert_moved(completion)
        if num_begun < NUM_CHUNKS:
            return
    raise AssertionError(f"in {NUM_TRIES} tries the last chunk had always begun when blocks were read")


async def test_requests_with_common_blocks_at_once_each_get_their_own_answer(
    stack: Stack, prompts: random.Random
) -> None:
    shared = random_prompt(prompts, 5 * BLOCK_SIZE)
    asked = [
        (shared + random_prompt(prompts, prompts.randrange(1, 80)), {**SEEDED, "seed": seed} if seed % 2 else GREEDY)
        for seed in range(8)
    ]
    async with AsyncClient(stack.rig.address) as client:
        completions = await asyncio.gather(*(client.generate(prompt, **how) for prompt, how in asked))
    for (prompt, how), completion in zip(asked, completions, strict=True):
        stack.assert_exact(completion, prompt, how)
        assert completion.usage.recomputed_tokens == 0, stack.rig.router_warnings()


@pytest.mark.parametrize("state", ["saving", "loading"])
def test_a_slow_peer_costs_time_alone(stack: Stack, prompts: random.Random, state: str) -> None:
    prompt = random_prompt(prompts, 150)
    with stack.stopped_at(state) as stop:
        asked = Asked(stack.rig.address, prompt, **SEEDED)
        stop.wait()
        time.sleep(DELAY_S)  # the fault itself
    completion = asked.completion()
    stack.assert_exact(completion, prompt, SEEDED)
    stack.assert_moved(completion)
