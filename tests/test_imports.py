"""What processes do not import: it would cost each start of them time and memory, or they must run without it.

A child executes the steps of its case in a row, and each step also holds for what the steps before it have imported.
So one child replaces one for each step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


class Step(NamedTuple):
    code: str
    absent: str
    """Modules that are not imported after it, nor before."""


TORCH = "torch transformers numpy numba"
CASES = {
    # Without torch, gRPC and pydantic
    "engine": {
        "requests and text": Step(
            "import engine.sampling.params, engine.generation_config, engine.identity, engine.text.tokenizer, "
            "engine.text.token_bytes, engine.text.chat_template, engine.text.detokenizer",
            f"{TORCH} grpc",
        ),
        "a checkpoint's config": Step("import engine.models.config", "torch transformers numba"),
        "an engine's client": Step("import engine, engine.core.async_engine", TORCH),
        "counters of a connector": Step("import kv_transfer.transfer.connector", "prometheus_client pydantic"),
        "the store of an engine core": Step(
            "import kv_transfer.transfer.lease, kv_transfer.page.format, kv_transfer.stores.files, "
            "kv_transfer.stores.connector",
            TORCH,
        ),
        "tandem bench": Step("import tandem.commands.bench", "torch numpy grpc"),
        "every other command": Step(
            "import tandem.cli, tandem.commands.up, tandem.commands.generate, tandem.commands.chat, "
            "tandem.commands.doctor, tandem.commands.pools, tandem.commands.top, tandem.client.client",
            "torch transformers numba pydantic",
        ),
    },
    "services": {
        "every module of serving": Step(
            "import importlib, pkgutil, serving\n"
            "for module in pkgutil.walk_packages(serving.__path__, 'serving.'):\n"
            "    importlib.import_module(module.name)",
            f"{TORCH} engine kv_transfer tandem router",
        ),
        "a router": Step(
            "import router.__main__; from router.request.validation import ServedModel",
            f"{TORCH} kv_transfer kubernetes aiohttp opentelemetry.sdk",
        ),
        "the front of kv_transfer": Step(
            "import kv_transfer.transfer.server, kv_transfer.transfer.client, kv_transfer.secret", TORCH
        ),
        "an instance's server": Step(
            "import prefill_service.__main__, decode_service.__main__",
            "torch transformers numba opentelemetry.sdk",
        ),
    },
    # With torch
    "engine core": {
        # numba would import scipy.linalg to look for a BLAS
        "a core": Step("import engine.core.core, engine.attention.cpu_kernels", "scipy.linalg transformers"),
        # The compiler takes a second to import, and streams would wait for it
        "a recording": Step(
            "import torch; from engine.executor.decode_graphs import LaunchRecorder\n"
            "replay, result = LaunchRecorder()(lambda: torch.ones(3).cos() + 1); replay()\n"
            "assert result.tolist() == (torch.ones(3).cos() + 1).tolist()",
            "torch._dynamo",
        ),
    },
}

_CHILD = """
import json, sys
present = {}
for name, (code, absent) in json.loads(sys.argv[1]).items():
    exec(code, {})
    present[name] = [module for module in absent.split() if module in sys.modules]
print(json.dumps(present))
"""


@cache
def imported(case: str) -> dict[str, list[str]]:
    """Of each step, which of its absent modules are there."""
    command = [sys.executable, "-c", _CHILD, json.dumps(CASES[case])]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    return json.loads(ended.stdout)


@pytest.mark.parametrize(("case", "step"), [(case, step) for case, steps in CASES.items() for step in steps])
def test_a_process_does_not_import_what_it_has_no_use_for(case: str, step: str) -> None:
    assert imported(case)[step] == []
