"""Requests that end early, at any state and in any way: the instances and the store free everything they held.

Each test stops the request at a failpoint and waits until a process reports that it stands there. Then the request is
cancelled, and the failpoint is released. `stack` counts blocks, transfers, stored pages, open files, threads and
processes, long before a lease is over: what is free was given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tandem import AsyncClient, Client, TandemError
from tests.engine_under_test import BLOCK_SIZE
from tests.lively import random_prompt
from tests.system.background_request import BackgroundRequest
from tests.system.checker import assert_no_leak, footprint, wait_idle
from tests.system.connectors import CONNECTORS
from tests.system.rig import Failpoint, Rig
from tests.system.stacks import GREEDY, LONG, STATES, Stack, on, on_stack
from tests.waiting import wait_until

AT_ONCE = 8
DEADLINE_S = 3.0
FREED_WITHIN_S = 1.5
"""The promise is one second and one step; load reports come every quarter of a second."""
NUM_TRIES = 3

PHASES = {
    "queued": ("prefill-0", "prefill.accepted"),
    "prefill chunk": ("prefill-0", "engine.step"),
    "hand-over": ("decode-0", "kv.load"),
    "decode step": ("decode-0", "engine.step"),
    "decode stream": ("decode-0", "decode.after_token"),
}
"""Instance and failpoint. A queued request has been accepted while the engine is stopped in another request's step."""


def abort(rig: Rig, prompt: list[int], stopped: Failpoint) -> None:
    """Another client ends the request by its id."""
    request = long_request(rig, prompt, request_id="to-be-aborted")
    stopped.wait()
    with Client(rig.address) as other:
        assert other.abort("to-be-aborted") == 1
    assert request.completion().finish_reason == "abort"


def disconnect(rig: Rig, prompt: list[int], stopped: Failpoint) -> None:
    """The client closes its connection."""
    request = long_request(rig, prompt)
    stopped.wait()
    request.disconnect()
    request.join()
    assert request.error is not None


def kill(rig: Rig, prompt: list[int], stopped: Failpoint) -> None:
    """The client's process gets SIGKILL."""
    code = (
        "import json, sys; from tandem import Client\n"
        "Client(sys.argv[1]).generate(json.loads(sys.argv[2]), max_tokens=1000, temperature=0.0, ignore_eos=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", code, rig.address, str(prompt)])
    try:
        stopped.wait(60)
        assert client.poll() is None
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()


def expire(rig: Rig, prompt: list[int], stopped: Failpoint) -> None:
    """The client's deadline passes."""
    started_s = time.monotonic()
    request = long_request(rig, prompt, timeout_s=DEADLINE_S)
    stopped.wait()
    request.join()
    assert isinstance(request.error, TandemError)
    assert request.error.status == "DEADLINE_EXCEEDED"
    assert time.monotonic() - started_s > DEADLINE_S - 0.05


def long_request(rig: Rig, prompt: list[int], **options: Any) -> BackgroundRequest:
    return BackgroundRequest(rig.address, prompt, **LONG, **options)


Ending = Callable[[Rig, list[int], Failpoint], None]
BY_DEFAULT = {("decode stream", kill), ("prefill chunk", expire)}


def phases_and_endings() -> list[Any]:
    """Every client that disconnects, and two of the others; the rest are slow tests. Aborts have their own test."""
    return [
        pytest.param(
            phase,
            end,
            marks=() if end is disconnect or (phase, end) in BY_DEFAULT else pytest.mark.slow,
            id=f"{phase}-{end.__name__}",
        )
        for phase in PHASES
        for end in (disconnect, abort, kill, expire)
    ]


@on_stack("pair shared_storage")
@pytest.mark.parametrize(("phase", "end"), phases_and_endings())
def test_both_pools_free_within_a_second_and_a_step(
    stack: Stack, prompts: random.Random, phase: str, end: Ending
) -> None:
    """A busy machine may delay one try, not every one."""
    before = footprint(stack.rig)
    for _ in range(NUM_TRIES):
        end_at(stack.rig, prompts, phase, end)
        freed_s = wait_idle(stack.rig, 15.0)
        if freed_s < FREED_WITHIN_S:
            break
    assert freed_s < FREED_WITHIN_S, f"the last of {NUM_TRIES} tries freed everything after {freed_s:.1f} s"
    assert_no_leak(before, stack.rig)


