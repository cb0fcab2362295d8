"""Tests with the real vLLM, in an environment of its own: `make test-vllm`. A start of vLLM takes 20 s of two cores, so
the tests of a module share one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import EngineConfig

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tandem/demo/model"


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = Path(os.environ.get("TANDEM_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    if not python.is_file():
        pytest.fail(f"{python} does not exist: make test-vllm")
    # The environment has no Tandem of its own: it takes this checkout.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return str(python)


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
