"""What files hold, read again when one of them changes, the last good content kept over a bad one.

    good ──a stat differs──▶ read ──usable──▶ good, the new content
                               └──half written, unreadable──▶ refused: the last good content serves, one warning
                                          refused ──a stat differs, or after a second──▶ read

Whoever asks pays a `stat` a file, and nothing has to be told that a file was replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from serving.settings import SettingsError

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0
"""A file may have been unreadable for a reason that its stat does not show."""

T = TypeVar("T")


class Watched(Generic[T]):
    """One content of one or several files. Safe to use from every thread."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Reads the files, by `read`, which raises SettingsError for what cannot be used; so does this constructor."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._problem: str | None = None
        self._again_s = 0.0
        self.num_taken = 0
        """Changes that were taken."""
        self.num_refused = 0
        """Changes that were not."""
        self._signature = self._look()
        self._content = read()

    def current(self) -> T:
        """What is to be used now; the same object for as long as it stays so. Never raises."""
        with self._lock:
            signature = self._look()
            due = self._problem is not None and time.monotonic() >= self._again_s
            if signature != self._signature or due:
                self._signature = signature  # of before the reading: what changes meanwhile is read once more
                self._take()
            return self._content

    def _take(self) -> None:
        try:
            content = self._read()
        except SettingsError as error:
            self._again_s = time.monotonic() + _AGAIN_S
            if str(error) != self._problem:
                self._problem = str(error)
                self.num_refused += 1
                _log.warning("a changed file is not taken, the last good content stays: %s", error)
            return
        self._problem = None
        if content != self._content:
            self._content = content
            self.num_taken += 1

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_signature(path) for path in self._paths)


def read_bytes(path: Path, name: str) -> bytes:
    """The content of the file that the setting `name` gives. Raises SettingsError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{name}: {path} cannot be read: {error.strerror}") from None


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()  # follows links: a mounted Secret is swapped by one
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
