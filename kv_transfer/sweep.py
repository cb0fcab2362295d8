"""Keeps a shared folder within its size: one thread, never the step loop, never an I/O thread.

    start ─▶ scan ─▶ wait (written past the capacity | scan_interval_s) ─▶ scan ─▶ …

A scan looks at every file, removes what nobody finished writing, what a dead instance left of its transfers, and,
above the capacity, full blocks in the order of their last use. Several instances share a folder and do not talk: each
estimates its size as that of its last scan plus its own writes since, so the cap may be passed by what the others
write within one interval. They remove the same oldest files, and a file that is gone already is no error. The clock
is the file system's own (a probe file's mtime), for instances' clocks differ.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEMP_PREFIX = ".tmp-"
_LOW_WATER = 0.9
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one scan found and did. Bytes and files that are left."""

    num_files: int
    num_bytes: int
    num_evicted: int
    num_orphans: int


@dataclass(frozen=True, slots=True)
class _File:
    used_ns: int
    num_bytes: int
    path: str
    is_temp: bool
    is_tail: bool


class Sweeper:
    """Owns the sweeping thread of one instance. `note_written` may be called from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        scan_interval_s: float,
        temp_max_age_s: float,
        tail_max_age_s: float,
    ) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._scan_interval_s = scan_interval_s
        self._temp_max_age_ns = int(temp_max_age_s * 1e9)
        self._tail_max_age_ns = int(tail_max_age_s * 1e9)
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._due = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-sweep", daemon=True)

    def start(self) -> None:
        """Begin with a scan."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a scan under way is waited for, but not long."""
        self._stopping = True
        self._due.set()
        self._thread.join(5.0)

    def note_written(self, num_bytes: int) -> None:
        """This instance has written so much."""
        with self._lock:
            self._num_bytes += num_bytes
            due = self._num_bytes > self._capacity_bytes
        if due:
            self._due.set()

    def sweep(self) -> SweepReport:
        """One scan. Raises OSError where the folder cannot be written to."""
        with self._lock:
            written_before = self._num_bytes
        now_ns = self._now_ns()
        kept: list[_File] = []
        num_orphans = num_evicted = 0
        for file in self._files():
            max_age_ns = self._temp_max_age_ns if file.is_temp else self._tail_max_age_ns
            if (file.is_temp or file.is_tail) and now_ns - file.used_ns > max_age_ns:
                num_orphans += self._remove(file)
            else:
                kept.append(file)
        num_files, num_bytes = len(kept), sum(file.num_bytes for file in kept)
        if num_bytes > self._capacity_bytes:
            evictable = (file for file in kept if not file.is_temp and not file.is_tail)
            for file in sorted(evictable, key=lambda file: file.used_ns):
                if num_bytes <= self._capacity_bytes * _LOW_WATER:
                    break
                if self._remove(file):
                    num_evicted, num_files, num_bytes = num_evicted + 1, num_files - 1, num_bytes - file.num_bytes
        with self._lock:
            self._num_bytes += num_bytes - written_before
        return SweepReport(num_files, num_bytes, num_evicted, num_orphans)

    def _run(self) -> None:
        warned = False
        while not self._stopping:
            self._due.clear()
            try:
                self.sweep()
                warned = False
            except OSError as error:
                if not warned:
                    _log.warning("the KV folder cannot be swept: %s", error.strerror)
                warned = True
                self._due.wait(1.0)
            self._due.wait(self._scan_interval_s)

    def _files(self) -> Iterator[_File]:
        """Regular files below v1; no link is followed."""
        for folder, _, names, descriptor in os.fwalk(self._path / "v1", follow_symlinks=False):
            is_tail = Path(folder).parent.name == "transfers"
            for name in names:
                try:
                    status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    used_ns = status.st_mtime_ns
                    yield _File(
                        used_ns, status.st_size, os.path.join(folder, name), name.startswith(TEMP_PREFIX), is_tail
                    )

    def _remove(self, file: _File) -> bool:
        """Whether it is gone now, by us or by another. False: it was used since the scan, or cannot be removed."""
        try:
            if os.lstat(file.path).st_mtime_ns != file.used_ns:
                return False
            os.unlink(file.path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        if file.is_tail:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(file.path))
        return True

    def _now_ns(self) -> int:
        """What time it is for the file system that stamps the files."""
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir("v1", 0o700, dir_fd=folder)
            probe = f"v1/{TEMP_PREFIX}{secrets.token_hex(8)}"  # an orphan, should this process end here
            descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                return os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
                os.unlink(probe, dir_fd=folder)
        finally:
            os.close(folder)
