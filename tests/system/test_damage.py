"""A stored page that is damaged, short, swapped or gone costs a recompute, which is counted, and never a token.

The decode instance is stopped before it reads the first page, until the prefill instance has written the last one. In
between the test does to the pages what disks, other programs and attackers do.
"""

from __future__ import annotations

import random

import pytest

from tests.engine_under_test import BLOCK_SIZE
from tests.lively import random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_usage
from tests.system.connectors import STORES
from tests.system.stacks import GREEDY, Stack, on
from tests.system.stored_pages import DAMAGES
from tests.waiting import wait_until

NUM_PAGES = 7
"""The last one is the unfilled tail."""
LENGTH = (NUM_PAGES - 1) * BLOCK_SIZE + 5
QUICK = ("payload bit", "all gone")
"""In each run. tests/kv_transfer/stores has all kinds in each run, over each store and between two engine cores."""


@on("shared_storage", "redis", names=STORES)
@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DAMAGES]
)
def test_damage_costs_a_recompute_and_never_a_token(stack: Stack, prompts: random.Random, damage: str) -> None:
    pages = stack.pages
    assert pages is not None
    prompt = random_prompt(prompts, LENGTH)
    before, old = stack.settled()["decode-0"], pages.names()
    with stack.stopped_at("loading") as stop:
        request = BackgroundRequest(stack.rig.address, prompt, **GREEDY)
        stop.wait()
        num_pages = NUM_PAGES - stack.backing.is_prefix_store
        wait_until(lambda: len(pages.names() - old) == num_pages, "not all pages are in the store")
        DAMAGES[damage](pages, sorted(pages.names() - old), prompts)
    completion = request.completion()
    stack.assert_exact(completion, prompt, GREEDY)
    assert_usage(completion)
    if not stack.backing.is_prefix_store:
        assert completion.usage.recomputed_tokens > 0
        after = stack.settled()["decode-0"]
        assert after.num_recomputed_blocks > before.num_recomputed_blocks
    # The store heals: the next request gets the same tokens, wherever the KV comes from.
    stack.assert_exact(stack.generate(prompt, GREEDY), prompt, GREEDY)
