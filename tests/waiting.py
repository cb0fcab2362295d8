"""Waiting without a guess at how long it takes, and measuring without counting the machine's stalls."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from tests.engine_under_test import PATIENCE


async def until(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Returns when `condition` holds. Raises TimeoutError after a time that a busy machine does not need either."""
    async with asyncio.timeout(within_s * PATIENCE):
        began_s = time.monotonic()
        while not condition():
            await asyncio.sleep(_pause_s(0.005, began_s))


def wait_until(condition: Callable[[], object], problem: str | Callable[[], str] = "", within_s: float = 60.0) -> None:
    """As `until`, without an event loop. Raises AssertionError with `problem`."""
    within_s *= PATIENCE
    began_s = time.monotonic()
    while not condition():
        if time.monotonic() > began_s + within_s:
            raise AssertionError(f"after {within_s:g} s: {problem if isinstance(problem, str) else problem()}")
        time.sleep(_pause_s(0.01, began_s))


def _pause_s(shortest_s: float, began_s: float) -> float:
    """Until the next look: most look at processes or ask them, which costs milliseconds here and there. At most five
    times the shortest, and a thirtieth of the time that has passed."""
    return min(5 * shortest_s, max(shortest_s, (time.monotonic() - began_s) / 30))


def freeze(pid: int) -> None:
    """SIGSTOP. Returns when every thread of the process has stopped, which on a busy machine takes a while."""
    os.kill(pid, signal.SIGSTOP)
    stats = [*Path(f"/proc/{pid}/task").glob("*/stat")]
    wait_until(lambda: all(_is_stopped(stat) for stat in stats), f"process {pid} does not stop")


def _is_stopped(stat: Path) -> bool:
    """Or gone."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:
        return True


_TICK_S = 0.005
_LONGEST_TICK_S = 0.05


class Stopwatch:
    """Seconds since it was made, for upper limits. A stall of this process counts for 50 ms, however long it was."""

    def __init__(self) -> None:
        self.s = 0.0
        self._started_s = time.monotonic()
        threading.Thread(target=_tick, args=(weakref.ref(self), self._started_s), daemon=True).start()

    @property
    def stalled_s(self) -> float:
        """What stalls took of the time so far."""
        return time.monotonic() - self._started_s - self.s


def _tick(watch: weakref.ref[Stopwatch], last_s: float) -> None:
    while (running := watch()) is not None:
        now_s = time.monotonic()
        running.s += min(now_s - last_s, _LONGEST_TICK_S)
        last_s = now_s
        del running
        time.sleep(_TICK_S)
