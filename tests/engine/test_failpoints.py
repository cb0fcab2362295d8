"""Failpoints do nothing unless enabled, and then exactly their actions."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import failpoints
from tests.waiting import Stopwatch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    failpoints.configure(None)


def in_a_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")} | environment
    command = [sys.executable, "-c", f"from engine import failpoints; {code}"]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def test_without_the_switch_nothing_fires() -> None:
    done = in_a_process("failpoints.hit('a'); print('alive')", TANDEM_FAILPOINTS="a=exit")
    assert done.stdout == "alive\n"


def test_exit_ends_the_process_without_cleanup() -> None:
    code = "import atexit; atexit.register(print, 'cleanup'); failpoints.hit('a')"
    done = in_a_process(code, TANDEM_FAILPOINTS="a=exit", TANDEM_ENABLE_FAILPOINTS="1")
    assert done.returncode == failpoints.EXIT_STATUS
    assert done.stdout == ""


def test_fail_fires_at_its_hit_only() -> None:
    failpoints.configure("store.write=fail@3")
    failpoints.hit("store.write")
    failpoints.hit("store.read")
    failpoints.hit("store.write")
    with pytest.raises(failpoints.FailpointError, match=r"store\.write, hit 3"):
        failpoints.hit("store.write")
    failpoints.hit("store.write")


def test_without_a_count_every_hit_fires() -> None:
    failpoints.configure("a=fail")
    for _ in range(2):
        with pytest.raises(failpoints.FailpointError):
            failpoints.hit("a")


async def test_sleep_delays_by_its_seconds_and_leaves_the_loop_free() -> None:
    failpoints.configure("a=sleep:0.2")
    started, watch = time.monotonic(), Stopwatch()
    await asyncio.gather(failpoints.hit_async("a"), failpoints.hit_async("a"))
    assert watch.s < 0.39
    assert time.monotonic() - started > 0.19
    failpoints.hit("a")
    assert time.monotonic() - started > 0.39


def test_a_parked_thread_announces_itself_and_continues_at_the_go_file(tmp_path: Path) -> None:
    file = tmp_path / "handshake"
    failpoints.configure("decode.after_token=park@2", file=str(file))
    failpoints.hit("decode.after_token")
    assert not file.exists()
    thread = threading.Thread(target=failpoints.hit, args=("decode.after_token",))
    thread.start()
    while not file.exists() or not file.read_text():
        time.sleep(0.005)
    assert file.read_text() == f"FAILPOINT decode.after_token 2 pid={os.getpid()}\n"
    thread.join(0.05)
    assert thread.is_alive()
    Path(f"{file}.decode.after_token.go").touch()
    thread.join(20)
    assert not thread.is_alive()


async def test_a_parked_coroutine_leaves_the_loop_free(tmp_path: Path) -> None:
    file = tmp_path / "handshake"
    failpoints.configure("a=park", file=str(file))
    parked = asyncio.create_task(failpoints.hit_async("a"))
    await asyncio.sleep(0.05)
    assert file.exists()
    assert not parked.done()
    Path(f"{file}.a.go").touch()
    await asyncio.wait_for(parked, 20)


@pytest.mark.parametrize(
    "entry", ["a", "a=", "a=explode", "a=fail@0", "a=fail@x", "a=sleep", "a=park:3", "A b=fail", "=fail"]
)
def test_a_wrong_spec_names_the_entry(entry: str) -> None:
    with pytest.raises(ValueError, match="is not name=park"):
        failpoints.configure(f"ok=fail;{entry}")


def test_a_park_without_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="TANDEM_FAILPOINT_FILE"):
        failpoints.configure("a=park")


def test_a_failpoint_that_is_off_costs_next_to_nothing() -> None:
    started = time.process_time()
    for _ in range(100_000):
        failpoints.hit("engine.step")
    assert (time.process_time() - started) / 100_000 < 2e-6
