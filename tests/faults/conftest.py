"""What the fault tests share: a model whose output varies, and the aggregated engine on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM
from tests.builders import lively_checkpoint
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
def llm(checkpoint: Path) -> LLM:
    """The fault-free run: the aggregated engine, in this process."""
    return LLM(checkpoint, dtype="float32", num_threads=1, max_num_batched_tokens=64, num_gpu_blocks_override=512)
