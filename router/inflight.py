"""What this router has at one instance, set against what the instance's last report can have counted.

sent ──acknowledged and then a report──▶ counted ──ended──▶ (remembered until the next report)

A report may have left the instance before a request reached it, so a report counts a request only once the instance has
answered it, or after `report_lag_s` (an instance that is busy with a prompt says nothing until its first token).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Sent:
    at_s: float
    acknowledged: bool = False
    counted: bool = False


class Inflight:
    """The requests of one router at one instance. Owned by the pool member; legs report to it."""

    def __init__(self, report_lag_s: float = 0.5) -> None:
        self._report_lag_s = report_lag_s
        self._sent: dict[int, _Sent] = {}
        self._num_ended = 0

    def sent(self, leg_id: int, now_s: float) -> None:
        """A request is on its way."""
        self._sent[leg_id] = _Sent(now_s)

    def acknowledged(self, leg_id: int) -> None:
        """The instance has answered, so its next report counts the request."""
        if (sent := self._sent.get(leg_id)) is not None:
            sent.acknowledged = True

    def ended(self, leg_id: int) -> None:
        """The request is over there. Idempotent."""
        sent = self._sent.pop(leg_id, None)
        if sent is not None and sent.counted:
            self._num_ended += 1

    def reported(self, now_s: float) -> None:
        """A report has come."""
        self._num_ended = 0
        for sent in self._sent.values():
            if sent.acknowledged or now_s - sent.at_s >= self._report_lag_s:
                sent.counted = True

    def clear(self) -> None:
        """Another process answers at this address: nothing sent before is there."""
        self._sent.clear()
        self._num_ended = 0

    @property
    def num_unreported(self) -> int:
        """Requests that the last report cannot have counted."""
        return sum(not sent.counted for sent in self._sent.values())

    @property
    def num_ended(self) -> int:
        """Requests that the last report counted and that are over."""
        return self._num_ended
