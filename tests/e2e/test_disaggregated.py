"""A prompt prefilled on one instance and decoded on another: the aggregated engine's tokens, and KV really moved."""

from __future__ import annotations

import random

import pytest

from tandem import AsyncClient, Client
from tests.faults.checker import assert_no_leak, assert_same_answer, assert_usage, footprint
from tests.faults.reference import Reference
from tests.faults.rig import Rig
from tests.lively import BLOCK_SIZE, random_prompt

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 24, "ignore_eos": True}
NARROWED = {**SEEDED, "top_p": 1.0, "top_k": 20, "min_p": 0.02, "temperature": 1.3}


def test_the_reference_is_lively(reference: Reference, prompts: random.Random) -> None:
    """Equal answers prove something only if answers differ from each other, and within themselves."""
    answers = [reference.answer(random_prompt(prompts, 20), **GREEDY).token_ids for _ in range(6)]
    assert len(set(answers)) == 6
    assert len({token_id for answer in answers for token_id in answer}) > 30


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 100, 257])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, NARROWED], ids=["greedy", "seeded", "narrowed"])
def test_tokens_equal_those_of_the_aggregated_engine(
    rig: Rig, reference: Reference, prompts: random.Random, length: int, sampling: dict[str, object]
) -> None:
    prompt = random_prompt(prompts, length)
    answer = reference.answer(prompt, **sampling)
    before = rig.load("decode-0")
    with Client(rig.address) as client:
        completion = client.generate(prompt, **sampling)  # type: ignore[arg-type]
    assert_same_answer(completion, answer)
    assert_usage(completion)
    # KV came over the wire, all of it: nothing was computed twice.
    usage = completion.usage
    assert usage.external_tokens == length - usage.cached_tokens
    assert usage.recomputed_tokens == 0
    after = rig.load("decode-0")
    assert after.num_external_tokens - before.num_external_tokens >= usage.external_tokens
    assert after.num_recomputed_blocks == before.num_recomputed_blocks
    assert after.num_prefilled_tokens == before.num_prefilled_tokens, "the decode instance prefilled something"


def test_a_repeated_prefix_is_not_moved_again(rig: Rig, reference: Reference, prompts: random.Random) -> None:
    shared = random_prompt(prompts, 6 * BLOCK_SIZE)
    with Client(rig.address) as client:
        client.generate(shared + random_prompt(prompts, 20), **GREEDY)  # type: ignore[arg-type]
        prompt = shared + random_prompt(prompts, 20)
        before = rig.load("decode-0")
        completion = client.generate(prompt, **GREEDY)  # type: ignore[arg-type]
    assert_same_answer(completion, reference.answer(prompt, **GREEDY))
    moved = rig.load("decode-0").num_external_tokens - before.num_external_tokens
    assert 20 <= moved < len(prompt), "the decode instance asked for blocks that it had"


async def test_many_requests_at_once_each_get_their_own_answer(
    rig: Rig, reference: Reference, prompts: random.Random
) -> None:
    import asyncio

    asked = [(random_prompt(prompts, prompts.randrange(1, 150)), {**SEEDED, "seed": seed}) for seed in range(16)]
    before = footprint(rig)
    async with AsyncClient(rig.address) as client:
        completions = await asyncio.gather(*(client.generate(prompt, **how) for prompt, how in asked))
    for (prompt, how), completion in zip(asked, completions, strict=True):
        assert_same_answer(completion, reference.answer(prompt, **how))
        assert_usage(completion)
    assert_no_leak(before, rig)


def test_text_in_text_out(rig: Rig, reference: Reference) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. Grüße, 漢字 and 😀!"
    sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    with Client(rig.address) as client:
        pieces = list(client.stream(prompt, **sampling))  # type: ignore[arg-type]
        completion = client.generate(prompt, **sampling)  # type: ignore[arg-type]
    assert_same_answer(completion, reference.answer(prompt, **sampling))
    assert "".join(piece.text for piece in pieces) == completion.text
    assert len(pieces) > 10, "the answer came in one lump"


def test_a_stop_string_ends_the_answer_where_the_aggregated_engine_ends_it(
    rig: Rig, reference: Reference, prompts: random.Random
) -> None:
    prompt = random_prompt(prompts, 50)
    whole = reference.answer(prompt, **GREEDY)
    assert whole.text is not None
    middle = whole.text[len(whole.text) // 2 :][:3]
    sampling = {**GREEDY, "stop": [middle]}
    with Client(rig.address) as client:
        completion = client.generate(prompt, **sampling)  # type: ignore[arg-type]
    assert_same_answer(completion, reference.answer(prompt, **sampling))
    assert completion.finish_reason == "stop"
    assert middle not in completion.text


def test_one_token_is_answered_by_the_prefill_instance_alone(rig: Rig, prompts: random.Random) -> None:
    before = rig.load("decode-0")
    with Client(rig.address) as client:
        completion = client.generate(random_prompt(prompts, 40), temperature=0.0, max_tokens=1)
    assert len(completion.token_ids) == 1
    assert completion.finish_reason == "length"
    assert rig.load("decode-0").num_generated_tokens == before.num_generated_tokens


def test_several_choices_differ_and_each_is_the_reference(rig: Rig, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 40)
    with Client(rig.address) as client:
        together = client.generate(prompt, n=3, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
        again = client.generate(prompt, n=3, seed=5, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert len({choice.token_ids for choice in together.choices}) == 3
    assert [choice.token_ids for choice in together.choices] == [choice.token_ids for choice in again.choices]
