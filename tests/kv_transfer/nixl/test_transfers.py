"""A producer's metadata is checked before it is used; errors where NIXL is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from instance.settings import ListenSettings, TransferSection, connector_config
from kv_transfer.nixl.agent import NetDevices, NixlAgent, UcxSettings, net_device_of, with_needed
from kv_transfer.nixl.connector import NixlConnector
from kv_transfer.nixl.transfers import LeaseTags, MetadataError, TransferMetadata, decode, encode, page_digest
from kv_transfer.page.format import PageSpec
from serving.settings import SettingsError
from tests.kv_transfer.harness import FINGERPRINT, LAYOUT

KEY = bytes(range(32))
EPOCH = bytes(range(16))
GOOD = TransferMetadata(
    version=1,
    agent_name=f"lends-{EPOCH.hex()}",
    epoch=EPOCH,
    agent_metadata=b"nixl's own",
    memory_type="DRAM",
    device_id=0,
    pages_address=1 << 30,
    page_bytes=4096,
    num_blocks=100,
    tags_address=1 << 20,
    num_tags=8,
    tag_index=7,
    tag=b"8 bytes!",
    block_ids=[0, 99, 3],
)


def test_metadata_arrives_as_it_was_sent() -> None:
    assert decode(encode(GOOD, KEY), KEY, page_bytes=4096, num_pages=3) == GOOD


@settings(max_examples=300)
@given(st.data())
def test_metadata_with_a_changed_byte_is_rejected(data: st.DataObject) -> None:
    encoded = bytearray(encode(GOOD, KEY))
    index = data.draw(st.integers(0, len(encoded) - 1))
    encoded[index] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MetadataError, match="not authentic"):
        decode(bytes(encoded), KEY, page_bytes=4096, num_pages=3)


@given(st.binary(max_size=200))
def test_garbage_is_rejected_even_with_the_right_checksum(body: bytes) -> None:
    sealed = encode(GOOD, KEY)
    for data in (body, sealed[: len(body)]):
        with pytest.raises(MetadataError):
            decode(data, KEY, page_bytes=4096, num_pages=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("agent_name", ""),
        ("agent_name", "x" * 200),
        ("agent_name", "tandem-of-another-epoch"),
        ("epoch", b"short"),
        ("agent_metadata", b""),
        ("device_id", -1),
        ("page_bytes", 8192),
        ("num_blocks", 0),
        ("num_blocks", 1 << 40),
        ("pages_address", 0),
        ("pages_address", (1 << 63) - 10),
        ("tags_address", -5),
        ("num_tags", 1 << 40),
        ("tag_index", 8),
        ("tag", b"short"),
        ("tag", bytes(8)),
        ("block_ids", [0, 1]),
        ("block_ids", [0, 1, 100]),
        ("block_ids", [0, 1, -1]),
    ],
)
def test_each_field_is_checked_though_the_producer_has_the_key(field: str, value: object) -> None:
    bad = msgspec.structs.replace(GOOD, **{field: value})
    with pytest.raises(MetadataError, match="bad"):
        decode(encode(bad, KEY), KEY, page_bytes=4096, num_pages=3)


def test_a_digest_binds_the_page_to_what_it_is_and_who_holds_it() -> None:
    spec = PageSpec(bytes(32), bytes(32), b"h" * 32, b"p" * 32, 16, 64)
    page = bytes(64)
    digest = page_digest(spec, page, key=KEY, epoch=EPOCH)
    others = [
        page_digest(spec, b"\1" + page[1:], key=KEY, epoch=EPOCH),
        page_digest(spec, page, key=bytes(32), epoch=EPOCH),
        page_digest(spec, page, key=KEY, epoch=bytes(16)),
        *(
            page_digest(PageSpec(**{**_fields(spec), **change}), page, key=KEY, epoch=EPOCH)  # type: ignore[arg-type]
            for change in ({"block_hash": bytes(32)}, {"parent_hash": bytes(32)}, {"num_tokens": 15}, {"is_tail": True})
        ),
    ]
    assert len({digest, *others}) == 1 + len(others)


def _fields(spec: PageSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in PageSpec.__slots__}


def test_a_lease_tag_keeps_its_value_until_it_is_released_and_never_has_it_again() -> None:
    tags = LeaseTags(2)
    first = tags.acquire()
    second = tags.acquire()
    assert first is not None
    assert second is not None
    assert tags.acquire() is None
    assert first[1] != second[1]
    tags.release(first[0])
    again = tags.acquire()
    assert again is not None
    assert again[0] == first[0]
    assert again[1] not in (first[1], second[1], bytes(8)), "a tag that is acquired again has another value"


@pytest.mark.parametrize(
    ("given_tls", "used"),
    [("tcp", "tcp"), ("sm,self", "sm,self,tcp"), ("tcp:am,sm", "tcp:am,sm"), ("all", "all"), ("^rc", "^rc")],
)
def test_tcp_is_always_among_the_transports(given_tls: str, used: str) -> None:
    assert with_needed(given_tls, has_gpu=False) == used


@pytest.mark.parametrize(
    ("given_tls", "used"),
    [
        ("tcp", "tcp,cuda_copy"),
        ("tcp:am,sm", "tcp:am,sm,cuda_copy"),
        ("tcp,cuda", "tcp,cuda"),
        ("cuda_copy,tcp", "cuda_copy,tcp"),
        ("all", "all"),
        ("^rc", "^rc"),
    ],
)
def test_transports_include_cuda_where_there_is_a_gpu(given_tls: str, used: str) -> None:
    assert with_needed(given_tls, has_gpu=True) == used
    assert with_needed(given_tls, has_gpu=False) == given_tls


def test_ucx_listens_where_peers_reach_this_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert net_device_of("127.0.0.1") == net_device_of("localhost") == "lo"
    assert net_device_of("0.0.0.0") == "all"
    assert UcxSettings().environment(20)["UCX_NET_DEVICES"] == "lo"


@pytest.mark.parametrize(
    ("given_devices", "used"),
    [
        ("mlx5_0:1", "mlx5_0:1,lo"),
        ("mlx5_0:1,lo", "mlx5_0:1,lo"),
        ("eth7", "eth7"),
        ("mlx5_0:1,eth[5-8]", "mlx5_0:1,eth[5-8]"),
        ("all", "all"),
        ("^mlx5_0:1", "^mlx5_0:1"),
    ],
)
def test_devices_include_one_that_tcp_can_use(given_devices: str, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "eth7": []})
    assert UcxSettings(net_devices=given_devices).environment(20)["UCX_NET_DEVICES"] == used
    monkeypatch.setenv("UCX_NET_DEVICES", given_devices)
    assert UcxSettings().environment(20)["UCX_NET_DEVICES"] == used


@pytest.mark.parametrize("given_devices", ["lo,no_such0", "no_such0", "no_such0:1", "no_such[0-1]:1", "lo:2", "l*"])
@pytest.mark.parametrize("source", ["ucx_net_devices", "UCX_NET_DEVICES"])
def test_a_device_that_ucx_cannot_use_is_an_error_that_names_the_usable_ones(
    given_devices: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", given_devices if source.isupper() else "lo")
    options: dict[str, Any] = {} if source.isupper() else {source: given_devices}
    connector = NixlConnector(wake=lambda: None, digest=False, **options)
    shown = rf"{source} '{re.escape(given_devices)}': "
    reason = shown + r".*: network devices? .*(no_such0|lo:2|l\*).* not available.*'lo'\(tcp\)"
    with pytest.raises(EngineError, match=reason):
        connector.register_kv_cache(torch.zeros((4, *LAYOUT.page_shape)), LAYOUT, FINGERPRINT)


@pytest.mark.parametrize("given_devices", ["", "lo", "lo,lo", "all", "^no_such0"])
def test_devices_that_ucx_can_use_are_accepted(given_devices: str) -> None:
    agent = NixlAgent("a", UcxSettings(net_devices=given_devices))
    agent.check_devices()
    agent.close()


def test_a_device_that_was_added_for_tcp_need_not_be_available() -> None:
    warning = "network devices {} not available, please use one or more of: 'lo'(tcp), 'eth0'(tcp)"
    devices = NetDevices("ucx_net_devices", "mlx5_0:1", added="br0")
    devices.check(warning.format("'br0' is"))
    with pytest.raises(EngineError, match="UCX cannot use all of them: network devices 'mlx5_0:1','br0' are"):
        devices.check(warning.format("'mlx5_0:1','br0' are"))


def test_an_address_that_ucx_cannot_use_is_no_error_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"no_such0:2": [SimpleNamespace(address="192.0.2.1")]})
    with pytest.raises(EngineError, match=r"NIXL cannot make an agent over UCX: .*\(network device 'no_such0' is not"):
        NixlAgent("a", UcxSettings(address="192.0.2.1"))


@pytest.mark.parametrize("level", ["warn", pytest.param("ERROR", marks=pytest.mark.slow)])
def test_devices_are_checked_whatever_ucx_logs(level: str) -> None:
    code = "from kv_transfer.nixl.agent import *; NixlAgent('a', UcxSettings(net_devices='no_such0')).check_devices()"
    environment = {**os.environ, "UCX_LOG_LEVEL": level}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "EngineError: ucx_net_devices 'no_such0': UCX cannot use all of them" in ended.stderr


def test_an_agent_that_is_made_again_does_without_a_device_that_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    agent = NixlAgent("a", UcxSettings(net_devices="lo,no_such0"))
    assert "network device 'no_such0' is not available" in caplog.text
    agent.close()


def test_no_device_is_added_where_none_has_the_address() -> None:
    assert UcxSettings(net_devices="mlx5_0:1", address="192.0.2.1").environment(20)["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_memory_of_a_gpu_is_read_without_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0"])
    assert UcxSettings().environment(20)[name] == "on"
    monkeypatch.setenv(name, "auto")
    assert UcxSettings().environment(20)[name] == "auto"
    monkeypatch.setattr("glob.glob", lambda pattern: [])
    assert name not in UcxSettings().environment(20)


def test_a_missing_library_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._bindings", None)
    connector = NixlConnector(wake=lambda: None, digest=False)
    with pytest.raises(EngineError, match="pip install 'nixl"):
        connector.register_kv_cache(torch.zeros((4, *LAYOUT.page_shape)), LAYOUT, FINGERPRINT)


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(EngineError, match=r"ucx_tsl.*known: .*ucx_tls"):
        NixlConnector(wake=lambda: None, digest=False, ucx_tsl="tcp")


def test_settings_of_an_instance_become_options() -> None:
    transfer = TransferSection(connector="nixl", secret_file=Path("key"), options={"ucx_tls": "tcp"})
    config = connector_config(transfer, "10.0.0.7")
    assert config.class_path == "kv_transfer.nixl.connector:NixlConnector"
    assert config.options == {"kv_secret_file": "key", "ucx_tls": "tcp", "address": "10.0.0.7"}
    with pytest.raises(SettingsError, match=r"folder .* is not supported by the nixl connector"):
        connector_config(TransferSection(connector="nixl", secret_file=Path("key"), folder=Path("x")))
    with pytest.raises(SettingsError, match="secret_file"):
        connector_config(TransferSection(connector="nixl"))
    server = ListenSettings(listen="0.0.0.0:50051", advertise="10.0.0.7:50051")
    assert server.advertised_host == "10.0.0.7"
    assert ListenSettings(listen="127.0.0.1:0").advertised_host == "127.0.0.1"
