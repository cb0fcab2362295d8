"""Every architecture through real stacks: fifty prompts at once, handed over, checked against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem import AsyncClient, Completion
from tandem.demo import MODEL_DIR
from tests.builders import dequantised, lively_checkpoint
from tests.lively import PATIENT_PEERS
from tests.oracle import GreedyOracle, random_prompts
from tests.system.reference import Reference
from tests.system.rig import Rig
from tests.system.stacks import Model, Stack, on_stack, started

NUM_PROMPTS, NUM_DEMO_PROMPTS = 50, 16
NUM_TOKENS = 64
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}
PAIRS = [
    *((name, size, "none") for name in ("llama", "qwen2", "qwen3", "mistral") for size in (1, 2)),
    ("demo", 2, "none"),
    ("qwen3_moe", 1, "none"),
    ("gemma2", 1, "none"),
    ("gpt_oss", 1, "none"),
    ("qwen2", 1, "int8"),
    ("gemma2", 1, "int4"),
]
"""Architecture, instances per pool, quantization."""


@pytest.fixture(params=PAIRS, ids=lambda pair: "{0}-{1}P{1}D-{2}".format(*pair))
def architectures_stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stack]:
    """A stack of its own that serves the architecture."""
    name, size, quantization = request.param
    checkpoint = MODEL_DIR if name == "demo" else lively_checkpoint(tmp_path / name, name)
    with started(
        Model(checkpoint, Reference(checkpoint), tmp_path),
        size=size,
        failpoints=False,
        quantization=quantization,
        num_blocks=4096,
        instance_args=PATIENT_PEERS,
        router_args=("--admission-queue-timeout-s", "60"),
    ) as stack:
        yield stack


async def generate_all(address: str, prompts: list[list[int]]) -> list[Completion]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(client.generate(prompt, **GREEDY) for prompt in prompts))  # type: ignore[arg-type]


@on_stack("demo")
def test_prompts_of_the_demo_model_equal_transformers_and_their_kv_moved(stack: Stack) -> None:
    assert_prompts_are_exact(stack.rig, MODEL_DIR, NUM_DEMO_PROMPTS)


@pytest.mark.slow
def test_fifty_prompts_at_once_equal_transformers_and_their_kv_moved(
    architectures_stack: Stack, tmp_path: Path
) -> None:
    checkpoint, quantization = architectures_stack.reference.folder, architectures_stack.rig.stack.settings.quantization
    same = checkpoint if quantization == "none" else dequantised(checkpoint, tmp_path / "numbers", quantization)
    with architectures_stack.leaves_nothing():
        completions = assert_prompts_are_exact(architectures_stack.rig, same, NUM_PROMPTS)
    if checkpoint != MODEL_DIR:
        assert len({token for completion in completions for token in completion.token_ids}) >= 50


def assert_prompts_are_exact(rig: Rig, checkpoint: Path, num_prompts: int) -> list[Completion]:
    oracle = GreedyOracle(checkpoint)
    prompts = random_prompts(num_prompts, longest=600, vocab_size=oracle.vocab_size)
    before = rig.loads()
    completions = asyncio.run(generate_all(rig.address, prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == NUM_TOKENS
        logprobs = [position[0].logprob for position in completion.choices[0].logprobs]
        oracle.check(prompt, list(completion.token_ids), logprobs)
        usage = completion.usage
        assert usage.external_tokens == len(prompt) - usage.cached_tokens, rig.router_warnings()
        assert usage.recomputed_tokens == 0
    after = rig.loads()
    num_generated = sum_of("num_generated_tokens", before, after, "decode")
    assert num_generated == num_prompts * (NUM_TOKENS - 1), rig.router_warnings()
    assert sum_of("num_prefilled_tokens", before, after, "decode") == 0, "decode computed prompt tokens"
    assert sum_of("num_recomputed_blocks", before, after, "decode") == 0
    assert all(sum_of("num_generated_tokens", before, after, name) > 0 for name in after), "an instance had no work"
    return completions


def sum_of(counter: str, before: dict[str, Any], after: dict[str, Any], role: str) -> int:
    """By how much a counter of load reports has grown, over the instances of `role`."""
    names = [name for name in after if name.startswith(role)]
    return sum(getattr(after[name], counter) - getattr(before[name], counter) for name in names)
