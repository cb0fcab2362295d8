"""Settings of both roles, and the engine configuration built from them. A role's `service` has its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ValidationInfo, field_validator

from engine.config import (
    MAX_THREADS,
    Device,
    Dtype,
    EngineConfig,
    EngineKind,
    KVConnectorConfig,
    LoadFormat,
    ModelImpl,
    Quantization,
)
from engine.imports import CLASS_PATH
from instance.convert import may_be_dialled
from kv_transfer.transfer.connector import MAX_LEASE_S
from serving.channel import MAX_INT, ChannelSettings, listens_privately
from serving.logging import LogSettings
from serving.metrics import MetricsSettings
from serving.server import HealthSettings, ServerSettings
from serving.settings import MAX_TIME_S, Address, Section, Settings, SettingsError, parse_address, setting
from serving.tls import TlsSettings
from serving.tracing import TracingSettings


class ListenSettings(ServerSettings):
    """The gRPC port of this instance. All calls of a router come from one address, so one address may have many."""

    advertise: Address | None = setting(
        None,
        "host:port at which peers reach this instance; none: the address listened on, or the one that the router calls "
        "where that is all of its host's.",
        flag="--advertise",
    )
    listen: Address | None = setting(None, "host:port to listen on; overrides host and port.", flag="--listen")
    max_calls_per_peer: int = setting(4096, "Open calls from one address.", ge=1)
    max_large_messages_per_peer: int = setting(
        4096,
        "Messages of 256 KiB and more from one address that are parsed at a time, each followed by a pause of forty"
        " times its CPU time; 8 times as many wait. A router sends the long prompts of all its clients.",
        ge=1,
    )
    # Those of one router come over one connection, and a few more: load reports, the token stream, releases.
    max_streams_per_connection: int = setting(
        8192, "HTTP/2 streams on one connection; further calls wait.", ge=1, le=MAX_INT
    )
    max_bad_calls_per_s: float = setting(
        10_000.0,
        "Failed calls per second allowed from one address, twice as many in a burst; routers may have many.",
        gt=0,
    )
    # Routers end their calls at their own limit, which may be longer than the default.
    max_deadline_s: float = setting(
        86_400.0, "Longest call in seconds, whatever the client's deadline.", gt=0, le=MAX_TIME_S
    )
    drain_accept_s: float = setting(
        1.0, "Seconds for which a drain still accepts requests, until routers are notified.", ge=0
    )
    drain_move_s: float = setting(
        10.0, "Last seconds of the grace, in which routers resume running requests elsewhere.", ge=0
    )

    @field_validator("advertise")
    @classmethod
    def _may_be_dialled(cls, address: str | None) -> str | None:
        if address is not None and not may_be_dialled(address):
            raise ValueError("must be a DNS name, an IPv4 address or [IPv6], and a port above 0; peers call it")
        return address

    def resolved(self) -> ListenSettings:
        """The same settings with `listen` split into host and port."""
        if self.listen is None:
            return self
        host, port = parse_address(self.listen)
        return self.model_copy(update={"host": host, "port": port, "listen": None})

    @property
    def advertised_host(self) -> str:
        address = self.advertise or self.listen
        return self.host if address is None else parse_address(address)[0]

    @property
    def has_peer_address(self) -> bool:
        """False: it listens on every address of its host and advertises none."""
        return self.advertise is not None or self.resolved().host not in ("0.0.0.0", "::")


class InstanceSection(Section):
    """Identity and limits of this instance."""

    id: str | None = setting(None, "Stable name; none: role and port.", flag="--instance-id")
    domain: str = setting(
        "", "Network domain, such as a zone or a rack, within which hand-overs are fast; empty: unknown."
    )
    ready_file: Path | None = setting(
        None, "File written when the instance is ready; contains the ready line.", flag="--ready-file"
    )
    max_requests: int = setting(
        1024, "Concurrent requests, waiting ones included; more are rejected.", flag="--max-requests", ge=1
    )
    core_unready_s: float = setting(5.0, "Seconds of the core's silence after which readiness ends.", gt=0.5)
    core_dead_s: float = setting(
        30.0,
        "Seconds of the core's silence after which liveness ends; after twice as many the core is killed, and the"
        " instance ends.",
        gt=0.5,
    )
    load_interval_s: float = setting(
        0.25, "Maximum seconds between two load reports; routers get more where they need them.", ge=0.02, le=10
    )


class ModelSection(Section):
    folder: Path = setting(..., "Folder of a checkpoint in Hugging Face's form.", flag="--model")
    name: str | None = setting(None, "Name of the model in requests; none: the folder's.", flag="--served-model-name")
    dtype: Dtype = setting("auto", "Type of weights and KV; auto: the checkpoint's own.", flag="--dtype")
    load_format: LoadFormat = setting(
        "auto", "dummy: random weights from config.json alone, for benchmarks.", flag="--load-format"
    )
    max_model_len: int | None = setting(
        None, "Maximum prompt + output in tokens; none: the model's own limit.", flag="--max-model-len", ge=2
    )
    seed: int = setting(0, "Seed of dummy weights.", flag="--seed", ge=0)


class EngineSection(Section):
    """The engine core; the fields are those of `EngineConfig`."""

    kind: EngineKind = setting("tandem", "tandem: the built-in engine. vllm: vLLM, see docs/vllm.md.", flag="--engine")
    python: str = setting("", "Interpreter of an environment that has vLLM; empty: this one.", flag="--engine-python")
    vllm_args: dict[str, Any] = setting(
        {},
        "Further arguments of vLLM, named as in AsyncEngineArgs: {tensor_parallel_size: 2}.",
        flag="--vllm-args",
    )
    model_impl: ModelImpl = setting(
        "auto",
        "What computes the model: the built-in decoder (native), transformers, or auto: transformers where there is no "
        "native decoder. Instances that exchange KV need the same. Without effect on vLLM.",
        flag="--model-impl",
    )
    quantization: Quantization = setting(
        "none",
        "int8 or int4: weights of linear layers in 8 or 4 bits, made at the start, on CPU; KV keeps the dtype. "
        "Instances that exchange KV need the same.",
        flag="--quantization",
    )
    lora_adapters: dict[str, str] = setting(
        {},
        "Folders of LoRA adapters in PEFT's form, by the name that requests give: {sql: /adapters/sql}. Instances that "
        "exchange KV need the same. Of native decoders; with vLLM of the models that it supports.",
        flag="--lora-adapters",
    )
    device: Device = setting("cpu", "Device of the engine core.", flag="--device")
    block_size: int = setting(16, "Tokens in one KV block.", flag="--block-size", ge=1)
    num_blocks: int | None = setting(None, "KV blocks; none: kv_cache_bytes by block.", flag="--num-blocks", ge=2)
    kv_cache_bytes: int | None = setting(
        None, "KV memory in bytes; none: a fraction of the free memory.", flag="--kv-cache-bytes", ge=1
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Part of the GPU's memory for this engine, where no KV size is given. Without effect on CPU; vLLM's is one of "
        "vllm_args.",
        flag="--gpu-memory-utilization",
        gt=0,
        le=1,
    )
    enforce_eager: bool = setting(
        False,
        "true: no decode steps run as CUDA graphs, which dense native models otherwise do on a GPU. Without effect on "
        "vLLM.",
        flag="--enforce-eager",
    )
    max_num_seqs: int = setting(64, "Maximum number of requests in one step.", flag="--max-num-seqs", ge=1)
    max_num_batched_tokens: int = setting(
        512, "Token budget of one step: the chunk of chunked prefill.", flag="--max-num-batched-tokens", ge=1
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV of equal prompt prefixes.", flag="--prefix-caching")
    num_speculative_tokens: int = setting(
        0,
        "Tokens of a stream that prompt lookup drafts for one step at most: docs/speculation.md. Not with vLLM.",
        flag="--num-speculative-tokens",
        ge=0,
        le=64,
    )
    tensor_parallel_size: int = setting(
        1,
        "Processes that divide every layer among them, on this host. Instances of different sizes exchange KV.",
        flag="--tensor-parallel-size",
        ge=1,
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages, of that many processes each, that divide the layers among them, on this host.",
        flag="--pipeline-parallel-size",
        ge=1,
    )
    num_threads: int | None = setting(
        None,
        "Compute threads of each process of the core; none: the cores it may use, within a container's quota.",
        flag="--num-threads",
        ge=1,
        le=MAX_THREADS,
    )
    cpu_cores: tuple[int, ...] = setting((), "CPU cores the engine core is pinned to; empty: any.", flag="--cpu-cores")
    attention_backend: str = setting("auto", "Name of the attention backend.", flag="--attention-backend")

    @field_validator("tensor_parallel_size", "pipeline_parallel_size", "quantization")
    @classmethod
    def _is_for_the_built_in_engine(cls, value: int | str, info: ValidationInfo) -> int | str:
        if value not in (1, "none") and info.data.get("kind") == "vllm":
            raise ValueError(
                f"of the built-in engine alone; for vLLM write --vllm-args '{{{info.field_name}: {value}}}'"
            )
        return value

    @field_validator("num_speculative_tokens")
    @classmethod
    def _is_exact(cls, value: int, info: ValidationInfo) -> int:
        if value and info.data.get("kind") == "vllm":
            raise ValueError("of the built-in engine alone: with vLLM's drafts a sampled stream does not go on exactly")
        return value


_LIST = "kv_transfer.multi_connector:MultiConnector"
_SETTINGS = {
    "path": "transfer.folder (--kv-folder)",
    "url": "transfer.url (--kv-url)",
    "kv_secret_file": "transfer.secret_file (--kv-secret-file)",
    "capacity_bytes": "transfer.capacity_bytes (--kv-capacity-bytes)",
}
"""Options with a setting of their own, by the name of the connectors' argument."""


