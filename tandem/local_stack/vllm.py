"""Whether an interpreter has the supported vLLM, asked before any process of a stack starts."""

from __future__ import annotations

import os
import shutil
import subprocess

from engine.imports import child_environment


def check_vllm(python: str) -> None:
    """Raises ValueError, which says what to install, where instances with this interpreter could not start."""
    if shutil.which(python) is None:
        raise ValueError(f"--engine-python: {python} is no program; give the path of a Python interpreter with vLLM")
    try:
        checked = subprocess.run(
            [python, "-m", "vllm_engine.versions"],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **child_environment()},
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise ValueError(f"--engine-python: {python} cannot be run: {error.strerror}") from error
    if checked.returncode != 0:
        problem = checked.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"{problem}; docs/vllm.md describes how vLLM and Tandem are installed there")
