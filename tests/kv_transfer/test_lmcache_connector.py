"""The connector over LMCache as an engine builds it: options, settings, the library missing, no telemetry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import KVConnectorConfig
from engine.errors import EngineError
from engine.kv_connector import make_connector
from instance.config import TransferSection, _connector_config
from kv_transfer.lmcache_connector import LMCacheConnector, LMCacheOptions, make_store
from kv_transfer.lmcache_disk import LMCacheDisk
from kv_transfer.lmcache_names import ObjectName, page_key
from kv_transfer.lmcache_server import LMCacheServer
from kv_transfer.store import MemoryStore
from serving.settings import SettingsError
from tandem.stack_settings import StackSettings
from tandem.topology import Topology
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT, Core
from tests.kv_transfer.test_shared_storage import key_of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"does not know where pages are kept; give one of path \(--kv-folder /mnt/kv\) for disk, url \(--kv-url"),
        ({"url": "http://host"}, "does not know where pages are kept"),
        ({"backend": "gds", "path": "/x"}, "backend 'gds': must be one of disk, server, redis"),
        ({"backend": "disk"}, r"backend disk needs path \(--kv-folder /mnt/kv\)"),
        ({"backend": "server"}, r"backend server needs url \(--kv-url tcp://host:5555\)"),
        ({"backend": "redis", "path": "/x"}, r"backend redis needs url"),
        ({"path": "/x", "url": "tcp://host:1"}, "backend disk takes no url"),
        ({"url": "tcp://host:1", "capacity_bytes": 1}, "server takes no capacity_bytes: .*--l1-size-gb"),
        ({"url": "redis://host", "capacity_bytes": 1}, "redis takes no capacity_bytes: .*maxmemory"),
        ({"url": "tcp://host"}, "tcp://host:port of an `lmcache server` is expected"),
        ({"url": "redis://:hunter2@host"}, "no login in it"),
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


def test_backend_is_what_the_place_says(tmp_path: Path) -> None:
    on_disk = make_store(LMCacheOptions(path=str(tmp_path)))
    at_server = make_store(LMCacheOptions(url="tcp://127.0.0.1:1"))
    assert isinstance(on_disk, LMCacheDisk)
    assert isinstance(at_server, LMCacheServer)
    assert LMCacheOptions(url="rediss://host").backend_name() == "redis"
    for store in (on_disk, at_server):
        store.close()


def test_connector_starts_without_its_server() -> None:
    for url in ("tcp://127.0.0.1:1", "redis://127.0.0.1:1"):
        config = KVConnectorConfig(
            class_path="kv_transfer.lmcache_connector:LMCacheConnector", options={"url": url, "digest": False}
        )
        connector = make_connector(config, lambda: None)
        assert isinstance(connector, LMCacheConnector)
        connector.register_kv_cache(Core(MemoryStore()).kv, LAYOUT, FINGERPRINT)
        assert "KV is computed instead" in (connector.self_test() or "")
        connector.shutdown()


def test_settings_of_an_instance_become_options() -> None:
    key = Path("key")
    config = _connector_config(TransferSection(connector="lmcache", folder=Path("/kv"), secret_file=key))
    assert config.class_path == "kv_transfer.lmcache_connector:LMCacheConnector"
    assert config.options == {"path": "/kv", "kv_secret_file": "key"}
    config = _connector_config(TransferSection(connector="lmcache", url="tcp://kv:5555", secret_file=key))
    assert config.options == {"url": "tcp://kv:5555", "kv_secret_file": "key"}
    with pytest.raises(SettingsError, match=r"transfer\.folder .*transfer\.url .*required by the lmcache connector"):
        _connector_config(TransferSection(connector="lmcache", secret_file=key))
    with pytest.raises(SettingsError, match=r"transfer\.secret_file is required by the lmcache connector"):
        _connector_config(TransferSection(connector="lmcache", folder=Path("/kv")))


def test_stack_on_a_laptop_has_it_on_disk(tmp_path: Path) -> None:
    for kv_url, flag in ((None, ("--kv-folder", str(tmp_path / "store"))), ("tcp://h:1", ("--kv-url", "tcp://h:1"))):
        settings = StackSettings(model=tmp_path, model_name="m", connector="lmcache", kv_url=kv_url)
        topology = Topology(settings, tmp_path)
        for spec in (topology.instance("prefill-0", "h:1"), topology.instance("decode-0", "h:2")):
            pairs = list(zip(spec.argv, spec.argv[1:], strict=False))
            assert ("--kv-connector", "lmcache") in pairs
            assert flag in pairs
            assert ("--kv-folder" in spec.argv) != ("--kv-url" in spec.argv)
            assert "--kv-secret-file" in spec.argv
    with pytest.raises(ValueError, match="needs the address of a Redis"):
        StackSettings(model=tmp_path, model_name="m", connector="redis")
    with pytest.raises(ValueError, match="nixl has no server"):
        StackSettings(model=tmp_path, model_name="m", connector="nixl", kv_url="tcp://h:1")


def test_names_are_hex_and_come_back() -> None:
    for key in (key_of(1), key_of(1, transfer="a@b/../c")):
        name = ObjectName.of(key)
        assert name.is_ours
        back = page_key(name.model_name, 0, 0, name.chunk_hash, name.cache_salt)
        assert back.parts == key.parts
    theirs = [
        page_key("meta/llama", 0, 0, b"h" * 32, ""),
        page_key("meta/llama", 1, 0, b"h" * 32, ""),
        page_key("meta/llama", 0, 1, b"h" * 32, ""),
        page_key("meta/llama", 0, 0, b"h" * 32, "salt"),
        page_key("tandem-v1-" + "0" * 16, 1, 0, b"h" * 32, ""),
    ]
    assert len({key.parts for key in theirs}) == len(theirs)
    assert all(set("".join(key.parts)) <= set("0123456789abcdefv") for key in theirs)


_ASSERTIONS = """
import os, sys
from kv_transfer.lmcache_connector import LMCacheOptions, make_store
assert not [name for name in sys.modules if name.partition(".")[0] == "lmcache"], "imported though nobody uses it"
make_store(LMCacheOptions(url="tcp://127.0.0.1:1")).close()
assert not [name for name in sys.modules if name.partition(".")[0] == "lmcache"], "imported by the one that needs none"
os.environ.update(LMCACHE_TRACK_USAGE="true", DO_NOT_TRACK="0")
make_store(LMCacheOptions(path=sys.argv[1])).close()
make_store(LMCacheOptions(url="redis://127.0.0.1:1")).close()
assert os.environ["LMCACHE_LOG_LEVEL"] == "WARNING"
from lmcache.usage_telemetry.identity import is_usage_tracking_enabled
assert not is_usage_tracking_enabled()
adapters = [name for name in sys.modules if name.endswith("_l2_adapter")]
assert adapters == ["lmcache.v1.distributed.l2_adapters.plugin_l2_adapter"], adapters
assert "google.cloud" not in sys.modules
print("good")
"""

_MISSING = """
import sys
sys.modules["lmcache"] = None
from engine.errors import EngineError
from kv_transfer.lmcache_connector import LMCacheOptions, make_store
for options in (LMCacheOptions(path=sys.argv[1]), LMCacheOptions(url="redis://127.0.0.1:1")):
    try:
        make_store(options)
    except EngineError as error:
        assert "pip install '.[lmcache]'" in str(error), error
        print("said")
make_store(LMCacheOptions(url="tcp://127.0.0.1:1")).close()
"""


@pytest.mark.parametrize(
    ("code", "said"), [(_ASSERTIONS, ["good"]), (_MISSING, ["said", "said"])], ids=["there", "missing"]
)
def test_library_is_imported_late_and_tells_nobody(tmp_path: Path, code: str, said: list[str]) -> None:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{code}", str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (0, said), ended.stderr
    assert "Warning" not in ended.stderr
