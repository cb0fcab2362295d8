"""How a stack starts, supervises and ends its processes, with small scripts as processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from serving.auth import BearerTokens
from tandem.client import health
from tandem.client.registry import credentials_for, metrics_address_of, running_stacks
from tandem.commands.up import usage_text
from tandem.local_stack import process as process_module
from tandem.local_stack import stack as stack_module
from tandem.local_stack import supervisor, topology
from tandem.local_stack.stack import LocalStack, StartCancelled
from tandem.local_stack.supervisor import StackFailed
from tests.tandem.local_stack.scripted_stack import (
    BECOMES_READY,
    DIES,
    DRAINS,
    HAS_A_CHILD,
    IGNORES_SIGTERM,
    let_go,
    scripted,
    settings,
    until,
)
from tests.waiting import Stopwatch, wait_until


@pytest.fixture(autouse=True)
def temporary(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stack folders lie here; afterwards none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_folder))
    yield short_folder
    assert list(short_folder.glob("tandem-*")) == []


def gone(pids: list[int], within_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def test_processes_start_together_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "prefill-0": HAS_A_CHILD, "decode-0": IGNORES_SIGTERM})
    stack = LocalStack(settings(num_prefill=1))
    lines: list[str] = []
    stack.start(lines.append)
    try:
        assert sorted(line.split()[0] for line in lines) == ["decode-0", "prefill-0", "router"]
        pids = [process.pid for process in stack.processes.values()]
        pids += [child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)]
        assert len(pids) == 4
        assert oct((stack.folder / "kv_secret").stat().st_mode & 0o777) == "0o600"
    finally:
        watch = Stopwatch()
        stack.stop()
    assert watch.s < 2, "one of them ignores SIGTERM, and Ctrl-C must still be quick"
    assert gone(pids, within_s=5.0)
    stack.stop()


def test_what_processes_log_about_their_start_is_shown_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "import logging, os, sys\nfrom serving.logging import LogSettings, configure\n"
    log += "configure(LogSettings(format='json' if sys.argv[1] == 'prefill-0' else 'human'))\n"
    log += "logging.info('start-up: compiling, about \"9 s\"')\nlogging.info('start-up: compiled %s', sys.argv[1])\n"
    scripted(monkeypatch, {"router": BECOMES_READY}, log + "import time; time.sleep(0.5)\n" + BECOMES_READY)
    lines: list[str] = []
    stack = LocalStack(settings(num_prefill=1))
    stack.start(lines.append)
    stack.stop()
    shown = [line for line in lines if "is ready" not in line]
    assert shown[0] == 'compiling, about "9 s"'
    assert sorted(shown[1:]) == ["compiled decode-0", "compiled prefill-0"]


def test_the_api_key_reaches_the_router_as_a_digest_and_this_users_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings(api_key="k" * 32)) as stack:
        argv = stack.processes["router"].spec.argv
        tokens = Path(argv[argv.index("--auth-tokens-file") + 1])
        assert BearerTokens(tokens, "auth.tokens_file").tenant_of(stack.credentials.metadata()) == "client"
        stack.announce()
        assert credentials_for(stack.address) == stack.credentials
        assert not any("k" * 32 in part for process in stack.processes.values() for part in process.spec.argv)
        assert '-H "Authorization: Bearer $(cat ' in usage_text(stack)
        assert "live page" not in usage_text(stack), "it has none"


def test_a_stack_whose_state_file_is_removed_is_announced_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by systemd, which deletes the runtime directory when its user logs out and makes it at the next login."""
    scripted(monkeypatch, {})
    home, runtime = temporary / "home", temporary / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with LocalStack(settings()) as stack:
        stack.announce()
        [before] = running_stacks()
        # STEP the file alone is removed
        for file in (runtime / "tandem").iterdir():
            file.unlink()
        assert running_stacks() == []
        until(stack, lambda: running_stacks() == [before])
        # STEP the whole folder is: the home takes its place
        shutil.rmtree(runtime)
        until(stack, lambda: running_stacks() == [before])
        assert list((home / ".tandem").iterdir())
        # STEP it is there again
        runtime.mkdir()
        until(stack, lambda: running_stacks() == [before])
        assert list((runtime / "tandem").iterdir())
    assert not [*(home / ".tandem").iterdir(), *(runtime / "tandem").iterdir()]


