"""A real `lmcache server` with Tandem's module: its memory, two places behind it, and failures under load."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from click.testing import CliRunner

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from kv_transfer.secret import ensure_secret
from kv_transfer.stores.base import BadValue, StoreError
from kv_transfer.stores.lmcache.connector import LMCacheOptions
from kv_transfer.stores.lmcache.server import (
    GET,
    MAX_VALUE_BYTES,
    PROTOCOL_VERSION,
    PUT,
    Head,
    LMCacheServer,
    ObjectName,
    parse_answer,
    parse_request,
    request_frames,
)
from tandem.cli import main
from tests.builders import lively_checkpoint
from tests.kv_transfer.core_pair import CorePair, aggregated, store_config
from tests.kv_transfer.stores.contract import HEADER, NUM_BYTES, PAGE, check_contract, check_keepalive, key_of, read
from tests.kv_transfer.stores.lmcache.lmcache_checks import LMCacheLoad, check_many_threads, nothing_leaks, pages_in
from tests.kv_transfer.stores.lmcache.server_process import ServerProcess, lmcache_server
from tests.kv_transfer.stores.redis.test_connector import PROMPTS
from tests.kv_transfer.stores.test_hand_over import GREEDY
from tests.waiting import Stopwatch, wait_until

PATIENT: Mapping[str, Any] = {"timeout_s": 20.0, "connect_timeout_s": 20.0}
"""A busy machine is not a dead server."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lmcache")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """Pages in its memory, then in two folders. It takes seconds to start, so that all tests share it."""
    limits = {"max_capacity_gb": 0.1, "eviction": {"eviction_policy": "LRU"}}
    places: list[dict[str, object]] = [
        {"type": "fs_native", "base_path": str(folder / name), "num_workers": 2, **limits} for name in ("l2", "second")
    ]
    with lmcache_server(folder, *places) as server:
        yield server


def test_store_keeps_its_contract_and_leaves_nothing(server: ServerProcess, folder: Path) -> None:
    with nothing_leaks():
        store = LMCacheServer(LMCacheOptions(url=server.url, **PATIENT))
        check_contract(store)
        check_many_threads(store)
        store.close()
    wait_until(lambda: not pages_in(folder / "l2"))
    assert not pages_in(folder / "second"), "what was deleted is deleted in all places"


def test_pages_go_to_both_folders_and_come_from_there(server: ServerProcess, folder: Path) -> None:
    store = LMCacheServer(LMCacheOptions(url=server.url, **PATIENT))
    tail = key_of(3, transfer="../../etc/passwd")
    for key in (key_of(1), key_of(2), tail):
        store.put(key, (HEADER, PAGE))
    for name in ("l2", "second"):
        wait_until(lambda name=name: len(pages_in(folder / name)) == 3)  # type: ignore[misc]
    # STEP the server loses its memory; of one page a file is cut short and the other is gone
    server.kill()
    for path in pages_in(folder / "l2"):
        if key_of(2).block_hash.hex() in path.name:
            os.truncate(path, 1000)
            (folder / "second" / path.name).unlink()
    with pytest.raises(StoreError, match=r"reset|refused"):
        read(store, key_of(1))
    server.start()
    # STEP the same store object uses the new server
    assert store.contains(key_of(1), NUM_BYTES)
    assert read(store, key_of(1)) == (HEADER, PAGE)
    with pytest.raises(BadValue, match="size"):
        read(store, key_of(2))
    # STEP a page that its memory has no room for now is kept
    store.put(key_of(4), (HEADER, PAGE))
    hasty = LMCacheServer(LMCacheOptions(url=server.url, min_bytes_per_s=1e9))
    with contextlib.closing(hasty), pytest.raises(StoreError, match=r"late|timeout"):
        read(hasty, tail, MAX_VALUE_BYTES - len(HEADER))
    assert read(store, tail) == (HEADER, PAGE)
    for key in (key_of(1), key_of(2), key_of(4), tail):
        store.delete(key)
        assert not store.contains(key, NUM_BYTES)
    assert pages_in(folder / "l2") == []
    assert pages_in(folder / "second") == []
    store.close()


