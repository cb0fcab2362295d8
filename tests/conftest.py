"""What holds for every test: no test sees the user's own stacks, and no test leaves a process behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Before torch is imported: on tiny models a second thread only spins, and other tests' processes need the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.register_assert_rewrite("tests.faults.checker")  # so that its asserts say what differed


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for sockets below it, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True, scope="session")
def _own_runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """State files of stacks that tests start lie in a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    alive = [f"{child.pid} {' '.join(child.cmdline())}" for child in left if child.status() != psutil.STATUS_ZOMBIE]
    # multiprocessing's own helpers live as long as the test process.
    alive = [line for line in alive if "multiprocessing" not in line]
    assert not alive, f"tests left processes behind: {alive}"
