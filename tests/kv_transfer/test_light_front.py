"""What the fronts import of this package is free of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRONT = ["kv_transfer.holder", "kv_transfer.attach", "kv_transfer.secret", "kv_transfer.wire", "engine.identity"]
CORE = ["kv_transfer.leases", "kv_transfer.page", "kv_transfer.shared_storage", "kv_transfer.connector"]


@pytest.mark.parametrize("modules", [FRONT, CORE], ids=["front", "core"])
def test_importing_does_not_load_torch(modules: list[str]) -> None:
    script = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
