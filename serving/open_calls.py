"""The calls that are open on one server: caps on them, and the drain that waits for them.

accepting ──begin_draining──▶ draining ──the last awaited call leaves──▶ idle

While draining, only calls whose policy admits them enter. One instance belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serving.errors import Overloaded, Unavailable

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """How one rpc is treated; the defaults are a request's."""

    admit_while_draining: bool = False
    counted: bool = True
    """Counts toward the caps on open calls."""
    drain_waits: bool = True
    """A drain waits for its end."""
    cap_deadline: bool = True
    """Ends at the server's longest deadline, whatever the client asked for."""


REQUEST = CallPolicy()
"""A client's work."""
CONTROL = CallPolicy(admit_while_draining=True, counted=False, drain_waits=False, cap_deadline=False)
"""Health, load reports, releases, aborts: always let in, for as long as they like, and never waited for."""


def peer_key(peer: str) -> str:
    """The peer without its port ("ipv4:10.0.0.7"): all connections of one host are one peer."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


class OpenCalls:
    """Counts open calls by peer and in all, refuses those over a cap, and knows when the last has ended."""

    def __init__(self, *, max_per_peer: int, max_in_all: int) -> None:
        self._max_per_peer = max_per_peer
        self._max_in_all = max_in_all
        self._by_peer: Counter[str] = Counter()
        self._num_awaited = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_open(self) -> int:
        """Open calls that count toward the caps."""
        return self._by_peer.total()

    @property
    def num_awaited(self) -> int:
        """Open calls that a drain waits for."""
        return self._num_awaited

    def begin_draining(self) -> None:
        """From now on requests are refused with UNAVAILABLE."""
        self._draining = True

    async def wait_idle(self) -> None:
        """Returns when no call is open that a drain waits for."""
        await self._idle.wait()

    @contextmanager
    def admitted(self, peer: str, policy: CallPolicy) -> Iterator[None]:
        """Holds one place for a call from `peer`; raises Overloaded or Unavailable instead of entering."""
        if self._draining and not policy.admit_while_draining:
            raise Unavailable("draining")
        if not policy.counted:
            yield
            return
        key = peer_key(peer)
        if self._by_peer[key] >= self._max_per_peer:
            raise Overloaded(f"this client has {self._max_per_peer} open calls, the most allowed", _RETRY_AFTER_S)
        if self._by_peer.total() >= self._max_in_all:
            raise Overloaded(f"the server has {self._max_in_all} open calls, the most allowed", _RETRY_AFTER_S)
        self._by_peer[key] += 1
        try:
            yield
        finally:
            self._by_peer[key] -= 1
            if not self._by_peer[key]:
                del self._by_peer[key]

    @contextmanager
    def awaited(self, policy: CallPolicy) -> Iterator[None]:
        """Makes a drain wait while a handler runs. Left before the status is sent, which a dead reader can hold up."""
        if not policy.drain_waits:
            yield
            return
        self._num_awaited += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_awaited -= 1
            if self._num_awaited == 0:
                self._idle.set()