@dataclass(frozen=True, slots=True)
class KnownConnector:
    """A connector with a short name. `takes`: options with a setting of their own."""

    class_path: str
    takes: frozenset[str]
    needs: frozenset[str] = frozenset()  # at least one of these is required
    is_store: bool = True  # stores pages by content, so that it may follow another connector in a list


_KNOWN = {
    "null": KnownConnector("engine.kv_connector:NullKVConnector", frozenset(), is_store=False),
    "shared_storage": KnownConnector(
        "kv_transfer.stores.files:SharedStorageConnector",
        frozenset({"path", "kv_secret_file", "capacity_bytes"}),
        frozenset({"path"}),
    ),
    "redis": KnownConnector(
        "kv_transfer.stores.redis.connector:RedisConnector", frozenset({"url", "kv_secret_file"}), frozenset({"url"})
    ),
    "nixl": KnownConnector("kv_transfer.nixl.connector:NixlConnector", frozenset({"kv_secret_file"}), is_store=False),
    "lmcache": KnownConnector(
        "kv_transfer.stores.lmcache.connector:LMCacheConnector", frozenset(_SETTINGS), frozenset({"path", "url"})
    ),
}
CONNECTORS = {name: known.class_path for name, known in _KNOWN.items()}
"""Class of each short name; any other connector is given as module:Class."""


