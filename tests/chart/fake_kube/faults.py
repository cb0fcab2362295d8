"""Faults that a test orders: the next requests that match meet them, and each says how often it was met."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chart.fake_kube.refusal import Refused

_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


@dataclass
class Fault:
    """What goes wrong, where, and how often."""

    verb: str
    resource: str
    """With its subresource."""
    code: int | None = None
    """The answer's status; None: the request is served, late or as of the past."""
    times: int | None = 1
    """None: until it is withdrawn."""
    retry_after_s: int | None = None
    delay_s: float = 0.0
    is_done: bool = False
    """The request is carried out and the answer is lost: a write that fails has happened."""
    revision: int | None = None
    """A `get` is answered as if nothing had happened since then: a stale cache."""
    num_met: int = 0

    def matches(self, verb: str, resource: str) -> bool:
        """Whether it is due for this request."""
        return (verb, resource) == (self.verb, self.resource) and (self.times is None or self.num_met < self.times)

    def refusal(self) -> Refused | None:
        """The answer, if it is one."""
        if self.code is None:
            return None
        details = {} if self.retry_after_s is None else {"retryAfterSeconds": self.retry_after_s}
        return Refused(self.code, _REASONS.get(self.code, "Unknown"), f"ordered by the test: {self.code}", **details)


class Faults:
    """Those that are ordered, the oldest first."""

    def __init__(self) -> None:
        self._ordered: list[Fault] = []

    def order(self, fault: Fault) -> Fault:
        """From now on."""
        self._ordered.append(fault)
        return fault

    def withdraw(self, fault: Fault) -> None:
        """From now on no more."""
        self._ordered.remove(fault)

    def due(self, verb: str, resource: str) -> Fault | None:
        """The one that this request meets, counted."""
        for fault in self._ordered:
            if fault.matches(verb, resource):
                fault.num_met += 1
                return fault
        return None
