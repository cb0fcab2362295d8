"""Redis behind LMCache's storage layer, by our adapter: what wedges LMCache's own client is a miss or a time-out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.lmcache_connector import LMCacheOptions, make_store
from kv_transfer.redis_connector import make_store as make_redis_store
from kv_transfer.store import BadValue, BlockStore, StoreError
from tests.kv_transfer.lmcache_checks import (
    NUM_BYTES,
    LMCacheLoad,
    check_contract,
    check_many_threads,
    nothing_leaks,
    read,
)
from tests.kv_transfer.redis_server import RedisServer, name_of, options_of, redis_server
from tests.kv_transfer.test_shared_storage import HEADER, PAGE, key_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


def store_of(server: RedisServer) -> BlockStore:
    return make_store(LMCacheOptions(url=server.url, digest=False))


def test_store_keeps_its_contract_and_leaves_nothing(server: RedisServer) -> None:
    store_of(server).close()  # imports
    with nothing_leaks():
        store = store_of(server)
        check_contract(store)
        check_many_threads(store)
        store.close()
    assert server.names() == []


def test_pages_are_the_redis_connectors(server: RedisServer) -> None:
    ours, theirs = store_of(server), make_redis_store(options_of(server))
    for key in (key_of(1), key_of(1, transfer="t")):
        ours.put(key, (HEADER, PAGE))
        assert name_of(key).encode() in server.names()
        assert 0 < int(server.run("PTTL", name_of(key))) <= 3_600_000  # type: ignore[call-overload]
        assert read(theirs, key) == (HEADER, PAGE)
    ours.close()
    theirs.close()


def test_missing_wrong_or_dropped_values_leave_the_adapter_whole(server: RedisServer) -> None:
    store = store_of(server)
    for _ in range(8):  # more than there are connections and threads
        assert read(store, key_of(1)) is None
        server.run("SET", name_of(key_of(2)), b"short")  # type: ignore[arg-type]
        with pytest.raises(BadValue, match="size"):
            read(store, key_of(2))
        assert not store.contains(key_of(2), NUM_BYTES)
        store.put(key_of(3), (HEADER, PAGE))
        assert store.contains(key_of(3), NUM_BYTES)
        server.run("DEL", name_of(key_of(3)))  # between the look and the load
        assert read(store, key_of(3)) is None
    server.run("CONFIG", "SET", "maxmemory", 1)
    with pytest.raises(StoreError, match="oom"):
        store.put(key_of(4), (HEADER, PAGE))
    server.run("CONFIG", "SET", "maxmemory", 0)
    store.put(key_of(4), (HEADER, PAGE))
    assert read(store, key_of(4)) == (HEADER, PAGE)
    store.close()


def test_frozen_server_is_a_time_out(server: RedisServer) -> None:
    store = store_of(server)
    store.put(key_of(1), (HEADER, PAGE))
    server.freeze()
    for act in (lambda: read(store, key_of(1)), lambda: store.contains(key_of(1), NUM_BYTES)):
        started = time.monotonic()
        with pytest.raises(StoreError, match="timeout"):
            act()
        assert time.monotonic() - started < 1.2
    server.thaw()
    assert read(store, key_of(1)) == (HEADER, PAGE)
    server.freeze()
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 3.0
    server.thaw()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_no_request_fails_whatever_happens_to_redis(server: RedisServer, fault: str) -> None:
    with LMCacheLoad(lambda: store_of(server)) as load:
        server.kill() if fault == "killed" else server.freeze()
        assert load.wait_for_breaker(3.0) <= 1.5
        load.wait_for_miss(2.0)
        server.start() if fault == "killed" else server.thaw()
        assert load.wait_for_hit(5.0) <= 5.0
    assert load.longest_s < 2.0, "a request waited for Redis"