def check_names(connector: str) -> str:
    """Returns the setting; raises ValueError for an unknown connector or an invalid list."""
    names = connector.split(",")
    for name in names:
        if name not in _KNOWN and not CLASS_PATH.fullmatch(name):
            raise ValueError(f"{name!r} must be one of {', '.join(CONNECTORS)}, or module:Class")
    if len(set(names)) < len(names):
        raise ValueError("names a connector twice")
    if len(names) > 1 and "null" in names:
        raise ValueError("null transfers nothing and cannot be in a list")
    for name in names[1:]:
        if name in _KNOWN and not _KNOWN[name].is_store:
            raise ValueError(f"{name} stores nothing: it can only be the first of a list")
    if "lmcache" in names and (shared := {"redis", "shared_storage"}.intersection(names)):
        raise ValueError(f"lmcache would get the url or folder of {min(shared)}: give it alone, or after nixl")
    return connector


class TransferSection(Section):
    connector: Annotated[str, AfterValidator(check_names)] = setting(
        "shared_storage",
        f"{', '.join(CONNECTORS)}, or module:Class of a third party. Of several, as in nixl,redis, the first hands KV"
        " over and the others store shared prefixes.",
        flag="--kv-connector",
    )
    folder: Path | None = setting(
        None, "Folder of shared_storage, or of lmcache on a disk, shared by all instances.", flag="--kv-folder"
    )
    url: str | None = setting(
        None,
        "Server of redis: redis:// or rediss://host:port/db, without credentials. Of lmcache: tcp://host:port.",
        flag="--kv-url",
    )
    secret_file: Path | None = setting(
        None, "File with the key of the page digests, the same for all instances.", flag="--kv-secret-file"
    )
    capacity_bytes: int | None = setting(
        None, "Maximum size of the store in bytes; none: the connector's default.", flag="--kv-capacity-bytes", ge=1
    )
    options: dict[str, str | int | float | bool] = setting(
        {},
        "Further arguments of the connector's class; with several connectors prefixed by its name: redis.ttl_s.",
        flag="--kv-options",
    )
    lease_s: float = setting(
        30.0, "Seconds for which KV is held after the last renewal by its reader.", flag="--lease-s", gt=0, le=3600
    )
    reservation_s: float = setting(
        30.0,
        "Most seconds that a request waits for room, and that blocks stay reserved without KV or seed.",
        flag="--reservation-s",
        gt=0,
        le=3600,
    )
    max_held_fraction: float = setting(0.5, "Fraction of the blocks that transfers may hold.", gt=0, le=1)


