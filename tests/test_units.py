"""The run of tests ends, with the crashed one as its failure, whenever a worker crashes."""

from __future__ import annotations

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


@pytest.mark.parametrize(("count", "unit", "number"), [(1, 0, 0), (1, 3, 0), (3, 1, 1)])
def test_a_run_ends_whenever_a_worker_crashes(tmp_path: Path, count: int, unit: int, number: int) -> None:
    """In the first, the last or another one of four units of `count` tests."""
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    tests = _TESTS.format(count=count, unit=unit, number=number)
    for name in range(4):
        (tmp_path / f"test_{name}.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", "2", "--no-loadscope-reorder"]
    ended = subprocess.run(
        [*command, "--dist=loadscope", str(tmp_path)],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert f"1 failed, {4 * count - 1} passed" in ended.stdout, ended.stdout
    assert f"crashed while running 'test_{unit}.py::test_one[{number}]'" in ended.stdout


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
