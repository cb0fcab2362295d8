"""An instance moves a block to itself before it is ready, so that faults are found before the first request."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import failpoints
from engine.config import EngineConfig, KVConnectorConfig
from engine.core.core import EngineCore
from engine.errors import EngineError
from engine.kv_connector import KVConnector, NullKVConnector, make_connector, self_test
from kv_transfer.nixl.connector import NixlConnector
from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.secret import ensure_secret
from kv_transfer.stores.files import SharedStorage, Sweeper
from tandem.demo import MODEL_DIR
from tests.files_below import files_below
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT, BrokenStore, Core, GatedStore
from tests.kv_transfer.memory_store import MemoryStore
from tests.kv_transfer.stores.redis.redis_server import redis_server

SHARED_STORAGE = "kv_transfer.stores.files:SharedStorageConnector"
REDIS = "kv_transfer.stores.redis.connector:RedisConnector"
LMCACHE = "kv_transfer.stores.lmcache.connector:LMCacheConnector"
NIXL = "kv_transfer.nixl.connector:NixlConnector"


def connect(tmp_path: Path, class_path: str, **options: object) -> tuple[KVConnector, torch.Tensor]:
    """A connector with KV memory, and that memory."""
    ensure_secret(tmp_path / "secret")
    named = {"kv_secret_file": str(tmp_path / "secret"), **options}
    connector = make_connector(KVConnectorConfig(class_path=class_path, options=named), wake=lambda: None)
    kv = torch.zeros((4, *LAYOUT.page_shape), dtype=torch.float32)
    connector.register_kv_cache(kv, LAYOUT, FINGERPRINT)
    return connector, kv


def passes(connector: KVConnector, kv: torch.Tensor) -> None:
    """It passes, and nothing of it is left in the KV memory."""
    assert self_test(connector) is None
    assert not kv.any()
    assert connector.num_transfers == connector.num_quarantined_blocks == 0


@pytest.mark.parametrize("digest", [True, False])
def test_a_shared_folder_passes_and_no_file_is_left(tmp_path: Path, digest: bool) -> None:
    connector, kv = connect(tmp_path, SHARED_STORAGE, path=str(tmp_path / "pages"), digest=digest)
    passes(connector, kv)
    assert not files_below(tmp_path / "pages")
    connector.shutdown()


def test_redis_passes_and_no_key_is_left(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        connector, kv = connect(tmp_path, REDIS, url=server.url)
        passes(connector, kv)
        assert not server.names()
        connector.shutdown()


def test_a_redis_that_is_down_costs_one_warning_and_the_instance_comes_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ensure_secret(tmp_path / "secret")
    options = {"url": "redis://127.0.0.1:1", "kv_secret_file": str(tmp_path / "secret")}
    config = KVConnectorConfig(class_path=REDIS, options=options)
    with caplog.at_level(logging.WARNING):
        core = EngineCore(EngineConfig(model=str(MODEL_DIR), num_blocks=32, kv_connector=config), wake=lambda: None)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("kv_transfer")]
    assert messages == ["redis at 127.0.0.1:1 is unavailable: refused; KV is computed instead"]
    core.shutdown()


@pytest.mark.parametrize("options", [{}, {"digest": False}, {"ucx_tls": "tcp"}])
def test_nixl_reads_a_block_of_its_own(tmp_path: Path, options: dict[str, object]) -> None:
    connector, kv = connect(tmp_path, NIXL, **options)
    assert isinstance(connector, NixlConnector)
    passes(connector, kv)
    assert connector.counters.loaded.num_blocks == 0, "it counts for no request"
    connector.shutdown()


def test_nixl_tries_a_read_that_fails_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    connector, kv = connect(tmp_path, NIXL)
    failpoints.configure("kv.load=fail@1")
    try:
        passes(connector, kv)
    finally:
        failpoints.configure(None)
    assert "trying again with a new agent" in caplog.text
    connector.shutdown()


def test_nixl_whose_reads_fail_does_not_start(tmp_path: Path) -> None:
    connector, _ = connect(tmp_path, NIXL)
    failpoints.configure("kv.load=fail")
    try:
        with pytest.raises(EngineError, match=r"nixl connector: a block did not come back \(failpoint\)"):
            self_test(connector)
    finally:
        failpoints.configure(None)


def test_nixl_that_reads_other_bytes_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connector, _ = connect(tmp_path, NIXL)
    count = iter(range(32, 34))
    monkeypatch.setattr("kv_transfer.nixl.connector.page_digest", lambda *args, **named: bytes([next(count)] * 32))
    with pytest.raises(EngineError, match=r"nixl connector: a block did not come back \(page_digest\)"):
        self_test(connector)


class OtherBytes(MemoryStore):
    """Gives a page in which one bit is another one."""

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        found = super().get_into(key, buffers, check)
        memoryview(buffers[1])[7] ^= 1
        return found


class Forgetful(MemoryStore):
    """Keeps nothing."""

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        pass


class Faulty(MemoryStore):
    """Has a fault of its own."""

    def put(self, key: PageKey, buffers: Sequence[Buffer]) -> None:
        raise KeyError("a fault of its own")


class WithoutContains(MemoryStore):
    """Lacks a method that saves alone call."""

    contains = None  # type: ignore[assignment]


class Unsure(MemoryStore):
    """Says that it lacks what it has."""

    def contains(self, key: PageKey, num_bytes: int) -> bool:
        return False


@pytest.mark.parametrize("digest", [True, False])
def test_other_bytes_end_the_start_with_and_without_digests(tmp_path: Path, digest: bool) -> None:
    ensure_secret(tmp_path / "secret")
    options: dict[str, Any] = {"kv_secret_file": str(tmp_path / "secret")} if digest else {}
    core = Core(OtherBytes(), **options)
    with pytest.raises(EngineError, match=r"memory connector: a block came back .*the instance does not start with it"):
        self_test(core.connector)


def test_an_engine_core_does_not_start_over_a_store_that_gives_other_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_secret(tmp_path / "secret")
    options: dict[str, str | int | float | bool] = {
        "path": str(tmp_path / "pages"),
        "kv_secret_file": str(tmp_path / "secret"),
    }
    get_into = SharedStorage.get_into

    def damaged(store: SharedStorage, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        found = get_into(store, key, buffers, check)
        memoryview(buffers[1])[0] ^= 1
        return found

    monkeypatch.setattr(SharedStorage, "get_into", damaged)
    config = KVConnectorConfig(class_path=SHARED_STORAGE, options=options)
    with pytest.raises(EngineError, match=r"self-test of the shared_storage connector: .* \(digest\); the instance"):
        EngineCore(EngineConfig(model=str(MODEL_DIR), num_blocks=32, kv_connector=config), wake=lambda: None)
    assert not files_below(tmp_path / "pages")


@pytest.mark.parametrize(
    ("store", "what"), [(Faulty(), "KeyError: 'a fault of its own'"), (WithoutContains(), "TypeError: 'NoneType'")]
)
def test_a_fault_in_the_connector_ends_the_start_plainly(store: MemoryStore, what: str) -> None:
    with pytest.raises(EngineError, match=f"memory connector: {what}"):
        self_test(Core(store).connector)


@pytest.mark.parametrize(
    ("store", "what"),
    [
        (Forgetful(), "lost a page"),
        (Unsure(), "lost a page"),
        (BrokenStore(), r"cannot be used now \(Input/output error\)"),
    ],
)
def test_an_unavailable_store_is_logged_once(store: MemoryStore, what: str, caplog: pytest.LogCaptureFixture) -> None:
    core = Core(store)
    sentence = self_test(core.connector)
    assert sentence is not None
    assert caplog.messages == [sentence]
    assert caplog.records[0].levelname == "WARNING"
    assert re.search(what, sentence)


def test_a_store_that_hangs_times_out_and_never_writes_to_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.stores.connector.SELF_TEST_TIMEOUT_S", 0.05)
    store = GatedStore()
    core = Core(store)
    sentence = self_test(core.connector)
    assert sentence is not None
    assert "did not answer within 0.05 s" in sentence
    core.kv.fill_(1.0)
    store.gate.set()
    core.settle()
    assert bool((core.kv == 1.0).all())
    assert not store.values, "it removed its page all the same"


@pytest.mark.parametrize(
    ("owner", "name", "error", "warning"),
    [
        (SharedStorage, "put", OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (os, "preadv", OSError(errno.EIO, "Input/output error"), "cannot be used now (unreadable)"),
    ],
    ids=["read-only", "unreadable"],
)
def test_an_instance_starts_over_a_folder_that_cannot_be_used(
    owner: object, name: str, error: OSError, warning: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, _ = connect(tmp_path, SHARED_STORAGE, path=str(tmp_path / "pages"))

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, failing)
    assert warning in (self_test(connector) or "")
    connector.shutdown()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_this_user_may_not_write_to_is_an_error_of_the_log(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the folder and what to do. The instance starts: what is there can be read, and all else computed."""
    connector, _ = connect(tmp_path, SHARED_STORAGE, path=str(tmp_path / "pages"))

    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number), "v1")

    monkeypatch.setattr(SharedStorage, "_write", failing)
    sentence = self_test(connector)
    connector.shutdown()
    [record] = [record for record in caplog.records if record.name == "kv_transfer.stores.page_io"]
    assert (record.levelname, record.getMessage()) == ("ERROR", sentence)
    assert f"cannot write to {tmp_path / 'pages'} ({os.strerror(number)})" in record.getMessage()
    assert "ReadWritePaths=" in record.getMessage()


