"""Ends a process that is PID 1 of its container at SIGTERM, until it has handlers of its own.

Linux ignores SIGTERM where PID 1 has no handler, and other processes end by it. So a container that is stopped while
Python imports, before `lifecycle.stop_signals`, would run until SIGKILL. Imports nothing but the standard library.
"""

from __future__ import annotations

import os
import signal

EXIT_TERMINATED = 128 + signal.SIGTERM
"""As a shell reports it of a process that ended by the signal."""


def end_on_sigterm() -> None:
    """Does nothing where this process is not PID 1."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))
