"""Budgets for calls that fail, per address, and the consequence beyond them.

    answered with INVALID_ARGUMENT ─within budget─▶ answered at once
                                   ─beyond it─────▶ answered after a delay; the call keeps its place until then
    cancelled before its message   ─within budget─▶ nothing
                                   ─beyond it─────▶ its connection is muted ──5 s──▶ reset

Such calls cost the sender less than the server: 40 bytes to one, a task to the other. A client that waits for its
answers is slowed by delaying them; one that does not is disconnected. Closing its connection at once only makes it
connect again at the same cost (benchmarks/LOG.md), so the kernel first discards incoming packets for a while. A call's
message comes with its headers: no well-behaved client cancels before it.

gRPC's server cannot close a connection, so it is found by its peer among the open descriptors of this process; a change
to a duplicate of a socket applies to the connection.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import logging
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

from serving.limits import grpc_peer, peer_key

_log = logging.getLogger(__name__)
_YIELD_EVERY = 100  # connections between two yields to the event loop, some 10 µs each
_TCP = (socket.AF_INET, socket.AF_INET6)
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h
_BPF_RETURN = 0x06  # BPF_RET | BPF_K: keep so many bytes of a packet, here none


def tcp_connections() -> Iterator[socket.socket]:
    """A duplicate of each connected TCP socket of this process, closed when the next one is requested."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError), _duplicate(int(name)) as connection:  # or closed meanwhile, or not connected
            if connection.family in _TCP:
                connection.getpeername()
                yield connection


async def connections_from(peers: set[str]) -> list[socket.socket]:
    """Duplicates of this process's TCP connections from `peers` ("ipv4:10.0.0.7:5000"), to be closed by the caller."""
    wanted = {unquote(peer) for peer in peers}
    found: dict[str, socket.socket] = {}
    for number, connection in enumerate(tcp_connections(), start=1):
        with suppress(OSError):  # closed meanwhile
            peer = grpc_peer(*connection.getpeername()[:2])
            if peer in wanted and peer not in found:
                found[peer] = connection.dup()
        if number % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
    return list(found.values())


def discard_incoming(connection: socket.socket) -> None:
    """Makes the kernel drop every incoming packet of this connection (Linux; elsewhere it does nothing)."""
    if not sys.platform.startswith("linux"):
        return
    program = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def reset_connection(connection: socket.socket) -> None:
    """Ends the connection, dropping unsent data, and closes the duplicate."""
    with connection, suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)


def _duplicate(descriptor: int) -> socket.socket:
    """A duplicate, because the owner may close its descriptor at any time and the number be reused. Raises OSError for
    anything but a socket: closing a duplicate of a file would release this process's locks on it."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


_BURST_S = 2.0  # the largest unused budget, in seconds of it
_MAX_DELAY_S = 5.0
_MAX_ADDRESSES = 10_000
_BLOCKED_S = 10.0
"""For calls of a connection that were under way when it was muted; another client may get its port later."""
_MUTED_S = 5.0
_MAX_MUTED = 256  # each holds a descriptor. Further connections are reset at once.
_MAX_SEARCH_SHARE = 0.1  # of the time, for searching open descriptors; there can be thousands
_LOG_INTERVAL_S = 10.0


class _TokenBuckets:
    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._burst = per_s * _BURST_S
        self._left: dict[str, tuple[float, float]] = {}  # tokens, and when; least recently used first

    def take(self, peer: str, *, at_least: float) -> float:
        """Takes one token from the address of `peer`; returns the rest, negative for a debt, `at_least` at least."""
        key, now_s = peer_key(peer), time.monotonic()
        left, at_s = self._left.pop(key, (self._burst, now_s))
        left = max(min(self._burst, left + (now_s - at_s) * self._per_s) - 1.0, at_least)
        if len(self._left) >= _MAX_ADDRESSES:
            del self._left[next(iter(self._left))]
        self._left[key] = (left, now_s)
        return left


class AbuseLimits:
    """Budgets of all addresses for invalid and for cancelled calls, `per_s` of each in the long run."""

    def __init__(self, *, per_s: float) -> None:
        self._per_s = per_s
        self._invalid = _TokenBuckets(per_s)
        self._cancelled = _TokenBuckets(per_s)
        self._to_mute: set[str] = set()
        self._blocked_until_s: dict[str, float] = {}
        self._muting: asyncio.Task[None] | None = None
        self._muted: set[socket.socket] = set()
        self._logged_at_s = -_LOG_INTERVAL_S
        self.num_dropped = 0  # connections so far

    async def delay_invalid(self, peer: str) -> None:
        """To be awaited before a call of `peer` (as gRPC writes it) is answered with INVALID_ARGUMENT."""
        left = self._invalid.take(peer, at_least=-_MAX_DELAY_S * self._per_s)
        if left < 0:
            await asyncio.sleep(-left / self._per_s)

    def count_cancelled(self, peer: str) -> None:
        """A call of `peer` has ended before its message came."""
        if self._cancelled.take(peer, at_least=-1.0) >= 0 or self.is_blocked(peer):
            return
        now_s = time.monotonic()
        for other in list(itertools.takewhile(lambda key: self._blocked_until_s[key] < now_s, self._blocked_until_s)):
            del self._blocked_until_s[other]
        self._blocked_until_s[peer] = now_s + _BLOCKED_S
        self._to_mute.add(peer)
        if self._muting is None or self._muting.done():
            self._muting = asyncio.create_task(self._mute_connections(), name="mute connections")

    def is_blocked(self, peer: str) -> bool:
        """Whether the connection of `peer` is being dropped; calls that still come from it are rejected."""
        return self._blocked_until_s.get(peer, 0.0) > time.monotonic()

    def close(self) -> None:
        if self._muting is not None:
            self._muting.cancel()
        for connection in list(self._muted):
            self._reset(connection)

    async def _mute_connections(self) -> None:
        while self._to_mute:
            peers, self._to_mute = self._to_mute, set()
            began_s = time.monotonic()
            try:
                for connection in await connections_from(peers):
                    self._mute(connection)
            except OSError as error:  # no free descriptor
                _log.warning("cannot drop connections: %s", error.strerror)
            ended_s = time.monotonic()
            if ended_s - self._logged_at_s >= _LOG_INTERVAL_S:
                self._logged_at_s = ended_s
                host = peer_key(next(iter(peers)))
                _log.warning("dropping connections: %s cancels too many calls before a request is sent", host)
            await asyncio.sleep((ended_s - began_s) * (1 / _MAX_SEARCH_SHARE - 1))

    def _mute(self, connection: socket.socket) -> None:
        self.num_dropped += 1
        self._muted.add(connection)
        try:
            if len(self._muted) > _MAX_MUTED:
                raise OSError("too many")
            discard_incoming(connection)
        except OSError:
            self._reset(connection)
        else:
            asyncio.get_running_loop().call_later(_MUTED_S, self._reset, connection)

    def _reset(self, connection: socket.socket) -> None:
        if connection in self._muted:
            self._muted.remove(connection)
            reset_connection(connection)
