"""The connector over Redis as an engine builds it: options, logins, TLS, Sentinel, warnings, exact hand-over."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import make_connector
from instance.settings import TransferSection, connector_config
from kv_transfer.page.format import HEADER_BYTES, PageKey, PageNaming
from kv_transfer.secret import ensure_secret
from kv_transfer.stores.base import StoreError
from kv_transfer.stores.redis.address import PASSWORD_VARIABLE, ConnectionFailed, RedisAddress, RedisLogin
from kv_transfer.stores.redis.connection import PagePool, RedisEndpoint
from kv_transfer.stores.redis.connector import (
    RedisConnector,
    RedisOptions,
    RedisStore,
    config_warnings,
    inspect_server,
)
from serving.settings import SettingsError
from tests.builders import lively_checkpoint
from tests.kv_transfer.core_pair import CorePair, aggregated, store_config
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT, LAYOUT, Core, make_request
from tests.kv_transfer.stores.contract import HEADER, PAGE, check_keepalive, key_of, read
from tests.kv_transfer.stores.redis.redis_load import PROMPT
from tests.kv_transfer.stores.redis.redis_server import (
    PATIENT,
    RedisServer,
    make_certificate,
    name_of,
    options_of,
    redis_sentinel,
    redis_server,
)
from tests.kv_transfer.stores.redis.test_store import PASSWORD
from tests.kv_transfer.stores.test_hand_over import GREEDY
from tests.oracle import random_prompts
from tests.waiting import wait_until

PROMPTS = random_prompts(5, longest=120, vocab_size=1024, seed=5)
PERMISSIONS = "+getrange +set +del +strlen +pexpire +info +select +client|setname"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


# Start-up, logins, TLS


def test_account_with_the_documented_permissions_logs_in_by_a_password_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    with redis_server(tmp_path, password="admin") as server:
        server.run("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", "~tandem:*", *PERMISSIONS.split())
        store = RedisStore(options_of(server, username="kv", password_file=str(tmp_path / "password")))
        assert len(inspect_server(store)) == 1
        store.put(key_of(1), (HEADER, PAGE))
        assert store.contains(key_of(1), 4352)
        assert read(store, key_of(1)) == (HEADER, PAGE)
        store.delete(key_of(1))
        assert store.endpoint.run_id is not None
        store.close()


def test_login_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    with redis_server(tmp_path, password=PASSWORD) as server:
        store = RedisStore(options_of(server))
        store.put(key_of(1), (HEADER, PAGE))
        store.close()


def test_rejected_login_backs_off_until_the_password_changes(tmp_path: Path) -> None:
    now, password_file = 100.0, tmp_path / "password"
    password_file.write_text("wrong")
    with redis_server(tmp_path, password=PASSWORD) as server:
        address = RedisAddress.parse(server.url)
        login = RedisLogin(password_file=str(password_file), clock=lambda: now)
        pool = PagePool(RedisEndpoint(address, login), 1, max_remote=1)
        for _ in range(600):
            with pytest.raises(ConnectionFailed, match="auth"):
                pool.connect()
            now += 1.0
        with server.client() as client:
            log: Any = client.acl_log()
        num_attempts = sum(int(entry["count"]) for entry in log)
        assert 8 <= num_attempts <= 16
        password_file.write_text(PASSWORD)
        pool.connect()
        pool.close()


def test_refusals_of_several_connections_count_as_one() -> None:
    now = 100.0
    login = RedisLogin(clock=lambda: now)
    for wait_s in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        for _ in range(8):  # each has logged in with the same password, before the first answer came
            login.note_refused(None)
        now += wait_s - 0.1
        with pytest.raises(ConnectionFailed, match="auth"):
            login.password_to_try()
        now += 0.2
        login.password_to_try()
    # STEP it is accepted, and refused again before the last wait would have ended
    login.note_refused(None)
    login.note_accepted()
    login.password_to_try()
    login.note_refused(None)
    with pytest.raises(ConnectionFailed, match="auth"):
        login.password_to_try()
    now += 2.1
    login.password_to_try()


def test_login_without_a_password_backs_off_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    with redis_server(tmp_path, password=PASSWORD) as server:
        pool = PagePool(RedisEndpoint(RedisAddress.parse(server.url), RedisLogin(clock=lambda: now)), 1, max_remote=1)
        for _ in range(600):
            with pytest.raises(ConnectionFailed, match="auth"):
                pool.connect()
            now += 1.0
        with server.client() as client:
            statistics: Any = client.info("stats")
        assert 8 <= statistics["total_connections_received"] <= 50
        monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
        pool.connect()
        pool.close()


def test_tls_verifies_the_server(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    with redis_server(tmp_path, tls=certificate) as server:
        store = RedisStore(options_of(server, tls_ca_file=str(certificate / "cert.pem")))
        big = bytes(range(256)) * 4096
        store.put(key_of(1), (HEADER, big))
        found: list[object] = []

        def read_once() -> None:
            found.append(read(store, key_of(1), len(big)))

        threads = [threading.Thread(target=read_once) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [(HEADER, big)] * 6
        store.close()
        untrusting = RedisStore(options_of(server))
        with pytest.raises(ConnectionFailed, match="tls"):
            read(untrusting, key_of(1))
        untrusting.close()


def test_tls_with_a_certificate_of_the_client(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    files = {"tls_ca_file": str(certificate / "cert.pem")}
    with redis_server(tmp_path, tls=certificate) as server:
        server.run("CONFIG", "SET", "tls-auth-clients", "yes")
        own = {"tls_cert_file": str(certificate / "cert.pem"), "tls_key_file": str(certificate / "key.pem")}
        store = RedisStore(options_of(server, **files, **own))
        store.put(key_of(1), (HEADER, PAGE))
        assert read(store, key_of(1)) == (HEADER, PAGE)
        store.close()
        anonymous = RedisStore(options_of(server, **files))
        with pytest.raises(ConnectionFailed):
            read(anonymous, key_of(1))
        anonymous.close()


def test_primary_is_found_by_sentinel_and_again_after_a_fail_over(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    with redis_server(folders[0]) as first, redis_server(folders[1]) as second:
        second.run("REPLICAOF", "127.0.0.1", first.port)
        with redis_sentinel(tmp_path / "sentinel", first, "kv") as sentinel:
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/kv/0"
            store = RedisStore(RedisOptions(url=url, digest=False, **PATIENT))
            store.put(key_of(1), (HEADER, PAGE))
            assert first.names() == [name_of(key_of(1)).encode()]
            # STEP the primary is gone; the replica takes its place
            wait_until(lambda: b"slave" in str(sentinel.run("SENTINEL", "REPLICAS", "kv")).encode(), within_s=20.0)
            sentinel.run("SENTINEL", "SET", "kv", "down-after-milliseconds", "500")
            first.kill()
            with pytest.raises(ConnectionFailed):
                store.put(key_of(2), (HEADER, PAGE))
            wait_until(lambda: _is_saved(store), within_s=60.0)
            assert name_of(key_of(2)).encode() in second.names()
            assert read(store, key_of(2)) == (HEADER, PAGE)
            store.close()


def _is_saved(store: RedisStore) -> bool:
    with contextlib.suppress(StoreError):
        store.put(key_of(2), (HEADER, PAGE))
        return True
    return False


def test_service_that_sentinel_does_not_know_is_an_error_with_a_name(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server, redis_sentinel(tmp_path / "sentinel", server, "kv") as sentinel:
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/other"
        store = RedisStore(RedisOptions(url=url, digest=False, **PATIENT))
        with pytest.raises(ConnectionFailed, match="no_primary"):
            store.connect()
        store.close()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://kv", RedisAddress((("kv", 6379),))),
        ("rediss://[::1]:7/3", RedisAddress((("::1", 7),), 3, tls=True)),
        ("redis+sentinel://a:1,b/kv", RedisAddress((("a", 1), ("b", 26379)), service="kv")),
        ("rediss+sentinel://a/kv/2", RedisAddress((("a", 26379),), 2, tls=True, service="kv")),
    ],
)
def test_address_is_parsed(url: str, expected: RedisAddress) -> None:
    assert RedisAddress.parse(url) == expected


def test_server_that_answers_a_byte_at_a_time_does_not_hold_the_login_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_slowly() -> None:
            with listener.accept()[0] as sock, contextlib.suppress(OSError):
                while True:
                    sock.sendall(b"+")
                    time.sleep(0.02)

        thread = threading.Thread(target=answer_slowly)
        thread.start()
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        store = RedisStore(RedisOptions(url=url, digest=False, timeout_s=0.5, connect_timeout_s=10.0))
        started = time.monotonic()
        with pytest.raises(ConnectionFailed):
            store.connect()
        assert time.monotonic() - started < 5.0
        store.close()
        thread.join()


@pytest.mark.parametrize("host", ["redis..svc", "a" * 64 + ".svc"])
def test_a_host_that_no_name_server_is_asked_for_is_not_resolved(host: str) -> None:
    store = RedisStore(RedisOptions(url=f"redis://{host}:6379", digest=False, **PATIENT))
    with pytest.raises(ConnectionFailed, match="resolve"):
        store.connect()
    store.close()


def test_idle_connections_are_probed_before_a_nat_forgets_them(own_server: RedisServer) -> None:
    store = RedisStore(options_of(own_server))
    store.connect()
    for connection in [*store._readers._idle, *store._writers._idle]:
        check_keepalive(connection._sock)
    store.close()


def test_child_process_does_not_use_the_connections_of_its_parent(own_server: RedisServer) -> None:
    store = RedisStore(options_of(own_server))
    store.put(key_of(1), (HEADER, PAGE))
    child = os.fork()
    if not child:  # without pytest's own handlers
        code = 1
        try:
            store.put(key_of(2), (HEADER, PAGE))
            code = 0 if read(store, key_of(1)) == (HEADER, PAGE) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(store, key_of(2)) == (HEADER, PAGE)
    assert own_server.names() == sorted(name_of(key_of(number)).encode() for number in (1, 2))
    store.close()


def test_warnings_about_the_servers_configuration() -> None:
    good = {"maxmemory": "1000", "used_memory": "10", "maxmemory_policy": "noeviction", "role": "master"}
    assert config_warnings(good) == []
    assert config_warnings({**good, "maxmemory_policy": "volatile-ttl"}) == []
    assert config_warnings({}) == []
    for change, word in [
        ({"maxmemory_policy": "allkeys-lru"}, "allkeys-lru"),
        ({"maxmemory": "0"}, "maxmemory is not set"),
        ({"used_memory": "950"}, "95%"),
        ({"role": "slave"}, "replica"),
    ]:
        (warning,) = config_warnings({**good, **change})
        assert word in warning


def test_only_a_redis_that_evicts_nothing_is_warned_about_when_it_is_nearly_full() -> None:
    """Others, as of the chart, are full in normal operation, and save what comes."""
    full = {"maxmemory": "1000", "used_memory": "999", "role": "master"}
    (warning,) = config_warnings({**full, "maxmemory_policy": "noeviction"})
    assert "is not saved until other pages have expired" in warning
    for policy in ("volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"):
        assert config_warnings({**full, "maxmemory_policy": policy}) == []
    for policy in ("allkeys-lru", "allkeys-lfu", "allkeys-random"):
        (warning,) = config_warnings({**full, "maxmemory_policy": policy})
        assert f"maxmemory-policy is {policy}" in warning


def test_connector_starts_without_redis_and_warns_about_a_bad_set_up(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.run("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    own_server.run("CONFIG", "SET", "maxmemory", "100mb")
    for expected in ("maxmemory-policy is allkeys-lru", "is unavailable: refused"):
        options = {"url": own_server.url, "digest": False, "num_io_threads": "3"}
        config = KVConnectorConfig(class_path="kv_transfer.stores.redis.connector:RedisConnector", options=options)
        connector = make_connector(config, lambda: None)
        assert isinstance(connector, RedisConnector)
        connector.register_kv_cache(Core(RedisStore(options_of(own_server))).kv, LAYOUT, FINGERPRINT)
        connector.shutdown()
        assert expected in caplog.text
        own_server.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": "x"}, "unknown field `urls`"),
        ({"url": "http://localhost"}, "redis://host:port/db or rediss://"),
        ({"url": "redis://:hunter2@localhost"}, "no login in it"),
        ({"url": "redis://localhost/x"}, "database is a number"),
        ({"url": "redis://localhost:99999"}, "not a URL"),
        ({"url": "redis://a,b/0"}, r"or redis\+sentinel://"),
        ({"url": "redis+sentinel://localhost"}, "host:port/service/db is expected"),
        ({"url": "redis+sentinel://localhost/kv/x"}, "database is a number"),
        ({"url": "redis+sentinel://a,:hunter2@b/kv"}, "no login in it"),
        ({"url": "redis:/:hunter2@localhost"}, "no login in it"),
        ({"url": "redis:default:hunter2@localhost"}, "no login in it"),
        ({"url": ":hunter2@localhost"}, "no login in it"),
        ({"url": "redis://localhost/0?password=hunter2"}, "for a login use `username`, and `password_file` or"),
        ({"url": "redis://localhost/0#hunter2"}, r"what follows \? or # is not supported"),
        ({"url": "redis://localhost/hunter2"}, "database is a number"),
        ({"url": "redis://localhost:hunter2"}, "not a URL"),
        ({"url": "hunter2://localhost"}, "its scheme is another one"),
        ({"url": "localhost:6379"}, "its scheme is another one, or missing; redis://host:port/db"),
        ({"url": "redis://localhost:0"}, "a port is 0"),
        ({"url": "redis:///0"}, "a host is missing"),
        ({"prefix": "a b"}, "prefix"),
        ({"ttl_s": 0}, "ttl_s is 0"),
        ({"tail_ttl_s": 10.0}, "max_lease_s"),
        (
            {"username": "kv"},
            "redis username .kv. has no password: give password_file, or the variable TANDEM_REDIS_PASS",
        ),
        ({"password_file": "/nonexistent/password"}, "password_file '/nonexistent/password': No such file"),
        ({"tls_ca_file": "/nonexistent/ca"}, "not rediss://"),
        ({"tls_key_file": "/nonexistent/key"}, "not rediss://"),
        ({"url": "rediss://localhost", "tls_key_file": "/nonexistent/key"}, "tls_key_file needs tls_cert_file"),
        ({"url": "rediss://localhost", "tls_ca_file": "/nonexistent/ca"}, "TLS files: No such file"),
        ({"digest": True}, "kv_secret_file is not set"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        RedisConnector(wake=lambda: None, **{"url": "redis://localhost", "digest": False, **options})
    assert "hunter2" not in str(caught.value)


def test_settings_of_an_instance_become_options() -> None:
    transfer = TransferSection(connector="redis", url="redis://kv:6379", secret_file=Path("key"))
    config = connector_config(transfer)
    assert config.class_path == "kv_transfer.stores.redis.connector:RedisConnector"
    assert config.options == {"url": "redis://kv:6379", "kv_secret_file": "key"}
    with pytest.raises(SettingsError, match=r"transfer\.url .*is required by the redis connector"):
        connector_config(TransferSection(connector="redis", secret_file=Path("key")))
    with pytest.raises(SettingsError, match=r"transfer\.secret_file is required by the redis connector"):
        connector_config(TransferSection(connector="redis", url="redis://kv:6379"))


# Values changed by other clients


def _garbage(server: RedisServer, names: list[str]) -> None:
    server.run("SET", names[2], b"\xff" * (HEADER_BYTES + LAYOUT.bytes_per_block))  # type: ignore[arg-type]


def _flipped(server: RedisServer, names: list[str]) -> None:
    server.run("SETRANGE", names[2], HEADER_BYTES + 10, "x")


def _another_block(server: RedisServer, names: list[str]) -> None:
    server.run("COPY", names[1], names[2], "REPLACE")


def _huge(server: RedisServer, names: list[str]) -> None:
    server.run("SETRANGE", names[2], 64 << 20, "x")


def _list(server: RedisServer, names: list[str]) -> None:
    server.run("DEL", names[2])
    server.run("RPUSH", names[2], "x")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_garbage, "page_magic"),
        (_flipped, "page_digest"),
        (_another_block, "page_block_hash"),
        (_huge, "page_size"),
        (_list, "page_type"),
    ],
)
def test_replaced_value_is_a_counted_miss_and_is_removed(
    own_server: RedisServer, tmp_path: Path, damage: Callable[[RedisServer, list[str]], None], reason: str
) -> None:
    naming = PageNaming.of(FINGERPRINT, LAYOUT, ensure_secret(tmp_path / "key"))
    options: dict[str, Any] = {"kv_secret_file": str(tmp_path / "key"), "num_io_threads": 1}
    prefill, decode = (Core(RedisStore(options_of(own_server, digest=False)), **options) for _ in range(2))
    request, reader = make_request(PROMPT, hold=True), make_request(PROMPT, remote=True)
    prefill.prefill(request)
    names = [name_of(PageKey(naming.space, block_hash)) for block_hash in naming.block_hashes(request)]
    assert set(names) <= {name.decode() for name in own_server.names()}
    damage(own_server, names)
    decode.reserve(reader)
    rss = psutil.Process().memory_info().rss
    result = decode.complete(reader)
    assert psutil.Process().memory_info().rss - rss < 16 << 20, "a value of 64 MB is not read"
    assert result.num_verified_tokens == 2 * BLOCK_SIZE
    assert decode.has(reader, 2 * BLOCK_SIZE)
    assert decode.connector.counters.loaded.failures[reason] == 1
    assert names[2].encode() not in own_server.names()
    for core in (prefill, decode):
        core.connector.shutdown()


# Two real engines


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lively_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return aggregated(checkpoint, PROMPTS, GREEDY)


@pytest.mark.parametrize("is_killed", [False, True], ids=["up", "killed"])
def test_hand_over_between_two_engines_is_exact(
    own_server: RedisServer, checkpoint: Path, expected: list[list[int]], tmp_path: Path, is_killed: bool
) -> None:
    ensure_secret(tmp_path / "secret")
    options = {"url": own_server.url, "kv_secret_file": str(tmp_path / "secret"), **({} if is_killed else PATIENT)}
    connector = KVConnectorConfig(class_path="kv_transfer.stores.redis.connector:RedisConnector", options=options)
    pair = CorePair(store_config(checkpoint, tmp_path, kv_connector=connector))
    if is_killed:
        own_server.kill()
    for index, prompt in enumerate(PROMPTS):
        pair.start(f"r{index}", prompt, GREEDY)
    pair.run()
    assert [pair.outcomes[f"r{index}"].token_ids for index in range(len(PROMPTS))] == expected
    assert (pair.decode.load.num_prefilled_tokens == 0) != is_killed, "decode computes prompts only without Redis"
    pair.close()
    if not is_killed:
        names = own_server.names()
        assert names, "nothing went through Redis"
        assert not [name for name in names if b"transfers" in name], "a tail was not removed"
