"""The seam between a store connector and a store, which puts, gets, finds and deletes values by key.

A value is a header and a page (kv_transfer/page/format.py), passed as buffers so that a page goes straight from and
into KV memory. All methods may block, are called from I/O threads, and must be thread-safe. A store promises little: a
value may vanish or be damaged at any time, since the reader verifies what it gets. It must never show part of a value
as a whole one under its own name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.page.format import Buffer, PageKey

KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3
"""Of connections to stores: seconds of silence before the first probe, between probes, and their number. A NAT forgets
no idle connection, and one that is lost is found before a request needs it."""
_log = logging.getLogger(__name__)


class StoreError(Exception):
    """An operation of the store failed. `reason` is one word, fit for a counter's label."""

    is_logged = False
    """The store has logged the failure itself."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class BadValue(StoreError):
    """The store works, but the key has no value of the right length."""


class UnreadableValue(BadValue):
    """The store has the value, and its medium cannot read it."""


class NotWritable(OSError):
    """The folder `filename` of the store cannot be written to, which does not end by itself."""

    remedy = "let this user write there; a systemd unit also needs ReadWritePaths= (docs/systemd.md)"


class BlockStore(Protocol):
    """See the module. Raises StoreError or OSError where the store cannot be used now, and what `check` raises; any
    other error is a fault of the connector, with which no instance starts. All buffers are of bytes, the first one is
    the header, the second one the page."""

    name: str
    """Of the connector, in logs and metrics."""

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        """Make the concatenation of `buffers` the value of `key`, visible all at once. The last writer wins. They are
        views of KV memory, which changes once this has returned: keep a copy."""

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        """Fill `buffers`; False: no such value. A value of another length is a BadValue, raised before a byte is read.

        `check` is called once buffers[0] is full, if possible before the rest is read; it raises to stop there.
        """

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        """Whether there is a value of exactly this length; if so it counts as used now."""

    def delete(self, key: PageKey) -> None:
        """Remove the value if there is one."""

    def close(self) -> None:
        """Stop threads, close connections. No method is called afterwards."""


def rest_of(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of them past the first `num_bytes`."""
    while views and num_bytes >= len(views[0]):
        num_bytes -= len(views[0])
        views = views[1:]
    return [views[0][num_bytes:], *views[1:]] if views else []


class OutageLog:
    """Logs that a server is unavailable and that it answers again, each at most once per interval. Thread-safe."""

    _INTERVAL_S = 10.0

    def __init__(self, server: str) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._failed_at: float | None = None
        self._logged_at: dict[str, float] = {}

    def failed_within(self, seconds: float) -> bool:
        """The last event was a failure, less than `seconds` ago."""
        failed_at = self._failed_at
        return failed_at is not None and time.monotonic() - failed_at < seconds

    def note_failure(self, reason: str) -> None:
        self._failed_at = time.monotonic()
        self.warn(reason)

    def warn(self, reason: str) -> None:
        """The server answers, but rejects requests."""
        self._log(f"is unavailable: {reason}; KV is computed instead")

    def note_answer(self) -> None:
        if self._failed_at is not None:
            self._failed_at = None
            self._log("answers again")

    def _log(self, event: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._logged_at.get(event, -self._INTERVAL_S) < self._INTERVAL_S:
                return
            self._logged_at[event] = now
        _log.warning("%s %s", self._server, event)
