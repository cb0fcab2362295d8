"""The connector over LMCache: a fleet that runs LMCache already has its pages kept there, in our own page format.

    backend   place                                              wants          LMCache here
    disk      fs_native's files in a folder (lmcache_disk)       path           its fs client
    server    an `lmcache server` with our module (…_server)     url tcp://     none
    redis     Redis behind our L2 adapter (…_adapter)            url redis://   its storage layer's plugins

LMCache is imported when the store is made and only then, with its telemetry off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from engine.errors import EngineError, shown
from kv_transfer.connector import StoreConnector, StoreOptions
from kv_transfer.lmcache_adapter import LMCacheAdapter
from kv_transfer.lmcache_disk import LMCacheDisk
from kv_transfer.lmcache_server import LMCacheServer
from kv_transfer.store import BlockStore

_BACKENDS = ("disk", "server", "redis")
_EXAMPLES = {
    "disk": "path (--kv-folder /mnt/kv)",
    "server": "url (--kv-url tcp://host:5555)",
    "redis": "url (--kv-url redis://host:6379/0)",
}
_REDIS_FIELDS = ("url", "username", "password_file", "tls_ca_file", "prefix", "ttl_s", "tail_ttl_s")


class LMCacheOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the connector over LMCache."""

    backend: str = ""
    """disk, server or redis; none: disk where `path` is given, else what `url` begins with."""
    path: str = ""
    """disk: the folder, the same one for all instances; made if it is not there."""
    url: str = ""
    """server: tcp://host:port. redis: redis://host:port/db, or rediss:// for TLS."""
    capacity_bytes: int | None = None
    """disk: bytes of pages, of all instances together, above which the least recently used go; none: 16 GiB."""
    scan_interval_s: float = 60.0
    """disk: how often the folder is looked through for what others wrote and left, seconds."""
    tail_max_age_s: float = 3600.0
    """disk: age from which a transfer's own page is removed if its owner did not, seconds; longer than any lease."""
    username: str = "default"
    """redis: account of its ACL."""
    password_file: str = ""
    """redis: file with the password, read at every connect; none: the variable TANDEM_REDIS_PASSWORD, or no login."""
    tls_ca_file: str = ""
    """redis: authority that the server's certificate is from; none: the system's."""
    prefix: str = "tandem"
    """redis: what keys begin with. With the same one the redis connector and this one share pages."""
    ttl_s: float = 3600.0
    """redis: how long a full block is kept that nobody has saved again, seconds."""
    tail_ttl_s: float = 3600.0
    """redis: how long a transfer's own page is kept if its owner did not remove it, seconds; longer than any lease."""
    connect_timeout_s: float = 0.25
    """server and redis: for a new connection, seconds."""
    timeout_s: float = 1.0
    """For an answer of LMCache, seconds, apart from the time for a page's bytes."""
    min_bytes_per_s: float = 50e6
    """Speed below which a page is given up."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("tail_max_age_s", "tail_ttl_s"):
            if getattr(self, field) < self.max_lease_s:
                raise ValueError(f"{field} is {getattr(self, field)}; it must not be less than max_lease_s")

    def backend_name(self) -> str:
        """The backend, after looking whether it has what it needs. Raises EngineError."""
        name = self.backend or self._guess()
        if name not in _BACKENDS:
            raise EngineError(f"lmcache backend {shown(name)}: must be one of {', '.join(_BACKENDS)}")
        wanted, other = ("path", "url") if name == "disk" else ("url", "path")
        if not getattr(self, wanted):
            raise EngineError(f"the lmcache backend {name} needs {_EXAMPLES[name]}")
        if getattr(self, other):
            raise EngineError(f"the lmcache backend {name} takes no {other}, only {_EXAMPLES[name]}")
        if name != "disk" and self.capacity_bytes is not None:
            raise EngineError(
                f"the lmcache backend {name} takes no capacity_bytes: set the size where the pages are, with"
                f" {'--l1-size-gb and max_capacity_gb of lmcache server' if name == 'server' else 'maxmemory of Redis'}"
            )
        return name

    def _guess(self) -> str:
        if self.path:
            return "disk"
        scheme = self.url.partition(":")[0]
        guess = {"tcp": "server", "redis": "redis", "rediss": "redis"}.get(scheme)
        if guess is None:
            wants = ", ".join(f"{example} for {name}" for name, example in _EXAMPLES.items())
            raise EngineError(f"the lmcache connector does not know where pages are kept; give one of {wants}")
        return guess


class LMCacheConnector(StoreConnector):
    """Pages in a place of LMCache's. Outlives every instance. While it is down, KV is computed."""

    def __init__(self, *, wake: Callable[[], None], **options: Any) -> None:
        try:
            parsed = msgspec.convert(options, LMCacheOptions, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(LMCacheOptions.__struct_fields__)
            raise EngineError(f"options of the lmcache connector: {error}; known: {known}") from error
        parsed.digest_key()  # or what is wrong with it would be found with a store open already
        super().__init__(make_store(parsed), parsed, wake=wake)


def make_store(options: LMCacheOptions) -> BlockStore:
    """The store that the options describe. Raises EngineError."""
    backend = options.backend_name()
    limits = {"timeout_s": options.timeout_s, "min_bytes_per_s": options.min_bytes_per_s}
    if backend == "server":
        return LMCacheServer(
            options.url, connect_timeout_s=options.connect_timeout_s, down_s=options.breaker_retry_s, **limits
        )
    if backend == "redis":
        params: dict[str, object] = {name: getattr(options, name) for name in _REDIS_FIELDS}
        params |= {
            "num_io_threads": options.num_io_threads,
            "connect_timeout_s": options.connect_timeout_s,
            "breaker_retry_s": options.breaker_retry_s,
            "max_lease_s": options.max_lease_s,
            "min_bytes_per_s": options.min_bytes_per_s,
        }
        return LMCacheAdapter.of_redis(params, **limits)
    return LMCacheDisk(
        options.path,
        capacity_bytes=options.capacity_bytes or 16 << 30,
        num_workers=options.num_io_threads,
        scan_interval_s=options.scan_interval_s,
        tail_max_age_s=options.tail_max_age_s,
        **limits,
    )
