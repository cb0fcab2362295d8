"""Pages in Redis or Valkey: the store, one value for each page, and its connector.

    <prefix>:v1/<space>/<first byte of hash>/<hash>             full blocks, shared by all instances
    <prefix>:v1/<space>/transfers/<SHA-256 of transfer>/<hash>  tails, deleted by their owner

<space> stands for the model and the key of the digests (kv_transfer/page/format.py). Every key has a time to live.
Reads and writes have connections of their own, so that a server that accepts no writes (a replica, a paused one) can
still be read from. A value is read by GETRANGE, one byte longer than it must be: one that is too long is detected and
never sent whole. Nothing is retried and nothing waits for longer than its time-out; the breaker above the store keeps
requests away from a server that is down.
Permissions an ACL user needs: getrange set del strlen pexpire info select client|setname, on <prefix>:*.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import redis

from engine.errors import EngineError, shown
from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.base import BadValue, OutageLog, StoreError
from kv_transfer.stores.connector import StoreConnector, StoreOptions
from kv_transfer.stores.redis.address import (
    PASSWORD_VARIABLE,
    ConnectionFailed,
    RedisAddress,
    RedisLogin,
    tls_contexts,
)
from kv_transfer.stores.redis.connection import (
    ErrorReply,
    PageConnection,
    PagePool,
    RedisEndpoint,
    connection_failed,
)
from kv_transfer.transfer.connector import parse_options

T = TypeVar("T")
_NEARLY_FULL = 0.9
_ANSWERED_S = 0.01
"""For an answer that has come, or else does not."""
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger(__name__)


class RedisOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    """redis://host:port/db; rediss:// for TLS, which verifies the server; redis+sentinel://host:port,…/service/db where
    Sentinels know the primary. Without a login."""
    username: str = "default"
    """Account of Redis's ACL."""
    password_file: str = ""
    """File with the password, read at every connect; none: the variable TANDEM_REDIS_PASSWORD, or no login."""
    tls_ca_file: str = ""
    """Authority that the server's certificate is from; none: the system's. Like the next two, read again when it
    changes."""
    tls_cert_file: str = ""
    """Client certificate, where Redis requires one."""
    tls_key_file: str = ""
    """Its key; none: in the certificate's file."""
    prefix: str = "tandem"
    """What keys begin with, for ACLs and for sharing a server with others."""
    num_io_threads: int = 4
    """Threads that read and write pages: so many requests are in flight at once."""
    num_connections: int = 1
    """Connections for reading, and as many for writing, made at the start. With TLS at least num_io_threads."""
    max_in_flight: int | None = None
    """Requests in flight for each of them, which takes as many connections; none: up to num_io_threads, and 1 to a
    Redis on this machine."""
    ttl_s: float = 3600.0
    """How long a full block is kept after it was last saved or found, seconds."""
    tail_ttl_s: float = 3600.0
    """How long a transfer's own page is kept if its owner did not remove it, seconds; longer than any lease."""
    connect_timeout_s: float = 0.25
    """For name and TCP of a new connection, seconds. Each answer of the TLS handshake has `timeout_s` more."""
    timeout_s: float = 0.25
    """For an answer, seconds, apart from the time for its bytes."""
    min_bytes_per_s: float = 50e6
    """Speed below which a page is late."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: letters, digits, `_`, `.` and `-`, 1 to 64 of them")
        if self.tail_ttl_s < self.max_lease_s:
            raise ValueError(f"tail_ttl_s is {self.tail_ttl_s}; it must not be less than max_lease_s")
        if (self.tls_ca_file or self.tls_cert_file or self.tls_key_file) and not self.url.startswith("rediss"):
            raise ValueError("tls files are given and url is not rediss://")
        if self.tls_key_file and not self.tls_cert_file:
            raise ValueError("tls_key_file needs tls_cert_file, the certificate that it belongs to")


class RedisConnector(StoreConnector):
    """Pages outlive every instance. While Redis is down, KV is computed."""

    def __init__(self, *, wake: Callable[[], None], **options: Any) -> None:
        parsed = parse_options(RedisOptions, "redis", options)
        store = RedisStore(parsed)
        super().__init__(store, parsed, wake=wake)
        inspect_server(store)


def make_endpoint(options: RedisOptions) -> RedisEndpoint:
    """The Redis that the options name. Raises EngineError where files, or an account's password, are missing."""
    address = RedisAddress.parse(options.url)
    login = RedisLogin(options.username, options.password_file)
    try:
        password = login.password()
    except OSError as error:
        raise EngineError(f"password_file {options.password_file!r}: {error.strerror}") from error
    if password is None and options.username not in ("", "default"):
        raise EngineError(
            f"redis username {shown(options.username)} has no password: give password_file, or the variable"
            f" {PASSWORD_VARIABLE}"
        )
    tls = None
    if address.tls:
        tls = tls_contexts(ca_file=options.tls_ca_file, cert_file=options.tls_cert_file, key_file=options.tls_key_file)
    return RedisEndpoint(
        address, login, tls=tls, connect_timeout_s=options.connect_timeout_s, timeout_s=options.timeout_s
    )


