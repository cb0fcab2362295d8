"""Pages in a real Redis: the store's contract, connections that stay in step, values changed by other clients,
turns at connections."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kv_transfer.stores.base import BadValue, StoreError
from kv_transfer.stores.redis.address import ConnectionFailed
from kv_transfer.stores.redis.connection import ErrorReply, Slots
from kv_transfer.stores.redis.connector import RedisOptions, RedisStore
from tests.kv_transfer.stores.contract import HEADER, PAGE, check_contract, check_header_first, key_of, read
from tests.kv_transfer.stores.redis.redis_server import RedisServer, name_of, options_of, redis_server
from tests.waiting import Stopwatch, wait_until

PASSWORD = "open-sesame"


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """Emptied; the tests leave it intact."""
    shared_server.run("FLUSHALL")
    return shared_server


@pytest.fixture
def store(server: RedisServer) -> Iterator[RedisStore]:
    store = RedisStore(options_of(server))
    yield store
    store.close()


# The contract of a store


def test_redis_keeps_the_contract_and_leaves_nothing(store: RedisStore, server: RedisServer) -> None:
    check_contract(store)
    assert server.names() == []


def test_a_page_is_not_read_after_a_wrong_header_and_the_stream_stays_in_step(store: RedisStore) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    assert not any(check_header_first(store, key_of(1)))


@pytest.mark.parametrize("num_bytes", [1, 100, 256, 4351, 4353, 100_000])
def test_value_of_another_length_is_rejected_and_the_connection_is_kept(
    store: RedisStore, server: RedisServer, num_bytes: int
) -> None:
    store.put(key_of(1), (b"x" * num_bytes, b""))
    store.put(key_of(2), (HEADER, PAGE))
    header, page = bytearray(256), bytearray(4096)
    with pytest.raises(BadValue, match="size"):
        store.get_into(key_of(1), (header, page), lambda: pytest.fail("there is no header to check"))
    assert bytes(header + page) == bytes(4352)
    num_connections = server.num_clients()
    assert read(store, key_of(2)) == (HEADER, PAGE)
    assert server.num_clients() == num_connections
    assert not store.contains(key_of(1), 4352)


def test_empty_value_and_value_of_another_type_are_no_pages(store: RedisStore, server: RedisServer) -> None:
    name = name_of(key_of(1))
    server.run("SET", name, "")
    assert read(store, key_of(1)) is None
    server.run("DEL", name)
    server.run("RPUSH", name, "x")
    with pytest.raises(BadValue, match="type"):
        read(store, key_of(1))
    assert not store.contains(key_of(1), 4352)
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)


def test_every_key_is_hex_under_the_prefix_and_has_a_time_to_live(server: RedisServer) -> None:
    store = RedisStore(options_of(server, prefix="acme.kv", ttl_s=100.0, tail_ttl_s=500.0))
    store.put(key_of(1), (HEADER, PAGE))
    store.put(key_of(1, transfer="../\0\r\nFLUSHALL\r\n"), (HEADER, PAGE))
    names = server.names()
    assert len(names) == 2
    for name in names:
        assert re.fullmatch(rb"acme\.kv:v1/[0-9a-f]{16}/([0-9a-f]{2}|transfers/[0-9a-f]{64})/[0-9a-f]{64}", name)
        left_ms = server.run("PTTL", name.decode())
        assert isinstance(left_ms, int)
        assert 490_000 < left_ms <= 500_000 if b"transfers" in name else 90_000 < left_ms <= 100_000
    for use in (lambda: store.contains(key_of(1), 4352), lambda: read(store, key_of(1)) == (HEADER, PAGE)):
        server.run("PEXPIRE", name_of(key_of(1), "acme.kv"), 5000)
        assert use()
        renewed_ms = server.run("PTTL", name_of(key_of(1), "acme.kv"))
        assert isinstance(renewed_ms, int)
        assert renewed_ms > 90_000, "a page that was found or read counts as used"
    store.close()


def test_readers_see_one_of_two_writers_whole(store: RedisStore) -> None:
    key, stop, seen = key_of(1), threading.Event(), set()
    values = [bytes([letter]) * (256 + (1 << 20)) for letter in b"ab"]
    store.put(key, (values[0],))

    def write(value: bytes) -> None:
        while not stop.is_set():
            store.put(key, (value[:256], memoryview(value)[256:]))

    writers = [threading.Thread(target=write, args=(value,)) for value in values]
    for writer in writers:
        writer.start()
    watch, num_read = Stopwatch(), 0
    while (num_read < 100 or len(seen) < 2) and watch.s < 20:
        found = read(store, key, 1 << 20)
        seen.add(b"" if found is None else found[0] + found[1])
        num_read += 1
    stop.set()
    for writer in writers:
        writer.join()
    assert seen == set(values)


@pytest.mark.parametrize("max_in_flight", [1, 3, 8])
def test_threads_share_a_few_connections_and_get_their_own_answers(server: RedisServer, max_in_flight: int) -> None:
    num_keys, num_bytes, wrong = 16, 50_000, []
    before = server.num_clients()
    store = RedisStore(options_of(server, max_in_flight=max_in_flight))
    for number in range(num_keys):
        store.put(key_of(number), (HEADER, bytes([number]) * num_bytes))
    store.put(key_of(100), (b"too short",))

    def work(seed: int) -> None:
        for step in range(40):
            number = (seed * 7 + step) % (num_keys + 4)
            found = read(store, key_of(number), num_bytes)
            expected = (HEADER, bytes([number]) * num_bytes) if number < num_keys else None
            if found != expected:
                wrong.append(number)
            try:
                read(store, key_of(100), num_bytes)
                wrong.append(100)
            except BadValue:
                pass
            store.put(key_of(number % num_keys), (HEADER, bytes([number % num_keys]) * num_bytes))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert before + 2 <= server.num_clients() <= before + 2 * max_in_flight
    assert b"name=tandem-kv" in server.run("CLIENT", "LIST")  # type: ignore[operator]
    store.close()


def test_closed_store_leaves_no_connection_and_makes_none(server: RedisServer) -> None:
    before = server.num_clients()
    store = RedisStore(options_of(server))
    store.put(key_of(1), (HEADER, PAGE))
    assert read(store, key_of(1)) == (HEADER, PAGE)
    store.close()
    with pytest.raises(ConnectionFailed, match="closed"):
        read(store, key_of(1))
    deadline = time.monotonic() + 2.0
    while server.num_clients() != before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_half_sent_page_is_never_stored(server: RedisServer, store: RedisStore) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        name = name_of(key_of(1)).encode()
        sock.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$4352\r\n" % (len(name), name) + HEADER + PAGE[:100])
    time.sleep(0.05)
    assert read(store, key_of(1)) is None


def test_answers_that_are_not_redis_protocol_are_errors(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = RedisStore(
            RedisOptions(url=f"redis://127.0.0.1:{port}", digest=False, timeout_s=10.0, connect_timeout_s=10.0)
        )
        for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$99999999999999999999\r\n", b"*999\r\n", b"x" * 9000):
            thread = threading.Thread(target=_answer, args=(listener, answer))
            thread.start()
            with pytest.raises(ConnectionFailed, match=r"protocol|closed|reset"):
                read(store, key_of(1))
            thread.join()
        store.close()


def _answer(listener: socket.socket, answer: bytes) -> None:
    with listener.accept()[0] as sock:
        sock.recv(1000)
        sock.sendall(answer)


def test_no_exception_or_log_line_contains_kv_keys_or_passwords(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = b"KVBYTES!" * 512
    (tmp_path / "password").write_text(PASSWORD + "\n")
    raised: list[str] = []

    def attempt(action: Callable[[], object]) -> None:
        with pytest.raises(StoreError) as caught:
            action()
        raised.extend(traceback.format_exception(caught.value))

    with redis_server(tmp_path, password=PASSWORD) as server:
        store = RedisStore(options_of(server, password_file=str(tmp_path / "password")))
        store.put(key_of(1), (HEADER, secret))
        server.run("CONFIG", "SET", "maxmemory", 1)
        attempt(lambda: store.put(key_of(2), (HEADER, secret)))
        server.run("CONFIG", "SET", "maxmemory", 0)
        server.run("REPLICAOF", "127.0.0.1", 1)
        attempt(lambda: store.put(key_of(2), (HEADER, secret)))
        server.run("REPLICAOF", "NO", "ONE")
        attempt(lambda: store.get_into(key_of(1), (bytearray(256), bytearray(10)), lambda: None))
        store.put(key_of(3), (HEADER, secret))  # READONLY has closed the connections that write
        server.freeze()
        store._options = msgspec.structs.replace(store._options, timeout_s=1.0)
        attempt(lambda: store.put(key_of(2), (HEADER, secret)))
        attempt(lambda: read(store, key_of(1)))
        server.kill()
        attempt(lambda: read(store, key_of(1)))
        store.close()
    assert [line for line in raised if "StoreError" in line or "ErrorReply: oom" in line]
    everything = caplog.text + "".join(raised)
    assert "readonly" in everything
    assert "KVBYTES" not in everything
    assert PASSWORD not in everything
    assert not re.search("[0-9a-f]{17}", everything), "a key is never written in full"


def test_error_lines_of_the_server_become_reasons() -> None:
    lines = {
        b"OOM command not allowed when used memory > 'maxmemory'.": "oom",
        b"READONLY You can't write against a read only replica.": "readonly",
        b"LOADING Redis is loading the dataset in memory": "loading",
        b"WRONGPASS invalid username-password pair or user is disabled.": "auth",
        b"NOAUTH Authentication required.": "auth",
        b"ERR max number of clients reached": "maxclients",
        b"MOVED 3999 127.0.0.1:6381": "cluster",
        b"ERR unknown command 'KVBYTES'": "error",
    }
    assert {line: str(ErrorReply.of(line)) for line in lines} == lines


# Turns at connections


def test_no_thread_waits_for_as_long_as_others_come_back() -> None:
    slots, counts, stop = Slots(1), [0] * 4, threading.Event()

    def come_back(index: int) -> None:
        while not stop.is_set():
            with slots:
                counts[index] += 1
                time.sleep(0.001)

    threads = [threading.Thread(target=come_back, args=(index,)) for index in range(len(counts))]
    for thread in threads:
        thread.start()
    wait_until(lambda: min(counts) >= 3, lambda: f"one of them waits: {counts}")
    stop.set()
    for thread in threads:
        thread.join()


def test_as_many_enter_as_there_are_slots_and_new_ones_are_used() -> None:
    slots, inside, leave = Slots(2), list[int](), threading.Event()

    def enter(index: int) -> None:
        with slots:
            inside.append(index)
            leave.wait()

    threads = [threading.Thread(target=enter, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(inside) == 2)
    slots.release()
    wait_until(lambda: len(inside) == 3)
    time.sleep(0.1)
    assert len(inside) == 3
    leave.set()
    for thread in threads:
        thread.join()
    assert sorted(inside) == [0, 1, 2, 3]
