"""The process of an engine core ends at once, whatever ends its loop, and its status says whether to start it again."""

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


STARTS = """
import errno
from types import SimpleNamespace
import engine.core.core, engine.core.loop
from engine.core import process
from engine.errors import CapacityError, InvalidCheckpoint
from engine.ranks import RankLost

def caused_by(number):
    error = InvalidCheckpoint("cannot read config.json")
    error.__cause__ = OSError(number, "of the disk")
    return error

engine.core.loop.Mailbox = lambda address: SimpleNamespace(wake=None)
process.place_process = lambda *args: None
for error in (
    *(InvalidCheckpoint("damaged"), CapacityError("too large"), FileNotFoundError(errno.ENOENT, "missing")),
    caused_by(errno.EACCES),
    *(OSError(number, "none is left") for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENOSPC)),
    *(caused_by(errno.EMFILE), RankLost("rank 1 ended with status -9")),
):
    def start(config, wake):
        raise error
    engine.core.core.EngineCore = start
    try:
        process._run(SimpleNamespace(parallelism=SimpleNamespace(core_rank=0)), "ipc:///none")
    except SystemExit as end:
        print(end.code, end=" ")
"""


def test_only_a_start_that_would_fail_again_has_the_status_of_wrong_settings() -> None:
    ended = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=50, check=False)
    assert ended.stdout.split() == ["2"] * 4 + ["1"] * 6, ended.stderr
    assert "engine core: damaged\n" in ended.stderr


UNINSTALLED = """
import sys
from engine.config import EngineConfig
from engine.core import process

sys.modules["torch"] = None  # as if it were not there
process._run(EngineConfig(model="m"), "ipc:///none")
"""


def test_an_installation_without_a_module_is_one_line_and_the_status_of_wrong_settings() -> None:
    ended = subprocess.run([sys.executable, "-c", UNINSTALLED], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("engine core: torch cannot be imported: ")
    assert line.endswith(": pip install -c constraints.txt -e . in the checkout")
