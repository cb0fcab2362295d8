"""The engine of the stacks that tests start. `TANDEM_TEST_ENGINE=vllm` runs the same tests with the real vLLM in every
instance (`make test-vllm`); the oracle stays the built-in engine. `TANDEM_TEST_DEVICE=cuda` runs the tests whose engine
cores are in the test's process on a GPU (`make test-gpu`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.process_logs import ProcessLogs

ROOT = Path(__file__).parents[1]
IS_VLLM = os.environ.get("TANDEM_TEST_ENGINE", "tandem") == "vllm"
BLOCK_SIZE = 32 if IS_VLLM else 16
"""vLLM's CPU kernels want a multiple of 32."""
NUM_KEPT_BLOCKS = 1 if IS_VLLM else 0
"""Of an instance's blocks, those that the engine keeps for itself."""
PATIENCE = 5.0 if IS_VLLM else 1.0
"""A start of vLLM takes 20 s of two cores, and its end some seconds: factor of every time limit."""
DEVICE = os.environ.get("TANDEM_TEST_DEVICE", "cpu")
_AT_ITS_END = "EngineDeadError|CancelledError|EngineCore|vllm/"
"""In the exceptions that vLLM logs when one of its processes is killed, or stopped."""


def run_cores_on_the_device(patch: pytest.MonkeyPatch) -> None:
    """Engine cores of this process compute on `DEVICE`, whatever their configuration says."""
    import msgspec

    from engine.config import EngineConfig
    from engine.core.core import EngineCore

    make = EngineCore.__init__

    def make_on_device(self: EngineCore, config: EngineConfig, wake: Callable[[], None]) -> None:
        make(self, msgspec.structs.replace(config, device=DEVICE), wake)

    patch.setattr(EngineCore, "__init__", make_on_device)


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
