"""What this router has at one instance, set against what the instance's last report can have counted.

sent ──a report that must know of it──▶ counted ──ended──▶ (remembered until a report that must know of that)

A report tells how things were when the engine core last spoke, `age_s` ago. What was on its way then it does not know,
so it counts a request only that had been sent `report_lag_s` before, the way into the core, or sooner if the instance
has answered it meanwhile. The same holds for ends on their way back.
"""

from __future__ import annotations

from dataclasses import dataclass

REPORT_LAG_S = 0.1
"""Generous for a network and an event loop. Too short herds for one report, too long shuns an instance for one."""


@dataclass(slots=True)
class _Sent:
    at_s: float
    num_tokens: int
    acknowledged: bool = False
    counted: bool = False


class Inflight:
    """The requests of one router at one instance. Owned by the pool member; legs report to it."""

    def __init__(self, report_lag_s: float = REPORT_LAG_S) -> None:
        self._report_lag_s = report_lag_s
        self._sent: dict[int, _Sent] = {}
        self._num_unreported = 0
        self._num_unreported_tokens = 0
        self._ended_s: list[float] = []

    def sent(self, leg_id: int, now_s: float, num_tokens: int = 0) -> None:
        """A request is on its way, with `num_tokens` tokens whose KV it needs before it can go on."""
        self.ended(leg_id, now_s)
        self._sent[leg_id] = _Sent(now_s, num_tokens)
        self._num_unreported += 1
        self._num_unreported_tokens += num_tokens

    def acknowledged(self, leg_id: int) -> None:
        """The instance has answered: it has the request."""
        if (sent := self._sent.get(leg_id)) is not None:
            sent.acknowledged = True

    def ended(self, leg_id: int, now_s: float) -> None:
        """The request is over there. Idempotent."""
        if (sent := self._sent.pop(leg_id, None)) is None:
            return
        if sent.counted:
            self._ended_s.append(now_s)
        else:
            self._count_out(sent)

    def reported(self, now_s: float, age_s: float = 0.0) -> None:
        """A report has come that tells how things were `age_s` ago."""
        as_of_s = now_s - age_s
        self._ended_s = [ended_s for ended_s in self._ended_s if ended_s > as_of_s + self._report_lag_s]
        for sent in self._sent.values():
            lag_s = 0.0 if sent.acknowledged else self._report_lag_s
            if not sent.counted and sent.at_s + lag_s <= as_of_s:
                sent.counted = True
                self._count_out(sent)

    def clear(self) -> None:
        """Another process answers at this address: nothing sent before is there."""
        self._sent.clear()
        self._ended_s.clear()
        self._num_unreported = self._num_unreported_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests of this router that are there or on their way."""
        return len(self._sent)

    @property
    def num_unreported(self) -> int:
        """Requests that the last report cannot have counted."""
        return self._num_unreported

    @property
    def num_unreported_tokens(self) -> int:
        """The tokens that those bring."""
        return self._num_unreported_tokens

    @property
    def num_ended(self) -> int:
        """Requests that the last report counted and that are over."""
        return len(self._ended_s)

    def _count_out(self, sent: _Sent) -> None:
        self._num_unreported -= 1
        self._num_unreported_tokens -= sent.num_tokens
