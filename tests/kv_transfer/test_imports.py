"""What the fronts import of this package is free of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRONT = [
    "kv_transfer.transfer.server",
    "kv_transfer.transfer.client",
    "kv_transfer.secret",
    "kv_transfer.transfer.client",
    "engine.identity",
]
CORE = [
    "kv_transfer.transfer.lease",
    "kv_transfer.page.format",
    "kv_transfer.stores.files",
    "kv_transfer.stores.connector",
]


@pytest.mark.parametrize("modules", [FRONT, CORE], ids=["front", "core"])
def test_importing_does_not_load_torch(modules: list[str]) -> None:
    script = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
