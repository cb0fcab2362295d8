"""Two models that differ in their weights alone, and the aggregated engine on each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine import LLM
from tests.builders import lively_checkpoint
from tests.lively import CHUNK, checkpoint

__all__ = ["checkpoint"]


@pytest.fixture(scope="session")
def other_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights behind the same tokenizer."""
    folder = Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("other"), dirs_exist_ok=True))
    config = json.loads((checkpoint / "config.json").read_text())
    same = {name: config[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")}
    return lively_checkpoint(folder, seed=1, **same)


def aggregated(folder: Path) -> LLM:
    """The fault-free run."""
    return LLM(folder, dtype="float32", num_threads=1, max_num_batched_tokens=CHUNK, num_gpu_blocks_override=512)
