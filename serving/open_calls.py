"""The calls that are open on one server: caps on them, and the drain that waits for them.

accepting ──begin_draining──▶ draining ──the last awaited call leaves──▶ idle
                                 └──cut_off──▶ every awaited call is ended with UNAVAILABLE ──▶ idle

While draining, only calls whose policy admits them enter. One instance belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote

from serving.errors import Overloaded, Unavailable

_RETRY_AFTER_S = 1.0
_RETRY_ELSEWHERE_S = 0.25
"""Behind one name there are others, who can serve at once; here there is a successor only after a while."""


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """How one rpc is treated; the defaults are a request's."""

    admit_while_draining: bool = False
    counted: bool = True
    """Takes one of the places for requests; if not, one of as many that are kept for everything else."""
    drain_waits: bool = True
    """A drain waits for its end."""
    cap_deadline: bool = True
    """Ends at the server's longest deadline, whatever the client asked for."""


REQUEST = CallPolicy()
"""A client's work."""
CONTROL = CallPolicy(admit_while_draining=True, counted=False, drain_waits=False, cap_deadline=False)
"""Health, load reports, releases, aborts: let in however many requests there are, for as long as they like, and never
waited for."""


def peer_key(peer: str) -> str:
    """The host of `peer`, as gRPC writes it: "ipv4:10.0.0.7" of "ipv4:10.0.0.7:5000". All its connections are one peer,
    and so are all addresses of one IPv6 network of 64 bits, which is what a host has to itself."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = unquote(address).rpartition(":")[0].strip("[]").partition("%")[0]
    if kind == "ipv4":
        return f"ipv4:{host}"
    ip = ipaddress.IPv6Address(host)
    return f"ipv4:{ip.ipv4_mapped}" if ip.ipv4_mapped else f"ipv6:{ipaddress.IPv6Address(int(ip) >> 64 << 64)}"


class OpenCalls:
    """Counts open calls by peer and in all, refuses those over a cap, and knows when the last has ended."""

    def __init__(self, *, max_per_peer: int, max_in_all: int) -> None:
        self._max_per_peer = max_per_peer
        self._max_in_all = max_in_all
        self._requests: Counter[str] = Counter()
        self._others: Counter[str] = Counter()
        self._num_awaited = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._ends: set[asyncio.Timeout] = set()
        self._is_cut_off = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def num_open(self) -> int:
        """Open requests."""
        return self._requests.total()

    @property
    def num_awaited(self) -> int:
        """Open calls that a drain waits for."""
        return self._num_awaited

    def begin_draining(self) -> None:
        """From now on requests are refused with UNAVAILABLE."""
        self._draining = True

    def cut_off(self) -> None:
        """Ends the calls that a drain waits for, as far as they are bound by `ends_with`, with UNAVAILABLE."""
        self._is_cut_off = True
        for end in self._ends:
            if not end.expired():
                end.reschedule(0.0)

    @contextmanager
    def ends_with(self, end: asyncio.Timeout, policy: CallPolicy) -> Iterator[None]:
        """While inside, `cut_off` lets `end` pass. The TimeoutError of that, and no other, becomes Unavailable."""
        if not policy.drain_waits:
            yield
            return
        self._ends.add(end)
        try:
            yield
        except TimeoutError as error:
            if self._is_cut_off and end.expired():
                raise Unavailable("ended before the request was finished", _RETRY_ELSEWHERE_S) from error
            raise
        finally:
            self._ends.discard(end)

    async def wait_idle(self) -> None:
        """Returns when no call is open that a drain waits for."""
        await self._idle.wait()

    @contextmanager
    def admitted(self, peer: str, policy: CallPolicy) -> Iterator[None]:
        """Holds one place for a call from `peer`; raises Overloaded or Unavailable instead of entering."""
        if self._draining and not policy.admit_while_draining:
            raise Unavailable("draining", _RETRY_ELSEWHERE_S)
        key, by_peer = peer_key(peer), self._requests if policy.counted else self._others
        if by_peer[key] >= self._max_per_peer:
            raise Overloaded(f"this client has {self._max_per_peer} open calls, the most allowed", _RETRY_AFTER_S)
        if by_peer.total() >= self._max_in_all:
            raise Overloaded(f"the server has {self._max_in_all} open calls, the most allowed", _RETRY_AFTER_S)
        by_peer[key] += 1
        try:
            yield
        finally:
            by_peer[key] -= 1
            if not by_peer[key]:
                del by_peer[key]

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