@pytest.mark.slow
def test_tandem_bench_transfer_measures_a_server_and_leaves_no_page(server: ServerProcess) -> None:
    small = ["--blocks", "4", "--block-bytes", "65536", "--rounds", "2"]
    argv = ["bench", "transfer", *small, "--connector", "lmcache", "--kv-url", server.url, "--digest", "off"]
    result = CliRunner().invoke(main, argv)
    assert result.exit_code == 0, result.output
    assert "lmcache" in result.output


@pytest.mark.slow
def test_memory_that_is_full_is_an_error_and_no_wait(server: ServerProcess) -> None:
    store = LMCacheServer(LMCacheOptions(url=server.url, connect_timeout_s=20.0))
    big = bytes(64 << 20)
    keys = [key_of(number) for number in range(6)]
    reasons = []
    watch = Stopwatch()
    for key in keys:
        try:
            store.put(key, (HEADER, big))
        except StoreError as error:
            reasons.append(error.reason)
    assert watch.s < 15.0
    assert reasons, "0.25 GB hold no 6 x 64 MB"
    assert set(reasons) <= {"full", "timeout"}
    store.close()
    with contextlib.closing(LMCacheServer(LMCacheOptions(url=server.url, **PATIENT))) as patient:
        for key in keys:
            patient.delete(key)
        patient.put(key_of(9), (HEADER, PAGE))
        patient.delete(key_of(9))


