"""Decides when an instance is unavailable: by the silence of its load reports, or of the engine core they describe.

stopped ──start──▶ watching ──no report in time──▶ silent: reported once, then stopped
                      ⇅ ──the core is silent for too long──▶ wedged: reported once, until a load report says otherwise

One timer per instance, which a report does not touch: it reads the clock when it fires. A timer that fires late means
that this process was held up and that reports may wait in its buffers; it then checks once more, a little later.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

_SILENT_STEPS = 5
"""An engine core is silent during a step; a step that takes as long as predicted is not a wedge."""
_LATE_S = 0.1
_GRACE_S = 0.25
_RESOLUTION_S = 0.001


@dataclass(slots=True, eq=False)
class FailureDetector:
    """Watches one instance. Belongs to one event loop, on which it calls `on_silent` and `on_wedged`."""

    report_timeout_s: float
    core_silence_timeout_s: float
    on_silent: Callable[[], None]
    on_wedged: Callable[[], None]
    is_wedged: bool = False
    """Whether the engine core has been silent for too long: a report says so, or none has come since in time."""
    _last_report_s: float = -math.inf
    _core_due_s: float = math.inf
    _timer: asyncio.TimerHandle | None = None
    _timer_due_s: float = 0.0
    _is_grace_used: bool = False
    _is_wedge_reported: bool = False

    def start(self) -> None:
        """Watches from now on; the first report is due like any other."""
        self.stop()
        self._last_report_s = time.monotonic()
        self._set_timer()

    def stop(self) -> None:
        """Nothing is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._core_due_s = math.inf
        self.is_wedged = self._is_grace_used = self._is_wedge_reported = False

    def report_received(self, core_silence_s: float, step_s: float) -> None:
        """A report has come: the core has been silent for `core_silence_s` and predicts a step of `step_s`."""
        now_s = self._last_report_s = time.monotonic()
        limit_s = max(self.core_silence_timeout_s, _SILENT_STEPS * step_s)
        self._core_due_s = now_s - core_silence_s + limit_s
        self.is_wedged = now_s >= self._core_due_s
        self._is_grace_used = False
        if not self.is_wedged:
            self._is_wedge_reported = False
        if self._timer is not None and self._due_s < self._timer_due_s:
            self._set_timer()

    @property
    def report_age_s(self) -> float:
        """Seconds since the last report; infinite before the first."""
        return time.monotonic() - self._last_report_s

    @property
    def _due_s(self) -> float:
        silent_s = self._last_report_s + self.report_timeout_s
        return silent_s if self._is_wedge_reported else min(silent_s, self._core_due_s)

    def _set_timer(self, delay_s: float | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now_s = time.monotonic()
        self._timer_due_s = max(now_s, self._due_s) if delay_s is None else now_s + delay_s
        self._timer = asyncio.get_running_loop().call_later(self._timer_due_s - now_s, self._check)

    def _check(self) -> None:
        now_s = time.monotonic() + _RESOLUTION_S
        if now_s < self._due_s:
            self._set_timer()
        elif now_s - self._timer_due_s > _LATE_S and not self._is_grace_used:
            self._is_grace_used = True
            self._set_timer(_GRACE_S)
        elif now_s >= self._last_report_s + self.report_timeout_s:
            self.stop()
            self.on_silent()
        else:
            self.is_wedged = self._is_wedge_reported = True
            self._set_timer()
            self.on_wedged()
