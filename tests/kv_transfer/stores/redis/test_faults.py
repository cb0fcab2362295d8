"""Failures of Redis under load: no request fails, waits longer than the time-outs or gets wrong KV."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kv_transfer.stores.base import StoreError
from kv_transfer.stores.redis.connection import CLIENT_NAME, ErrorReply
from kv_transfer.stores.redis.connector import RedisStore
from tests.kv_transfer.stores.contract import HEADER, PAGE, key_of, read
from tests.kv_transfer.stores.redis.redis_load import Load
from tests.kv_transfer.stores.redis.redis_server import (
    IMPATIENT,
    PATIENT,
    RedisServer,
    name_of,
    options_of,
    redis_server,
)
from tests.waiting import Stopwatch, wait_until


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """For one test, which breaks it."""
    with redis_server(tmp_path) as server:
        yield server


# A server that things happen to, under load

_LOG_LINE = re.compile(
    r"redis at 127\.0\.0\.1:\d+ (is unavailable: [a-z_]+; KV is computed instead|answers again"
    r"|is another process now \(restart or failover\): pages that it lacks are computed again)"
)


class Fault:
    """How a failure begins and how it ends."""

    opens_breaker = True
    costs_hits = True

    def begin(self, server: RedisServer) -> None:
        raise NotImplementedError

    def end(self, server: RedisServer) -> None:
        raise NotImplementedError


class Killed(Fault):
    def begin(self, server: RedisServer) -> None:
        server.kill()

    def end(self, server: RedisServer) -> None:
        server.start()


class Frozen(Fault):
    """Accepts connections and answers nothing."""

    def begin(self, server: RedisServer) -> None:
        server.freeze()

    def end(self, server: RedisServer) -> None:
        server.thaw()


class Paused(Fault):
    """Accepts no writes; reads go on."""

    def begin(self, server: RedisServer) -> None:
        server.run("CLIENT", "PAUSE", 60_000, "WRITE")

    def end(self, server: RedisServer) -> None:
        server.run("CLIENT", "UNPAUSE")


class Full(Fault):
    def begin(self, server: RedisServer) -> None:
        server.run("CONFIG", "SET", "maxmemory", 1)

    def end(self, server: RedisServer) -> None:
        server.run("CONFIG", "SET", "maxmemory", 0)


class ReadOnly(Fault):
    def begin(self, server: RedisServer) -> None:
        server.run("REPLICAOF", "127.0.0.1", 1)

    def end(self, server: RedisServer) -> None:
        server.run("REPLICAOF", "NO", "ONE")


class Emptied(Fault):
    """Nothing fails; lost pages are written again by the next request that has them."""

    opens_breaker = costs_hits = False

    def begin(self, server: RedisServer) -> None:
        for _ in range(20):
            server.run("FLUSHALL")
            time.sleep(0.01)

    def end(self, server: RedisServer) -> None:
        return


class Crowded(Fault):
    """The connector's connections are closed, and maxclients admits the others alone."""

    def begin(self, server: RedisServer) -> None:
        self.others = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        with server.client() as client:
            client.ping()
            client.config_set("maxclients", 1 + len(self.others))
            for other in client.client_list():
                if other["name"] == CLIENT_NAME:
                    client.client_kill_filter(_id=other["id"])

    def end(self, server: RedisServer) -> None:
        for other in self.others:
            other.close()
        deadline = time.monotonic() + 2.0
        while True:  # until Redis has seen that they are gone
            try:
                server.run("CONFIG", "SET", "maxclients", 1000)
                return
            except redis.RedisError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


class LockedOut(Fault):
    """The password was changed and all connections closed."""

    def begin(self, server: RedisServer) -> None:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">other")
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        server.password = "other"

    def end(self, server: RedisServer) -> None:
        server.run("ACL", "SETUSER", "default", "nopass")
        server.password = None


