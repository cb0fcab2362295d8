"""What the conformance tests share: a subject, and a stack with it that is started once and serves all its tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.stacks import Stack, running
from tests.conformance.subjects import SUBJECTS, Backing
from tests.faults.reference import Reference
from tests.lively import checkpoint, prompts, reference

__all__ = ["checkpoint", "prompts", "reference"]


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backing]:
    """The connector under test, by its name, with what it needs running."""
    name: str = request.param
    with SUBJECTS[name](tmp_path_factory.mktemp(name)) as backing:
        yield backing


@pytest.fixture(scope="session")
def subjects_stack(checkpoint: Path, reference: Reference, subject: Backing) -> Iterator[Stack]:
    """One prefill and one decode instance in which nobody dies, for all tests of a subject; nothing is left of them."""
    with running(checkpoint, reference, subject) as stack, stack.leaves_nothing():
        yield stack


@pytest.fixture
def stack(subjects_stack: Stack) -> Iterator[Stack]:
    """The subject's stack; a test that leaves anything behind fails."""
    with subjects_stack.leaves_nothing():
        yield subjects_stack
