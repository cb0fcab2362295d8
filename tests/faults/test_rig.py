"""The rig's failpoints stop a process where the test wants, and a fault that misses is a failure, not a pass."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.rig import Failpoint

LOOP = """
import time
from engine import failpoints
for number in range(1000000):
    failpoints.hit("loop.turn")
    open({progress!r}, "w").write(str(number))
    time.sleep(0.005)
"""


@pytest.fixture
def looping(tmp_path: Path) -> Iterator[tuple[Failpoint, Path]]:
    """A process that comes by `loop.turn` again and again, nothing armed yet."""
    handshake, progress = tmp_path / "loop", tmp_path / "progress"
    failpoint = Failpoint("loop", "loop.turn", handshake)
    failpoint.release()
    env = {
        **os.environ,
        "TANDEM_ENABLE_FAILPOINTS": "1",
        "TANDEM_FAILPOINTS": "loop.turn=park",
        "TANDEM_FAILPOINT_FILE": str(handshake),
    }
    process = subprocess.Popen([sys.executable, "-c", LOOP.format(progress=str(progress))], env=env)
    try:
        while not progress.exists():
            time.sleep(0.01)
        yield failpoint, progress
    finally:
        process.kill()
        process.wait()


def moves(progress: Path, within_s: float = 5.0) -> bool:
    """Whether the process writes its progress again within a while."""
    first, deadline_s = progress.stat().st_mtime_ns, time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if progress.stat().st_mtime_ns != first:
            return True
        time.sleep(0.01)
    return False


def test_nothing_stops_until_it_is_armed_and_goes_on_when_released(looping: tuple[Failpoint, Path]) -> None:
    failpoint, progress = looping
    assert moves(progress)
    for _ in range(3):
        failpoint.arm()
        arrival = failpoint.wait()
        assert arrival.name == "loop.turn"
        assert not moves(progress, within_s=0.1)
        failpoint.release()
        assert moves(progress)


def test_only_arrivals_since_the_arming_count(looping: tuple[Failpoint, Path]) -> None:
    failpoint, _ = looping
    failpoint.arm()
    first = failpoint.wait()
    failpoint.release()
    time.sleep(0.1)
    failpoint.arm()
    assert failpoint.wait().hit > first.hit
    failpoint.release()


def test_a_failpoint_that_nobody_reaches_is_a_failure(tmp_path: Path) -> None:
    failpoint = Failpoint("decode-0", "never.hit", tmp_path / "decode-0")
    failpoint.arm()
    assert not failpoint.reached
    with pytest.raises(AssertionError, match=r"nobody came to the failpoint never\.hit of decode-0"):
        failpoint.wait(timeout_s=0.1)
