"""Settings become the engine's configuration, or an error that names the setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine.config import EngineKind, KVConnectorConfig
from instance.settings import (
    EngineSection,
    InstanceSettings,
    ListenSettings,
    ModelSection,
    TransferSection,
    engine_config,
)
from serving.server import ServerSettings
from serving.settings import SettingsError


def settings(**sections: Any) -> InstanceSettings:
    transfer: dict[str, Any] = {"folder": Path("kv"), "secret_file": Path("secret")}
    return InstanceSettings(
        **{"model": ModelSection(folder=Path("m")), "transfer": TransferSection(**transfer)} | sections
    )


@pytest.mark.parametrize("address", ["prefill-0.ns.svc.cluster.local.:7000", "[fe80::1%eth0]:7000", "10.0.0.1:7000"])
def test_an_address_that_instances_dial_may_be_advertised(address: str) -> None:
    assert ListenSettings(advertise=address).advertise == address


@pytest.mark.parametrize("address", ["10.0.0.1:0", "-prefill:7000", "prefill..:7000", "a b:7000"])
def test_no_other_address_may_be_advertised(address: str) -> None:
    """Or the instance starts, and every hand-over from it is refused."""
    with pytest.raises(ValidationError, match=r"advertise\n.*must be a DNS name"):
        ListenSettings(advertise=address)


def test_every_setting_reaches_the_engine() -> None:
    config = engine_config(
        settings(
            model=ModelSection(folder=Path("m"), dtype="float32", load_format="dummy", max_model_len=99, seed=3),
            engine=EngineSection(
                block_size=8,
                num_blocks=40,
                kv_cache_bytes=5,
                max_num_seqs=2,
                max_num_batched_tokens=7,
                enable_prefix_caching=False,
                num_threads=1,
                cpu_cores=(0, 2),
                attention_backend="reference",
                model_impl="transformers",
                quantization="int4",
            ),
            transfer=TransferSection(connector="null", max_held_fraction=0.25),
        )
    )
    assert (config.model, config.dtype, config.load_format, config.max_model_len, config.seed) == (
        "m",
        "float32",
        "dummy",
        99,
        3,
    )
    assert (config.block_size, config.num_blocks, config.kv_cache_bytes) == (8, 40, 5)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.enable_prefix_caching) == (2, 7, False)
    assert (config.num_threads, config.cpu_cores, config.attention_backend) == (1, (0, 2), "reference")
    assert (config.model_impl, config.quantization) == ("transformers", "int4")
    assert config.max_held_fraction == 0.25
    assert config.kv_connector == KVConnectorConfig()


def test_weights_of_few_bits_are_for_cpus() -> None:
    with pytest.raises(SettingsError, match=r"engine\.quantization: int8 is supported on cpu, not on cuda; set none"):
        engine_config(settings(engine=EngineSection(quantization="int8", device="cuda")))


def test_drafts_are_for_the_built_in_engine() -> None:
    assert engine_config(settings(engine=EngineSection(num_speculative_tokens=3))).num_speculative_tokens == 3
    with pytest.raises(ValidationError, match=r"num_speculative_tokens\n.* of the built-in engine alone"):
        EngineSection(kind="vllm", num_speculative_tokens=3)


def test_the_connector_gets_the_given_options_alone() -> None:
    connector = engine_config(settings()).kv_connector
    assert connector.class_path == "kv_transfer.stores.files:SharedStorageConnector"
    assert connector.options == {"path": "kv", "kv_secret_file": "secret"}
    own = TransferSection(connector="acme.kv:Connector", options={"url": "x"}, capacity_bytes=5)
    connector = engine_config(settings(transfer=own)).kv_connector
    assert connector == KVConnectorConfig(class_path="acme.kv:Connector", options={"url": "x", "capacity_bytes": 5})


@pytest.mark.parametrize("connector", ["shared_storage", "nixl,shared_storage"])
def test_no_connector_ends_a_lease_before_the_setting_does(connector: str) -> None:
    transfer = TransferSection(connector=connector, folder=Path("kv"), secret_file=Path("secret"), lease_s=1800.0)
    options = engine_config(settings(transfer=transfer)).kv_connector.options
    members = options.get("connectors", [{"options": options}])
    assert [member["options"]["max_lease_s"] for member in members] == [1800.0] * len(members)


@pytest.mark.parametrize(
    ("connector", "option"),
    [("shared_storage", "max_lease_s"), ("nixl,shared_storage", "nixl.max_lease_s"), ("acme.kv:Own", "max_lease_s")],
)
def test_no_option_ends_a_lease_before_the_setting_does(connector: str, option: str) -> None:
    def config(max_lease_s: float | str, option: str = option) -> KVConnectorConfig:
        transfer = TransferSection(
            connector=connector, folder=Path("kv"), secret_file=Path("secret"), options={option: max_lease_s}
        )
        return engine_config(settings(transfer=transfer)).kv_connector

    assert config(30.0)
    with pytest.raises(SettingsError, match=r"max_lease_s of .* is 5; it must not be less than transfer\.lease_s"):
        config(5.0)
    with pytest.raises(SettingsError, match=r"max_lease_s of .* is 5; it must not be less than transfer\.lease_s"):
        config("5")
    if "," in connector:
        assert config(5.0, "shared_storage.max_lease_s"), "it grants no lease"


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ({}, "transfer.folder .--kv-folder. is required by the shared_storage connector; give a folder"),
        ({"folder": "kv"}, "transfer.secret_file is required"),
        (
            {"folder": "kv", "secret_file": "s", "options": {"path": "x"}},
            "transfer.options.path has a setting of its own",
        ),
        ({"connector": "null", "capacity_bytes": 5}, "capacity_bytes .* is not supported by the null connector"),
        ({"connector": "nixl", "folder": "kv"}, "folder .* is not supported by the nixl connector"),
        ({"connector": "nixl,redis", "secret_file": "s"}, "transfer.url .* is required by the redis connector"),
        (
            {"connector": "nixl,redis", "secret_file": "s", "url": "redis://h:1/0", "options": {"ttl_s": 9}},
            "transfer.options.ttl_s: in a list of connectors it must be redis.ttl_s",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(transfer: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        engine_config(settings(transfer=TransferSection(**transfer)))


@pytest.mark.parametrize("connector", ["redis,lmcache", "lmcache,redis", "nixl,shared_storage,lmcache"])
def test_connectors_of_a_list_share_no_url_and_no_folder(connector: str) -> None:
    with pytest.raises(
        ValidationError, match=r"lmcache would get the url or folder of \w+: give it alone, or after nixl"
    ):
        TransferSection(connector=connector)
    assert TransferSection(connector="nixl,lmcache").connector == "nixl,lmcache"


def test_the_sizes_of_the_built_in_engine_are_not_lost_on_vllm() -> None:
    with pytest.raises(ValidationError, match=r"for vLLM write --vllm-args '\{tensor_parallel_size: 2\}'"):
        EngineSection(kind="vllm", tensor_parallel_size=2)
    assert EngineSection(kind="vllm", vllm_args={"tensor_parallel_size": 2}).tensor_parallel_size == 1


@pytest.mark.parametrize("kind", ["tandem", "vllm"])
def test_both_engines_take_adapters(kind: EngineKind) -> None:
    folders = {"sql": "/adapters/sql"}
    assert engine_config(settings(engine=EngineSection(kind=kind, lora_adapters=folders))).lora_adapters == folders


def test_arguments_of_vllm_are_not_lost_on_the_built_in_engine() -> None:
    vllm_args = {"enforce_eager": True}
    with pytest.raises(
        SettingsError, match=r"engine\.vllm_args .--vllm-args.: the engine is tandem.*; set --engine vllm"
    ):
        engine_config(settings(engine=EngineSection(vllm_args=vllm_args)))
    assert engine_config(settings(engine=EngineSection(kind="vllm", vllm_args=vllm_args))).vllm_args == vllm_args


def test_pages_without_digests_need_no_key() -> None:
    transfer = TransferSection(folder=Path("kv"), options={"digest": False})
    assert engine_config(settings(transfer=transfer)).kv_connector.options == {"path": "kv", "digest": False}


@pytest.mark.parametrize(
    ("listen", "host", "port"),
    [("0.0.0.0:7000", "0.0.0.0", 7000), ("[::1]:0", "::1", 0), ("host.name:65535", "host.name", 65535)],
)
def test_listen_is_host_and_port_in_one(listen: str, host: str, port: int) -> None:
    resolved = ListenSettings(listen=listen, port=1, drain_grace_s=3.0).resolved()
    assert (resolved.host, resolved.port, resolved.drain_grace_s) == (host, port, 3.0)


def test_the_model_name_defaults_to_its_folder_s() -> None:
    assert settings(model=ModelSection(folder=Path("/models/demo/"))).model_name == "demo"
    assert settings(model=ModelSection(folder=Path("m"), name="poet")).model_name == "poet"


def test_a_router_may_allow_calls_of_any_length() -> None:
    assert ListenSettings().max_deadline_s >= 24 * 3600 > ServerSettings().max_deadline_s


def test_more_threads_than_a_system_starts_are_rejected() -> None:
    """The engine core's process would end, again and again."""
    with pytest.raises(ValidationError, match=r"num_threads\n.*less than or equal to 1024"):
        EngineSection(num_threads=8000)
