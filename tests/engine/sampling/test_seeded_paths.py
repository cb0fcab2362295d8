"""Seeded sampling gives the same tokens in any batch, after preemption, and at another instance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from tests.builders import lively_checkpoint
from tests.oracle import random_prompts

NUM_TOKENS = 48


def params_for(index: int) -> SamplingParams:
    """A different way of sampling for each request of the batch."""
    ways: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 40},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 100, "top_p": 0.8, "min_p": 0.01},
    ]
    return SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1000 + index, **ways[index % len(ways)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(32, longest=120, vocab_size=1024, seed=3)


def engine(checkpoint: Path, num_blocks: int = 2048) -> LLM:
    return LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=num_blocks)


def run(llm: LLM, prompts: list[list[int]], *, first: int = 0) -> list[list[int]]:
    params = [params_for(first + index) for index in range(len(prompts))]
    return [answer.outputs[0].token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def together(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    return run(engine(checkpoint), prompts)


def test_a_batch_of_32_gives_what_each_gives_alone(
    checkpoint: Path, prompts: list[list[int]], together: list[list[int]]
) -> None:
    assert len({tuple(token_ids) for token_ids in together}) == len(prompts)
    llm = engine(checkpoint)
    assert together == [run(llm, [prompt], first=index)[0] for index, prompt in enumerate(prompts)]


def test_preemption_changes_no_sampled_token(
    checkpoint: Path, prompts: list[list[int]], together: list[list[int]]
) -> None:
    llm = engine(checkpoint, num_blocks=48)
    assert run(llm, prompts) == together
    assert llm.core.load.num_preemptions > 0


def test_choices_of_one_prompt_differ_and_are_reproducible(checkpoint: Path, prompts: list[list[int]]) -> None:
    llm = LLM(checkpoint, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=512)
    params = SamplingParams(n=4, temperature=1.0, max_tokens=12, seed=5, ignore_eos=True)
    prompt = max(prompts, key=len)
    first = llm.generate([prompt], params, use_tqdm=False)[0]
    num_prefilled = llm.core.load.num_prefilled_tokens
    second = llm.generate([prompt], params, use_tqdm=False)[0]
    choices = [output.token_ids for output in first.outputs]
    assert choices == [output.token_ids for output in second.outputs]
    assert len({tuple(token_ids) for token_ids in choices}) == 4
    num_shared = (len(prompt) - 1) // 16 * 16
    assert num_prefilled == len(prompt) + 3 * (len(prompt) - num_shared), "sisters share the prompt's blocks"
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, num_shared)