def inspect_server(store: RedisStore) -> list[str]:
    """Connects, and logs what is wrong with the server's configuration. That it is unavailable is no error."""
    try:
        store.connect()
        warnings = config_warnings(store.info("memory", "replication"))
    except StoreError:
        return []  # the store has logged it; an instance starts without Redis, too
    for warning in warnings:
        _log.warning("redis at %s: %s", store.endpoint.address, warning)
    return warnings


def config_warnings(info: Mapping[str, object]) -> list[str]:
    """For the operator; none: Redis is configured as it should be. `info` is INFO memory and INFO replication."""
    warnings = []
    policy = str(info.get("maxmemory_policy", ""))
    limit, used = _number(info, "maxmemory"), _number(info, "used_memory")
    if policy.startswith("allkeys-"):
        warnings.append(
            f"maxmemory-policy is {policy}: when memory is short it drops pages, and any other keys, without an error;"
            " pages that are gone are computed again. Set noeviction or volatile-lru: every page has a time to live"
        )
    if limit == 0:
        warnings.append(
            "maxmemory is not set: pages may take all of that machine's memory. Set it to what KV may use, e.g."
            " `maxmemory 16gb`"
        )
    elif policy == "noeviction" and limit and used is not None and used > _NEARLY_FULL * limit:
        warnings.append(
            f"{used / limit:.0%} of maxmemory is in use, and maxmemory-policy is noeviction: what does not fit is not"
            " saved until other pages have expired"
        )
    if info.get("role") == "slave":
        warnings.append("it is a replica: pages can be read and not saved. Give the primary's address")
    return warnings


def _number(info: Mapping[str, object], name: str) -> int | None:
    value = str(info.get(name, ""))
    return int(value) if value.isdecimal() else None


