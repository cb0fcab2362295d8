"""Fixtures of the system tests: a model whose output varies, the aggregated engine on it, and the shared stacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from tests.engine_under_test import NUM_KEPT_BLOCKS
from tests.lively import checkpoint, prompts, reference
from tests.system.reference import Reference
from tests.system.rig import Rig
from tests.system.stacks import NUM_BLOCKS, Model, Stack, start
from tests.waiting import wait_until

__all__ = ["checkpoint", "prompts", "reference"]
_RUNNING = ExitStack()
"""Ends the shared stack that runs."""


@pytest.fixture(scope="session")
def llm(reference: Reference) -> LLM:
    """The aggregated engine on the checkpoint, in this process."""
    return reference.llm


@pytest.fixture(scope="session")
def shared_stack(
    request: pytest.FixtureRequest, checkpoint: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The stack that the mark `on` or `on_stack` names. It runs until the last of its tests has ended."""
    model = Model(checkpoint, reference, tmp_path_factory.mktemp("stack"))
    with _RUNNING:
        yield _RUNNING.enter_context(start(request.param, model))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A session's fixtures live until it ends, and a stack that no test uses any more still beats and reports."""
    try:
        return (yield)
    finally:
        if nextitem is None or _stack_name(nextitem) != _stack_name(item):
            _RUNNING.close()


def _stack_name(item: pytest.Item) -> Any:
    call = getattr(item, "callspec", None)
    return call and call.params.get("shared_stack")


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """The shared stack, idle; a test that leaves anything behind fails."""
    with shared_stack.leaves_nothing():
        yield shared_stack


@pytest.fixture
def killable(shared_stack: Stack) -> Iterator[Stack]:
    """The shared stack with all instances alive and idle; after the test, dead ones live again and hold nothing."""
    stack = shared_stack
    stack.wait_idle()
    yield stack
    for name in stack.rig.stack.instances:
        if not stack.rig.stack.processes[name].running:
            stack.rig.stack.restart(name)
    for name in stack.rig.stack.instances:
        wait_until(lambda: stack.rig.is_ready(name), f"{name} is not ready again")  # noqa: B023
    stack.warm_up()
    for name, load in stack.settled().items():
        assert load.blocks.free + load.blocks.cached == NUM_BLOCKS - NUM_KEPT_BLOCKS, f"{name}: {load.blocks}"


@pytest.fixture
def rig(stack: Stack) -> Rig:
    return stack.rig
