"""Every architecture through real stacks: fifty prompts at once, split between the pools, checked against
transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tandem import AsyncClient, Completion
from tandem.demo import MODEL_DIR
from tests.builders import lively_checkpoint
from tests.faults.checker import assert_no_leak, footprint
from tests.faults.rig import Rig
from tests.lively import rig_settings
from tests.oracle import GreedyOracle, random_prompts

NUM_PROMPTS = 50
NUM_TOKENS = 64
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
PATIENT = ("--peers-ping-timeout-ms", "20000")
"""Fifty prompts on two cores can keep a process waiting for longer than what counts as dead in production, and a prompt
at the router's door for longer than anybody would."""
IN_EVERY_RUN = {("demo", 1)}
"""Architecture and instances per pool; the other pairs are for the full run."""


def pairs() -> Iterator[object]:
    for arch in ("llama", "qwen2", "qwen3", "mistral", "demo"):
        for size in (1, 2):
            marks = () if (arch, size) in IN_EVERY_RUN else pytest.mark.slow
            yield pytest.param((arch, size), marks=marks, id=f"{arch}-{size}P{size}D")


@pytest.fixture(params=pairs())
def split(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Rig]]:
    """A checkpoint and a stack of its own that serves it."""
    arch, size = request.param
    checkpoint = MODEL_DIR if arch == "demo" else lively_checkpoint(tmp_path / arch, arch)
    settings = rig_settings(checkpoint, num_prefill=size, num_decode=size, num_blocks=4096, lease_s=30.0)
    rig = Rig(
        replace(
            settings,
            instance_args=(*settings.instance_args, *PATIENT),
            router_args=(*settings.router_args, "--admission-queue-timeout-s", "60"),
        )
    )
    rig.start()
    try:
        yield checkpoint, rig
    finally:
        rig.stop()


async def ask_all(address: str, prompts: list[list[int]]) -> list[Completion]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(client.generate(prompt, **GREEDY) for prompt in prompts))  # type: ignore[arg-type]


def test_fifty_prompts_at_once_equal_transformers_and_their_kv_moved(split: tuple[Path, Rig]) -> None:
    checkpoint, rig = split
    oracle = GreedyOracle(checkpoint)
    prompts = random_prompts(NUM_PROMPTS, longest=600, vocab_size=oracle.vocab_size)
    before = footprint(rig)
    completions = asyncio.run(ask_all(rig.address, prompts))
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == NUM_TOKENS
        oracle.check(prompt, list(completion.token_ids))
        usage = completion.usage
        assert usage.external_tokens == len(prompt) - usage.cached_tokens, rig.router_warnings()
        assert usage.recomputed_tokens == 0
    decode = [load for name, load in rig.loads().items() if name.startswith("decode")]
    assert sum(load.num_generated_tokens for load in decode) == NUM_PROMPTS * (NUM_TOKENS - 1)
    assert sum(load.num_prefilled_tokens for load in decode) == 0, "decode computed prompt tokens"
    assert sum(load.num_recomputed_blocks for load in decode) == 0
    assert all(load.num_generated_tokens > 0 for load in rig.loads().values()), "an instance had nothing to do"
    if checkpoint != MODEL_DIR:
        assert len({token for completion in completions for token in completion.token_ids}) >= 50
    assert_no_leak(before, rig)