class InstanceSettings(Settings):
    """The settings of `python -m prefill_service` and `python -m decode_service`."""

    of_other_programs = frozenset({("tls", "require_client_cert")})
    model: ModelSection
    server: ListenSettings = ListenSettings()
    instance: InstanceSection = InstanceSection()
    engine: EngineSection = EngineSection()
    transfer: TransferSection = TransferSection()
    peers: ChannelSettings = ChannelSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    tls: TlsSettings = TlsSettings()
    health: HealthSettings = HealthSettings()

    def check_network(self) -> None:
        """Raises SettingsError for a public address without TLS: the services are for routers and instances alone."""
        server = self.server.resolved()
        if self.tls.ca_file is None and not server.allow_plaintext and not listens_privately(server.host):
            raise SettingsError(
                f"server.host: {server.host} is not private, and without TLS an instance listens on private addresses "
                "alone: give the pod's own address, tls.cert_file, key_file and ca_file, or --server-allow-plaintext"
            )

    @property
    def model_name(self) -> str:
        return self.model.name or self.model.folder.resolve().name


def engine_config(settings: InstanceSettings) -> EngineConfig:
    """The engine core's configuration. Raises SettingsError where sections do not fit together."""
    model, transfer, engine = settings.model, settings.transfer, settings.engine
    if engine.quantization != "none" and engine.device != "cpu":
        raise SettingsError(
            f"engine.quantization: {engine.quantization} is supported on cpu, not on {engine.device}; set none"
        )
    if engine.vllm_args and engine.kind != "vllm":
        raise SettingsError(
            f"engine.vllm_args (--vllm-args): the engine is {engine.kind}, which has no such arguments; set --engine "
            "vllm, or leave them out"
        )
    return EngineConfig(
        model=str(model.folder),
        **model.model_dump(exclude={"folder", "name"}),
        **engine.model_dump(),
        max_held_fraction=transfer.max_held_fraction,
        kv_connector=connector_config(transfer, settings.server.advertised_host),
        process_setup="serving.logging:configure_process",
        process_setup_options={"level": settings.log.level, "format": settings.log.format},
    )


