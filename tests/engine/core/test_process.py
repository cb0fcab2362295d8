"""The process of an engine core ends at once, whatever ends its loop."""

from __future__ import annotations

import subprocess
import sys

BUG = """
import concurrent.futures, time
from types import SimpleNamespace
import engine.core.core, engine.core.loop
from engine.core import process

def run_core(core, mailbox):
    pool = concurrent.futures.ThreadPoolExecutor(1)
    for _ in range(2):  # Python would wait for what is queued
        pool.submit(time.sleep, 60)
    raise MemoryError("a bug")

engine.core.core.EngineCore = lambda *args: None
engine.core.loop.Mailbox = lambda address: SimpleNamespace(wake=None, close=lambda: None)
engine.core.loop.run_core = run_core
process.place_process = lambda *args: None
process._run(SimpleNamespace(parallelism=SimpleNamespace(core_rank=0)), "ipc:///none")
"""


def test_a_bug_does_not_wait_for_grammars_that_are_queued() -> None:
    ended = subprocess.run([sys.executable, "-c", BUG], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1
    assert "MemoryError: a bug" in ended.stderr
