"""Kills instances of a shared stack at a state of a request."""

from __future__ import annotations

import time
from typing import Any

from tests.system.background_request import BackgroundRequest
from tests.system.stacks import DECODE_STEP_S, SEEDED, SETTLE_S, SHORT_LEASE_S, Stack
from tests.waiting import Stopwatch, wait_until

FREED_WITHIN_S = SHORT_LEASE_S + 1.0 + 2.0
"""The lease and a second, and time for load reports on a busy machine."""
STALL_S = 5.0
"""From the kill to the end of an answer as long as that to SEEDED."""


def choose(stack: Stack, stopped: str, role: str) -> str:
    """The instance of `role` that takes part in the request which is stopped in `stopped`; if none does, any."""
    if stopped.startswith(role):
        return stopped
    names = [name for name in stack.rig.stack.instances if name.startswith(role)]
    deadline_s = time.monotonic() + 0.6  # two load reports
    while time.monotonic() < deadline_s:
        for name in names:
            if stack.busy(name):
                return name
    return names[0]


def kill_at(stack: Stack, prompt: list[int], state: str, victim: str, sampling: dict[str, Any] = SEEDED) -> None:
    """SIGKILL to the victim while a request is at `state`."""
    rig, private = stack.rig, stack.private()
    with stack.stopped_at(state) as stop:
        request = BackgroundRequest(rig.address, prompt, **sampling)
        name = choose(stack, stop.wait(), victim)
        rig.kill(name)
        watch = Stopwatch()
    completion = request.completion()
    assert watch.s < STALL_S + (sampling["max_tokens"] - SEEDED["max_tokens"]) * DECODE_STEP_S
    stack.assert_exact(completion, prompt, sampling)
    rig.stack.restart(name)  # not waited for
    survivors = [instance for instance in rig.stack.instances if instance != name]
    stack.wait_idle(survivors, FREED_WITHIN_S)
    if victim == "decode":
        stack.wait_clean(private)
    else:
        sweep(stack, private)


def sweep(stack: Stack, private: set[str]) -> None:
    """Removes the tail that a dead prefill instance left. Age would, too, but other tests look into the same store."""
    if stack.pages is None:
        return
    wait_until(lambda: len(stack.private() - private) <= 1, "more is left than one tail", SETTLE_S)
    for name in stack.private() - private:
        stack.pages.remove(name)
