"""redis-py's connections to one Redis, and pages that go between their sockets and KV memory without a copy.

    resolve ─▶ TCP ─▶ TLS ─▶ AUTH, CLIENT SETNAME, SELECT, INFO server ─▶ idle ⇄ one request
                               │ login refused: no further attempt for 2 s, 4 s, … 60 s, or until the password changes
                               ▼
                             failed ◀── time-out, reset, protocol error: closed, and every request that waits fails too

redis-py connects, logs in, and finds the primary by Sentinel. Requests about pages bypass its parser,
which returns each value as new `bytes` (1.1 GB/s against 3.3 for 1.8 MB values): the bytes of a value are received
straight into the caller's memory, and a page is sent from where it lies. Every wait has a deadline. There are no
retries. Each new connection resolves the name, and reads the password and changed TLS files. No text of the server gets
into an exception, because it may quote a value: `reason` is a word of this module.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import redis
from redis import exceptions as redis_errors
from redis import sentinel as redis_sentinel

from kv_transfer.page.format import Buffer
from kv_transfer.stores.base import StoreError, rest_of
from kv_transfer.stores.redis.address import ConnectionFailed, RedisAddress, RedisLogin, connect_tcp

T = TypeVar("T")
CLIENT_NAME = "tandem-kv"
RECEIVE_BYTES = 4 << 20
_BUFFER_BYTES = 4096  # a line must fit; the part of a page that arrives with it is copied once more
_SCRATCH_BYTES = 1 << 16
_PATIENCE_S = 0.05  # some ten pages
_TIMEVAL = struct.Struct("@ll")
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_RUN_ID = re.compile(rb"run_id:([0-9a-f]+)")
_ERROR_CODES = {
    b"ASK": "cluster",
    b"BUSY": "busy",
    b"CLUSTERDOWN": "cluster",
    b"LOADING": "loading",
    b"MASTERDOWN": "masterdown",
    b"MISCONF": "misconf",
    b"MOVED": "cluster",
    b"NOAUTH": "auth",
    b"NOPERM": "noperm",
    b"OOM": "oom",
    b"READONLY": "readonly",
    b"WRONGPASS": "auth",
    b"WRONGTYPE": "type",
}
# What redis-py raises while it connects, and sockets at any time. The first match counts.
_FAILURES: tuple[tuple[type[Exception], str], ...] = (
    (redis_errors.AuthenticationError, "auth"),
    (redis_errors.NoPermissionError, "noperm"),
    (redis_errors.BusyLoadingError, "loading"),
    (redis_errors.TimeoutError, "timeout"),
    (redis_errors.ResponseError, "error"),
    (redis_sentinel.MasterNotFoundError, "no_primary"),
    (redis_errors.RedisError, "protocol"),
    (TimeoutError, "timeout"),
    (BlockingIOError, "timeout"),  # a time-out of the kernel
    (ssl.SSLError, "tls"),
    (socket.gaierror, "resolve"),
    (ConnectionRefusedError, "refused"),
    (ConnectionError, "reset"),
)
_log = logging.getLogger(__name__)


class ErrorReply(StoreError):
    """Redis answered with an error. The connection is as good as before."""

    @classmethod
    def of(cls, text: bytes) -> ErrorReply:
        """From the error line, without its dash."""
        if text.startswith(b"ERR max number of clients"):
            return cls("maxclients")
        return cls(_ERROR_CODES.get(text.split(b" ", 1)[0], "error"))


def connection_failed(error: Exception) -> ConnectionFailed:
    """What a socket or redis-py raised, as the one word that counters and logs have for it."""
    if isinstance(error, ConnectionFailed):
        return error
    if type(error) is redis_errors.ConnectionError:  # redis-py's words for what it got from the socket, or read
        if isinstance(error.__context__, OSError):
            error = error.__context__
        elif str(error).startswith("max number of clients"):
            return ConnectionFailed("maxclients")
        elif "closed by server" in str(error):
            return ConnectionFailed("closed")
    return ConnectionFailed(next((reason for kind, reason in _FAILURES if isinstance(error, kind)), "unreachable"))


class PageConnection(redis.Connection):
    """One connection, used by one thread at a time. After an exception other than ErrorReply it must be closed.

    Over plain TCP the time-outs of pages are the kernel's, one for each direction, so that a whole page can be received
    by one system call.
    """

    def __init__(
        self,
        *,
        login: RedisLogin | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        receive_bytes: int = RECEIVE_BYTES,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.is_local = False
        """Both ends are on this machine."""
        self._login = login
        self._tls = tls
        self._receive_bytes = receive_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of what was received and not read yet
        self._scratch = memoryview(b"")
        self._deadlines: dict[int, float] = {}

    def _connect(self) -> socket.socket:
        """What redis-py calls for a socket: name and TCP within one deadline, TLS, and the password of this moment."""
        if self._login is not None:
            password: Any = self._login.password_to_try()  # bytes, which redis-py takes for what it calls a str
            self.username, self.password = (None, None) if password is None else (self._login.username, password)
        deadline = time.monotonic() + (self.socket_connect_timeout or 0.0)
        sock = connect_tcp(self.host, self.port, deadline, self._receive_bytes)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.is_local = sock.getsockname()[0] == sock.getpeername()[0]
            if self._tls is not None:
                sock.settimeout(max(0.001, deadline - time.monotonic()) + (self.socket_timeout or 0.0))
                sock = self._tls().wrap_socket(sock, server_hostname=self.host)
            sock.settimeout(self.socket_timeout)
        except BaseException:
            sock.close()
            raise
        self._start = self._end = 0
        self._deadlines = {}
        return sock

    def interrupt(self) -> None:
        """From any thread: the one that waits on the socket gets an error."""
        # Not SSLSocket's own shutdown, which drops the TLS layer: a reader would then take ciphertext for the answer.
        with contextlib.suppress(OSError, ConnectionFailed):
            socket.socket.shutdown(self._open_socket(), socket.SHUT_RDWR)

    def is_quiet(self) -> bool:
        """Connected, and nothing came that no request asked for. For when no answer is due."""
        try:
            sock = self._open_socket()
            sock.settimeout(0.0 if self._tls is not None else None)
            sock.recv(1, 0 if self._tls is not None else socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):  # TLS's own tickets are no answer
            return True
        except (OSError, ConnectionFailed):
            return False
        return False

    def send_buffers(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """All of them, without joining them. Raises OSError."""
        sock = self._open_socket()
        if self._tls is not None:
            for buffer in buffers:
                sock.settimeout(_seconds_until(deadline))
                sock.sendall(buffer)
            return
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while views:
            self._limit(sock, socket.SO_SNDTIMEO, deadline)
            views = rest_of(views, sock.sendmsg(views))

    def read_status(self, deadline: float) -> bytes | ErrorReply:
        """An answer of one line: a status or a number. Raises OSError, ConnectionFailed, as all that follow."""
        return self._reply_line(deadline, (b"+", b":"))

    def read_bulk_length(self, deadline: float) -> int | ErrorReply | None:
        """The beginning of a bulk string: its length; `fill` or `skip` what follows, then `skip` 2 for its end."""
        text = self._reply_line(deadline, (b"$",))
        if isinstance(text, ErrorReply):
            return text
        if not _NUMBER.fullmatch(text):
            raise ConnectionFailed("protocol")
        return None if text[:1] == b"-" else int(text)

    def fill(self, target: memoryview, deadline: float) -> None:
        """The next bytes, straight into `target` except for those that arrived with a line."""
        num_filled = min(len(target), self._end - self._start)
        target[:num_filled] = self._view[self._start : self._start + num_filled]
        self._start += num_filled
        while num_filled < len(target):
            num_filled += self._receive(target[num_filled:], deadline, is_whole=True)

    def skip(self, num_bytes: int, deadline: float) -> None:
        """Drops the next bytes."""
        while num_bytes:
            in_buffer = min(num_bytes, self._end - self._start)
            self._start += in_buffer
            num_bytes -= in_buffer
            if num_bytes:
                self._scratch = self._scratch or memoryview(bytearray(_SCRATCH_BYTES))
                num_bytes -= self._receive(self._scratch[:num_bytes], deadline)

    def _reply_line(self, deadline: float, kinds: tuple[bytes, ...]) -> bytes | ErrorReply:
        line = self._line(deadline)
        if line.startswith(b"-"):
            return ErrorReply.of(line[1:])
        if not line.startswith(kinds):
            raise ConnectionFailed("protocol")
        return line[1:]

    def _line(self, deadline: float) -> bytes:
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._start:
                kept = bytes(self._view[self._start : self._end])
                self._view[: len(kept)] = kept
                self._start, self._end = 0, len(kept)
            if self._end == _BUFFER_BYTES:
                raise ConnectionFailed("protocol")
            self._end += self._receive(self._view[self._end :], deadline)
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _receive(self, view: memoryview, deadline: float, *, is_whole: bool = False) -> int:
        """At least one byte; `is_whole`: as much as the kernel gives in one call."""
        sock = self._open_socket()
        if self._tls is not None:
            sock.settimeout(_seconds_until(deadline))
            num_received = sock.recv_into(view)  # a TLS record at most
        else:
            self._limit(sock, socket.SO_RCVTIMEO, deadline)
            num_received = sock.recv_into(view, 0, socket.MSG_WAITALL if is_whole else 0)
        if not num_received:
            raise ConnectionFailed("closed")
        return num_received

    def _open_socket(self) -> socket.socket:
        sock: socket.socket | None = cast(Any, self)._sock
        if sock is None:
            raise ConnectionFailed("closed")
        return sock

    def _limit(self, sock: socket.socket, option: int, deadline: float) -> None:
        """At most twice the time: once set, it applies to each wait until the deadline has passed."""
        left = _seconds_until(deadline)
        if self._deadlines.get(option) != deadline:
            self._deadlines[option] = deadline
            if sock.gettimeout() is not None:
                sock.settimeout(None)
            timeval = _TIMEVAL.pack(int(left), max(1, int(left % 1.0 * 1e6)))
            sock.setsockopt(socket.SOL_SOCKET, option, timeval)


class _SentinelConnection(redis_sentinel.SentinelManagedConnection, PageConnection):
    """Asks the Sentinels where the primary is, whenever it connects."""


class RedisEndpoint:
    """One Redis as configured: makes pools of connections, and remembers which run of the server answered last."""

    def __init__(
        self,
        address: RedisAddress,
        login: RedisLogin,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        connect_timeout_s: float = 0.25,
        timeout_s: float = 0.25,
    ) -> None:
        self.address = address
        self.run_id: str | None = None
        self._login = login
        self._timeout_s = timeout_s
        self._kwargs: dict[str, Any] = {
            "tls": tls,
            "protocol": 2,
            "driver_info": None,
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": timeout_s,
        }

    def make_pool(self, *, receive_bytes: int = RECEIVE_BYTES) -> redis.ConnectionPool:
        """redis-py's; not connected yet. `receive_bytes` is the size of the kernel's buffer, 0 for its own choice."""
        kwargs = self._kwargs | {
            "receive_bytes": receive_bytes,
            "login": self._login,
            "db": self.address.db,
            "client_name": CLIENT_NAME,
            "redis_connect_func": self._introduce,
        }
        if not self.address.service:
            host, port = self.address.hosts[0]
            return redis.ConnectionPool(PageConnection, host=host, port=port, **kwargs)
        sentinel = redis_sentinel.Sentinel([])
        sentinel.sentinels = [
            redis.Redis.from_pool(redis.ConnectionPool(PageConnection, host=host, port=port, **self._kwargs))
            for host, port in self.address.hosts
        ]
        return redis_sentinel.SentinelConnectionPool(
            self.address.service, sentinel, connection_class=_SentinelConnection, **kwargs
        )

    def _introduce(self, connection: Any) -> None:
        """redis-py's login, whose waits are limited one by one, under a deadline for all of it."""
        timer = threading.Timer(2 * self._timeout_s, connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            connection.on_connect()
            self._login.note_accepted()
            with contextlib.suppress(redis_errors.ResponseError):  # not every account may ask
                connection.send_command("INFO", "server")
                self._note_run(connection.read_response())
        except (redis_errors.AuthenticationError, redis_errors.NoPermissionError):
            self._login.note_refused(connection.password)
            raise
        finally:
            timer.cancel()

    def _note_run(self, info: object) -> None:
        found = _RUN_ID.search(info) if isinstance(info, bytes) else None
        if found is None:
            return
        run_id = found[1].decode()
        if self.run_id is not None and run_id != self.run_id:
            _log.warning(
                "redis at %s is another process now (restart or failover): pages that it lacks are computed again",
                self.address,
            )
        self.run_id = run_id


class Slots:
    """A semaphore for threads that come back at once, in which none is overtaken for longer than `_PATIENCE_S`. Strict
    order would leave a connection idle until the next thread runs: a sixth of the throughput. Without any, a page may
    wait as long as others come."""

    def __init__(self, num_free: int) -> None:
        self._changed = threading.Condition()
        self._num_free = num_free
        self._waiting: dict[int, float] = {}  # since when, the longest first, by thread

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._waiting[me] = time.monotonic()
            try:
                while self._num_free == 0 or self._impatient() not in (None, me):
                    if self._num_free:
                        self._changed.notify_all()  # this one was notified before the other became impatient
                    self._changed.wait()
                self._num_free -= 1
            finally:  # also after Ctrl-C: or it would be the longest for ever
                del self._waiting[me]

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """A slot is free, or a new one is there."""
        with self._changed:
            self._num_free += 1
            self._changed.notify(1 if self._impatient() is None else len(self._waiting))

    def _impatient(self) -> int | None:
        me, since_s = next(iter(self._waiting.items()), (0, math.inf))
        return me if time.monotonic() - since_s > _PATIENCE_S else None


class PagePool:
    """Connections for one kind of request, each with one request at a time. Thread-safe.

    On one machine one request at a time is fastest: the ends take turns with the page in a cache between them (2.5 GB/s
    on two cores, 1.5 with the next GET sent ahead). To a Redis elsewhere that would cost a round trip for each page, so
    once a connection turns out to be remote there may be `max_remote` of them.
    """

    def __init__(self, endpoint: RedisEndpoint, num_connections: int, *, max_remote: int) -> None:
        self._pool = endpoint.make_pool()  # makes the connections; its check of each one costs a tenth of a read
        self._idle: list[Any] = []
        self._num_connections = num_connections
        self._num_more_if_remote = max(0, max_remote - num_connections)
        self._slots = Slots(num_connections)
        self._lock = threading.Lock()  # of all below
        self._busy: set[PageConnection] = set()
        self._is_closed = False
        self._failed_at = -1.0
        self._failure = ""

    def exchange(
        self,
        request: Sequence[Buffer],
        read: Callable[[PageConnection, float], T],
        *,
        send_s: float,
        answer_s: float,
    ) -> T:
        """Sends, and returns what `read` makes of the answers by the deadline it gets. Raises ConnectionFailed.

        The times count from when there is a connection, and from when the request is sent.
        """
        with self._connection() as connection:
            connection.send_buffers(request, time.monotonic() + send_s)
            return read(connection, time.monotonic() + answer_s)

    def connect(self) -> None:
        """Makes the connections before they are needed. Raises ConnectionFailed.

        Not only to save milliseconds: where pages follow the login at once, BBR takes the small answers for all that
        the way can carry, and may leave the connection at half its speed for good (1.4 GB/s against 2.2 on loopback).
        """
        with contextlib.ExitStack() as stack:
            for _ in range(self._num_connections):
                stack.enter_context(self._connection())

    def drop_idle(self) -> None:
        """The next request makes a new connection."""
        with self._lock:
            for connection in self._idle:
                connection.disconnect()

    def close(self) -> None:
        """Ends all connections, those in use too, and makes none any more."""
        with self._lock:
            self._is_closed = True
            for connection in self._busy:
                connection.interrupt()
        self.drop_idle()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[PageConnection]:
        """One, as soon as the requests before this one have ended: each of them has deadlines.

        A request that waited while another one failed fails with it, so that many requests to a server that hangs cost
        one time-out and not one each.
        """
        waits_since = time.monotonic()
        with self._slots:
            if self._is_closed or self._failed_at >= waits_since:
                raise ConnectionFailed("closed" if self._is_closed else self._failure)
            try:
                with self._taken() as connection:
                    yield connection
            except (OSError, redis.RedisError, ConnectionFailed) as error:
                failure = connection_failed(error)
                self._failed_at, self._failure = time.monotonic(), failure.reason
                raise failure from None
            except BaseException:
                self._failed_at, self._failure = time.monotonic(), "interrupted"
                raise

    @contextlib.contextmanager
    def _taken(self) -> Iterator[PageConnection]:
        """A connection; it is closed if its request fails."""
        with self._lock:
            connection: Any = self._idle.pop() if self._idle else self._pool.make_connection()
        try:
            if not connection.is_quiet():
                connection.disconnect()
                connection.connect()
            with self._lock:
                self._busy.add(connection)
                if self._is_closed:
                    connection.interrupt()
                if not connection.is_local:
                    for _ in range(self._num_more_if_remote):
                        self._slots.release()
                    self._num_more_if_remote = 0
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                self._idle.append(connection)
                if self._is_closed:
                    connection.disconnect()


def _seconds_until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
