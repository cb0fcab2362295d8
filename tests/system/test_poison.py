"""A request under which real engines crash: two instances report it, and no further one gets the request."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tandem import Client
from tandem.client.errors import TandemError
from tests.system.background_request import BackgroundRequest
from tests.system.killable import KillableStack, killable_stack
from tests.waiting import wait_until

POISON = [3, 1, 4, 1, 5]
WHOLESOME = [2, 7, 1, 8, 2]


@pytest.fixture
def stack(checkpoint: Path) -> Iterator[KillableStack]:
    with killable_stack(checkpoint, num_prefill=0, num_decode=3) as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_request_under_which_engines_crash_costs_two_and_is_rejected(stack: KillableStack) -> None:
    rig, crashed = stack.rig, []
    with ExitStack() as armed:
        failpoints = {name: armed.enter_context(rig.armed(name, "engine.step")) for name in stack.decode}
        request = BackgroundRequest(rig.address, POISON, max_tokens=5, ignore_eos=True)
        for _ in range(2):
            wait_until(lambda: any(one.reached for one in failpoints.values()), "no instance computes it")
            victim = next(name for name, failpoint in failpoints.items() if failpoint.reached)
            os.kill(failpoints.pop(victim).wait().pid, signal.SIGKILL)  # the engine core alone
            crashed.append(victim)
        request.join()
        assert not any(failpoint.reached for failpoint in failpoints.values())
    assert isinstance(request.error, TandemError)
    assert (request.error.status, "rejected" in request.error.message) == ("INTERNAL", True)
    with Client(rig.address, timeout_s=60.0) as client:
        assert len(client.generate(WHOLESOME, max_tokens=5, ignore_eos=True).token_ids) == 5
        with pytest.raises(TandemError, match="rejected"):
            client.generate(POISON, max_tokens=5, ignore_eos=True)
    for victim in crashed:
        wait_until(lambda victim=victim: not rig.stack.processes[victim].running, f"{victim} goes on")  # type: ignore[misc]
        stack.rig.stack.restart(victim)
    stack.wait_up()
