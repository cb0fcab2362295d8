"""The events of a request's life: one set of names for logs, metrics, spans and benchmark columns."""

from __future__ import annotations

import time
from enum import StrEnum


class RequestEvent(StrEnum):
    """What can happen to a request, in the order of a fault-free life; the last four may come at any point."""

    RECEIVED = "received"
    """The router has the request, parsed."""
    ADMITTED = "admitted"
    """It is valid and within its budget."""
    PICKED = "picked"
    """Its instances are chosen; again after every failover."""
    KV_RESERVED = "kv_reserved"
    """The decode instance holds blocks for it."""
    PREFILL_STARTED = "prefill_started"
    """Its first tokens are scheduled."""
    FIRST_TOKEN = "first_token"
    """Its first token is on the way to the client."""
    KV_ATTACHED = "kv_attached"
    """The decode instance is attached to the transfer at the prefill instance."""
    KV_LOADED = "kv_loaded"
    """Every block has arrived and is verified."""
    DECODE_STARTED = "decode_started"
    """The decode instance has scheduled it."""
    FINISHED = "finished"
    """It ended by itself: a stop condition or its length."""
    PREEMPTED = "preempted"
    """The engine took its blocks back; it will be computed again."""
    RESUMED = "resumed"
    """It goes on at another instance from the tokens already emitted."""
    ABORTED = "aborted"
    """It was ended from outside: cancelled, disconnected, or past its deadline."""
    FAILED = "failed"
    """It was answered with an error."""


class Timeline:
    """When each event of one request happened, on the monotonic clock. Owned by whoever handles the request."""

    __slots__ = ("_marks",)

    def __init__(self) -> None:
        self._marks: list[tuple[RequestEvent, float]] = []

    def mark(self, event: RequestEvent, at_s: float | None = None) -> float:
        """Records `event`, now unless `at_s` (`time.monotonic()`) says otherwise; returns its time."""
        at_s = time.monotonic() if at_s is None else at_s
        self._marks.append((event, at_s))
        return at_s

    def at(self, event: RequestEvent) -> float | None:
        """The time of the first `event`, None if it has not happened."""
        return next((at_s for name, at_s in self._marks if name is event), None)

    def count(self, event: RequestEvent) -> int:
        """How often `event` has happened."""
        return sum(name is event for name, _ in self._marks)

    def between(self, start: RequestEvent, end: RequestEvent) -> float | None:
        """Seconds from the first `start` to the first `end`, None unless both have happened."""
        start_s, end_s = self.at(start), self.at(end)
        return None if start_s is None or end_s is None else end_s - start_s

    @property
    def marks(self) -> tuple[tuple[RequestEvent, float], ...]:
        """Every event with its time, in the order of recording."""
        return tuple(self._marks)

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds from the first mark to the first of each event, for one log line."""
        if not self._marks:
            return {}
        start_s = self._marks[0][1]
        offsets: dict[str, float] = {}
        for event, at_s in self._marks:
            offsets.setdefault(f"{event}_ms", round((at_s - start_s) * 1e3, 3))
        return offsets
