"""A prompt prefilled on one instance and decoded on another: the aggregated engine's tokens, and all KV transferred."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem import AsyncClient, Client
from tests.engine_under_test import BLOCK_SIZE
from tests.lively import CHUNK, random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_same_answer, assert_usage
from tests.system.reference import Reference
from tests.system.stacks import GREEDY, NARROWED, SEEDED, Stack, on, on_stack
from tests.waiting import wait_until

LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, 100, 257)
SAMPLINGS = (GREEDY, SEEDED, NARROWED)
DELAY_S = 1.0
NUM_CHUNKS = 28
"""So many that the test can stop the prefill instance before the last one: a chunk takes milliseconds."""
NUM_TRIES = 5


def test_the_reference_is_lively(reference: Reference, prompts: random.Random) -> None:
    """Equal answers prove something only if answers differ from each other, and within themselves."""
    answers = [reference.answer(random_prompt(prompts, 20), **GREEDY).token_ids for _ in range(6)]
    assert len(set(answers)) == 6
    assert len({token_id for answer in answers for token_id in answer}) > 30


@on("shared_storage", "nixl", "redis")
def test_answers_equal_those_of_the_aggregated_engine_and_all_kv_moved(stack: Stack, prompts: random.Random) -> None:
    before = stack.settled()["decode-0"]
    for sampling in SAMPLINGS:
        for length in LENGTHS:
            prompt = random_prompt(prompts, length)
            completion = stack.generate(prompt, sampling)
            stack.assert_exact(completion, prompt, sampling)
            assert_usage(completion)
            stack.assert_moved(completion)
    after = stack.settled()["decode-0"]
    num_generated = len(SAMPLINGS) * len(LENGTHS) * (GREEDY["max_tokens"] - 1)
    assert after.num_external_tokens - before.num_external_tokens == len(SAMPLINGS) * sum(LENGTHS)
    assert after.num_generated_tokens - before.num_generated_tokens == num_generated
    assert after.num_prefilled_tokens == before.num_prefilled_tokens, "the decode instance computed prompt tokens"
    assert after.num_recomputed_blocks == before.num_recomputed_blocks


@on("shared_storage", "nixl")
def test_a_known_prefix_is_not_moved_again(stack: Stack, prompts: random.Random) -> None:
    shared = random_prompt(prompts, 6 * BLOCK_SIZE)
    stack.generate(shared + random_prompt(prompts, 20), GREEDY)
    before = stack.settled()["decode-0"]
    for num_other_tokens in (1, 20, 3 * BLOCK_SIZE):
        prompt = shared + random_prompt(prompts, num_other_tokens)
        completion = stack.generate(prompt, GREEDY)
        stack.assert_exact(completion, prompt, GREEDY)
        stack.assert_moved(completion, num_local_tokens=len(shared))
    after = stack.settled()["decode-0"]
    assert after.num_external_tokens - before.num_external_tokens == 1 + 20 + 3 * BLOCK_SIZE


@on("shared_storage", "nixl")
def test_blocks_arrive_while_later_chunks_are_computed(stack: Stack, prompts: random.Random) -> None:
    """The prefill instance is stopped in the middle of a prompt; the blocks computed so far are read meanwhile. With a
    connector that moves everything at the end, no request reaches the decode side's failpoint and the test fails."""
    for _ in range(NUM_TRIES):
        prompt = random_prompt(prompts, NUM_CHUNKS * CHUNK)
        with stack.rig.armed("prefill-0", "engine.step") as step, stack.rig.armed("decode-0", "kv.load") as load:
            load.release()  # it is to count, not to stop
            request = BackgroundRequest(stack.rig.address, prompt, **GREEDY)
            step.wait()
            step.release()
            wait_until(lambda: step.num_arrivals >= 3, "no third chunk was begun")
            step.hold()
            # From a store each page is read by itself, from memory many at once.
            num_reads = 1 if stack.backing.reads_memory else 2 * CHUNK // BLOCK_SIZE
            wait_until(lambda: load.num_arrivals >= num_reads, "no blocks are read")  # noqa: B023
            num_begun = step.num_arrivals  # after the reads: what is true now was true then
        completion = request.completion()
        stack.assert_exact(completion, prompt, GREEDY)
        stack.assert_moved(completion)
        if num_begun < NUM_CHUNKS:
            return
    raise AssertionError(f"in {NUM_TRIES} tries the last chunk had always begun when blocks were read")


@on("shared_storage", "nixl")
async def test_requests_with_common_blocks_at_once_each_get_their_own_answer(
    stack: Stack, prompts: random.Random
) -> None:
    shared = random_prompt(prompts, 5 * BLOCK_SIZE)
    requests = [
        (shared + random_prompt(prompts, prompts.randrange(1, 80)), {**SEEDED, "seed": seed} if seed % 2 else GREEDY)
        for seed in range(16)
    ]
    async with AsyncClient(stack.rig.address) as client:
        completions = await asyncio.gather(*(client.generate(prompt, **sampling) for prompt, sampling in requests))
    for (prompt, sampling), completion in zip(requests, completions, strict=True):
        stack.assert_exact(completion, prompt, sampling)
        assert completion.usage.recomputed_tokens == 0, stack.rig.router_warnings()