def test_frozen_server_is_one_time_out_for_all_requests(server: ServerProcess) -> None:
    timeout_s, num_threads = 3.0, 6
    with contextlib.closing(LMCacheServer(LMCacheOptions(url=server.url, **PATIENT))) as patient:
        patient.put(key_of(1), (HEADER, PAGE))
    options = LMCacheOptions(url=server.url, timeout_s=timeout_s, breaker_retry_s=3600.0)
    with contextlib.closing(LMCacheServer(options)) as store:
        server.freeze()
        reasons: list[str] = []

        def read_once() -> None:
            try:
                read(store, key_of(1))
            except StoreError as error:
                reasons.append(error.reason)

        try:
            watch = Stopwatch()
            threads = [threading.Thread(target=read_once) for _ in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert watch.s < num_threads * timeout_s / 2, "they waited one after another"
            assert set(reasons) <= {"timeout", "connect_timeout"}
            assert len(reasons) == num_threads
            for number in range(100):
                with pytest.raises(StoreError, match="down"):  # without a request to the server
                    store.delete(key_of(number))
        finally:
            server.thaw()
        wait_until(lambda: _answered(lambda: read(store, key_of(1)) == (HEADER, PAGE)))
        wait_until(lambda: _answered(lambda: _deletes(store)))
        server.freeze()
        try:
            with pytest.raises(StoreError, match="timeout"):
                store.contains(key_of(1), NUM_BYTES)
            watch = Stopwatch()
            store.close()
            assert watch.s < timeout_s, "close waits for the server"
        finally:
            server.thaw()


def _deletes(store: LMCacheServer) -> bool:
    store.delete(key_of(1))
    return True


def _answered(call: Callable[[], bool]) -> bool:
    """What `call` returns; False while the store fails."""
    try:
        return call()
    except StoreError:
        return False


def test_no_request_fails_while_the_server_is_frozen(server: ServerProcess) -> None:
    with LMCacheLoad(lambda: LMCacheServer(LMCacheOptions(url=server.url, timeout_s=0.3))) as load:
        server.freeze()
        try:
            assert load.wait_for_breaker(5.0) <= 3.0
            load.wait_for_miss(2.0)
        finally:
            server.thaw()
        assert load.wait_for_hit(10.0) <= 10.0
    assert load.longest_s < 3.0, "a request waited for the server"


@pytest.mark.slow
def test_no_request_fails_while_the_server_is_restarted(server: ServerProcess) -> None:
    with LMCacheLoad(lambda: LMCacheServer(LMCacheOptions(url=server.url))) as load:
        server.kill()
        assert load.wait_for_breaker(3.0) <= 1.0
        load.wait_for_miss(2.0)
        server.start()
        assert load.wait_for_hit(10.0) <= 10.0
    assert load.longest_s < 2.0, "a request waited for the server"


# Two real engines, through every backend


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return aggregated(checkpoint, PROMPTS, GREEDY)


@pytest.mark.parametrize("backend", ["disk", "server"])
def test_hand_over_between_two_engines_is_exact(
    request: pytest.FixtureRequest, checkpoint: Path, expected: list[list[int]], tmp_path: Path, backend: str
) -> None:
    ensure_secret(tmp_path / "secret")
    options: dict[str, Any] = {"backend": backend, "kv_secret_file": str(tmp_path / "secret")}
    if backend == "disk":
        options["path"] = str(tmp_path / "store")
    else:
        options |= {"url": request.getfixturevalue("server").url, "load_timeout_s": 60.0, **PATIENT}
    connector = KVConnectorConfig(class_path="kv_transfer.stores.lmcache.connector:LMCacheConnector", options=options)
    pair = CorePair(store_config(checkpoint, tmp_path, kv_connector=connector))
    for index, prompt in enumerate(PROMPTS):
        pair.start(f"r{index}", prompt, GREEDY)
    pair.run()
    assert [pair.outcomes[f"r{index}"].token_ids for index in range(len(PROMPTS))] == expected
    assert pair.decode.load.num_prefilled_tokens == 0, "decode has computed prompts that it could load"
    pair.close()
    if backend == "disk":
        assert pages_in(tmp_path / "store"), "nothing went to the disk"
        assert not [path for path in pages_in(tmp_path / "store") if "transfers" in path.parts], (
            "a tail was not removed"
        )


# Without a server


def test_idle_links_are_probed_before_a_nat_forgets_them() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        store = LMCacheServer(LMCacheOptions(url=f"tcp://127.0.0.1:{port}", connect_timeout_s=20.0))
        link = store._link()
        connections = psutil.Process().net_connections("tcp")
        [descriptor] = [one.fd for one in connections if one.raddr and one.raddr.port == port]
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            check_keepalive(sock)
        link.close()
        store.close()


class _Links:
    """Connections to a server that listens on IPv4 alone, by a name that has an IPv6 address as well."""

    def __init__(self, reason: str) -> None:
        self.tried: list[bool] = []
        self._reason = reason

    def make(self, *_: object, ipv6: bool) -> object:
        self.tried.append(ipv6)
        if ipv6:
            raise StoreError(self._reason)
        return object()


def _store_of(links: _Links, host: str, monkeypatch: pytest.MonkeyPatch) -> LMCacheServer:
    monkeypatch.setattr("kv_transfer.stores.lmcache.server._Link", links.make)
    return LMCacheServer(LMCacheOptions(url=f"tcp://{host}:5555", digest=False))


@pytest.mark.parametrize(("reason", "num_failures"), [("refused", 0), ("connect_timeout", 1)])
def test_a_name_of_both_families_is_dialled_by_the_one_that_accepts(
    monkeypatch: pytest.MonkeyPatch, reason: str, num_failures: int
) -> None:
    links = _Links(reason)
    store = _store_of(links, "lmcache.svc", monkeypatch)
    for _ in range(num_failures):
        with pytest.raises(StoreError, match=reason):
            store._link()
    for _ in range(2):
        store._link()
    assert links.tried == [True, False, False]
    store.close()


@pytest.mark.parametrize("host", ["[::1]", "10.0.0.1"])
def test_an_address_is_dialled_once(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    links = _Links("refused")
    store = _store_of(links, host, monkeypatch)
    with pytest.raises(StoreError, match="refused"):
        store._link()
    assert links.tried == [True]
    store.close()


def test_missing_server_and_silent_server_are_errors_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        patient = LMCacheServer(LMCacheOptions(url=url, connect_timeout_s=20.0))
        with contextlib.closing(patient), pytest.raises(StoreError, match="refused"):
            read(patient, key_of(1))
        silent.listen()  # accepts connections and never answers
        store = LMCacheServer(LMCacheOptions(url=url))
        watch = Stopwatch()
        with pytest.raises(StoreError, match="connect_timeout"):
            read(store, key_of(1))
        assert watch.s < 0.6
        store.close()
    nowhere = LMCacheServer(LMCacheOptions(url="tcp://no-such-host.invalid:5555"))
    watch = Stopwatch()
    with pytest.raises(StoreError, match=r"connect_timeout|refused"):
        read(nowhere, key_of(1))
    nowhere.close()
    assert watch.s < 3.0


@pytest.mark.parametrize(
    "url",
    ["tcp://host", "http://host:1", "tcp://host:0", "tcp://host:70000", "tcp://user:pw@host:1", "tcp://*:5555", ""],
)
def test_wrong_url_is_rejected(url: str) -> None:
    with pytest.raises(EngineError, match="tcp://host:port of an `lmcache server` is expected"):
        LMCacheServer(LMCacheOptions(url=url))


def test_requests_are_encoded_as_lmcache_does_and_invalid_ones_are_rejected() -> None:
    import msgspec

    name = ObjectName.of(key_of(1, transfer="t"))
    head = Head(PROTOCOL_VERSION, name.model_name, name.chunk_hash, name.cache_salt, NUM_BYTES, 1.0)
    number, operation, body = request_frames(7, PUT, head, (HEADER, PAGE))
    assert (msgspec.msgpack.decode(number), msgspec.msgpack.decode(operation)) == (7, "server_module_call")
    envelope = msgspec.msgpack.decode(body)  # as LMCache decodes it
    assert envelope.keys() == {"method", "payload"}
    assert envelope["method"] == PUT
    assert parse_request(envelope["payload"]) == (head, memoryview(HEADER + PAGE))
    assert name.is_valid
    for other in (("meta/llama", name.chunk_hash, ""), (name.model_name, b"short", ""), (*_pair(name), "../x")):
        assert not ObjectName(*other).is_valid
    for invalid in (b"", b"\0\0\0\1", b"\xff" * 100, b"\0\0\0\2\x91\x01", envelope["payload"][:20]):
        assert parse_request(invalid) is None
    for version, num_bytes in ((PROTOCOL_VERSION + 1, 1), (PROTOCOL_VERSION, -1), (PROTOCOL_VERSION, 1 << 40)):
        wrong = Head(version, name.model_name, name.chunk_hash, "", num_bytes, 1.0)
        assert parse_request(msgspec.msgpack.decode(request_frames(1, GET, wrong)[2])["payload"]) is None
    answer = msgspec.msgpack.encode({"success": True, "payload": b"\0page", "error": ""})
    frames = [number, operation, answer]
    assert parse_answer(frames, 8) is None
    assert parse_answer(frames, 7) == (0, memoryview(b"page"))
    for invalid in ([number, operation], [number, operation, b"\xc1"], [number, operation, answer[:-9]]):
        with pytest.raises(StoreError, match="protocol"):
            parse_answer(invalid, 7)
    unknown = msgspec.msgpack.encode({"success": False, "payload": b"", "error": "unknown server module method: x"})
    with pytest.raises(StoreError, match="no_module"):
        parse_answer([number, operation, unknown], 7)


def _pair(name: object) -> tuple[str, bytes]:
    return name.model_name, name.chunk_hash  # type: ignore[attr-defined]
