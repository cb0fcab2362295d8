"""A file in the working directory runs in place of no module, and is found where a setting names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.imports import child_environment, named

ROOT = Path(__file__).parents[2]
_FOREIGN = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch(); raise SystemExit('foreign code')\n"
_MINE = "from engine.kv_connector import NullKVConnector\nclass Mine(NullKVConnector):\n    name = 'mine'\n"
_ROUTER = """
import os, pathlib, subprocess
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.topology import Topology
topology = Topology(StackSettings(model=pathlib.Path("m"), model_name="m"), pathlib.Path("f"))
spec = topology.router("127.0.0.1:1", "127.0.0.1:2")
subprocess.run([*spec.argv[:3], "--help"], env={**os.environ, **spec.env})
"""
_CORE = """
import asyncio
from engine import AsyncEngine
from engine.config import EngineConfig, KVConnectorConfig
async def main():
    connector = KVConnectorConfig(class_path="mine:Mine")
    ranks = {"tensor_parallel_size": 2, "num_threads": 1}
    engine = await AsyncEngine.start(EngineConfig(model=MODEL, num_blocks=8, kv_connector=connector, **ranks))
    print("started")
    await engine.shutdown()
asyncio.run(main())
"""
_VLLM = """
import sys
from tandem.local_stack.preflight import check_vllm
try:
    check_vllm(sys.executable)
except ValueError as error:
    print(error)
"""
_SOURCE = """
from engine.config import KVConnectorConfig
from tandem.bench.transfer.endpoint import Shape, SourceEndpoint
source = SourceEndpoint(Shape(2, 64), KVConnectorConfig(class_path="mine:Mine"), b"f", seed=1)
source.wait_ready()
print("started")
source.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with files that have names of Tandem's, Python's and a missing optional module."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("router", "engine", "queue", "redis_extra_that_is_missing"):
        (folder / f"{name}.py").write_text(_FOREIGN)
    (folder / "mine.py").write_text(_MINE)
    return folder


def run(script: str, folder: Path) -> str:
    """Output of a script outside of `folder`, which is the working directory; the command `tandem` is such a one."""
    file = folder.parent / "script.py"
    file.write_text(script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, str(file)],
        cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert not list(folder.glob("*.ran")), done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("script", "output"),
    [
        pytest.param(_ROUTER, "usage: ", id="process of a stack"),
        pytest.param(_CORE, "started", id="engine core and rank, with a connector of the working directory"),
        pytest.param(_VLLM, "docs/vllm.md", id="look for vLLM"),
        pytest.param(_SOURCE, "started", id="source of a transfer, with a connector of the working directory"),
    ],
)
def test_a_file_in_the_working_directory_replaces_no_module_of_a_child(script: str, output: str, folder: Path) -> None:
    from tandem.demo import MODEL_DIR

    assert output in run(script.replace("MODEL", repr(str(MODEL_DIR))), folder).replace("Usage: ", "usage: ")


def test_a_named_module_is_found_in_the_working_directory_after_all_others(folder: Path) -> None:
    script = (
        "import importlib.util, json, sys\nfrom engine.imports import named\nbefore = list(sys.path)\n"
        "found = [named('mine:Mine').name, named('queue:Queue').__name__]\n"
        "late = importlib.util.find_spec('redis_extra_that_is_missing')\n"
        "print(json.dumps([found, late, before == sys.path]))\n"
    )
    assert json.loads(run(script, folder)) == [["mine", "Queue"], None, True]


def test_a_missing_module_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        named("no_such_module:Name")


def test_a_child_searches_the_working_directory_where_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert child_environment() == {"PYTHONSAFEPATH": "1"}
    for entry in ("", str(tmp_path), "."):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*sys.path, entry])
            assert child_environment() == {}
    tmp_path.rmdir()
    assert child_environment() == {"PYTHONSAFEPATH": "1"}
