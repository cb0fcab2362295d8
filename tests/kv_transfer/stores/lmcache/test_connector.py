"""The connector over LMCache as an engine builds it: options, settings, the library missing. Pages in LMCache's files:
the store's contract, and the files and names that LMCache itself reads and writes."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import make_connector
from instance.settings import TransferSection, connector_config
from kv_transfer.page.format import Buffer, PageKey
from kv_transfer.stores.lmcache.connector import LMCacheConnector, LMCacheDisk, LMCacheOptions, make_store
from kv_transfer.stores.lmcache.server import LMCacheServer, ObjectName
from serving.settings import SettingsError
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.topology import Topology
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT, NUM_FULL, PROMPT, Core, reader_of, writer_of
from tests.kv_transfer.memory_store import MemoryStore
from tests.kv_transfer.stores.contract import HEADER, NUM_BYTES, PAGE, check_contract, key_of, read
from tests.kv_transfer.stores.lmcache.lmcache_checks import (
    LMCacheLoad,
    check_many_threads,
    import_lmcache,
    nothing_leaks,
    pages_in,
)
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs the place of its pages; give one of path \(--kv-folder /mnt/kv\) for disk, url \(--kv-url"),
        ({"url": "http://host"}, "needs the place of its pages"),
        ({"backend": "gds", "path": "/x"}, "backend 'gds': must be one of disk, server$"),
        ({"backend": "disk"}, r"backend disk needs path \(--kv-folder /mnt/kv\)"),
        ({"backend": "server"}, r"backend server needs url \(--kv-url tcp://host:5555\)"),
        ({"backend": "redis", "path": "/x"}, "a redis:// URL is not supported; use the redis connector"),
        ({"path": "/x", "url": "tcp://host:1"}, "backend disk takes no url"),
        ({"url": "tcp://host:1", "capacity_bytes": 1}, "server takes no capacity_bytes: .*--l1-size-gb"),
        ({"url": "redis://host/0"}, "lmcache: a redis:// URL is not supported; use the redis connector"),
        ({"url": "rediss://host/0"}, "lmcache: a redis:// URL is not supported; use the redis connector"),
        ({"url": "tcp://host"}, "tcp://host:port of an `lmcache server` is expected"),
        ({"url": "redis://:hunter2@host"}, "use the redis connector"),
        ({"paths": "/x"}, "unknown field `paths`"),
        ({"path": "/x", "timeout_s": 0}, "timeout_s is 0"),
        ({"path": "/x", "tail_max_age_s": 1.0}, "tail_max_age_s is 1.0; it must not be less than max_lease_s"),
        ({"path": "/x", "digest": True}, "kv_secret_file is not set"),
        ({"path": "/dev/null/x"}, "lmcache path '/dev/null/x': Not a directory"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        LMCacheConnector(wake=lambda: None, **{"digest": False, **options})
    assert "hunter2" not in str(caught.value)


def test_backend_follows_from_path_or_url(tmp_path: Path) -> None:
    on_disk = make_store(LMCacheOptions(path=str(tmp_path)))
    at_server = make_store(LMCacheOptions(url="tcp://127.0.0.1:1"))
    assert isinstance(on_disk, LMCacheDisk)
    assert isinstance(at_server, LMCacheServer)
    for store in (on_disk, at_server):
        store.close()


def test_connector_starts_without_its_server() -> None:
    config = KVConnectorConfig(
        class_path="kv_transfer.stores.lmcache.connector:LMCacheConnector",
        options={"url": "tcp://127.0.0.1:1", "digest": False},
    )
    connector = make_connector(config, lambda: None)
    assert isinstance(connector, LMCacheConnector)
    connector.register_kv_cache(Core(MemoryStore()).kv, LAYOUT, FINGERPRINT)
    assert "KV is computed instead" in (connector.self_test() or "")
    connector.shutdown()


def test_settings_of_an_instance_become_options() -> None:
    key = Path("key")
    config = connector_config(TransferSection(connector="lmcache", folder=Path("/kv"), secret_file=key))
    assert config.class_path == "kv_transfer.stores.lmcache.connector:LMCacheConnector"
    assert config.options == {"path": "/kv", "kv_secret_file": "key"}
    config = connector_config(TransferSection(connector="lmcache", url="tcp://kv:5555", secret_file=key))
    assert config.options == {"url": "tcp://kv:5555", "kv_secret_file": "key"}
    with pytest.raises(SettingsError, match=r"transfer\.folder .*transfer\.url .*required by the lmcache connector"):
        connector_config(TransferSection(connector="lmcache", secret_file=key))
    with pytest.raises(SettingsError, match=r"transfer\.secret_file is required by the lmcache connector"):
        connector_config(TransferSection(connector="lmcache", folder=Path("/kv")))


def test_local_stack_has_it_on_disk(tmp_path: Path) -> None:
    for kv_url, flag in ((None, ("--kv-folder", str(tmp_path / "store"))), ("tcp://h:1", ("--kv-url", "tcp://h:1"))):
        settings = StackSettings(model=tmp_path, model_name="m", connector="lmcache", kv_url=kv_url)
        topology = Topology(settings, tmp_path)
        for spec in (topology.instance("prefill-0", "h:1"), topology.instance("decode-0", "h:2")):
            pairs = list(zip(spec.argv, spec.argv[1:], strict=False))
            assert ("--kv-connector", "lmcache") in pairs
            assert flag in pairs
            assert ("--kv-folder" in spec.argv) != ("--kv-url" in spec.argv)
            assert "--kv-secret-file" in spec.argv
    with pytest.raises(ValueError, match="lmcache: a redis:// URL is not supported; use --connector redis"):
        StackSettings(model=tmp_path, model_name="m", connector="nixl,lmcache", kv_url="redis://h:1")
    with pytest.raises(ValueError, match="needs the address of a Redis"):
        StackSettings(model=tmp_path, model_name="m", connector="redis")
    with pytest.raises(ValueError, match="nixl has no server"):
        StackSettings(model=tmp_path, model_name="m", connector="nixl", kv_url="tcp://h:1")


def test_names_are_hex_and_differ_where_keys_do() -> None:
    keys = (key_of(1), key_of(2), key_of(1, transfer="a@b/../c"), key_of(1, transfer="d"))
    names = [ObjectName.of(key) for key in keys]
    assert all(name.is_valid for name in names)
    assert len({name.file_name for name in names}) == len(keys)
    for name in names:
        assert set(name.file_name.removeprefix("tandem-v1-").removesuffix(".data")) <= set("0123456789abcdefx@")


def test_an_instance_needs_no_lmcache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    for options in (LMCacheOptions(path=str(tmp_path)), LMCacheOptions(url="tcp://127.0.0.1:1")):
        make_store(options).close()


# Pages in LMCache's files


def disk(path: Path) -> LMCacheDisk:
    return LMCacheDisk(path, capacity_bytes=1 << 30)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LMCacheDisk]:
    store = disk(tmp_path / "store")
    yield store
    store.close()


def test_store_keeps_its_contract_and_leaves_nothing(tmp_path: Path) -> None:
    with nothing_leaks():
        store = disk(tmp_path / "store")
        check_contract(store)
        check_many_threads(store)
        store.close()
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_paths_are_hex_and_private_whatever_the_transfer_is_called(store: LMCacheDisk) -> None:
    store.put(key_of(1), (HEADER, PAGE))
    store.put(key_of(1, transfer="../../etc/passwd\0/\n"), (HEADER, PAGE))
    for path in pages_in(store.path):
        assert re.fullmatch(r"tandem-v1-[0-9a-f]{16}@0x0{8}@0@[0-9a-f]{64}(@[0-9a-f]{64})?\.data", path.name)
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(pages_in(store.path)) == 2


def test_lmcache_server_finds_the_same_files(store: LMCacheDisk) -> None:
    api = import_lmcache("lmcache.v1.distributed.api")
    files = import_lmcache("lmcache.v1.distributed.l2_adapters.fs_l2_adapter")
    for key in (key_of(1), key_of(1, transfer="t")):
        store.put(key, (HEADER, PAGE))
        name = ObjectName.of(key)
        object_key = api.ObjectKey(name.chunk_hash, name.model_name, 0, 0, name.cache_salt)
        assert files._object_key_to_filename(object_key) in {path.name for path in pages_in(store.path)}


def test_lmcache_s_client_reads_what_is_written_here_and_the_reverse(store: LMCacheDisk) -> None:
    folder = store.path / "v1" / "pages"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    client = import_lmcache("lmcache.lmcache_fs").LMCacheFSClient(str(folder), 1, "", False, 0)
    names = [ObjectName.of(key_of(number)) for number in (1, 2)]
    ours, theirs = (f"{name.model_name}@00000000@0@{name.chunk_hash.hex()}" for name in names)
    ended: dict[int, bool] = {}

    def wait_for(task_id: int) -> None:
        def has_ended() -> bool:
            for one, is_done, _, found in client.drain_completions():
                ended[one] = is_done and (not found or bool(found[0]))
            return task_id in ended

        wait_until(has_ended)
        assert ended[task_id]

    try:
        store.put(key_of(1), (HEADER, PAGE))
        value = bytearray(len(HEADER) + len(PAGE))
        wait_for(client.submit_batch_get([ours], [memoryview(value)]))
        assert value == HEADER + PAGE
        written = bytearray(PAGE[::-1] + HEADER)
        wait_for(client.submit_batch_set([theirs], [memoryview(written)]))
        assert read(store, key_of(2)) == (bytes(written[: len(HEADER)]), bytes(written[len(HEADER) :]))
    finally:
        client.close()


def test_folder_is_kept_within_its_size_and_tails_stay(tmp_path: Path) -> None:
    store = LMCacheDisk(tmp_path / "store", capacity_bytes=10 * NUM_BYTES)
    store.put(key_of(0, transfer="t"), (HEADER, PAGE))
    for number in range(5):
        store.put(key_of(number), (HEADER, PAGE))
    for path in pages_in(store.path):
        os.utime(path, (1e9, time.time() - 1000))  # pages written in one moment have no order among them
    for number in range(5, 12):
        store.put(key_of(number), (HEADER, PAGE))
    wait_until(lambda: len(pages_in(store.path)) <= 10)
    assert all(read(store, key_of(number)) == (HEADER, PAGE) for number in range(5, 12))
    assert read(store, key_of(0, transfer="t")) == (HEADER, PAGE)
    store.close()


def test_requests_succeed_while_the_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / "store"

    def mount(what: str) -> None:
        """In one step, or a store would create the folder again in between."""
        (tmp_path / "link").symlink_to(tmp_path / what)
        (tmp_path / "link").rename(path)

    mount("folder")
    with LMCacheLoad(lambda: disk(path)) as load:
        mount("file")
        assert load.wait_for_breaker(3.0) <= 2.0
        load.wait_for_miss(2.0)
        mount("folder")
        assert load.wait_for_hit(5.0) <= 5.0
    assert load.longest_s < 2.0


class _Hanging(LMCacheDisk):
    """Reads wait for the disk while it hangs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, capacity_bytes=1 << 30)
        self.works = threading.Event()

    def get_into(self, key: PageKey, buffers: Sequence[Buffer], check: Callable[[], None]) -> bool:
        assert self.works.wait(60.0)
        return super().get_into(key, buffers, check)


def test_disk_that_hangs_costs_a_time_out_and_keeps_the_blocks_until_it_works_again(tmp_path: Path) -> None:
    store = _Hanging(tmp_path / "store")
    prefill, decode = Core(store), Core(store, load_timeout_s=0.2)
    prefill.prefill(writer_of())
    decode.reserve(reader := reader_of())
    result = decode.complete(reader)
    assert (result.num_verified_tokens, result.reason) == (0, "the store did not deliver within 0.2 s")
    assert result.retained_id not in (None, *decode.freed)
    store.works.set()
    decode.wait(lambda: decode.freed == [result.retained_id])
    decode.connector._loader._load_timeout_s = 60.0  # the disk works again: a stall is no failure of it
    decode.reserve(again := reader_of(request_id="again"))
    assert decode.complete(again).num_verified_tokens == len(PROMPT)
    prefill.release()
    for core in (prefill, decode):
        core.connector.shutdown()
    assert len(pages_in(store.path)) == NUM_FULL, "the tail is removed"
