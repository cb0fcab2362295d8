"""What one address may do in vain, and what becomes of it beyond that.

    answered with INVALID_ARGUMENT ─within the budget─▶ at once
                                   ─beyond it─────────▶ after a wait; the call keeps its place until then
    gone before its message came ──within the budget─▶ nothing
                                   ─beyond it─────────▶ nothing more is taken from its connection ──5 s──▶ it is ended

Both cost their sender less than us: a call that is begun and reset is 40 bytes to one side and a task to the other. A
client that waits for its answers is slowed by making it wait. One that waits for nothing has to go. To end its
connection at once would only have it dial again at once, and cost us as much as before (benchmarks/LOG.md); so the
kernel is told to drop what comes on it for a while, as firewalls do. A call's message comes with its head: a client
that means what it says never goes before it. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time

from serving.connections import connections_from, drop_what_comes, end
from serving.open_calls import peer_key

_BURST_S = 2.0
"""The budget that may be saved up, in seconds of it."""
_MAX_WAIT_S = 5.0
_MAX_ADDRESSES = 10_000
_CONDEMNED_S = 10.0
"""For the calls of a connection that were on their way to us when it was cut; its port may be another's later."""
_STARVED_S = 5.0
_MAX_STARVED = 256
"""Each is a descriptor. Further ones are ended at once."""
_MAX_SEARCHING = 0.1
"""Of the time, for looking through open descriptors; there can be thousands."""
_LOG_INTERVAL_S = 10.0
_log = logging.getLogger(__name__)


class _Budgets:
    """A token bucket for each address."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._burst = per_s * _BURST_S
        self._left: dict[str, tuple[float, float]] = {}  # tokens, and when

    def take(self, peer: str, *, at_least: float) -> float:
        """One of what the address of `peer` has; returns what is left, negative for a debt, of `at_least` at most."""
        key, now_s = peer_key(peer), time.monotonic()
        left, at_s = self._left.pop(key, (self._burst, now_s))
        left = max(min(self._burst, left + (now_s - at_s) * self._per_s) - 1.0, at_least)
        if len(self._left) >= _MAX_ADDRESSES:
            del self._left[next(iter(self._left))]
        self._left[key] = (left, now_s)  # last, so that the first is who has been quiet for longest
        return left


class BadCallers:
    """The budgets of all addresses."""

    def __init__(self, *, per_s: float) -> None:
        """`per_s` calls of an address may come to nothing, in the long run."""
        self._per_s = per_s
        self._wrong = _Budgets(per_s)
        self._early = _Budgets(per_s)
        self._to_cut: set[str] = set()
        self._condemned: dict[str, float] = {}
        self._cutting: asyncio.Task[None] | None = None
        self._starved: set[socket.socket] = set()
        self._said_at_s = -_LOG_INTERVAL_S
        self.num_cut = 0
        """Connections so far."""

    async def slow_down(self, peer: str) -> None:
        """Before a call of `peer` (as gRPC writes it) is answered that its message was wrong."""
        left = self._wrong.take(peer, at_least=-_MAX_WAIT_S * self._per_s)
        if left < 0:
            await asyncio.sleep(-left / self._per_s)

    def close(self) -> None:
        """Ends the connections that are to be ended."""
        if self._cutting is not None:
            self._cutting.cancel()
        for connection in list(self._starved):
            self._end(connection)

    def is_condemned(self, peer: str) -> bool:
        """Whether the connection of `peer` is being dropped. Its calls that have got through are worth nothing."""
        return self._condemned.get(peer, 0.0) > time.monotonic()

    def gone_early(self, peer: str) -> None:
        """A call of `peer` has ended without a message."""
        if self._early.take(peer, at_least=-1.0) >= 0 or self.is_condemned(peer):
            return
        now_s = time.monotonic()
        for other in list(itertools.takewhile(lambda other: self._condemned[other] < now_s, self._condemned)):
            del self._condemned[other]
        self._condemned[peer] = now_s + _CONDEMNED_S
        self._to_cut.add(peer)
        if self._cutting is None or self._cutting.done():
            self._cutting = asyncio.create_task(self._cut(), name="drop connections")

    def _starve(self, connection: socket.socket) -> None:
        self.num_cut += 1
        self._starved.add(connection)
        try:
            if len(self._starved) > _MAX_STARVED:
                raise OSError("too many")
            drop_what_comes(connection)
        except OSError:
            self._end(connection)
        else:
            asyncio.get_running_loop().call_later(_STARVED_S, self._end, connection)

    def _end(self, connection: socket.socket) -> None:
        """With a reset: what is under way is of no use."""
        if connection in self._starved:
            self._starved.remove(connection)
            end(connection)

    async def _cut(self) -> None:
        while self._to_cut:
            peers, self._to_cut = self._to_cut, set()
            began_s = time.monotonic()
            try:
                for connection in await connections_from(peers):
                    self._starve(connection)
            except OSError as error:  # no descriptor is left to look with
                _log.warning("connections cannot be dropped: %s", error.strerror)
            ended_s = time.monotonic()
            if ended_s - self._said_at_s >= _LOG_INTERVAL_S:
                self._said_at_s = ended_s
                _log.warning("connections are dropped: %s begins calls and resets them", peer_key(next(iter(peers))))
            await asyncio.sleep((ended_s - began_s) * (1 / _MAX_SEARCHING - 1))
