"""Tests with the real vLLM, in an environment of its own: `make test-vllm`. A start of vLLM takes 20 s of two cores, so
the tests of a module share one."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from tandem.demo import MODEL_DIR as DEMO
from tests import engine_under_test


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return engine_under_test.vllm_python()


@pytest.fixture(scope="session")
def vllm_config(vllm_python: str) -> EngineConfig:
    return EngineConfig(
        kind="vllm",
        python=vllm_python,
        model=str(DEMO),
        dtype="float32",
        num_blocks=200,
        block_size=32,
        max_num_seqs=16,
        max_num_batched_tokens=64,  # prompts take several steps
        num_threads=1,
    )
