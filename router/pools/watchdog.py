"""When an instance counts as gone: by the silence of its reports, or of the engine core that they tell of.

stopped ──begin──▶ watching ──no report in time──▶ silent: told once, and stopped
                      ⇅ ──the core said nothing for too long──▶ wedged: told once, until a report says otherwise

One timer per instance, which a report does not touch: it looks at the clock when it goes off. A timer that goes off
late says that this process itself was held up, and that reports may wait in its buffers: then it looks once more, a
little later, before it takes everybody else for dead.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

_STEPS_OF_SILENCE = 5
"""An engine core says nothing during a step; one that takes as long as predicted is no wedge."""
_OVERSLEPT_S = 0.1
_GRACE_S = 0.25
_RESOLUTION_S = 0.001


class Watchdog:
    """Watches one instance. Belongs to one event loop; `on_silent` and `on_wedged` are called on it."""

    def __init__(
        self,
        beat_timeout_s: float,
        core_silence_timeout_s: float,
        *,
        on_silent: Callable[[], None],
        on_wedged: Callable[[], None],
    ) -> None:
        self._beat_timeout_s = beat_timeout_s
        self._core_silence_timeout_s = core_silence_timeout_s
        self._on_silent = on_silent
        self._on_wedged = on_wedged
        self._last_beat_s = -math.inf
        self._core_due_s = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = 0.0
        self._looked_late = False
        self._told_wedged = False

    def begin(self) -> None:
        """Reports are asked for: the first one is due as any other."""
        self.stop()
        self._last_beat_s = time.monotonic()
        self._set_timer()

    def stop(self) -> None:
        """Nothing is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._core_due_s = math.inf
        self._looked_late = self._told_wedged = False

    def beat(self, core_silence_s: float, step_s: float) -> None:
        """A report has come: its core has been silent for so long, and predicts that its step takes `step_s`."""
        now_s = self._last_beat_s = time.monotonic()
        limit_s = max(self._core_silence_timeout_s, _STEPS_OF_SILENCE * step_s)
        self._core_due_s = now_s - core_silence_s + limit_s
        self._looked_late = False
        if not self.is_wedged:
            self._told_wedged = False
        if self._timer is not None and self._due_s < self._timer_due_s:
            self._set_timer()

    @property
    def age_s(self) -> float:
        """Seconds since the last report; infinite before the first."""
        return time.monotonic() - self._last_beat_s

    @property
    def is_wedged(self) -> bool:
        """Whether the engine core has been silent for too long."""
        return time.monotonic() >= self._core_due_s

    @property
    def _due_s(self) -> float:
        silent_s = self._last_beat_s + self._beat_timeout_s
        return silent_s if self._told_wedged else min(silent_s, self._core_due_s)

    def _set_timer(self, delay_s: float | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now_s = time.monotonic()
        self._timer_due_s = max(now_s, self._due_s) if delay_s is None else now_s + delay_s
        self._timer = asyncio.get_running_loop().call_later(self._timer_due_s - now_s, self._look)

    def _look(self) -> None:
        now_s = time.monotonic() + _RESOLUTION_S
        if now_s < self._due_s:
            self._set_timer()
        elif now_s - self._timer_due_s > _OVERSLEPT_S and not self._looked_late:
            self._looked_late = True
            self._set_timer(_GRACE_S)
        elif now_s >= self._last_beat_s + self._beat_timeout_s:
            self.stop()
            self._on_silent()
        else:
            self._told_wedged = True
            self._set_timer()
            self._on_wedged()