class RedisStore:
    """Implements kv_transfer.stores.base.BlockStore. Connects whenever it has no connection. Raises EngineError where
    files are missing."""

    name = "redis"

    def __init__(self, options: RedisOptions) -> None:
        endpoint = self.endpoint = make_endpoint(options)
        self._options = options
        num_threads, per_connection = options.num_io_threads, options.max_in_flight
        num_connections = max(options.num_connections, num_threads if endpoint.address.tls else 1)
        num_connections *= per_connection or 1
        max_remote = num_connections if per_connection else num_threads
        self._readers = PagePool(endpoint, num_connections, max_remote=max_remote)
        self._writers = PagePool(endpoint, num_connections, max_remote=max_remote)
        self._outages = OutageLog(f"redis at {endpoint.address}")
        self._left_replica_s = self._paused_until_s = -math.inf

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        num_bytes = sum(map(len, buffers))
        name, ttl_ms = self._name(key), b"%d" % self._ttl_ms(key)
        before = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, num_bytes)
        after = b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl_ms), ttl_ms)
        self._check(
            self._exchange(
                self._writers, [before, *buffers, after], PageConnection.read_status, num_sent_bytes=num_bytes
            )
        )

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        num_bytes = sum(map(len, buffers))
        name = self._name(key)
        request, is_extended = encode("GETRANGE", name, 0, num_bytes), not self._is_paused
        if is_extended:
            request += encode("PEXPIRE", name, self._ttl_ms(key))

        def read(connection: PageConnection, deadline: float) -> tuple[bool | Exception, bytes | ErrorReply | None]:
            outcome = _read_page(connection, deadline, buffers, num_bytes, check)
            return outcome, self._read_extended(connection) if is_extended else None

        outcome, extended = self._exchange(self._readers, [request], read, num_read_bytes=num_bytes)
        if _reason(outcome) == "masterdown" or (outcome is False and _reason(extended) == "readonly"):
            self._leave_replica()
        if _reason(outcome) == "type":
            raise BadValue("type")
        self._check(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        name = self._name(key)
        request = encode("STRLEN", name) + encode("PEXPIRE", name, self._ttl_ms(key))

        def read(connection: PageConnection, deadline: float) -> tuple[bytes | ErrorReply, bytes | ErrorReply]:
            return connection.read_status(deadline), connection.read_status(deadline)

        length, _ = self._exchange(self._writers, [request], read)
        if _reason(length) == "type":
            return False
        self._check(length)
        return length == b"%d" % num_bytes

    def delete(self, key: PageKey) -> None:
        if self._outages.failed_within(self._options.breaker_retry_s):
            raise ConnectionFailed("down")  # the time to live removes it
        self._check(self._exchange(self._writers, [encode("DEL", self._name(key))], PageConnection.read_status))

    def close(self) -> None:
        self._readers.close()
        self._writers.close()

    def connect(self) -> None:
        """Makes the connections before they are needed. Raises ConnectionFailed."""
        try:
            self._readers.connect()
            self._writers.connect()
        except ConnectionFailed as error:
            self._outages.note_failure(error.reason)
            raise

    def info(self, *sections: str) -> dict[str, object]:
        """What INFO says, on a connection of its own. Raises ConnectionFailed."""
        found: dict[str, object] = {}
        try:
            with redis.Redis.from_pool(self.endpoint.make_pool()) as client:
                for section in sections:
                    found |= client.info(section)
        except redis.RedisError as error:
            failure = connection_failed(error)
            self._outages.note_failure(failure.reason)
            raise failure from None
        return found

    def _exchange(
        self,
        pool: PagePool,
        request: Sequence[Buffer],
        read: Callable[[PageConnection, float], T],
        *,
        num_sent_bytes: int = 0,
        num_read_bytes: int = 0,
    ) -> T:
        timeout_s, min_bytes_per_s = self._options.timeout_s, self._options.min_bytes_per_s
        try:
            answer = pool.exchange(
                request,
                read,
                send_s=timeout_s + num_sent_bytes / min_bytes_per_s,
                answer_s=timeout_s + num_read_bytes / min_bytes_per_s,
            )
        except ConnectionFailed as error:
            self._outages.note_failure(error.reason)
            raise
        self._outages.note_answer()
        return answer

    def _read_extended(self, connection: PageConnection) -> bytes | ErrorReply | None:
        """The answer to PEXPIRE, which comes after the page, in a time of its own: the page may have been late.
        READONLY of a replica: the page lives as long as it was to. None: the server is paused for writes; for a while
        pages are only read."""
        wait_s = _ANSWERED_S if self._is_paused else self._options.timeout_s
        try:
            return connection.read_status(time.monotonic() + wait_s)
        except (TimeoutError, BlockingIOError):
            self._paused_until_s = time.monotonic() + self._options.breaker_retry_s
        connection.disconnect()  # type: ignore[no-untyped-call]  # the answer may still come
        return None

    @property
    def _is_paused(self) -> bool:
        """A request shows it to those that waited behind it as well."""
        return time.monotonic() < self._paused_until_s

    def _leave_replica(self) -> None:
        """It lacks a page, or serves none: it may have been the primary, and the name stands for another server now."""
        now_s = time.monotonic()
        if now_s >= self._left_replica_s + self._options.breaker_retry_s:
            self._left_replica_s = now_s
            self._readers.drop_idle()

    def _check(self, reply: object) -> None:
        """Raises an ErrorReply."""
        if isinstance(reply, ErrorReply):
            self._outages.warn(reply.reason)
            if reply.reason in ("readonly", "masterdown"):
                self._writers.drop_idle()  # the name may stand for another server by now
            raise reply

    def _name(self, key: PageKey) -> bytes:
        return f"{self._options.prefix}:{'/'.join(key.parts)}".encode()

    def _ttl_ms(self, key: PageKey) -> int:
        return round(1000 * (self._options.tail_ttl_s if key.scope else self._options.ttl_s))


def encode(*arguments: bytes | str | int) -> bytes:
    """A command without a page."""
    parts = [argument if isinstance(argument, bytes) else str(argument).encode() for argument in arguments]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def _reason(reply: object) -> str | None:
    return reply.reason if isinstance(reply, ErrorReply) else None


def _read_page(
    connection: PageConnection, deadline: float, buffers: Sequence[Buffer], num_bytes: int, check: Callable[[], None]
) -> bool | Exception:
    """Whether there is a value; what is wrong with it, or what `check` raised, as an exception to raise later.

    Whatever the value is, it is read or skipped to its end, so that the connection stays in step.
    """
    length = connection.read_bulk_length(deadline)
    if isinstance(length, ErrorReply):
        return length
    if length is None or length > num_bytes + 1:
        raise ConnectionFailed("protocol")
    if length != num_bytes:
        connection.skip(length + 2, deadline)
        return BadValue("size") if length else False  # GETRANGE of nothing is empty
    head, *rest = [memoryview(buffer).cast("B") for buffer in buffers]
    connection.fill(head, deadline)
    try:
        check()
    except Exception as error:
        connection.skip(length - len(head) + 2, deadline)
        return error
    for view in rest:
        connection.fill(view, deadline)
    connection.skip(2, deadline)
    return True
