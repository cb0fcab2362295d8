"""Where every layer has a sliding window, blocks that have left all windows are released, and no answer changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.core.core import EngineCore
from engine.core.messages import AddRequest, EngineRequest
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from tests.builders import lively_checkpoint
from tests.kv_transfer.core_pair import CorePair, store_config
from tests.oracle import GreedyOracle, random_prompts

WINDOW, BLOCK_SIZE = 24, 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
MOST_BLOCKS = -(-(WINDOW + 33) // BLOCK_SIZE) + 1
"""That a request needs at once, with chunks of 32."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("mistral"), "mistral", sliding_window=WINDOW)


def make_llm(checkpoint: Path, num_blocks: int) -> LLM:
    options: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_num_batched_tokens": 32}
    return LLM(checkpoint, skip_tokenizer_init=True, num_gpu_blocks_override=num_blocks, **options)


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS, use_tqdm=False)
    assert llm.core.load.running_blocks == 0
    return [answer.outputs[0].token_ids for answer in answers]


def most_running_blocks(core: EngineCore, prompt: list[int]) -> int:
    """The largest number of blocks in use while one request runs."""
    core.handle(AddRequest(EngineRequest(request_id="r", prompt_token_ids=prompt, params=PARAMS)))
    most = 0
    while not any(event.finish_reason for event in core.step()):  # type: ignore[union-attr]
        most = max(most, core.load.running_blocks)
    return most


def test_a_request_holds_the_blocks_of_its_window_alone(checkpoint: Path) -> None:
    prompt = random_prompts(2, longest=200, vocab_size=1000)[1]
    core = make_llm(checkpoint, 64).core
    assert most_running_blocks(core, prompt) <= MOST_BLOCKS < len(prompt) // BLOCK_SIZE


def test_answers_of_a_pool_that_holds_the_windows_alone_equal_transformers(checkpoint: Path) -> None:
    prompts = random_prompts(12, longest=150, vocab_size=1000)
    llm = make_llm(checkpoint, 12 * MOST_BLOCKS)
    answers = generate(llm, prompts)
    assert llm.core.load.num_preemptions == 0
    assert sum(len(prompt) + 100 for prompt in prompts) > 12 * MOST_BLOCKS * BLOCK_SIZE
    oracle = GreedyOracle(checkpoint)
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(prompt, answer)
    tight = make_llm(checkpoint, 32)
    assert generate(tight, prompts) == answers
    assert tight.core.load.num_preemptions > 0
    computed = tight.core.load.num_prefilled_tokens
    assert generate(tight, [prompts[1]]) == [answers[1]]
    assert generate(tight, [prompts[1]]) == [answers[1]]
    again = tight.core.load.num_prefilled_tokens - computed
    assert again <= len(prompts[1]) + BLOCK_SIZE, "the second time from the prefix cache"


def test_a_hand_over_moves_every_block_and_decode_releases_what_left_the_window(
    checkpoint: Path, tmp_path: Path
) -> None:
    prompts = random_prompts(4, longest=150, vocab_size=1000, seed=3)
    expected = generate(make_llm(checkpoint, 256), prompts)
    pair = CorePair(store_config(checkpoint, tmp_path, block_size=BLOCK_SIZE, num_blocks=128))
    for number in range(2):
        for index, prompt in enumerate(prompts):
            pair.start(f"{number}-{index}", prompt, PARAMS)
        pair.run()
    outcomes = list(pair.outcomes.values())
    assert [outcome.token_ids for outcome in outcomes] == expected * 2
    assert all(outcome.loaded and not outcome.loaded.num_recomputed_blocks for outcome in outcomes)
    longest = prompts[1]
    assert outcomes[1].loaded is not None
    assert outcomes[1].loaded.num_external_tokens == len(longest)
    assert outcomes[5].num_local_blocks == len(longest) // BLOCK_SIZE
    pair.close()


@settings(max_examples=200)
@given(
    is_cached=st.lists(st.booleans(), max_size=12),
    window=st.one_of(st.none(), st.integers(1, 60)),
    is_whole=st.booleans(),
)
def test_the_longest_prefix_whose_visible_blocks_are_cached(
    is_cached: list[bool], window: int | None, is_whole: bool
) -> None:
    tokens = list(range(len(is_cached) * BLOCK_SIZE + 1))
    sizes = {"num_blocks": 12, "block_size": BLOCK_SIZE, "max_model_len": 200, "max_num_seqs": 1}
    kv = KVCacheManager(**sizes, enable_prefix_caching=True, window=window)
    spec = EngineRequest(request_id="r", prompt_token_ids=tokens, params=PARAMS)
    request = Request.from_spec(spec, arrival=0, fingerprint="f")
    request.update_block_hashes(BLOCK_SIZE)
    for block, block_hash, chosen in zip(kv.pool.take(len(is_cached)), request.block_hashes, is_cached, strict=True):
        if chosen:
            kv.pool.publish(block, block_hash)

    def is_usable(count: int) -> bool:
        position = count * BLOCK_SIZE
        seen = range(position) if window is None or is_whole else range(max(0, position - window + 1), position)
        return all(is_cached[place // BLOCK_SIZE] for place in seen)

    expected = max(count for count in range(len(is_cached) + 1) if is_usable(count))
    prefix = kv.find_prefix(request, len(tokens) - 1, is_whole=is_whole)
    assert len(prefix) == expected
    for index, block in enumerate(prefix):
        is_seen = window is None or is_whole or (index + 1) * BLOCK_SIZE > expected * BLOCK_SIZE - window + 1
        assert (block is not kv.pool.null_block) is is_seen