@pytest.mark.parametrize("class_path", [SHARED_STORAGE, LMCACHE])
def test_a_store_that_nothing_is_saved_to_is_only_read(
    class_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its folder may be one that this user must not write to, with more pages than this instance's capacity."""
    (tmp_path / "pages" / "v1" / "pages").mkdir(parents=True)
    (left_over := tmp_path / "pages" / "v1" / "pages" / "a").write_bytes(bytes(1000))

    def failing(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "v1")

    monkeypatch.setattr(SharedStorage, "_write", failing)
    monkeypatch.setattr(SharedStorage, "delete", failing)
    monkeypatch.setattr(Sweeper, "sweep", failing)
    options = {"path": str(tmp_path / "pages"), "save": False, "prefix_only": True, "capacity_bytes": 1}
    connector, kv = connect(tmp_path, class_path, **options)
    passes(connector, kv)
    connector.shutdown()
    assert left_over.exists()
    assert not caplog.records


def test_a_store_that_is_only_read_and_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(SharedStorage, "get_into", failing)
    options = {"path": str(tmp_path / "pages"), "save": False, "prefix_only": True}
    connector, _ = connect(tmp_path, SHARED_STORAGE, **options)
    assert "cannot be used now (Input/output error)" in (self_test(connector) or "")
    connector.shutdown()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_that_this_user_may_not_make_ends_the_start_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_secret(tmp_path / "secret")

    def failing(*_: object, **named: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", failing)
    with pytest.raises(EngineError, match=r"path '\S+/pages': Read-only file system; let this user .* ReadWritePaths="):
        connect(tmp_path, SHARED_STORAGE, path=str(tmp_path / "pages"))


def test_a_third_party_without_a_test_has_none() -> None:
    assert self_test(NullKVConnector(wake=lambda: None)) is None


def test_a_third_party_that_fails_is_ended_and_named() -> None:
    class Pigeon(NullKVConnector):
        name = "pigeon"
        ended = False

        def self_test(self) -> str | None:
            raise RuntimeError("it flew away")

        def shutdown(self) -> None:
            self.ended = True

    pigeon = Pigeon(wake=lambda: None)
    with pytest.raises(EngineError, match="self-test of the pigeon connector: RuntimeError: it flew away"):
        self_test(pigeon)
    assert pigeon.ended


def test_two_self_tests_use_different_pages(tmp_path: Path) -> None:
    store = MemoryStore()
    seen: set[PageKey] = set()
    store.put = lambda key, buffers: (seen.add(key), MemoryStore.put(store, key, buffers))[1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(2):
        assert self_test(Core(store).connector) is None
    assert len(seen) == 2
    assert not store.values