@pytest.mark.parametrize("router_workers", [1, 2])
def test_the_metrics_of_one_worker_of_several_are_not_announced(
    router_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, {})
    with LocalStack(settings(router_workers=router_workers, http_port=0)) as stack:
        stack.announce()
        assert stack.http_address
        assert metrics_address_of(stack.admin_address) == (stack.http_address if router_workers == 1 else None)


@pytest.mark.parametrize("num_free", range(5))
def test_a_start_without_free_descriptors_leaves_nothing(temporary: Path, num_free: int) -> None:
    """The folder's locks take the first two, a pipe the next two."""
    code = (
        "import os, resource, sys, tempfile\n"
        "from tandem.local_stack.stack import LocalStack\n"
        "from tests.tandem.local_stack.scripted_stack import settings\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "fds = []\n"
        "try:\n"
        "    while True: fds.append(os.dup(0))\n"
        "except OSError:\n"
        "    for fd in fds[: int(sys.argv[2])]: os.close(fd)\n"
        "try:\n"
        "    LocalStack(settings()).start()\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    command = [sys.executable, "-c", code, str(temporary), str(num_free)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "Too many open files\n", ended.stderr


def test_a_process_that_cannot_start_is_named_with_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": DIES})
    stack = LocalStack(settings())
    with pytest.raises(StackFailed, match=r"(?s)decode-0 exited with status 3 before it was ready.*disk on fire"):
        stack.start()
    assert not any(process.running for process in stack.processes.values())


def test_a_process_that_dies_while_others_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(line: str) -> None:
        if line.startswith("prefill-0 is ready"):
            stack.processes["prefill-0"].kill()

    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": "import time; time.sleep(60)"})
    stack = LocalStack(settings(num_prefill=1))
    problem = r"(?s)prefill-0 was killed by SIGKILL before the stack was ready.*log of prefill-0"
    with pytest.raises(StackFailed, match=problem):
        stack.start(kill)
    assert not any(process.running for process in stack.processes.values())


def test_a_process_that_dies_before_the_router_finds_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_serving = LocalStack._wait_serving
    scripted(monkeypatch, {})
    monkeypatch.setattr(LocalStack, "_instances_out", lambda stack: "127.0.0.1:1 is lost")
    with LocalStack(settings()) as stack:

        def serving_with_a_death(*args: object, **named: object) -> bool:
            stack.processes["decode-0"].kill()
            return False

        monkeypatch.setattr(health, "wait_serving", serving_with_a_death)
        problem = r"(?s)decode-0 was killed by SIGKILL before the stack was ready.*log of decode-0"
        with pytest.raises(StackFailed, match=problem):
            wait_serving(stack)


def test_a_process_that_never_becomes_ready_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = 0.0

    def timeout(line: str) -> None:
        nonlocal passed_s
        assert line.startswith("router is ready")
        passed_s = 100.0

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s, sleep=time.sleep)
    monkeypatch.setattr(stack_module, "time", clock)
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": "import time; time.sleep(60)"})
    stack = LocalStack(settings(start_timeout_s=90))
    with pytest.raises(StackFailed, match=r"not ready within 90 s: decode-0"):
        stack.start(timeout)


def test_a_router_that_does_not_answer_operators_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_serving = LocalStack._wait_serving
    scripted(monkeypatch, {})
    monkeypatch.setattr(stack_module, "_SERVING_TIMEOUT_S", 0.0)
    monkeypatch.setattr(health, "wait_serving", lambda *args, **named: True)
    monkeypatch.setattr(health, "_LIST_TIMEOUT_S", 0.1)  # the script is no router
    with LocalStack(settings()) as stack:
        problem = re.escape(f"does not answer at {stack.admin_address} (DEADLINE_EXCEEDED)")
        with pytest.raises(StackFailed, match=rf"(?s){problem}.*log of router"):
            wait_serving(stack)


