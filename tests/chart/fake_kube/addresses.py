"""Addresses of a cluster on loopback: 127.x.0.0/16, of which no two clusters of this machine have the same x."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket

_LOCK_PORT = 50_000
"""Whoever listens here at 127.x.0.1 has the network 127.x."""


class Network:
    """Held from its making to `close`. On Linux, where all of 127.0.0.0/8 is this machine."""

    def __init__(self) -> None:
        self._lock, self._prefix = _free_network()
        self._numbers = itertools.count(256)

    def next(self) -> str:
        """An address that nobody has had yet."""
        number = next(self._numbers)
        return f"{self._prefix}.{number // 256}.{number % 256}"

    def close(self) -> None:
        """Others may have it."""
        self._lock.close()


def _free_network() -> tuple[socket.socket, str]:
    for number in random.sample(range(2, 255), 253):
        lock = socket.socket()
        with contextlib.suppress(OSError):
            lock.bind((f"127.{number}.0.1", _LOCK_PORT))
            lock.listen()
            return lock, f"127.{number}"
        lock.close()
    raise OSError(f"no 127.x.0.1:{_LOCK_PORT} is free: 253 clusters run on this machine")
