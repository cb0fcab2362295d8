"""Requests for which no token could be sampled: from vLLM's worker, which samples, to the host, which ends them.

vLLM has no channel for an error of one request. The worker appends to a file before the step's tokens leave it, so that
the host, when it has a token, has the failure as well: it never emits a token that was not sampled.
"""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "failed_requests"


class FailureLog:
    """The writing end, one for each worker."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, request_id: str) -> None:
        """One short write, which the system does not divide."""
        os.write(self._fd, f"{request_id}\n".encode())


class FailedRequests:
    """The reading end. A look costs one system call while nothing has failed."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / _FILE, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._num_read = 0
        self._ids: set[str] = set()

    def take(self, request_id: str) -> bool:
        """Whether this request has failed."""
        if os.fstat(self._fd).st_size > self._num_read:
            text = os.pread(self._fd, os.fstat(self._fd).st_size - self._num_read, self._num_read)
            self._num_read += len(text)
            self._ids.update(text.decode().split())
        return bool(self._ids) and request_id in self._ids

    def forget(self, request_id: str) -> None:
        self._ids.discard(request_id)
