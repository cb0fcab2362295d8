"""Limits on the calls of one server: how many are open, and how often large messages are parsed.

accepting ──begin_draining──▶ draining ──the last awaited call ends──▶ idle
                                 └──cut_off──▶ every awaited call ends with UNAVAILABLE ──▶ idle

While draining, only calls whose policy admits them enter. Each object here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote

from serving.errors import CutOff, Overloaded, ServiceError, Unavailable

_RETRY_AFTER_S = 1.0
_NO_THREAD = "no thread can be started to parse a large message"
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
                end.error = CutOff("ended before the request was finished", _RETRY_ELSEWHERE_S)
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


LARGE_BYTES = 256 << 10  # prompts of 87,000 token ids and more: an id below two million takes up to three bytes
_MAX_WAITING = 8  # for each that is parsed at a time
_PAUSE = 40.0  # times the CPU time of parsing
T = TypeVar("T")
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
        cpu_s, is_queued = 0.0, True

        def timed() -> T:
            nonlocal cpu_s
            if not is_queued:
                raise Overloaded(_NO_THREAD, _RETRY_AFTER_S)
            began_s = time.thread_time()
            try:
                return parse(data)
            finally:
                cpu_s = time.thread_time() - began_s

        def pause(parsing: asyncio.Future[T]) -> None:
            parsing.exception()  # of a call that has ended meanwhile, which asyncio would log as lost
            loop.call_later(cpu_s * _PAUSE, self._release, client)

        try:
            parsing = loop.run_in_executor(None, timed)
        except RuntimeError:  # no thread could be started, and another one may find the message later
            is_queued = False
            self._release(client)
            raise Overloaded(_NO_THREAD, _RETRY_AFTER_S) from None
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
