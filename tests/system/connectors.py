"""The connectors under test. To add one: a function that yields its `Backing`, and a line in CONNECTORS.

A connector of your own is held to everything that ours are held to:

    @contextmanager
    def mine(folder: Path) -> Iterator[Backing]:
        yield Backing({"connector": "my_package.my_module:MyConnector"}, ("--kv-options", '{"size": 3}'))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kv_transfer.secret import ensure_secret
from kv_transfer.stores.redis.address import PASSWORD_VARIABLE
from tests.kv_transfer.stores.redis.redis_server import RedisServer, redis_server
from tests.system.rig import Rig
from tests.system.stored_pages import FolderPages, RedisPages, SqlitePages, StoredPages

REDIS_PASSWORD = "quite-a-pass-word-0815"


@dataclass(frozen=True, slots=True)
class Backing:
    """Configures a stack with the connector under test, and gives access to its store."""

    settings: Mapping[str, object]
    """Fields of StackSettings."""
    instance_args: tuple[str, ...] = ()
    """Further flags of every instance."""
    pages: Callable[[Rig], StoredPages] | None = None
    """The store of a stack; None: pages go from memory to memory."""
    reads_memory: bool = False
    """True: many pages at once come straight from the peer; a read from a frozen peer pins its blocks until the peer
    runs again."""
    is_prefix_store: bool = False
    """True: the store keeps full blocks alone, for later requests; the hand-over takes another way."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every instance."""
    redis: RedisServer | None = None
    """The server behind the connector, if it is a Redis."""


def options(**fields: object) -> tuple[str, str]:
    """The flag with a connector's own options."""
    return ("--kv-options", json.dumps(fields))


@contextmanager
def shared_storage(folder: Path) -> Iterator[Backing]:
    del folder  # the stack has one
    yield Backing({"connector": "shared_storage"}, pages=lambda rig: FolderPages(rig.store_folder))


@contextmanager
def redis(folder: Path) -> Iterator[Backing]:
    """With a password, and logs as verbose as they can be: test_redis_faults.py searches them for secrets."""
    with redis_server(folder, password=REDIS_PASSWORD) as server:
        yield Backing(
            {"connector": "redis", "kv_url": server.url},
            # Longer than the default: a slow machine is not a dead Redis.
            (*options(timeout_s=3, connect_timeout_s=3), "--log-level", "debug"),
            lambda rig: RedisPages(server),
            env={PASSWORD_VARIABLE: REDIS_PASSWORD},
            redis=server,
        )


@contextmanager
def nixl(folder: Path) -> Iterator[Backing]:
    """Over the transport that UCX chooses: shared memory, on one machine."""
    del folder
    yield Backing({"connector": "nixl"}, reads_memory=True)


@contextmanager
def nixl_tcp(folder: Path) -> Iterator[Backing]:
    del folder
    yield Backing({"connector": "nixl"}, options(ucx_tls="tcp"), reads_memory=True)


@contextmanager
def nixl_and_redis(folder: Path) -> Iterator[Backing]:
    """A list: the first hands over, the second stands in for it and keeps prefixes."""
    with redis_server(folder) as server:
        yield Backing(
            {"connector": "nixl,redis", "kv_url": server.url},
            options(**{"redis.timeout_s": 10, "redis.connect_timeout_s": 10}),
            lambda rig: RedisPages(server),
            reads_memory=True,
            is_prefix_store=True,
            redis=server,
        )


@contextmanager
def lmcache(folder: Path) -> Iterator[Backing]:
    """On disk, in the stack's folder."""
    del folder
    yield Backing({"connector": "lmcache"}, pages=lambda rig: FolderPages(rig.store_folder))


@contextmanager
def third_party(folder: Path) -> Iterator[Backing]:
    ensure_secret(folder / "kv_secret")
    args = ("--kv-folder", str(folder / "store"), "--kv-secret-file", str(folder / "kv_secret"))
    connector = {"connector": "tests.system.third_party:SqliteConnector"}
    yield Backing(connector, args, lambda rig: SqlitePages(folder / "store"))


Connector = Callable[[Path], AbstractContextManager[Backing]]
"""Given a folder of its own, runs what the connector needs for as long as the `with` lasts."""

CONNECTORS: dict[str, Connector] = {
    "shared_storage": shared_storage,
    "nixl": nixl,
    "redis": redis,
    "nixl-tcp": nixl_tcp,
    "nixl,redis": nixl_and_redis,
    "lmcache": lmcache,
    "third-party": third_party,
}
THOROUGH = ("shared_storage", "nixl", "nixl,redis")
"""One for each way to move KV, on which death is tried at every state; the others are tried at the main states."""
STORES = ("shared_storage", "redis", "nixl,redis", "lmcache", "third-party")
"""Those whose pages lie where a test can damage them."""
