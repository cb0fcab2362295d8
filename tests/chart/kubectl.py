"""kubectl, which comes with the tests' packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def program() -> str:
    """Its path. Fails where it is not installed."""
    path = Path(sys.executable).parent / "kubectl"
    if not path.is_file():
        pytest.fail(f"no {path}; run: make install")
    return str(path)
