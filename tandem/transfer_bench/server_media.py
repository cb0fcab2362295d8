"""Connectors whose pages are in a server: redis, and lmcache over its own server or over Redis."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from kv_transfer import lmcache_connector
from kv_transfer.redis_connector import RedisOptions, make_store
from kv_transfer.redis_dial import RedisLogin
from kv_transfer.store import BlockStore, PageKey, StoreError
from tandem.transfer_bench.half import Shape
from tandem.transfer_bench.media import Common
from tandem.transfer_bench.options import Options
from tandem.transfer_bench.private_redis import private_redis
from tandem.transfer_bench.raw import Raw, RawRedis

_TTL_S = 300.0
"""What a measurement that was killed leaves in a Redis goes by itself after this."""
_PATIENCE_S = 5.0
"""A busy machine is to be measured, not given up."""
_ROUNDS_IN_MEMORY = 8


@dataclass(kw_only=True)
class RedisMedium(Common):
    """A Redis at `url`, or without one a private server."""

    name: str = "redis"
    connector: str = "redis"
    url: str | None = None
    num_lives: int = 3
    keeps_pages: bool = True
    goals: dict[str, float] = field(default_factory=lambda: {"off": 0.80, "on": 0.55})
    _url: str = ""

    def __post_init__(self) -> None:
        self._url = self.url or ""

    @property
    def where(self) -> str:
        return self.url or "a private server on loopback"

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        with self.folder_in(None) as folder, contextlib.ExitStack() as stack:
            max_bytes = _ROUNDS_IN_MEMORY * shape.num_bytes + (256 << 20)
            self._url = self.url or stack.enter_context(private_redis(folder, max_bytes))
            yield

    def named(self) -> Options:
        patient = {name: _PATIENCE_S for name in ("connect_timeout_s", "timeout_s") if name not in self.options}
        return {"url": self._url, "ttl_s": _TTL_S, "tail_ttl_s": _TTL_S, **patient}

    def raws(self, shape: Shape, kv: torch.Tensor) -> list[Raw]:
        options = self.store_options()
        login = RedisLogin(options.username, options.password_file)
        return [RawRedis(self._url, login, options.prefix, shape, kv, is_tuned=is_tuned) for is_tuned in (False, True)]

    def clear(self, keys: Sequence[PageKey]) -> None:
        _delete(make_store(self.store_options()), keys)

    def store_options(self) -> RedisOptions:
        """As the connector would read them."""
        return msgspec.convert(self.config(digest=False).options, RedisOptions, strict=False)


@dataclass(kw_only=True)
class LMCacheServerMedium(Common):
    """An LMCache server (tcp://), or LMCache over Redis (redis://)."""

    name: str = "lmcache"
    connector: str = "lmcache"
    url: str
    keeps_pages: bool = True
    goals: dict[str, float] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return self.url

    @contextlib.contextmanager
    def opened(self, shape: Shape) -> Iterator[None]:
        with self.folder_in(None):
            yield

    def named(self) -> Options:
        return {"url": self.url, "ttl_s": _TTL_S, "tail_ttl_s": _TTL_S}

    def raws(self, shape: Shape, kv: torch.Tensor) -> list[Raw]:
        if not self.url.startswith("redis"):
            return []
        options = self._store_options()
        login = RedisLogin(options.username, options.password_file)
        return [RawRedis(self.url, login, options.prefix, shape, kv, is_tuned=False)]

    def clear(self, keys: Sequence[PageKey]) -> None:
        _delete(lmcache_connector.make_store(self._store_options()), keys)

    def _store_options(self) -> lmcache_connector.LMCacheOptions:
        return msgspec.convert(self.config(digest=False).options, lmcache_connector.LMCacheOptions, strict=False)


def _delete(store: BlockStore, keys: Sequence[PageKey]) -> None:
    """As far as the store can."""
    with contextlib.suppress(StoreError):
        for key in keys:
            store.delete(key)
    store.close()
