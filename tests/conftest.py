"""Applies to every test: own runtime folder and ports, no process left behind, Hypothesis' profile, units of work
(tests/units.py).

`--slow-part 2/4` runs the second quarter of the slow tests; `make test-slow` runs all of them, .ci/run one part.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hypothesis
import psutil
import pytest

from tests.bytecode import compile_kernels, compile_modules
from tests.engine_under_test import DEVICE, PATIENCE, expected_exceptions, run_cores_on_the_device
from tests.process_logs import LOGS, ProcessLogs
from tests.units import UnitScheduling, in_order, unit_of

if TYPE_CHECKING:
    from tandem.local_stack.pki import StackCa

# Before torch is imported: on tiny models a second thread only spins, and other tests' processes need the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test has more threads, they wait without spinning
# A shell's background job ignores Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Under nohup this process goes on after SIGHUP. Commands that tests start have its default: a handler is not passed on.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
# Their asserts say what differs.
pytest.register_assert_rewrite("tests.system.checker", "tests.kv_transfer.stores.contract")

# No deadline: another process may take the core for longer than an example needs. In CI all runs try the same examples.
hypothesis.settings.register_profile("tandem", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("tandem")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> UnitScheduling:
    return UnitScheduling(config, log)


_KERNELS = pytest.StashKey[subprocess.Popen[bytes] | None]()


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    compile_modules(config)
    config.stash[_KERNELS] = compile_kernels()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (process := config.stash.get(_KERNELS, None)) is not None:
        process.terminate()
        process.wait()


_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # tests have another: what they write is captured
    os._exit = partial(_exit_with_reason, os._exit, os.getpid(), config.stash[_STDERR])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """Of xdist: a worker that has ended. What it lacks is how."""
    if error is not None:
        status: int | None = None  # it runs on, without its connection
        with suppress(subprocess.TimeoutExpired):
            status = node.gateway._io.popen.wait(10)
        sys.stderr.write(f"\n{node.gateway.id} has ended with status {status}\n")


def _exit_with_reason(leave: Callable[[int], NoReturn], pid: int, stderr: int, status: int) -> NoReturn:
    """As a thread of a connector does that has failed: without this, only the end of the process is reported."""
    if os.getpid() == pid:
        os.write(stderr, f"\n{threading.current_thread().name} ends the tests' process: {status}\n".encode())
        os.write(stderr, "".join(traceback.format_exception(*sys.exc_info())).encode())
        faulthandler.dump_traceback(stderr, all_threads=False)
    leave(status)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Ends this process, which fails the test, where a tear-down hangs: a timeout interrupts a test only once, and the
    run would never end."""
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-part", metavar="I/N", help="of the slow tests, run only the I-th of N parts")


def pytest_report_header(config: pytest.Config) -> str | None:
    part = config.getoption("--slow-part")
    return f"slow tests: part {part}" if part else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and test items stay until the end: no collection of garbage traverses a million objects, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--slow-part"):
        number, count = map(int, part.split("/"))
        slow = [item for item in items if item.get_closest_marker("slow")]
        other_parts = {item for index, item in enumerate(slow) if index % count != number - 1}
        config.hook.pytest_deselected(items=[item for item in items if item in other_parts])
        items[:] = [item for item in items if item not in other_parts]
    if PATIENCE > 1:
        for item in items:
            marker = item.get_closest_marker("timeout")
            seconds = marker.args[0] if marker is not None else 120.0
            item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)
    items.sort(key=_stack)  # each starts once, without `-n` too
    if hasattr(config, "workerinput"):
        units = dict.fromkeys(unit_of(item.nodeid) for item in items)
        places = {unit: place for place, unit in enumerate(in_order(units))}
        items.sort(key=lambda item: places[unit_of(item.nodeid)])


def _stack(item: pytest.Item) -> str:
    unit = unit_of(item.nodeid)
    return "" if unit.endswith(".py") else unit


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Iterator[None]:
    """A test that hangs ends at its time-out, even if that is raised in a callback of asyncio, which only logs it."""
    result = yield
    raise_timeout: Any = signal.getsignal(signal.SIGALRM)

    def stop(number: int, frame: Any) -> None:
        if loop := asyncio._get_running_loop():
            loop.stop()
        raise_timeout(number, frame)

    if callable(raise_timeout):
        signal.signal(signal.SIGALRM, stop)
    return result


@pytest.fixture(scope="module")
def authority() -> StackCa:
    """Issues the certificates of a module's tests."""
    from tandem.local_stack.pki import StackCa  # late: few modules need it

    return StackCa()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder with a path short enough for sockets below it, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True, scope="session")
def _device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE != "cpu":
            run_cores_on_the_device(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """State files of stacks that tests start lie in a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_ports(worker_id: str) -> Iterator[None]:
    """Each worker chooses the ports of its processes from a share of its own: two of them never start at one port."""
    from tandem.local_stack import topology

    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = 0 if worker_id == "master" else int(worker_id.removeprefix("gw"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "_PORTS", topology._PORTS[number::count])
        yield


@pytest.fixture(autouse=True, scope="session")
def process_logs() -> Iterator[ProcessLogs]:
    """Fails the run if a stack that a test or a shared fixture has stopped left an exception in a log."""
    with LOGS.watched(), expected_exceptions(LOGS):
        yield LOGS
    assert not (found := LOGS.take_found()), "exceptions in logs of processes:\n" + "\n".join(found)


@pytest.fixture(autouse=True)
def _no_exception_is_logged(process_logs: ProcessLogs) -> Iterator[None]:
    yield
    assert not (found := process_logs.take_found()), "exceptions in logs of processes:\n" + "\n".join(found)


@pytest.fixture(autouse=True)
def _threads_stay_as_they_were() -> Iterator[None]:
    """An engine in the test's process sets torch's threads: the next tests would be ten times as slow beside others."""
    before = _num_torch_threads()
    yield
    if _num_torch_threads() != before:
        sys.modules["torch"].set_num_threads(before or 1)


def _num_torch_threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else torch.get_num_threads()


@pytest.fixture(autouse=True, scope="session")
def _no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    alive = [f"{child.pid} {' '.join(child.cmdline())}" for child in left if child.status() != psutil.STATUS_ZOMBIE]
    # multiprocessing's own helpers live as long as the test process.
    alive = [line for line in alive if "multiprocessing" not in line]
    assert not alive, f"tests left processes behind: {alive}"
