"""Requests for which no token could be sampled, written by vLLM's workers and read by the host.

vLLM has no channel for an error from its worker, which samples, to the host, which ends the request. The worker appends
to a file before the step's tokens leave it, so that the host, when it has a token, has the failure as well: it never
emits a token that was not sampled.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Container
from pathlib import Path

from engine.core.messages import ErrorKind

FOLDER = "TANDEM_VLLM_FOLDER"
"""Environment variable: the private folder that the processes of one vLLM share."""
_FILE = "failed_requests"
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_PUNCHED_BYTES = 1 << 20
_Failure = tuple[str, ErrorKind | None]
_NOTHING_ALLOWED: _Failure = "its parameters or its constraint exclude every token", "nothing_allowed"
_NOT_FINITE: _Failure = "the model's logits are not finite: no token can be sampled", None


class FailureLog:
    """The writing end, one for each worker."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / _FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, request_id: str, *, is_finite: bool) -> None:
        """`is_finite`: so were the model's logits, before the request's parameters changed them. One short write, which
        the system does not divide."""
        os.write(self._fd, f"{request_id} {int(is_finite)}\n".encode())


class FailedRequests:
    """The reading end. A look costs one system call while nothing has failed."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._num_read = 0
        self._num_punched = 0
        self._failures: dict[str, _Failure] = {}

    def take(self, request_id: str, running: Container[str] | None = None) -> _Failure | None:
        """The error of this request, if it has failed. Failures of others are kept where they are `running`: a worker
        may write that of a request, once more for another step, when the request has ended and is forgotten."""
        if os.fstat(self._fd).st_size > self._num_read:
            text = os.pread(self._fd, os.fstat(self._fd).st_size - self._num_read, self._num_read)
            self._num_read += len(text)
            for failed_id, is_finite in (line.split() for line in text.decode().splitlines()):
                cause = _NOTHING_ALLOWED if is_finite == "1" else _NOT_FINITE
                if running is None or failed_id in running:
                    self._failures.setdefault(failed_id, cause)  # later ones are of tokens after it
            self._free_disk()
        return self._failures.get(request_id)

    def _free_disk(self) -> None:
        """Of what was read. The file keeps its length: workers append to it at any moment."""
        if self._num_read - self._num_punched >= _PUNCHED_BYTES:
            self._num_punched = self._num_read
            ctypes.CDLL(None).fallocate(
                self._fd, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(self._num_read)
            )

    def forget(self, request_id: str) -> None:
        self._failures.pop(request_id, None)
