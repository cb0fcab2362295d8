"""What the tests over real processes share: the checkpoint, its oracle, prompts, and settings of a small stack."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tandem.stack_settings import StackSettings
from tests.builders import lively_checkpoint
from tests.faults.reference import Reference
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder

BLOCK_SIZE = 16
CHUNK = 64
"""Tokens that one step computes at the most, so that a prompt of a few hundred takes several."""


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


def rig_settings(checkpoint: Path, **fields: object) -> StackSettings:
    """One prefill and one decode instance, float32, every request handed over."""
    defaults: dict[str, object] = {
        "disaggregation": "always",
        "dtype": "float32",
        "num_blocks": 512,
        "lease_s": 2.0,
        "start_timeout_s": 60.0,
        "instance_args": ("--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK_SIZE)),
    }
    return StackSettings(model=checkpoint, model_name="lively", **{**defaults, **fields})  # type: ignore[arg-type]


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> random.Random:
    """A source of prompts that no other test uses, so that no prefix cache helps by accident."""
    return random.Random(request.node.nodeid)


def random_prompt(source: random.Random, length: int) -> list[int]:
    """Token ids without special tokens."""
    return [source.randrange(0, 360) for _ in range(length)]
