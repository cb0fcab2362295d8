"""Children end with their parent, however it ends; signals drain first and stop second."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from serving.lifecycle import ParentBond, StopSignals, serve_until_stopped, stop_signals

ROOT = Path(__file__).resolve().parents[2]

CHILD = "from serving.lifecycle import bind_to_parent; assert bind_to_parent(); print('bound', flush=True); {wait}"
SLEEP = "import time; time.sleep(60)"
HANG = (
    "import ctypes; ctypes.PyDLL(None).sleep(60)"  # holds the GIL, so that no thread of the child can notice anything
)

PARENT = """
import os, subprocess, sys, threading, time
from serving.lifecycle import ParentBond
bond = ParentBond()
def start():
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, **bond.environment()},
                             pass_fds=bond.pass_fds, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
if sys.argv[2] == "thread":
    thread = threading.Thread(target=start); thread.start(); thread.join()
else:
    start()
time.sleep(60)
"""


def started(child: str, where: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    command = [sys.executable, "-c", PARENT, child, where]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def gone(process: psutil.Process, within_s: float = 5.0) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("wait", "where"),
    [(SLEEP, "main"), (HANG, "main"), (SLEEP, "thread")],
    ids=["asleep", "hanging", "started by a thread that has ended"],
)
def test_a_child_ends_when_its_parent_is_killed(wait: str, where: str) -> None:
    parent, child = started(CHILD.format(wait=wait), where)
    try:
        time.sleep(0.1)
        assert child.is_running()
        parent.kill()
        parent.wait()
        assert gone(child)
    finally:
        parent.kill()
        parent.communicate()
        if child.is_running():
            child.kill()


def test_a_child_ends_when_the_bond_is_closed() -> None:
    bond = ParentBond()
    command = [sys.executable, "-c", CHILD.format(wait=SLEEP)]
    env = {**os.environ, **bond.environment()}
    with subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=bond.pass_fds, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"bound\n"
        bond.close()
        assert child.wait(5) == 43


def test_a_process_without_a_parent_in_its_environment_is_left_alone() -> None:
    code = "from serving.lifecycle import bind_to_parent; assert not bind_to_parent()"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


class Service:
    def __init__(self, drain_s: float, *, cuts_off: bool = False) -> None:
        self.drain_s = drain_s
        self.cuts_off = cuts_off
        self.stopped = False

    async def drain(self) -> bool:
        await asyncio.sleep(self.drain_s)
        return True

    async def stop(self) -> bool:
        self.stopped = True
        return not self.cuts_off


async def test_the_first_signal_drains() -> None:
    service = Service(0.05)
    with stop_signals() as signals:
        serving = asyncio.create_task(serve_until_stopped(service, signals))
        await asyncio.sleep(0.02)
        assert not serving.done()
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(serving, 20) is True
    assert not service.stopped


@pytest.mark.parametrize("cuts_off", [False, True])
async def test_the_second_signal_stops_now_and_only_a_loss_counts(cuts_off: bool) -> None:
    service = Service(60, cuts_off=cuts_off)
    with stop_signals() as signals:
        serving = asyncio.create_task(serve_until_stopped(service, signals))
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.drain.wait(), 20)
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.wait_for(serving, 20) is not cuts_off
    assert service.stopped


async def test_the_first_signal_after_a_call_that_drains_cuts_nothing_off() -> None:
    service = Service(0.05)
    signals = StopSignals()
    signals.drain.set()  # as InstanceService.Drain
    serving = asyncio.create_task(serve_until_stopped(service, signals))
    await asyncio.sleep(0)
    signals.request_stop()
    assert not signals.now.is_set()
    assert await asyncio.wait_for(serving, 20) is True
    assert not service.stopped
    signals.request_stop()
    assert signals.now.is_set()


async def test_a_drain_that_fails_is_not_hidden() -> None:
    class Broken(Service):
        async def drain(self) -> bool:
            raise RuntimeError("cannot drain")

    signals = StopSignals()
    signals.request_stop()
    with pytest.raises(RuntimeError, match="cannot drain"):
        await serve_until_stopped(Broken(0), signals)


CHILD_WITHOUT_THREAD = """
import asyncio, threading
from serving.lifecycle import watch_children_without_threads

def start(thread):
    raise RuntimeError("can't start new thread")

async def main():
    watch_children_without_threads()
    child = await asyncio.create_subprocess_exec("sh", "-c", "exit 7")
    print(await child.wait())

threading.Thread.start = start
asyncio.run(main())
"""


def test_a_child_is_watched_where_no_thread_can_start() -> None:
    command = [sys.executable, "-c", CHILD_WITHOUT_THREAD]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "7\n", ended.stderr
