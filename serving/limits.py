"""Limits on the calls of one server: how many are open, how often large messages are parsed, and how many may fail.

accepting ──begin_draining──▶ draining ──the last awaited call ends──▶ idle
                                 └──cut_off──▶ every awaited call ends with UNAVAILABLE ──▶ idle

While draining, only calls whose policy admits them enter. Each object here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import itertools
import logging
import os
import socket
import stat
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote

from serving.errors import CutOff, Overloaded, ServiceError, Unavailable

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0
_RETRY_ELSEWHERE_S = 0.25
"""While draining: other instances behind the same name can serve at once, a successor of this one only later."""


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """How one rpc is treated; the defaults are a request's."""

    admit_while_draining: bool = False
    counted: bool = True  # counts against the limits on requests; if not, against equal limits of its own
    drain_waits: bool = True  # a drain waits until the call ends
    cap_deadline: bool = True  # ends at the server's longest deadline, whatever the client's


REQUEST = CallPolicy()  # A client's work
CONTROL = CallPolicy(admit_while_draining=True, counted=False, drain_waits=False, cap_deadline=False)
"""Health, load reports, releases, aborts: admitted beside any number of requests, without a deadline, never awaited."""
PICK = CallPolicy(admit_while_draining=True, counted=False, drain_waits=False)
"""The same with a deadline: a caller's choice of a server, which is no request yet."""


def peer_key(peer: str) -> str:
    """The host of `peer`, as gRPC writes it: "ipv4:10.0.0.7" of "ipv4:10.0.0.7:5000". All its connections are one peer,
    and so are all addresses of one IPv6 network of 64 bits, which one host usually has to itself."""
    kind, _, address = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = unquote(address).rpartition(":")[0].strip("[]").partition("%")[0]
    if kind == "ipv4":
        return f"ipv4:{host}"
    ip = ipaddress.IPv6Address(host)
    return f"ipv4:{ip.ipv4_mapped}" if ip.ipv4_mapped else f"ipv6:{ipaddress.IPv6Address(int(ip) >> 64 << 64)}"


def grpc_peer(host: str, port: int) -> str:
    host = host.removeprefix("::ffff:")
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


@dataclass(slots=True, eq=False)
class CallEnd:
    """How the server ends one call, whose handler is cancelled then. Shared by the tasks of the call."""

    error: ServiceError | None = None


_call_end: ContextVar[CallEnd | None] = ContextVar("tandem_call_end", default=None)


def call_end() -> CallEnd:
    """Of the current call; outside of a call a new one."""
    return _call_end.get() or CallEnd()


class OpenCalls:
    """Counts open calls, per peer and in total, rejects those over a limit, and knows when the last one has ended."""

    def __init__(self, *, max_per_peer: int, max_in_all: int) -> None:
        self._max_per_peer = max_per_peer
        self._max_in_all = max_in_all
        self._requests: Counter[str] = Counter()
        self._controls: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self._awaited: dict[asyncio.Timeout, CallEnd] = {}
        self._others: dict[asyncio.Timeout, CallEnd] = {}

    @property
    def num_open(self) -> int:
        return self._requests.total()

    @property
    def num_awaited(self) -> int:
        """Open calls that a drain waits for."""
        return len(self._awaited)

    def begin_draining(self) -> None:
        """Rejects requests with UNAVAILABLE from now on."""
        self.draining = True

    def cut_off(self) -> None:
        """Ends the calls that a drain waits for with UNAVAILABLE."""
        self._end(self._awaited)

    def cut_off_others(self) -> None:
        """Ends those that a drain does not wait for, such as streams of load reports, which have no end."""
        self._end(self._others)

    def _end(self, bounds: dict[asyncio.Timeout, CallEnd]) -> None:
        for bound, end in bounds.items():
            if not bound.expired():
                end.error = CutOff("the server ended before the request was finished", _RETRY_ELSEWHERE_S)
                bound.reschedule(0.0)

    async def wait_idle(self) -> None:
        await self._idle.wait()

    @contextmanager
    def admitted(self, peer: str, policy: CallPolicy) -> Iterator[None]:
        """Holds one place for a call from `peer`; raises Overloaded or Unavailable instead of entering."""
        if self.draining and not policy.admit_while_draining:
            raise Unavailable("draining", _RETRY_ELSEWHERE_S)
        key, by_peer = peer_key(peer), self._requests if policy.counted else self._controls
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
    def awaited(self, bound: asyncio.Timeout, policy: CallPolicy) -> Iterator[None]:
        """Makes a drain wait, by its policy, while a handler runs inside `bound`, which `cut_off` ends: that
        TimeoutError, and no other, becomes the call's CutOff. To be left before the status is sent, which a slow reader
        can delay."""
        bounds = self._awaited if policy.drain_waits else self._others
        bounds[bound] = end = CallEnd()
        _call_end.set(end)
        if self._awaited:
            self._idle.clear()
        try:
            yield
        except TimeoutError as error:
            if end.error is not None and bound.expired():
                raise end.error from error
            raise
        finally:
            del bounds[bound]
            if not self._awaited:
                self._idle.set()


