"""The engine of the stacks that tests start. `TANDEM_TEST_ENGINE=vllm` runs the same tests with the real vLLM in every
instance (`make test-vllm`); the oracle stays the built-in engine."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tests.process_logs import ProcessLogs

ROOT = Path(__file__).parents[1]
IS_VLLM = os.environ.get("TANDEM_TEST_ENGINE", "tandem") == "vllm"
BLOCK_SIZE = 32 if IS_VLLM else 16
"""vLLM's CPU kernels want a multiple of 32."""
NUM_KEPT_BLOCKS = 1 if IS_VLLM else 0
"""Of an instance's blocks, those that the engine keeps for itself."""
PATIENCE = 5.0 if IS_VLLM else 1.0
"""A start of vLLM takes 20 s of two cores, and its end some seconds: factor of every time limit."""
_AT_ITS_END = "EngineDeadError|CancelledError|EngineCore|vllm/"
"""In the exceptions that vLLM logs when one of its processes is killed, or stopped."""


def vllm_python() -> str:
    """The interpreter that has vLLM, made by `make test-vllm`; it takes Tandem from this checkout."""
    python = Path(os.environ.get("TANDEM_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    assert python.is_file(), f"{python} does not exist: make test-vllm"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *paths]))
    return str(python)


def engine_fields() -> dict[str, Any]:
    """Fields of StackSettings."""
    if not IS_VLLM:
        return {}
    return {"engine": "vllm", "engine_python": vllm_python(), "start_timeout_s": 600.0}


def expected_exceptions(logs: ProcessLogs) -> AbstractContextManager[None]:
    return logs.expected(_AT_ITS_END) if IS_VLLM else nullcontext()
