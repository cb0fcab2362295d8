"""Whatever ends a request early, and wherever it is then, both pools free what it held within a second and a step.

Each test parks the request at a failpoint and waits until a process says that it stands there. Then the client leaves,
in one of four ways, and the failpoint is released.
"""

from __future__ import annotations

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
from tests.e2e.asking import Asked
from tests.faults.checker import assert_no_leak, footprint, wait_idle
from tests.faults.rig import Failpoint, Rig
from tests.lively import random_prompt

# Where a request can be: (member, failpoint). A queued one has been accepted while the engine stands in another's step.
PHASES = {
    "queued": ("prefill-0", "prefill.accepted"),
    "prefill chunk": ("prefill-0", "engine.step"),
    "hand-over": ("decode-0", "kv.load"),
    "decode step": ("decode-0", "engine.step"),
    "decode stream": ("decode-0", "decode.after_token"),
}
DEADLINE_S = 1.2


def ask(rig: Rig, prompt: list[int], **options: Any) -> Asked:
    """A request that would go on for long."""
    return Asked(rig.address, prompt, max_tokens=1500, temperature=0.0, ignore_eos=True, **options)


def cancelled(rig: Rig, prompt: list[int], parked: Failpoint) -> None:
    """The client goes: its connection is closed."""
    request = ask(rig, prompt)
    parked.wait()
    request.disconnect()
    request.join()
    assert request.error is not None


def aborted(rig: Rig, prompt: list[int], parked: Failpoint) -> None:
    """Somebody ends the request by its label."""
    request = ask(rig, prompt, request_id="to-be-aborted")
    parked.wait()
    with Client(rig.address) as other:
        assert other.abort("to-be-aborted") == 1
    assert request.completion().finish_reason == "abort"


def killed(rig: Rig, prompt: list[int], parked: Failpoint) -> None:
    """The client's process gets SIGKILL."""
    code = (
        "import json, sys; from tandem import Client\n"
        "Client(sys.argv[1]).generate(json.loads(sys.argv[2]), max_tokens=1500, temperature=0.0, ignore_eos=True)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", code, rig.address, str(prompt)])
    try:
        parked.wait()
        assert client.poll() is None
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()


def expired(rig: Rig, prompt: list[int], parked: Failpoint) -> None:
    """The deadline passes."""
    started_s = time.monotonic()
    request = ask(rig, prompt, timeout_s=DEADLINE_S)
    parked.wait()
    request.join()
    assert isinstance(request.error, TandemError)
    assert request.error.status == "DEADLINE_EXCEEDED"
    assert DEADLINE_S - 0.05 < time.monotonic() - started_s < 2 * DEADLINE_S  # parked, it would not end by itself


@pytest.mark.parametrize("leave", [cancelled, aborted, killed, expired])
@pytest.mark.parametrize("phase", PHASES)
def test_leaving_frees_both_pools(
    rig: Rig, prompts: random.Random, phase: str, leave: Callable[[Rig, list[int], Failpoint], None]
) -> None:
    before = footprint(rig)
    member, name = PHASES[phase]
    with contextlib.ExitStack() as cleanup:
        if phase == "queued":
            stepping = cleanup.enter_context(rig.armed("prefill-0", "engine.step"))
            first = ask(rig, random_prompt(prompts, 300))
            cleanup.callback(first.join)
            cleanup.callback(first.disconnect)
            stepping.wait()
        parked = cleanup.enter_context(rig.armed(member, name))
        leave(rig, random_prompt(prompts, 300), parked)
    assert_no_leak(before, rig)


def test_a_request_that_stays_is_not_disturbed_by_one_that_leaves(rig: Rig, prompts: random.Random) -> None:
    prompt = random_prompt(prompts, 100)
    with Client(rig.address) as client:
        alone = client.generate(prompt, max_tokens=60, temperature=0.0, ignore_eos=True)
        staying = client.stream(prompt, max_tokens=60, temperature=0.0, ignore_eos=True)
        ids = list(next(staying).token_ids)
        leaving = ask(rig, random_prompt(prompts, 300))
        time.sleep(0.05)
        leaving.disconnect()
        for piece in staying:
            ids += piece.token_ids
        leaving.join()
    assert tuple(ids) == alone.token_ids


@pytest.mark.parametrize("cycles", [20, pytest.param(200, marks=pytest.mark.slow)])
async def test_random_leaving_leaves_nothing(rig: Rig, prompts: random.Random, cycles: int) -> None:
    import asyncio

    before = footprint(rig)
    async with AsyncClient(rig.address) as client:

        async def one() -> None:
            prompt = random_prompt(prompts, prompts.randrange(1, 400))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(prompts.uniform(0.0, 0.4)):
                    await client.generate(prompt, max_tokens=200, temperature=0.0, ignore_eos=True)

        for _ in range(0, cycles, 4):
            await asyncio.gather(*(one() for _ in range(4)))
    assert_no_leak(before, rig)


def test_the_checker_sees_a_request_that_holds_blocks(rig: Rig, prompts: random.Random) -> None:
    """The leak checks above prove something only if they can fail."""
    with rig.armed("decode-0", "decode.after_token") as parked:
        request = ask(rig, random_prompt(prompts, 100))
        parked.wait()
        with pytest.raises(AssertionError, match="running blocks"):
            wait_idle(rig, within_s=0.3)
        request.disconnect()
    request.join()
