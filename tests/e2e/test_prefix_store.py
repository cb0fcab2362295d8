"""NIXL hands over, Redis keeps prefixes: what one prefill instance has computed, no other one computes again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import AsyncClient
from tests.faults.reference import Reference
from tests.faults.rig import Rig
from tests.kv_transfer.redis_server import redis_server
from tests.lively import BLOCK_SIZE, random_prompt, rig_settings

GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
NUM_PREFIX_TOKENS = 10 * BLOCK_SIZE


@pytest.fixture
def rig(checkpoint: Path, tmp_path: Path) -> Iterator[Rig]:
    """Two prefill instances that share a Redis."""
    with redis_server(tmp_path) as server:
        settings = rig_settings(checkpoint, num_prefill=2, connector="nixl,redis", kv_url=server.url, lease_s=30.0)
        rig = Rig(settings)
        rig.start()
        try:
            yield rig
        finally:
            rig.stop()


def num_prefilled(rig: Rig) -> dict[str, int]:
    return {name: load.num_prefilled_tokens for name, load in rig.loads().items() if name.startswith("prefill")}


def test_a_shared_prefix_is_computed_once_for_all_prefill_instances(rig: Rig, reference: Reference) -> None:
    source = random.Random(5)
    prefix = random_prompt(source, NUM_PREFIX_TOKENS)
    before = num_prefilled(rig)
    prompts = []

    async def ask(prompt: list[int]) -> None:
        async with AsyncClient(rig.address) as client:
            completion = await client.generate(prompt, **GREEDY)  # type: ignore[arg-type]
        assert completion.token_ids == reference.answer(prompt, **GREEDY).token_ids
        assert completion.usage.recomputed_tokens == 0, rig.router_warnings()

    # One after the other, until each prefill instance has served one.
    for _ in range(40):
        prompts.append(prefix + random_prompt(source, 5))
        asyncio.run(ask(prompts[-1]))
        after = num_prefilled(rig)
        if all(after[name] > before[name] for name in after):
            break
    else:
        raise AssertionError("one of two idle prefill instances was never picked")
    num_computed = sum(after.values()) - sum(before.values())
    assert num_computed == NUM_PREFIX_TOKENS + 5 * len(prompts), "the prefix was computed more than once"
    loads = rig.loads()
    assert sum(loads[name].num_external_tokens for name in after) == NUM_PREFIX_TOKENS, "it came out of Redis once"
