"""The connector over LMCache as an engine builds it: options, settings, the library missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import make_connector
from instance.config import TransferSection, connector_config
from kv_transfer.stores.lmcache.connector import LMCacheConnector, LMCacheDisk, LMCacheOptions, make_store
from kv_transfer.stores.lmcache.server import LMCacheServer, ObjectName
from serving.settings import SettingsError
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.topology import Topology
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT, Core
from tests.kv_transfer.memory_store import MemoryStore
from tests.kv_transfer.stores.contract import key_of


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