@pytest.mark.parametrize(
    "fault",
    [Killed, Frozen, Paused, Full, ReadOnly, Emptied, Crowded, LockedOut],
)
def test_no_request_fails_whatever_happens_to_redis(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture, fault: type[Fault]
) -> None:
    caplog.set_level(logging.DEBUG)
    # The defaults where they matter most; elsewhere the test need not take so long.
    retry_s = 2.0 if fault in (Killed, Frozen) else 0.5
    event = fault()
    limits = IMPATIENT if event.opens_breaker else PATIENT
    with Load(own_server, breaker_retry_s=retry_s, **limits) as load:
        # STEP the failure begins
        event.begin(own_server)
        if event.opens_breaker:
            assert load.wait_for_breaker(3.0) <= 1.0
        if event.costs_hits:
            load.wait_for_miss(2.0)
        # STEP the failure ends
        event.end(own_server)
        assert load.wait_for_hit(5.0) <= 5.0
    assert load.longest_s < 2.0, "a request waited for Redis"
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("kv_transfer")]
    assert all(_LOG_LINE.fullmatch(line) for line in lines), lines
    assert bool(lines) == event.opens_breaker
    assert len(lines) <= 12, "a log line for each failure is too many"


def connections(server: RedisServer) -> set[str]:
    """Ids of the stores' own."""
    with server.client() as client:
        return {one["id"] for one in client.client_list() if one["name"] == CLIENT_NAME}


def test_readers_leave_a_replica_that_lacks_a_page(own_server: RedisServer) -> None:
    """After a failover the name stands for another server, and the old primary, a replica now, closes no connection."""
    store = RedisStore(options_of(own_server, breaker_retry_s=3600.0))
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)
    ReadOnly().begin(own_server)
    before = connections(own_server)
    assert read(store, key_of(1)) == (HEADER, PAGE)
    assert connections(own_server) == before
    assert read(store, key_of(2)) is None
    assert read(store, key_of(1)) == (HEADER, PAGE)
    after = connections(own_server)
    assert len(after - before) == 1
    for _ in range(2):  # within breaker_retry_s: where replicas are named on purpose, a miss does not cost a connection
        assert read(store, key_of(2)) is None
        assert read(store, key_of(1)) == (HEADER, PAGE)
    assert connections(own_server) == after
    store.close()


def test_both_pools_leave_a_replica_that_serves_nothing(own_server: RedisServer) -> None:
    """As above, where the replica has `replica-serve-stale-data no` and no link to its primary."""
    own_server.run("CONFIG", "SET", "replica-serve-stale-data", "no")
    store = RedisStore(options_of(own_server, breaker_retry_s=3600.0))
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)
    before = connections(own_server)
    assert len(before) == 2
    ReadOnly().begin(own_server)
    with pytest.raises(ErrorReply, match="masterdown"):
        read(store, key_of(1))
    with pytest.raises(ErrorReply, match="masterdown"):
        store.contains(key_of(1), 4352)
    wait_until(lambda: not connections(own_server) & before, within_s=10.0)
    # STEP the name stands for a primary
    ReadOnly().end(own_server)
    assert read(store, key_of(1)) == (HEADER, PAGE)
    assert store.contains(key_of(1), 4352)
    store.close()


def test_a_paused_server_can_be_read(own_server: RedisServer) -> None:
    store = RedisStore(options_of(own_server, timeout_s=2.5, breaker_retry_s=3600.0))
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)
    first = store.endpoint.run_id
    Paused().begin(own_server)
    for _ in range(3):
        assert read(store, key_of(1)) == (HEADER, PAGE)
    assert read(store, key_of(2)) is None
    with pytest.raises(StoreError, match="timeout"):
        store.put(key_of(2), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)
    assert store.endpoint.run_id == first
    store.close()


def test_reads_prolong_a_pages_life_again_after_a_pause(own_server: RedisServer) -> None:
    store = RedisStore(options_of(own_server, timeout_s=2.5, breaker_retry_s=0.01, ttl_s=1000.0))
    store.put(key_of(1), (HEADER, PAGE))
    Paused().begin(own_server)
    assert read(store, key_of(1)) == (HEADER, PAGE)
    Paused().end(own_server)
    own_server.run("PEXPIRE", name_of(key_of(1)), 500_000)
    time.sleep(0.02)
    assert read(store, key_of(1)) == (HEADER, PAGE)
    left_ms = own_server.run("PTTL", name_of(key_of(1)))
    assert isinstance(left_ms, int)
    assert left_ms > 900_000
    store.close()


