"""When a call to an instance that has ended is over: not before all is read that had arrived.

    ended ─▶ fading: messages are read, however late ──two looks at a reader that waits in vain──▶ silent

A router that is behind, because its client reads slowly or the machine is busy, still has the end of a stream in its
own buffers when the instance's process is gone. A connection that breaks ends its calls by itself, each after what had
come before; only a call that nothing has ended is given up here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LOOK_S = 0.05
_SILENT_LOOKS = 2
"""Two: after a moment in which this process did not run, the first look may come before what has arrived meanwhile."""


class LastWords:
    """Of one call. Its reader counts `num_reads` up as it begins to wait, and says so in `is_reading`."""

    def __init__(self, on_silence: Callable[[str], None]) -> None:
        self.num_reads = 0
        self.is_reading = False
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, reason: str) -> None:
        """The instance has ended, and why; `on_silence` is told that when nothing more comes. Idempotent."""
        if self._timer is None:
            self._look_later(reason, 0)

    def stop(self) -> None:
        """The call is over."""
        if self._timer is not None:
            self._timer.cancel()

    async def until_silent(self, length_s: float) -> None:
        """Returns when for `length_s` nothing has been read."""
        num_reads = -1
        while num_reads != self.num_reads:
            num_reads = self.num_reads
            await asyncio.sleep(length_s)

    def _look_later(self, reason: str, num_silent: int) -> None:
        num_reads = self.num_reads

        def look() -> None:
            is_silent = self.is_reading and self.num_reads == num_reads
            if is_silent and num_silent + 1 == _SILENT_LOOKS:
                self._on_silence(reason)
            else:
                self._look_later(reason, num_silent + 1 if is_silent else 0)

        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, look)
