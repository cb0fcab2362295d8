"""What the conformance tests share: a subject, and a stack with it that is started once and serves all its tests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import lively_checkpoint
from tests.conformance.stacks import Stack, running
from tests.conformance.subjects import SUBJECTS, Backing
from tests.e2e.conftest import CHUNK
from tests.faults.reference import Reference
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose greedy output varies and has no near-ties, with a byte-level tokenizer."""
    backend = byte_level_backend()
    end = backend.token_to_id("<|im_end|>")
    folder = lively_checkpoint(
        tmp_path_factory.mktemp("lively"), vocab_size=backend.get_vocab_size(), eos_token_id=end, bos_token_id=None
    )
    return write_folder(folder, backend, BYTE_LEVEL_CONFIG)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    """The aggregated engine on the same checkpoint, in this process."""
    return Reference(checkpoint, max_num_batched_tokens=CHUNK, num_blocks=512)


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


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> random.Random:
    """A source of prompts that no other test uses, so that no prefix cache helps by accident."""
    return random.Random(request.node.nodeid)