@on("shared_storage", "nixl")
@pytest.mark.parametrize("state", ["saving", "loading"])
def test_a_slow_peer_costs_time_alone(stack: Stack, prompts: random.Random, state: str) -> None:
    prompt = random_prompt(prompts, 150)
    with stack.stopped_at(state) as stop:
        request = BackgroundRequest(stack.rig.address, prompt, **SEEDED)
        stop.wait()
        time.sleep(DELAY_S)  # the fault itself
    completion = request.completion()
    stack.assert_exact(completion, prompt, SEEDED)
    stack.assert_moved(completion)


@on(kind="two pairs")
async def test_requests_over_two_pools_of_two_are_exact_and_all_kv_moved(stack: Stack, prompts: random.Random) -> None:
    """Whichever pair of instances a request meets."""
    requests = [
        (random_prompt(prompts, prompts.randrange(1, 400)), {**SEEDED, "seed": seed} if seed % 2 else GREEDY)
        for seed in range(32)
    ]
    before = stack.settled()
    async with AsyncClient(stack.rig.address) as client:
        completions = await asyncio.gather(*(client.generate(prompt, **sampling) for prompt, sampling in requests))
    for (prompt, sampling), completion in zip(requests, completions, strict=True):
        stack.assert_exact(completion, prompt, sampling)
        stack.assert_moved(completion)
    after = stack.settled()
    num_generated = {name: after[name].num_generated_tokens - before[name].num_generated_tokens for name in after}
    assert all(num_generated.values()), f"an instance had nothing to do: {num_generated}"
    decode = [name for name in after if name.startswith("decode")]
    assert sum(after[name].num_prefilled_tokens - before[name].num_prefilled_tokens for name in decode) == 0
    assert sum(num_generated[name] for name in decode) == len(requests) * (GREEDY["max_tokens"] - 1)


@on_stack("pair shared_storage")
def test_text_in_text_out(stack: Stack) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. Grüße, 漢字 and 😀!"
    sampling = {**GREEDY, "max_tokens": 40}
    with Client(stack.rig.address) as client:
        pieces = list(client.stream(prompt, **sampling))
        completion = client.generate(prompt, **sampling)
    assert_same_answer(completion, stack.reference.answer(prompt, **sampling))
    assert "".join(piece.text for piece in pieces) == completion.text
    assert len(pieces) > 1, "the answer came in one piece"


@on_stack("pair shared_storage")
def test_a_stop_string_ends_the_answer_where_the_aggregated_engine_ends_it(
    stack: Stack, prompts: random.Random
) -> None:
    prompt = random_prompt(prompts, 50)
    whole = stack.reference.answer(prompt, **GREEDY)
    assert whole.text is not None
    middle = whole.text[len(whole.text) // 2 :][:3]
    sampling = {**GREEDY, "stop": [middle]}
    completion = stack.generate(prompt, sampling)
    assert_same_answer(completion, stack.reference.answer(prompt, **sampling))
    assert completion.finish_reason == "stop"
    assert middle not in completion.text


@on_stack("pair shared_storage")
def test_one_token_is_answered_by_the_prefill_instance_alone(stack: Stack, prompts: random.Random) -> None:
    before = stack.settled()["decode-0"]
    completion = stack.generate(random_prompt(prompts, 40), {"temperature": 0.0, "max_tokens": 1})
    assert len(completion.token_ids) == 1
    assert completion.finish_reason == "length"
    assert stack.settled()["decode-0"].num_generated_tokens == before.num_generated_tokens


@on_stack("pair shared_storage")
def test_several_choices_differ_and_a_seed_repeats_them(stack: Stack, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 40)
    sampling = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    together, again = stack.generate(prompt, sampling), stack.generate(prompt, sampling)
    assert len({choice.token_ids for choice in together.choices}) == 3
    assert [choice.token_ids for choice in together.choices] == [choice.token_ids for choice in again.choices]


@pytest.mark.slow
@on_stack("prefix store")
def test_a_shared_prefix_is_computed_once_for_all_prefill_instances(stack: Stack, prompts: random.Random) -> None:
    """NIXL hands over, Redis keeps prefixes: no prefill instance computes what another one has computed."""
    prefix = random_prompt(prompts, 10 * BLOCK_SIZE)
    names = [name for name in stack.rig.stack.instances if name.startswith("prefill")]
    before, num_prompts, num_stored = stack.settled(), 0, 0

    def num_prefilled(name: str) -> int:
        return stack.rig.load(name).num_prefilled_tokens - before[name].num_prefilled_tokens

    # One, then two at once, until each prefill instance has served one: the second finds the first one's place taken.
    while not all(map(num_prefilled, names)):
        assert num_prompts < 40, "one of two prefill instances was never picked"
        asked = [prefix + random_prompt(prompts, 5) for _ in range(2 if num_prompts else 1)]
        with ThreadPoolExecutor() as clients:
            completions = list(clients.map(lambda prompt: stack.generate(prompt, GREEDY), asked))
        for prompt, completion in zip(asked, completions, strict=True):
            stack.assert_exact(completion, prompt, GREEDY)
            assert completion.usage.cached_tokens == (len(prefix) if num_prompts else 0)
            assert completion.usage.recomputed_tokens == 0, stack.rig.router_warnings()
            num_stored += completion.usage.stored_tokens
        num_prompts += len(asked)
    after = stack.settled()
    num_computed = sum(map(num_prefilled, names))
    assert num_computed == len(prefix) + 5 * num_prompts, "the prefix was computed more than once"
    num_loaded = sum(after[name].num_external_tokens - before[name].num_external_tokens for name in names)
    assert num_loaded == num_stored == len(prefix), "it came out of Redis once"
