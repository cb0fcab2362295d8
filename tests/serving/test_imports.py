"""The services' runtime stays light: no torch, no transformers, no engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CODE = """
import importlib, pkgutil, sys
import serving
for module in pkgutil.walk_packages(serving.__path__, "serving."):
    importlib.import_module(module.name)
heavy = {"torch", "transformers", "numpy", "numba", "engine", "kv_transfer", "tandem", "router"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_no_module_of_serving_imports_torch_or_transformers() -> None:
    result = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