Started = Callable[[LocalStack, Callable[[str], None]], None]


@pytest.fixture
def started_with_a_router(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Starts a stack of scripts whose router knows no instance but those that run."""
    wait_serving = LocalStack._wait_serving
    scripted(monkeypatch, {}, others=DRAINS)
    monkeypatch.setattr(LocalStack, "_wait_serving", wait_serving)
    monkeypatch.setattr(stack_module, "_SERVING_TIMEOUT_S", 0.0)
    monkeypatch.setattr(health, "wait_serving", lambda *args, **named: True)

    def start(stack: LocalStack, progress: Callable[[str], None]) -> None:
        def instances_out(*args: object, **named: object) -> dict[str, str]:
            running = {name for name, process in stack.processes.items() if process.running}
            return {address: "connecting" for name, address in stack.instances.items() if name not in running}

        monkeypatch.setattr(health, "instances_out", instances_out)
        stack.start(progress)

    return start


def test_a_pool_resized_while_the_stack_starts_gets_its_size_afterwards(started_with_a_router: Started) -> None:
    stack, sizes = LocalStack(settings(num_prefill=2)), [2]

    def resize(line: str) -> None:
        if sizes:
            stack.resize("decode", sizes.pop())
            stack.resize("prefill", 1)

    started_with_a_router(stack, resize)
    try:
        until(stack, lambda: "decode-1" in stack.processes and stack.processes["decode-1"].ready)
        let_go(stack, "prefill-1")
        until(stack, lambda: "prefill-1" not in stack.processes)
    finally:
        stack.stop()


def test_an_instance_drained_while_the_stack_starts_is_started_again(started_with_a_router: Started) -> None:
    stack, drained = LocalStack(settings(num_decode=2)), []

    def drain(line: str) -> None:
        if line.startswith("decode-1 is ready") and not drained:
            drained.append(stack.processes["decode-1"].pid)
            let_go(stack, "decode-1")
            stack.processes["decode-1"].send_signal(signal.SIGTERM)
            wait_until(lambda: not stack.processes["decode-1"].running)

    started_with_a_router(stack, drain)
    try:
        until(stack, lambda: stack.processes["decode-1"].ready)
        assert stack.processes["decode-1"].pid not in drained
    finally:
        stack.stop()


def test_a_start_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": "import time; time.sleep(60)"})
    stack, stop = LocalStack(settings(start_timeout_s=90)), threading.Event()
    with pytest.raises(StartCancelled):
        stack.start(lambda line: stop.set(), stop)  # once the router is ready
    assert not any(process.running for process in stack.processes.values())


def test_a_dead_process_is_reported_and_restarted_after_a_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.1)
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY})
    with LocalStack(settings()) as stack:
        assert stack.supervise() == []
        first_pid = stack.processes["decode-0"].pid
        stack.processes["decode-0"].kill()
        [event] = stack.supervise()
        assert "decode-0 was killed by SIGKILL; restarting in 0.1 s" in event.text
        assert event.lines == ("log of decode-0",)
        now_s += 0.09
        assert stack.supervise() == [], "not yet"
        now_s += 0.02
        assert [event.text for event in stack.supervise()] == ["decode-0 was restarted"]
        stack.wait_ready("decode-0")
        assert stack.processes["decode-0"].pid != first_pid


def test_a_process_that_keeps_exiting_ends_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.0)
    scripted(monkeypatch, {"router": BECOMES_READY, "decode-0": BECOMES_READY})
    with LocalStack(settings()) as stack:
        for _ in range(5):
            stack.processes["decode-0"].kill()
            stack.supervise()
            stack.supervise()
        stack.processes["decode-0"].kill()
        with pytest.raises(StackFailed, match=r"6 times within 60 s; giving up"):
            stack.supervise()


def test_processes_end_with_a_killed_owner(temporary: Path) -> None:
    code = (
        "import sys, tempfile, time, pytest; tempfile.tempdir = sys.argv[1]\n"
        "from tests.tandem.local_stack.scripted_stack import *\n"
        "scripted(pytest.MonkeyPatch(), {'router': BECOMES_READY, 'decode-0': BECOMES_READY})\n"
        "stack = LocalStack(settings()); stack.start()\n"
        "print(*(process.pid for process in stack.processes.values()), flush=True); time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(temporary)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert gone(pids)
    left = list(temporary.glob(f"tandem-{os.getuid()}-*"))
    assert len(left) == 1, "a killed owner cannot clear up"
    assert_swept(left[0])


def assert_swept(folder: Path) -> None:
    """The next start does."""
    from tandem.client.registry import sweep

    assert sweep() == 1
    assert not folder.exists()


def test_a_stack_beside_another_one_chooses_other_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the other one are free until its processes bind them; the scripts never do."""
    seeds: list[int | None] = []

    def free_ports(count: int, host: str, seed: int | None = None) -> list[int]:
        seeds.append(seed)
        return choose(count, host, seed)

    choose = topology.free_ports
    monkeypatch.setattr(topology, "free_ports", free_ports)
    scripted(monkeypatch, {})
    for _ in range(2):
        with LocalStack(settings(port_seed=7)), LocalStack(settings(port_seed=7)):
            pass
    assert seeds == [7, None, 7, None]


def test_environment_reaches_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    prints_environment = BECOMES_READY.replace(
        'print(f"log of {sys.argv[1]}"', 'print(os.environ.get("TANDEM_X"), os.environ.get("TANDEM_Y")'
    )
    scripted(monkeypatch, {"router": prints_environment, "decode-0": prints_environment})
    env = {"decode-0": {"TANDEM_X": "1"}, "*": {"TANDEM_Y": "2"}}
    with LocalStack(settings(), env=env) as stack:
        assert stack.processes["router"].last_lines() == ["None 2"]
        assert stack.processes["decode-0"].last_lines() == ["1 2"]


TALKS = """
import itertools, signal, sys, time
from serving.lifecycle import bind_to_parent
bind_to_parent()
lines = itertools.count()
def talk(*_):
    sys.stdout.write("".join(f"{next(lines):09}\\n" for _ in range(1000)))
    sys.stdout.flush()
signal.signal(signal.SIGUSR1, talk)
open(sys.argv[2], "w").write("ready")
while True:
    time.sleep(1)
"""
"""Logs a thousand further lines of ten bytes at each SIGUSR1."""


def test_a_log_keeps_its_newest_lines_and_the_process_goes_on_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MAX_LOG_BYTES", 20_000)
    scripted(monkeypatch, {"decode-0": TALKS})
    with LocalStack(settings()) as stack:
        decode = stack.processes["decode-0"]
        log = decode.spec.log_file
        num_lines = 0

        def numbers_after_a_thousand_more() -> list[int]:
            nonlocal num_lines
            num_lines += 1000
            decode.send_signal(signal.SIGUSR1)
            wait_until(lambda: decode.last_lines(1) == [f"{num_lines - 1:09}"])
            stack.supervise()
            return [int(line) for line in log.read_text().splitlines()]

        assert numbers_after_a_thousand_more() == [*range(1000)]
        assert numbers_after_a_thousand_more() == [*range(2000)]
        assert numbers_after_a_thousand_more() == [*range(2000, 3000)], "the newest half, which begins with a line"
        assert log.stat().st_size == 10_000
        assert numbers_after_a_thousand_more() == [*range(2000, 4000)]
        monkeypatch.setattr(process_module, "MAX_LOG_BYTES", 20_002)
        assert numbers_after_a_thousand_more() == [*range(4000, 5000)], "of a line that the cut divides nothing is left"
        # STEP: a log that a user removes ends nothing
        log.unlink()
        assert stack.supervise() == []
        assert decode.running
