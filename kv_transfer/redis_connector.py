"""The connector over Redis or Valkey: its options, and what is looked at when it starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec

from engine.errors import EngineError
from kv_transfer.connector import StoreConnector, StoreOptions
from kv_transfer.redis_dial import Dialer, RedisAddress, RedisLogin, tls_context
from kv_transfer.redis_store import RedisLimits, RedisStore
from kv_transfer.redis_survey import survey
from kv_transfer.store import StoreError

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_log = logging.getLogger(__name__)


class RedisOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector over Redis."""

    url: str
    """redis://host:port/db, or rediss:// for TLS, which verifies the server. Without a login."""
    username: str = "default"
    """Account of Redis's ACL."""
    password_file: str = ""
    """File with the password, read at every connect; none: the variable TANDEM_REDIS_PASSWORD, or no login."""
    tls_ca_file: str = ""
    """Authority that the server's certificate is from; none: the system's."""
    tls_cert_file: str = ""
    """Our certificate, where Redis wants one."""
    tls_key_file: str = ""
    """Its key; none: in the certificate's file."""
    prefix: str = "tandem"
    """What keys begin with, for ACLs and for sharing a server with others."""
    num_io_threads: int = 4
    """Threads that read and write pages: so many requests are in flight at once."""
    num_connections: int = 1
    """Connections for reading, and as many for writing. With TLS, where none can be shared, at least num_io_threads."""
    max_in_flight: int | None = None
    """Requests sent ahead of their answers on one connection; none: 8, and 1 to a Redis on this machine."""
    ttl_s: float = 3600.0
    """How long a full block is kept that nobody has saved again, seconds."""
    tail_ttl_s: float = 3600.0
    """How long a transfer's own page is kept if its owner did not remove it, seconds; longer than any lease."""
    connect_timeout_s: float = 0.25
    """For name, TCP and TLS of a new connection, seconds."""
    timeout_s: float = 0.25
    """For an answer, seconds, apart from the time for its bytes."""
    min_bytes_per_s: float = 50e6
    """Speed below which a page is given up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: letters, digits, `_`, `.` and `-`, 1 to 64 of them")
        if self.tail_ttl_s < self.max_lease_s:
            raise ValueError(f"tail_ttl_s is {self.tail_ttl_s}; it must not be less than max_lease_s")
        if bool(self.tls_ca_file or self.tls_cert_file) and not self.url.startswith("rediss:"):
            raise ValueError("tls files are given and url is not rediss://")


class RedisConnector(StoreConnector):
    """Pages as values in Redis or Valkey. Outlives every instance. While Redis is down, KV is computed."""

    def __init__(self, *, wake: Callable[[], None], **options: Any) -> None:
        try:
            parsed = msgspec.convert(options, RedisOptions, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(RedisOptions.__struct_fields__)
            raise EngineError(f"options of the redis connector: {error}; known: {known}") from error
        store = make_store(parsed)
        super().__init__(store, parsed, wake=wake)
        look_at(store)


def make_store(options: RedisOptions) -> RedisStore:
    """The store that the options describe; not connected yet. Raises EngineError where files are not there."""
    address = RedisAddress.parse(options.url)
    login = RedisLogin(options.username, options.password_file)
    try:
        login.password()
    except OSError as error:
        raise EngineError(f"password_file {options.password_file!r}: {error.strerror}") from error
    tls = None
    if address.tls:
        tls = tls_context(ca_file=options.tls_ca_file, cert_file=options.tls_cert_file, key_file=options.tls_key_file)
    dialer = Dialer(
        address,
        login,
        tls=tls,
        max_in_flight=options.max_in_flight,
        connect_timeout_s=options.connect_timeout_s,
        timeout_s=options.timeout_s,
    )
    limits = RedisLimits(
        ttl_s=options.ttl_s,
        tail_ttl_s=options.tail_ttl_s,
        timeout_s=options.timeout_s,
        min_bytes_per_s=options.min_bytes_per_s,
        down_s=options.breaker_retry_s,
    )
    num_connections = max(options.num_connections, options.num_io_threads if tls else 1)
    return RedisStore(dialer, prefix=options.prefix, num_connections=num_connections, limits=limits)


def look_at(store: RedisStore) -> list[str]:
    """Connect, and log what is wrong with the server's set-up. That it cannot be reached is no error."""
    try:
        store.connect()
        info = {**store.info("memory"), **store.info("replication")}
    except StoreError:
        return []  # the store has said so already; an instance starts without Redis, too
    warnings = survey(info)
    for warning in warnings:
        _log.warning("redis at %s: %s", store.dialer.address, warning)
    return warnings