T = TypeVar("T")


def start_in_thread(work: Callable[[], T], purpose: str) -> asyncio.Future[T]:
    """The result of `work()`, which a thread computes in the context of the caller. Raises Overloaded where no thread
    can be started for this `purpose`, as at a limit on processes."""
    context, is_given_up = copy_context(), False
    no_thread = Overloaded(f"no thread can be started to {purpose}", _RETRY_AFTER_S)

    def run() -> T:
        if is_given_up:
            raise no_thread
        return context.run(work)

    try:
        return asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError:  # it is queued all the same: another thread may find it later
        is_given_up = True
        raise no_thread from None


LARGE_BYTES = 256 << 10  # prompts of 87,000 token ids and more: an id below two million takes up to three bytes
_MAX_WAITING = 8  # for each that is parsed at a time
_PAUSE = 40.0  # times the CPU time of parsing
Metadata = Iterable[tuple[str, str | bytes]]


class LargeMessages:
    """Parses `num_at_once` large messages of one client at a time, with a pause after each.

        received ──a place is free──▶ parsed ──▶ pause ──▶ the next one
          ├────others are parsed, or pause──▶ waits ──▲
          └────too many wait──▶ rejected

    Parsing takes some 10 ms for a MiB of token ids, and as long again to validate and free them. It happens in a
    thread, but the parser keeps Python's lock for most of it, and so the event loop waiting. The pause limits each
    client to a small share of the loop's time. Clients do not wait for each other: a client is a tenant at an address,
    since behind a proxy all have one address.
    """

    def __init__(self, num_at_once: int = 1, tenant_of: Callable[[Metadata], str] | None = None) -> None:
        self._num_at_once = num_at_once
        self.tenant_of = tenant_of
        """The tenant that a call's metadata names; "" or a ServiceError: none. None: there are no tenants."""
        self._locks: dict[str, asyncio.Semaphore] = {}
        self._num_waiting: Counter[str] = Counter()
        self._num_held: Counter[str] = Counter()

    async def parsed(self, peer: str, data: bytes, parse: Callable[[bytes], T], metadata: Metadata = ()) -> T:
        """`parse(data)`, once it is this message's turn among those of its client: of the call's `metadata` and
        `peer`. Raises Overloaded."""
        if len(data) < LARGE_BYTES:
            return parse(data)
        client = self._client(peer, metadata)
        await self._acquire(client)
        loop = asyncio.get_running_loop()
        cpu_s = 0.0

        def timed() -> T:
            nonlocal cpu_s
            began_s = time.thread_time()
            try:
                return parse(data)
            finally:
                cpu_s = time.thread_time() - began_s

        def pause(parsing: asyncio.Future[T]) -> None:
            parsing.exception()  # of a call that has ended meanwhile, which asyncio would log as lost
            loop.call_later(cpu_s * _PAUSE, self._release, client)

        try:
            parsing = start_in_thread(timed, "parse a large message")
        except Overloaded:
            self._release(client)
            raise
        parsing.add_done_callback(pause)
        return await asyncio.shield(parsing)  # a thread parses to its end, whether its call is cancelled or not

    def _client(self, peer: str, metadata: Metadata) -> str:
        try:
            tenant = "" if self.tenant_of is None else self.tenant_of(metadata)
        except ServiceError:  # the handler's answer
            tenant = ""
        return f"{tenant}\0{peer}" if tenant else peer

    async def _acquire(self, client: str) -> None:
        most = _MAX_WAITING * self._num_at_once
        if self._num_waiting[client] >= most:
            raise Overloaded(f"{most} large messages of this client wait already", _RETRY_AFTER_S)
        self._num_waiting[client] += 1
        lock = self._locks.setdefault(client, asyncio.Semaphore(self._num_at_once))
        try:
            await lock.acquire()
            self._num_held[client] += 1
        finally:
            self._num_waiting[client] -= 1
            self._forget_idle(client)  # one that was cancelled

    def _release(self, client: str) -> None:
        self._locks[client].release()
        self._num_held[client] -= 1
        self._forget_idle(client)

    def _forget_idle(self, client: str) -> None:
        if not self._num_waiting[client] and not self._num_held[client]:
            del self._locks[client], self._num_waiting[client], self._num_held[client]


