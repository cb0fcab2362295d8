"""The connectors that the suite is run on. One more is a function that yields its `Backing`, and a line in SUBJECTS.

A connector of your own needs no more than that to be held to all that ours are:

    @contextmanager
    def mine(folder: Path) -> Iterator[Backing]:
        yield Backing({"connector": "my_package.my_module:MyConnector"}, ("--kv-options", '{"size": 3}'))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kv_transfer.secret import ensure_secret
from tests.conformance.stored_pages import FolderPages, RedisPages, SqlitePages, StoredPages
from tests.faults.rig import Rig
from tests.kv_transfer.redis_server import redis_server


@dataclass(frozen=True, slots=True)
class Backing:
    """What a stack with the connector under test is told, and what it leaves where."""

    settings: Mapping[str, object]
    """Fields of StackSettings."""
    instance_args: tuple[str, ...] = ()
    """Further flags of every instance."""
    pages: Callable[[Rig], StoredPages] | None = None
    """The store of a stack; None: pages go from memory to memory."""
    reads_memory: bool = False
    """True: many pages at once come straight from the peer; a read from one that is frozen keeps its blocks until that
    one is back."""
    is_prefix_store: bool = False
    """True: the store keeps full blocks alone, for later requests; what is handed over comes another way."""


def options(**fields: object) -> tuple[str, str]:
    """The flag with a connector's own options."""
    return ("--kv-options", json.dumps(fields))


Subject = Callable[[Path], AbstractContextManager[Backing]]
"""Given a folder of its own, runs what the connector needs for as long as the `with` lasts."""


@contextmanager
def shared_storage(folder: Path) -> Iterator[Backing]:
    del folder  # the stack has one
    yield Backing({"connector": "shared_storage"}, pages=lambda rig: FolderPages(rig.stack.store_folder))


@contextmanager
def redis(folder: Path) -> Iterator[Backing]:
    with redis_server(folder) as server:
        # A slow machine is not a dead Redis; that one is for tests/kv_transfer/test_redis_faults.py.
        told = {"connector": "redis", "kv_url": server.url}
        yield Backing(told, options(timeout_s=10, connect_timeout_s=10), lambda rig: RedisPages(server))


@contextmanager
def nixl(folder: Path) -> Iterator[Backing]:
    """Over what UCX chooses: shared memory, on one machine."""
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
        )


@contextmanager
def lmcache(folder: Path) -> Iterator[Backing]:
    """On disk, in the stack's folder."""
    del folder
    told = {"connector": "lmcache"}
    yield Backing(told, options(timeout_s=10), lambda rig: FolderPages(rig.stack.store_folder))


@contextmanager
def third_party(folder: Path) -> Iterator[Backing]:
    ensure_secret(folder / "kv_secret")
    args = ("--kv-folder", str(folder / "store"), "--kv-secret-file", str(folder / "kv_secret"))
    connector = {"connector": "tests.conformance.third_party:SqliteConnector"}
    yield Backing(connector, args, lambda rig: SqlitePages(folder / "store"))


SUBJECTS: dict[str, Subject] = {
    "shared_storage": shared_storage,
    "nixl": nixl,
    "redis": redis,
    "nixl-tcp": nixl_tcp,
    "nixl,redis": nixl_and_redis,
    "lmcache": lmcache,
    "third-party": third_party,
}


def on(*by_default: str, names: tuple[str, ...] = tuple(SUBJECTS)) -> pytest.MarkDecorator:
    """Runs a test, or a module, on every subject: on those named in each run, on the others in the full one."""
    assert set(by_default) <= set(SUBJECTS)
    params = [pytest.param(name, marks=() if name in by_default else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("subject", params, indirect=True)


THOROUGH = ("shared_storage", "nixl", "nixl,redis")
"""Of each way to move KV one subject, on which death is tried at every state; the others see the main ones."""
STORES = ("shared_storage", "redis", "nixl,redis", "lmcache", "third-party")
"""Subjects whose pages lie where they can be damaged."""