def end_at(rig: Rig, prompts: random.Random, phase: str, end: Ending) -> None:
    name, failpoint = PHASES[phase]
    with contextlib.ExitStack() as cleanup:
        if phase == "queued":
            step = cleanup.enter_context(rig.armed("prefill-0", "engine.step"))
            first = long_request(rig, random_prompt(prompts, 300))
            cleanup.callback(first.join)
            cleanup.callback(first.disconnect)
            step.wait()
        stopped = cleanup.enter_context(rig.armed(name, failpoint))
        end(rig, random_prompt(prompts, 300), stopped)


def connectors_and_states() -> list[Any]:
    """Each state of one connector; of NIXL, whose peers hold each other's blocks, those in which KV moves."""
    quick = {*(("shared_storage", state) for state in STATES), ("nixl", "saving"), ("nixl", "loading")}
    return [
        pytest.param(
            f"pair {name}",
            state,
            marks=() if (name, state) in quick else pytest.mark.slow,
            id=f"{state}-(pair {name})",  # as `on` names a stack
        )
        for name in CONNECTORS
        for state in STATES
    ]


@pytest.mark.parametrize(("shared_stack", "state"), connectors_and_states(), indirect=["shared_stack"])
def test_an_aborted_request_frees_everything(stack: Stack, prompts: random.Random, state: str) -> None:
    prompt = random_prompt(prompts, 150)
    with stack.stopped_at(state) as stop:
        request = long_request(stack.rig, prompt, request_id="to-be-aborted")
        stop.wait()
        with Client(stack.rig.address) as other:
            assert other.abort("to-be-aborted") == 1
        assert request.completion().finish_reason == "abort"
    stack.wait_idle()
    # What it left in caches and in the store is good.
    stack.assert_exact(stack.generate(prompt, GREEDY), prompt, GREEDY)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
@on("shared_storage", "nixl")
async def test_requests_cancelled_at_random_leave_nothing(stack: Stack, prompts: random.Random, count: int) -> None:
    shared = random_prompt(prompts, 10 * BLOCK_SIZE)
    ends = {"cancelled": 0, "finished": 0}
    logged = stack.rig.logged_exceptions()

    async with AsyncClient(stack.rig.address) as client:

        async def one() -> None:
            prompt = shared[: prompts.randrange(0, len(shared))] + random_prompt(prompts, prompts.randrange(1, 250))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(prompts.uniform(0.0, 0.3)):
                    several = prompts.choice(({}, {"n": 4, "temperature": 1.0}))
                    await client.generate(prompt, **{**LONG, "max_tokens": 300, **several})
                    ends["finished"] += 1
                    return
            ends["cancelled"] += 1

        async def some(num_requests: int) -> None:
            for _ in range(num_requests):
                await one()

        await asyncio.gather(*(some(count // AT_ONCE) for _ in range(AT_ONCE)))
    assert ends["cancelled"] > ends["finished"]
    prompt = shared + random_prompt(prompts, 40)
    stack.wait_idle()
    stack.assert_exact(stack.generate(prompt, GREEDY), prompt, GREEDY)
    assert stack.rig.logged_exceptions() == logged


@on_stack("pair shared_storage")
def test_a_request_that_stays_is_not_disturbed_by_one_that_leaves(stack: Stack, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 100)
    with Client(stack.rig.address) as client:
        alone = client.generate(prompt, **{**GREEDY, "max_tokens": 60})
        staying = client.stream(prompt, **{**GREEDY, "max_tokens": 60})
        ids = list(next(staying).token_ids)
        leaving = long_request(stack.rig, random_prompt(prompts, 300))
        leaving.wait_first_token()
        leaving.disconnect()
        for piece in staying:
            ids += piece.token_ids
        leaving.join()
    assert tuple(ids) == alone.token_ids


@on_stack("tight")
def test_the_checker_sees_a_request_that_holds_blocks(stack: Stack, prompts: random.Random) -> None:
    """The leak checks above prove something only if they can fail. This stack needs seconds for a long request."""
    request = long_request(stack.rig, random_prompt(prompts, 100))
    wait_until(lambda: "running blocks" in stack.busy("decode-0"), "the request does not run")
    with pytest.raises(AssertionError, match="running blocks"):
        wait_idle(stack.rig, within_s=0.3)
    request.disconnect()
    request.join()
