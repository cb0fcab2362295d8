"""The run of tests ends, with the crashed or hanging one as its failure, whenever a worker crashes or hangs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.units import in_order, unit_of

ROOT = Path(__file__).parents[1]
_CONFTEST = """
from tests.units import UnitScheduling

def pytest_xdist_make_scheduler(config, log):
    return UnitScheduling(config, log)
"""
_TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_one(number):
    if (__name__, number) == ("test_{unit}", {number}):
        os._exit(1)
"""


def run_of(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "--no-loadscope-reorder"]
    return subprocess.run(
        [*command, "--dist=loadscope", *arguments, str(folder)],
        cwd=folder, env={"PYTHONPATH": str(ROOT), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("count", "unit", "number"), [pytest.param(1, 0, 0, marks=pytest.mark.slow), (1, 3, 0), (3, 1, 1)]
)
def test_a_run_ends_whenever_a_worker_crashes(tmp_path: Path, count: int, unit: int, number: int) -> None:
    """In the first, the last or another one of four units of `count` tests."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    tests = _TESTS.format(count=count, unit=unit, number=number)
    for name in range(4):
        (tmp_path / f"test_{name}.py").write_text(tests)
    ended = run_of(tmp_path)
    assert f"1 failed, {4 * count - 1} passed" in ended.stdout, ended.stdout
    assert f"crashed while running 'test_{unit}.py::test_one[{number}]'" in ended.stdout


_HANGING = """
import threading
import pytest

@pytest.fixture
def hanging():
    yield
    threading.Event().wait()

@pytest.mark.timeout(2)
def test_one(hanging):
    threading.Event().wait()

def test_two():
    pass
"""


def test_a_run_ends_where_a_test_hangs_and_its_tear_down_too(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"{_CONFTEST}from tests.conftest import pytest_configure, pytest_runtest_teardown, pytest_testnodedown\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\n")
    (tmp_path / "test_0.py").write_text(_HANGING)
    ended = run_of(tmp_path, "-p", "pytest_timeout")
    assert "crashed while running 'test_0.py::test_one'" in ended.stdout, ended.stdout
    assert "2 failed, 1 passed" in ended.stdout
    assert "Timeout (0:00:04)!" in ended.stderr
    assert re.search(r"gw\d has ended with status 1", ended.stderr)


def test_stacks_begin_early_and_units_that_wait_run_beside_those_that_compute() -> None:
    stacks = ["killable x", "pair y", "tests/system/test_a.py"]
    computing = [f"tests/engine/{name}.py" for name in "abcde"]
    assert in_order([*computing, "tests/router/a.py", "tests/router/b.py", *reversed(stacks)]) == [
        "killable x", "pair y", "tests/router/a.py", computing[0], "tests/system/test_a.py",
        computing[1], computing[2], "tests/router/b.py", computing[3], computing[4],
    ]  # fmt: skip


def test_a_shared_stack_is_one_unit() -> None:
    assert unit_of("tests/system/test_death.py::test_a[x-(pair redis)]") == "pair redis"
    assert unit_of("tests/system/test_death.py::test_a[x]") == "tests/system/test_death.py"
    assert unit_of("tests/engine/test_llm.py::test_a[(0, 1)]") == "tests/engine/test_llm.py"
