"""Fixtures of tests with real processes: the checkpoint, its reference, prompts, and settings of a small stack."""

from __future__ import annotations

import fcntl
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.local_stack.settings import StackSettings
from tests.builders import lively_checkpoint
from tests.engine_under_test import BLOCK_SIZE, engine_fields
from tests.system.reference import Reference
from tests.tokenizer_builders import BYTE_LEVEL_CONFIG, byte_level_backend, write_folder

CHUNK = 64
"""Tokens that one step computes at the most, so that a prompt of a few hundred takes several."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A small random model whose greedy output varies and has no near-ties, with a byte-level tokenizer. The first
    worker that needs it makes it for all: transformers' models, which make it, take seconds to import."""
    own = tmp_path_factory.getbasetemp()
    of_run = own if worker_id == "master" else own.parent
    folder = of_run / "lively"
    with (of_run / "lively.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _make_checkpoint(tmp_path_factory.mktemp("unfinished")).rename(folder)
    return folder


def _make_checkpoint(folder: Path) -> Path:
    backend = byte_level_backend()
    end = backend.token_to_id("<|im_end|>")
    lively_checkpoint(folder, vocab_size=backend.get_vocab_size(), eos_token_id=end, bos_token_id=None)
    return write_folder(folder, backend, BYTE_LEVEL_CONFIG)


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    """The aggregated engine on the same checkpoint, in this process."""
    return Reference(checkpoint, max_num_batched_tokens=CHUNK, num_blocks=512)


_SMALL_STEPS = ("--max-num-batched-tokens", str(CHUNK), "--block-size", str(BLOCK_SIZE))
PATIENT_PEERS = ("--peers-ping-timeout-ms", "20000")
PATIENT_POOLS = ("--pools-beat-timeout-s", "20", "--pools-core-silence-timeout-s", "20")
"""On a busy machine a process waits for longer than counts as dead in production. So does a request at a failpoint."""


def rig_settings(
    checkpoint: Path, *, router_args: Sequence[str] = (), instance_args: Sequence[str] = (), **fields: object
) -> StackSettings:
    """One prefill and one decode instance, float32, every request handed over; none counts as dead when it is slow."""
    defaults: dict[str, object] = {
        "disaggregation": "always",
        "dtype": "float32",
        "num_blocks": 512,
        "lease_s": 2.0,
        "start_timeout_s": 60.0,
        "pin": False,  # several stacks share the machine's cores
        "threads": 1,
        "router_args": (*PATIENT_POOLS, *router_args),
        "instance_args": (*_SMALL_STEPS, *PATIENT_PEERS, *instance_args),
    }
    return StackSettings(model=checkpoint, model_name="lively", **{**defaults, **fields, **engine_fields()})


@pytest.fixture
def prompts(request: pytest.FixtureRequest) -> random.Random:
    """A source of prompts that no other test uses, so that no prefix cache helps by accident."""
    return random.Random(request.node.nodeid)


def random_prompt(source: random.Random, length: int) -> list[int]:
    """Token ids without special tokens."""
    return [source.randrange(0, 360) for _ in range(length)]


def text_prompt(source: random.Random, length: int) -> list[int]:
    """Random, but it ends with a whole character, which the answer does not complete."""
    return [*random_prompt(source, length - 1), 40]
