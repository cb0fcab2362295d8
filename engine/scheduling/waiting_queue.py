"""The waiting requests of a scheduler, in the order of service.

There may be 100,000 of them offline. What every step does must not take longer for that: an addition at the end and a
removal cost O(1), and counts say which passes over all of them would find nothing.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from engine.scheduling.request import Request

_MAX_PLANNED = 64
"""Waiting requests whose TTFT a step takes into account."""
_order = attrgetter("order")


@dataclass(slots=True)
class WaitingQueue:
    """Requests sorted by `Request.order`. What the counts are about stays the same while a request waits.

    Ctrl-C may interrupt any method: then a count may stay too large, so that a pass finds nothing, and never too small.
    """

    num_awaiting_kv: int = 0
    """Those with KV of another instance."""
    _num_expiring: int = 0
    _num_with_ttft: int = 0
    _requests: list[Request] = field(default_factory=list)
    """In order; with removed ones until the next read, if `_has_gaps`."""
    _members: set[Request] = field(default_factory=set)
    _has_gaps: bool = False

    def __len__(self) -> int:
        return len(self._settled())

    def __iter__(self) -> Iterator[Request]:
        return iter(self._settled())

    def __contains__(self, request: object) -> bool:
        return request in self._members

    def __getitem__(self, index: int) -> Request:
        return self._settled()[index]

    @property
    def expiring(self) -> Iterable[Request]:
        """Those with a time limit, among others; empty if none has one."""
        return self if self._num_expiring else ()

    @property
    def with_ttft(self) -> Iterable[Request]:
        """Those with an objective for their first token, late or not, among others; empty if none has one."""
        return self if self._num_with_ttft else ()

    def first_on_time(self) -> Iterator[Request]:
        """The first of those that are not late and of which nothing is computed."""
        return islice((request for request in self.with_ttft if request.waits_on_time), _MAX_PLANNED)

    def add(self, request: Request) -> None:
        """Insert a request at its place in the order."""
        requests = self._settled()  # before it is a member again, if it was removed
        self._count(request, 1)
        self._members.add(request)
        if requests and request.order < requests[-1].order:
            insort(requests, request, key=_order)
        else:
            requests.append(request)

    def remove(self, request: Request) -> None:
        """Remove a request. One that does not wait is ignored."""
        if request in self._members:
            self._has_gaps = True
            self._members.discard(request)
            self._count(request, -1)

    def pop(self, index: int) -> Request:
        """Remove and return the request at `index`. Those that follow it move up: 100,000 take some 10 µs."""
        request = self._settled().pop(index)
        self._members.discard(request)
        self._count(request, -1)
        return request

    def sort(self) -> None:
        """Restore the order after requests have become late."""
        self._settled().sort(key=_order)

    def _settled(self) -> list[Request]:
        """The requests without those that were removed: one pass for any number of removals."""
        if self._has_gaps:
            self._requests = [request for request in self._requests if request in self._members]
            self._has_gaps = False
        return self._requests

    def _count(self, request: Request, change: int) -> None:
        self._num_expiring += change * (request.deadline is not None or request.spec.begin_s is not None)
        self._num_with_ttft += change * (request.spec.ttft_s is not None)
        self.num_awaiting_kv += change * request.awaits_kv
