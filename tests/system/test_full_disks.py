"""A stack whose processes can write nothing more to files, as on a full disk: no request fails and no token is wrong.

RLIMIT_FSIZE, set from outside on processes that run, makes every write to a file fail, that of a log line too.
"""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.engine_under_test import BLOCK_SIZE
from tests.lively import random_prompt
from tests.system.stacks import GREEDY, Stack, on_stack
from tests.waiting import wait_until

LENGTH = 6 * BLOCK_SIZE + 5


@contextmanager
def full_disk(stack: Stack, *names: str) -> Iterator[None]:
    """Each write to a file by these members of the stack fails until the block ends."""
    processes = [psutil.Process(stack.rig.stack.processes[name].pid) for name in names]
    processes += [child for process in processes for child in process.children(recursive=True)]
    before = {each.pid: resource.prlimit(each.pid, resource.RLIMIT_FSIZE) for each in processes}
    for pid, (_, hard) in before.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        for pid, limits in before.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


@on_stack("demo")  # without failpoints, which write files
@pytest.mark.parametrize("names", [("prefill-0",), ("decode-0",), ("router", "prefill-0", "decode-0")], ids="+".join)
def test_a_full_disk_costs_no_token(stack: Stack, prompts: random.Random, names: tuple[str, ...]) -> None:
    with full_disk(stack, *names):
        for _ in range(3):
            prompt = random_prompt(prompts, LENGTH)
            completion = stack.generate(prompt, GREEDY)
            stack.assert_exact(completion, prompt, GREEDY)
            moved = completion.usage.external_tokens
            assert (moved == 0) == ("prefill-0" in names), f"{moved} tokens came by the full disk"

    def moves_again() -> bool:
        prompt = random_prompt(prompts, LENGTH)
        completion = stack.generate(prompt, GREEDY)
        stack.assert_exact(completion, prompt, GREEDY)
        return completion.usage.external_tokens == LENGTH

    wait_until(moves_again, lambda: f"KV does not move: {stack.rig.router_warnings()}", 30.0)
    stack.wait_idle()