_YIELD_EVERY = 100  # connections between two yields to the event loop, some 10 µs each
_TCP = (socket.AF_INET, socket.AF_INET6)
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h
_BPF_RETURN = 0x06  # BPF_RET | BPF_K: keep so many bytes of a packet, here none
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
    """Budgets of each address for calls that fail, `per_s` invalid and `per_s` cancelled ones in the long run, and the
    consequence beyond them.

        answered with INVALID_ARGUMENT ─within budget─▶ answered at once
                                       ─beyond it─────▶ answered after a delay; the call keeps its place until then
        cancelled before its message   ─within budget─▶ nothing
                                       ─beyond it─────▶ its connection is muted ──5 s──▶ reset

    Such calls cost the sender less than the server: 40 bytes to one, a task to the other. A client that waits for its
    answers is slowed by delaying them; one that does not is disconnected. Closing its connection at once only makes it
    connect again at the same cost (benchmarks/LOG.md), so the kernel first discards incoming packets for a while. A
    call's message comes with its headers: no well-behaved client cancels before it.

    gRPC's server cannot close a connection, so it is found by its peer among the open descriptors of this process; a
    change to a duplicate of a socket applies to the connection.
    """

    def __init__(self, *, per_s: float) -> None:
        self._per_s = per_s
        self._invalid = _TokenBuckets(per_s)
        self._cancelled = _TokenBuckets(per_s)
        self._to_mute: set[str] = set()
        self._blocked_until_s: dict[str, float] = {}
        self._muting: asyncio.Task[None] | None = None
        self._muted: set[socket.socket] = set()
        self._is_closed = False
        self._logged_at_s = -_LOG_INTERVAL_S
        self.num_dropped = 0  # connections so far

    async def delay_invalid(self, peer: str) -> None:
        """To be awaited before a call of `peer` (as gRPC writes it) is answered with INVALID_ARGUMENT."""
        left = self._invalid.take(peer, at_least=-_MAX_DELAY_S * self._per_s)
        if left < 0:
            await asyncio.sleep(-left / self._per_s)

    def count_cancelled(self, peer: str) -> None:
        """A call of `peer` has ended before its message came."""
        if self._is_closed or self._cancelled.take(peer, at_least=-1.0) >= 0 or self.is_blocked(peer):
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
        self._is_closed = True  # the end of the server cancels calls as well, and their connections would not be reset
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
