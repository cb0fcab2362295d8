"""Requests that end early, wherever they are: both pools, the store and the processes are as if they had never been."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from tandem import AsyncClient, Client
from tests.conformance.stacks import GREEDY, LONG, STATES, Stack
from tests.conformance.subjects import on
from tests.e2e.asking import Asked
from tests.lively import BLOCK_SIZE, random_prompt

AT_ONCE = 8


@on("shared_storage", "nixl")
@pytest.mark.parametrize("state", STATES)
def test_aborted_request_gives_everything_back(stack: Stack, prompts: random.Random, state: str) -> None:
    """Long before its lease is over, so that it was given back and did not just run out."""
    prompt = random_prompt(prompts, 150)
    with stack.stopped_at(state) as stop:
        asked = Asked(stack.rig.address, prompt, request_id="to-be-aborted", **LONG)
        stop.wait()
        with Client(stack.rig.address) as other:
            assert other.abort("to-be-aborted") == 1
        assert asked.completion().finish_reason == "abort"
    stack.wait_idle()
    # What it left in caches and in the store is good.
    stack.assert_exact(stack.ask(prompt, GREEDY), prompt, GREEDY)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@on("shared_storage", "nixl", "redis")
async def test_requests_aborted_at_random_phases_leave_nothing(
    stack: Stack, prompts: random.Random, count: int
) -> None:
    """The `stack` fixture counts blocks, transfers, stored things, open files, threads and processes."""
    shared = random_prompt(prompts, 10 * BLOCK_SIZE)
    ends = {"aborted": 0, "finished": 0}

    async with AsyncClient(stack.rig.address) as client:

        async def one() -> None:
            prompt = shared[: prompts.randrange(0, len(shared))] + random_prompt(prompts, prompts.randrange(1, 250))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(prompts.uniform(0.0, 0.3)):
                    await client.generate(prompt, **{**LONG, "max_tokens": 300})
                    ends["finished"] += 1
                    return
            ends["aborted"] += 1

        async def some(num_requests: int) -> None:
            for _ in range(num_requests):
                await one()

        await asyncio.gather(*(some(count // AT_ONCE) for _ in range(AT_ONCE)))
    assert ends["aborted"] > ends["finished"]
    prompt = shared + random_prompt(prompts, 40)
    stack.wait_idle()
    stack.assert_exact(stack.ask(prompt, GREEDY), prompt, GREEDY)
