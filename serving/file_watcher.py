"""The content of files, read again when one of them changes; the last good content stays over a bad one.

    good ──a stat differs──▶ read ──usable──▶ good, the new content
                               └──half written, unreadable──▶ rejected: the last good content stays, one warning
                                          rejected ──a stat differs, or after a second──▶ read

Each use costs a `stat` per file; no notification is needed when a file is replaced.
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
_RETRY_S = 1.0  # A file may be unreadable for a reason that its stat does not show

T = TypeVar("T")


class FileWatcher(Generic[T]):
    """One content of one or several files. Safe to use from every thread."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Reads the files by `read`, which raises SettingsError for unusable content, as does this constructor."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._problem: str | None = None
        self._retry_at_s = 0.0
        self.num_reloads = 0  # changes in use, or once in use
        self.num_rejected = 0  # unusable changes
        self._signature = self._signatures()
        self._content = read()

    def current(self) -> T:
        """The content to use now; the same object until it changes. Never raises."""
        with self._lock:
            signature = self._signatures()
            due = self._problem is not None and time.monotonic() >= self._retry_at_s
            if signature != self._signature or due:
                self._signature = signature  # taken before reading: a later change is read again
                self._reload()
            return self._content

    def count_rejected(self) -> None:
        """Counts a change that `read` accepts and that the caller cannot use."""
        with self._lock:
            self.num_rejected += 1

    def _reload(self) -> None:
        try:
            content = self._read()
        except SettingsError as error:
            self._retry_at_s = time.monotonic() + _RETRY_S
            if str(error) != self._problem:
                self._problem = str(error)
                self.num_rejected += 1
                _log.warning("a changed file is rejected, the last good content stays: %s", error)
            return
        self._problem = None
        if content != self._content:
            self._content = content
            self.num_reloads += 1

    def _signatures(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_signature(path) for path in self._paths)


def read_bytes(path: Path, name: str) -> bytes:
    """The content of the file named by the setting `name`. Raises SettingsError."""
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
