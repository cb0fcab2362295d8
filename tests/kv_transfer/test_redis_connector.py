"""The connector over Redis as an engine builds it: options, logins, TLS, what it says at its start, exact hand-over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import make_connector
from instance.config import TransferSection, _connector_config
from kv_transfer.page import HEADER_BYTES
from kv_transfer.page_naming import PageNaming
from kv_transfer.redis_connector import RedisConnector, look_at, make_store
from kv_transfer.redis_dial import PASSWORD_VARIABLE, Dialer, RedisAddress, RedisLogin
from kv_transfer.redis_survey import survey
from kv_transfer.redis_wire import LinkError
from kv_transfer.secret import ensure_secret
from kv_transfer.store import PageKey
from serving.settings import SettingsError
from tests.builders import lively_checkpoint
from tests.kv_transfer.core_pair import CorePair, aggregated, store_config
from tests.kv_transfer.harness import BLOCK_SIZE, FINGERPRINT, LAYOUT, Core, make_request
from tests.kv_transfer.redis_load import PROMPT
from tests.kv_transfer.redis_server import PATIENT, RedisServer, make_certificate, name_of, options_of, redis_server
from tests.kv_transfer.test_hand_over import GREEDY
from tests.kv_transfer.test_redis_store import PASSWORD, read
from tests.kv_transfer.test_shared_storage import HEADER, PAGE, key_of
from tests.oracle import random_prompts

PROMPTS = random_prompts(5, longest=120, vocab_size=1024, seed=5)
PERMISSIONS = "+getrange +set +del +strlen +pexpire +info +hello +select +client|setname"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


# Start-up, logins, TLS


def test_login_from_a_file_by_an_account_that_may_do_no_more(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    with redis_server(tmp_path, password="admin") as server:
        server.run("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", "~tandem:*", *PERMISSIONS.split())
        store = make_store(options_of(server, username="kv", password_file=str(tmp_path / "password")))
        assert len(look_at(store)) == 1
        store.put(key_of(1), (HEADER, PAGE))
        assert store.contains(key_of(1), 4352)
        assert read(store, key_of(1)) == (HEADER, PAGE)
        store.delete(key_of(1))
        assert store.dialer.run_id is not None
        store.close()


def test_login_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    with redis_server(tmp_path, password=PASSWORD) as server:
        store = make_store(options_of(server))
        store.put(key_of(1), (HEADER, PAGE))
        store.close()


def test_refused_login_is_tried_ever_more_seldom_until_the_password_changes(tmp_path: Path) -> None:
    now, password_file = 100.0, tmp_path / "password"
    password_file.write_text("wrong")
    with redis_server(tmp_path, password=PASSWORD) as server:
        address = RedisAddress.parse(server.url)
        dialer = Dialer(address, RedisLogin(password_file=str(password_file)), clock=lambda: now)
        for _ in range(600):
            with pytest.raises(LinkError, match="auth"):
                dialer.dial()
            now += 1.0
        with server.client() as client:
            num_attempts = sum(int(entry["count"]) for entry in client.acl_log())
        assert 8 <= num_attempts <= 16
        password_file.write_text(PASSWORD)
        connection = dialer.dial()
        connection.break_off("closed")


def test_tls_verifies_the_server(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    with redis_server(tmp_path, tls=certificate) as server:
        store = make_store(options_of(server, tls_ca_file=str(certificate / "cert.pem")))
        big = bytes(range(256)) * 4096
        store.put(key_of(1), (HEADER, big))
        found: list[object] = []

        def ask() -> None:
            found.append(read(store, key_of(1), len(big)))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [(HEADER, big)] * 6
        store.close()
        stranger = make_store(options_of(server))
        with pytest.raises(LinkError, match="tls"):
            read(stranger, key_of(1))
        stranger.close()


def test_survey_speaks_plainly() -> None:
    good = {"maxmemory": "1000", "used_memory": "10", "maxmemory_policy": "noeviction", "role": "master"}
    assert survey(good) == []
    assert survey({**good, "maxmemory_policy": "volatile-ttl"}) == []
    assert survey({}) == []
    for change, word in [
        ({"maxmemory_policy": "allkeys-lru"}, "allkeys-lru"),
        ({"maxmemory": "0"}, "maxmemory is not set"),
        ({"used_memory": "950"}, "95%"),
        ({"role": "slave"}, "replica"),
    ]:
        (warning,) = survey({**good, **change})
        assert word in warning


def test_connector_starts_without_redis_and_warns_about_a_bad_set_up(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    own_server.run("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    own_server.run("CONFIG", "SET", "maxmemory", "100mb")
    for expected in ("maxmemory-policy is allkeys-lru", "does not serve: refused"):
        options = {"url": own_server.url, "digest": False, "num_io_threads": "3"}
        config = KVConnectorConfig(class_path="kv_transfer.redis_connector:RedisConnector", options=options)
        connector = make_connector(config, lambda: None)
        assert isinstance(connector, RedisConnector)
        connector.register_kv_cache(Core(make_store(options_of(own_server))).kv, LAYOUT, FINGERPRINT)
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
        ({"prefix": "a b"}, "prefix"),
        ({"ttl_s": 0}, "ttl_s is 0"),
        ({"tail_ttl_s": 10.0}, "max_lease_s"),
        ({"password_file": "/nonexistent/password"}, "password_file '/nonexistent/password': No such file"),
        ({"tls_ca_file": "/nonexistent/ca"}, "not rediss://"),
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
    config = _connector_config(transfer)
    assert config.class_path == "kv_transfer.redis_connector:RedisConnector"
    assert config.options == {"url": "redis://kv:6379", "kv_secret_file": "key"}
    with pytest.raises(SettingsError, match=r"transfer\.url .*is required by the redis connector"):
        _connector_config(TransferSection(connector="redis", secret_file=Path("key")))
    with pytest.raises(SettingsError, match=r"transfer\.secret_file is required by the redis connector"):
        _connector_config(TransferSection(connector="redis", url="redis://kv:6379"))


# Values that others have put there


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
    ensure_secret(tmp_path / "key")
    options = {"kv_secret_file": str(tmp_path / "key"), "num_io_threads": 1}
    prefill, decode = (Core(make_store(options_of(own_server, digest=False)), **options) for _ in range(2))
    request, reader = make_request(PROMPT, hold=True), make_request(PROMPT, remote=True)
    prefill.prefill(request)
    hashes = PageNaming.of(FINGERPRINT, LAYOUT).block_hashes(request)
    names = [name_of(PageKey(FINGERPRINT, block_hash)) for block_hash in hashes]
    assert set(names) <= {name.decode() for name in own_server.names()}
    damage(own_server, names)
    decode.reserve(reader)
    rss = psutil.Process().memory_info().rss
    result = decode.complete(reader)
    assert psutil.Process().memory_info().rss - rss < 16 << 20, "a value of 64 MB is not read"
    assert result.num_verified_tokens == 2 * BLOCK_SIZE
    assert decode.has(reader, 2 * BLOCK_SIZE)
    assert decode.connector.counters.load_failures[reason] == 1
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
    connector = KVConnectorConfig(class_path="kv_transfer.redis_connector:RedisConnector", options=options)
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
        assert not [name for name in names if b"transfers" in name], "a tail stayed behind"
