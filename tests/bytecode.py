"""Compiles what the workers of a run import, once: in a new checkout each of them would compile every module, and
rewrite the asserts of every test, at the same time as the others. The CPU kernels are compiled while they collect the
tests: later all of them would wait for the first that needs one.

Names of `_pytest.assertion.rewrite` that begin with an underscore are not public; constraints.txt fixes pytest.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "benchmarks", "decode_service", "engine", "helm", "instance", "kv_transfer", "prefill_service", "protos", "router",
    "serving", "tandem", "tests", "tools", "vllm_engine",
)  # fmt: skip


def compile_modules(config: pytest.Config) -> None:
    """Of modules whose bytecode is up to date, nothing is written."""
    if sys.dont_write_bytecode:
        return
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    # Forked: a configuration cannot be sent.
    num_processes = os.cpu_count() or 1
    context = multiprocessing.get_context("fork")
    parts = [
        context.Process(target=partial(_compile, paths[number::num_processes], config))
        for number in range(num_processes)
    ]
    for part in parts:
        part.start()
    for part in parts:
        part.join()


def compile_kernels() -> subprocess.Popen[bytes] | None:
    """In a process of its own, which the caller ends. It ends by itself where they are compiled."""
    if sys.dont_write_bytecode:
        return None
    command = [sys.executable, "-c", _COMPILE_KERNELS]
    # Ctrl-C is for pytest.
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)


_COMPILE_KERNELS = """
import sys
from pathlib import Path

from engine.attention.compilation import sources_digest

if any(stamp.read_text() == sources_digest() for stamp in Path("engine", "attention").rglob("*.sources")):
    sys.exit()

from engine import LLM, SamplingParams

for dtype in ("float32", "bfloat16"):
    llm = LLM("demo", dtype=dtype, num_gpu_blocks_override=64)
    llm.generate(["Once"], SamplingParams(max_tokens=2), use_tqdm=False)
"""


def _compile(paths: list[Path], config: pytest.Config) -> None:
    for path in paths:
        if path.name.startswith("test_") or path.name == "conftest.py":
            _rewrite(path, config)
        else:
            compileall.compile_file(str(path), quiet=2)


def _rewrite(path: Path, config: pytest.Config) -> None:
    folder = rewrite.get_cache_dir(path)
    cached = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, cached) is None and rewrite.try_makedirs(folder):
        source_hash, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cached)
