"""What the fault tests share: a model whose output varies, and the aggregated engine on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine import LLM
from tests.lively import CHUNK, checkpoint, reference

__all__ = ["checkpoint", "reference"]


@pytest.fixture(scope="session")
def llm(checkpoint: Path) -> LLM:
    """The fault-free run: the aggregated engine, in this process."""
    return LLM(checkpoint, dtype="float32", num_threads=1, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=512)