ONE_RECEIVE = bytes(4096 - len(HEADER) - len(b"$4087\r\n\r\n"))
"""With its header a page of which the first receive has all, and none of the answer that follows it."""


def test_a_late_page_is_not_a_paused_server(own_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that ends just in time leaves no time to the answer about its life."""
    store = RedisStore(options_of(own_server, breaker_retry_s=3600.0, ttl_s=1000.0))
    store.put(key_of(1), (HEADER, ONE_RECEIVE))
    late_s = 0.0
    clock = time.monotonic

    def run_late() -> None:
        nonlocal late_s
        late_s = 100.0

    monkeypatch.setattr("kv_transfer.stores.redis.connection.time.monotonic", lambda: clock() + late_s)
    buffers = bytearray(len(HEADER)), bytearray(len(ONE_RECEIVE))
    assert store.get_into(key_of(1), buffers, lambda: None)
    before = connections(own_server)
    assert store.get_into(key_of(1), buffers, run_late)
    own_server.run("PEXPIRE", name_of(key_of(1)), 500_000)
    assert store.get_into(key_of(1), buffers, lambda: None)
    left_ms = own_server.run("PTTL", name_of(key_of(1)))
    assert isinstance(left_ms, int)
    assert left_ms > 900_000
    assert connections(own_server) == before
    store.close()


def test_a_read_that_was_answered_before_a_pause_keeps_its_connection(own_server: RedisServer) -> None:
    """Another one finds the pause meanwhile."""
    store = RedisStore(options_of(own_server, timeout_s=2.5, breaker_retry_s=3600.0, num_connections=2))
    store.put(key_of(1), (HEADER, ONE_RECEIVE))
    store.connect()
    before = connections(own_server)

    def pause_and_read() -> None:
        Paused().begin(own_server)
        assert store.get_into(key_of(1), (bytearray(len(HEADER)), bytearray(len(ONE_RECEIVE))), lambda: None)

    assert store.get_into(key_of(1), (bytearray(len(HEADER)), bytearray(len(ONE_RECEIVE))), pause_and_read)
    wait_until(lambda: connections(own_server) < before, within_s=10.0)  # that of the other read is closed
    assert len(before - connections(own_server)) == 1
    store.close()


def test_restarted_server_is_detected(own_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    store = RedisStore(options_of(own_server))
    store.put(key_of(1), (HEADER, PAGE))
    first = store.endpoint.run_id
    own_server.kill()
    own_server.start()
    # The pool detects that the old connection is closed before anything is sent on it: no request has to fail first.
    assert read(store, key_of(1)) is None
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)
    assert store.endpoint.run_id != first
    assert caplog.text.count("is another process now") == 1
    store.close()


@pytest.mark.parametrize("max_in_flight", [1, 8])
def test_frozen_server_costs_one_time_out_for_all_waiting_requests(own_server: RedisServer, max_in_flight: int) -> None:
    timeout_s = 2.0
    limits = {"timeout_s": timeout_s, "connect_timeout_s": timeout_s, "breaker_retry_s": 60.0}
    store = RedisStore(options_of(own_server, max_in_flight=max_in_flight, **limits))
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)
    own_server.freeze()
    reasons: list[str] = []

    def read_once() -> None:
        try:
            read(store, key_of(1))
        except StoreError as error:
            reasons.append(error.reason)

    for _ in range(2):  # on the connection that was there, and while making another
        started, watch = time.monotonic(), Stopwatch()
        threads = [threading.Thread(target=read_once) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - started > 0.8 * timeout_s
        assert watch.s < 2 * timeout_s
    assert reasons == ["timeout"] * 16
    watch = Stopwatch()
    for number in range(100):
        with pytest.raises(StoreError, match="down"):
            store.delete(key_of(number))
    assert watch.s < timeout_s, "removing tails must not hold up the end of an instance"
    own_server.thaw()
    store.close()
