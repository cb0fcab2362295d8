"""The rig's failpoints stop a process where a test wants, and a fault that misses is a failure, not a pass."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.rig import Failpoint
from tests.waiting import wait_until

LOOP = """
import os, time
from engine import failpoints
for number in range(1000000):
    while not os.path.exists({running!r}):
        open({paused!r}, "w").close()
        time.sleep(0.005)
    failpoints.hit("loop.turn")
    open({progress!r}, "w").write(str(number))
    time.sleep(0.005)
"""


class Looping:
    """A process that passes `loop.turn` again and again, except while it is paused."""

    def __init__(self, folder: Path) -> None:
        self.failpoint = Failpoint("loop", "loop.turn", folder / "loop")
        self.progress, self._running, self._paused = folder / "progress", folder / "running", folder / "paused"
        self.failpoint.release()
        env = {
            **os.environ,
            "TANDEM_ENABLE_FAILPOINTS": "1",
            "TANDEM_FAILPOINTS": "loop.turn=park",
            "TANDEM_FAILPOINT_FILE": str(folder / "loop"),
        }
        code = LOOP.format(progress=str(self.progress), running=str(self._running), paused=str(self._paused))
        self.process = subprocess.Popen([sys.executable, "-c", code], env=env)

    def run(self) -> None:
        self._running.touch()

    def arm(self) -> None:
        """Arms the failpoint while the process does not pass it."""
        self._running.unlink(missing_ok=True)
        self._paused.unlink(missing_ok=True)
        wait_until(self._paused.exists)
        self.failpoint.arm()
        self.run()


@pytest.fixture
def looping(tmp_path: Path) -> Iterator[Looping]:
    looping = Looping(tmp_path)
    try:
        looping.run()
        wait_until(looping.progress.exists)
        yield looping
    finally:
        looping.process.kill()
        looping.process.wait()


def moves(progress: Path, within_s: float = 5.0) -> bool:
    """Whether the process writes its progress again within a while."""
    first, deadline_s = progress.stat().st_mtime_ns, time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if progress.stat().st_mtime_ns != first:
            return True
        time.sleep(0.01)
    return False


def test_nothing_stops_until_it_is_armed_and_goes_on_when_released(looping: Looping) -> None:
    assert moves(looping.progress)
    for _ in range(3):
        looping.arm()
        arrival = looping.failpoint.wait()
        assert arrival.name == "loop.turn"
        assert not moves(looping.progress, within_s=0.1)
        looping.failpoint.release()
        assert moves(looping.progress)


def test_only_arrivals_since_the_arming_count(looping: Looping) -> None:
    looping.arm()
    first = looping.failpoint.wait()
    looping.failpoint.release()
    looping.arm()
    assert looping.failpoint.wait().hit > first.hit
    looping.failpoint.release()


def test_a_failpoint_that_is_not_reached_is_a_failure(tmp_path: Path) -> None:
    failpoint = Failpoint("decode-0", "never.hit", tmp_path / "decode-0")
    failpoint.arm()
    assert not failpoint.reached
    with pytest.raises(AssertionError, match=r"no request reached the failpoint never\.hit of decode-0"):
        failpoint.wait(timeout_s=0.1)