def connector_config(transfer: TransferSection, advertised_host: str = "127.0.0.1") -> KVConnectorConfig:
    """The connector, or the list of them: the first hands KV over, the others are prefix stores. Folder, address, key
    and capacity are given to those that take them; options of a list are prefixed by their connector:
    {"redis.ttl_s": 600}. Raises SettingsError."""
    names = transfer.connector.split(",")
    settings = {
        "path": transfer.folder and str(transfer.folder),
        "url": transfer.url,
        "kv_secret_file": transfer.secret_file and str(transfer.secret_file),
        "capacity_bytes": transfer.capacity_bytes,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    for option in given:
        if not any(name not in _KNOWN or option in _KNOWN[name].takes for name in names):
            raise SettingsError(f"{_SETTINGS[option]} is not supported by the {transfer.connector} connector")
    _check_max_lease(names[0], transfer)
    configs = [
        _one(name, given, options, advertised_host, transfer.lease_s)
        for name, options in _split_options(names, transfer.options).items()
    ]
    if len(configs) == 1:
        return configs[0]
    members = [{"class_path": config.class_path, "options": config.options} for config in configs]
    return KVConnectorConfig(class_path=_LIST, options={"connectors": members})


def _check_max_lease(name: str, transfer: TransferSection) -> None:
    """Of the first connector, which alone hands over."""
    options, lease_s = transfer.options, transfer.lease_s
    try:
        max_lease_s = float(options.get("max_lease_s", options.get(f"{name}.max_lease_s", lease_s)))
    except (TypeError, ValueError):
        return  # the connector says what it takes
    if max_lease_s < lease_s:
        raise SettingsError(
            f"transfer.options: max_lease_s of {name} is {max_lease_s:g};"
            f" it must not be less than transfer.lease_s (--lease-s), which is {lease_s:g}"
        )


def _split_options(names: list[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By connector."""
    if len(names) == 1:
        return {names[0]: dict(options)}
    split: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in options.items():
        name, dot, option = key.rpartition(".")
        if not dot or name not in split:
            raise SettingsError(f"transfer.options.{key}: in a list of connectors it must be {names[-1]}.{option}")
        split[name][option] = value
    return split


def _one(
    name: str, given: Mapping[str, Any], options: dict[str, Any], advertised_host: str, lease_s: float
) -> KVConnectorConfig:
    known = _KNOWN.get(name)
    own = {option: value for option, value in given.items() if known is None or option in known.takes}
    if twice := own.keys() & options.keys():
        raise SettingsError(f"transfer.options.{min(twice)} has a setting of its own; give it there")
    if known is None:
        return KVConnectorConfig(class_path=name, options={**options, **own})
    if name == "null" and options:
        raise SettingsError("the null connector takes no options")
    if known.needs and not known.needs & own.keys():
        needed = " or ".join(_SETTINGS[option] for option in sorted(known.needs))
        hint = "; give a folder that all instances share, or --kv-connector nixl" if name == "shared_storage" else ""
        raise SettingsError(f"{needed} is required by the {name} connector{hint}")
    if "kv_secret_file" in known.takes - own.keys() and options.get("digest", True):
        raise SettingsError(
            f"transfer.secret_file is required by the {name} connector: create one with"
            " `openssl rand -hex 32`, the same for all instances, and set --kv-secret-file"
        )
    if name == "nixl":
        options.setdefault("address", advertised_host)
    if name != "null" and lease_s > MAX_LEASE_S:
        options.setdefault("max_lease_s", lease_s)
    return KVConnectorConfig(class_path=known.class_path, options={**options, **own})
