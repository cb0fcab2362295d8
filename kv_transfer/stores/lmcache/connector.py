"""The connector over LMCache: fleets that run LMCache keep pages there, in Tandem's own page format.

    backend   place                                                        needs
    disk      fs_native's files in a folder (LMCacheDisk)                  path
    server    an `lmcache server` with Tandem's module (lmcache/server.py) url tcp://

An instance needs no LMCache. Redis is the redis connector's: LMCache would add a copy and two threads to every page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.errors import EngineError, shown
from kv_transfer.page.format import PageKey
from kv_transfer.stores.base import BlockStore
from kv_transfer.stores.connector import StoreConnector, StoreOptions
from kv_transfer.stores.files import SharedStorage
from kv_transfer.stores.lmcache.server import LMCacheServer, ObjectName
from kv_transfer.transfer.connector import parse_options

_EXAMPLES = {
    "disk": "path (--kv-folder /mnt/kv)",
    "server": "url (--kv-url tcp://host:5555)",
}


class LMCacheOptions(StoreOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    backend: str = ""
    """disk or server; none: disk where `path` is given, server where `url` is."""
    path: str = ""
    """disk: the folder, the same one for all instances; made if it is not there."""
    url: str = ""
    """server: tcp://host:port."""
    capacity_bytes: int | None = None
    """disk: bytes of pages, of all instances together, above which the least recently used go; none: 16 GiB."""
    scan_interval_s: float = 60.0
    """disk: how often the folder is scanned for what other instances wrote and left, seconds."""
    tail_max_age_s: float = 3600.0
    """disk: age from which a transfer's own page is removed if its owner did not, seconds; longer than any lease."""
    connect_timeout_s: float = 0.25
    """server: for a new connection, seconds."""
    timeout_s: float = 1.0
    """server: for an answer, seconds, apart from the time for a page's bytes."""
    min_bytes_per_s: float = 50e6
    """server: speed below which a page is late."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tail_max_age_s < self.max_lease_s:
            raise ValueError(f"tail_max_age_s is {self.tail_max_age_s}; it must not be less than max_lease_s")

    def backend_name(self) -> str:
        """The backend, once it is certain that its options are given. Raises EngineError."""
        if self.url.startswith(("redis:", "rediss:", "redis+", "rediss+")) or self.backend == "redis":
            raise EngineError("lmcache: a redis:// URL is not supported; use the redis connector")
        name = self.backend or self._guess()
        if name not in _EXAMPLES:
            raise EngineError(f"lmcache backend {shown(name)}: must be one of {', '.join(_EXAMPLES)}")
        needed, other = ("path", "url") if name == "disk" else ("url", "path")
        if not getattr(self, needed):
            raise EngineError(f"the lmcache backend {name} needs {_EXAMPLES[name]}")
        if getattr(self, other):
            raise EngineError(f"the lmcache backend {name} takes no {other}, only {_EXAMPLES[name]}")
        if name == "server" and self.capacity_bytes is not None:
            raise EngineError(
                "the lmcache backend server takes no capacity_bytes: set the size where the pages are, with"
                " --l1-size-gb and max_capacity_gb of lmcache server"
            )
        return name

    def _guess(self) -> str:
        if self.path:
            return "disk"
        if self.url.startswith("tcp:"):
            return "server"
        examples = ", ".join(f"{example} for {name}" for name, example in _EXAMPLES.items())
        raise EngineError(f"the lmcache connector needs the place of its pages; give one of {examples}")


class LMCacheDisk(SharedStorage):
    """Pages as files of LMCache's fs_native: the same that an `lmcache server` with that adapter reads and writes.

        <path>/v1/pages/<model>@0x00000000@0@<hash>.data                                  full blocks
        <path>/v1/transfers/<SHA-256 of transfer>/<model>@0x00000000@0@<hash>@<salt>.data tails, removed by their owner

    Only the names are LMCache's. Its client is not used: it cannot cancel a read or write, reports a file that is too
    long as a hit, hangs on a FIFO, and leaves a file that is there (a torn one, a link) unchanged when it should write.
    LMCache's cap (`max_capacity_gb`) counts what one process has written since its start; the sweeper counts the
    folder. Implements kv_transfer.stores.base.BlockStore.
    """

    name = "lmcache"

    @staticmethod
    def place(key: PageKey) -> tuple[Sequence[str], str]:
        folders = ("v1", "transfers", key.scope.hex()) if key.scope else ("v1", "pages")
        return folders, ObjectName.of(key).file_name


class LMCacheConnector(StoreConnector):
    """Pages outlive every instance. While LMCache is down, KV is computed."""

    def __init__(self, *, wake: Callable[[], None], **options: Any) -> None:
        parsed = parse_options(LMCacheOptions, "lmcache", options)
        parsed.digest_key()  # raises before a store is open
        super().__init__(make_store(parsed), parsed, wake=wake)


def make_store(options: LMCacheOptions) -> BlockStore:
    """The store that the options describe. Raises EngineError."""
    if options.backend_name() == "server":
        return LMCacheServer(options)
    return LMCacheDisk(
        options.path,
        capacity_bytes=options.capacity_bytes or 16 << 30,
        saves=options.save,
        scan_interval_s=options.scan_interval_s,
        tail_max_age_s=options.tail_max_age_s,
    )
