"""The settings that both roles share, and the engine's configuration made of them. A role's module has its defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from engine.config import Device, Dtype, EngineConfig, KVConnectorConfig, LoadFormat
from instance.connectors import CONNECTORS, check_names, connector_config
from serving.addresses import listens_privately
from serving.channel import ChannelSettings
from serving.logging import LogSettings
from serving.metrics import MetricsSettings
from serving.server_settings import HealthSettings, ServerSettings
from serving.settings import Section, Settings, SettingsError, setting
from serving.tls import TlsSettings
from serving.trace_export import TracingSettings

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/]+):(?P<port>[0-9]{1,5})")


class ListenSettings(ServerSettings):
    """The gRPC port of this instance. All calls of a router come from one address, so one address may have many."""

    advertise: str | None = setting(
        None, "host:port that peers are told; none: the address listened on.", flag="--advertise"
    )
    listen: str | None = setting(None, "host:port to listen on, in one: goes before host and port.", flag="--listen")
    max_calls_per_peer: int = setting(4096, "Open calls from one address.", ge=1)
    max_bad_calls_per_s: float = setting(
        10_000.0,
        "Calls per second from one address that may come to nothing, twice as many in a burst; a router's may be many.",
        gt=0,
    )
    drain_accept_s: float = setting(1.0, "Seconds that a drain still accepts requests, until routers know.", ge=0)
    drain_move_s: float = setting(
        10.0, "Last seconds of the grace, in which routers let what still runs go on elsewhere.", ge=0
    )
    allow_plaintext: bool = setting(
        False,
        "Listen without TLS on addresses that are not of a private network, and fetch KV from there: for networks that"
        " something else protects.",
    )

    @field_validator("listen")
    @classmethod
    def _is_host_port(cls, value: str | None) -> str | None:
        if value is not None and not _HOST_PORT.fullmatch(value):
            raise ValueError("must be host:port, an IPv6 host in brackets; port 0 takes a free one")
        return value

    def resolved(self) -> ListenSettings:
        """The same with `listen` written into host and port."""
        matched = _HOST_PORT.fullmatch(self.listen or "")
        if matched is None:
            return self
        update = {"host": matched["host"].strip("[]"), "port": int(matched["port"]), "listen": None}
        return self.model_validate({**self.model_dump(), **update})

    @property
    def advertised_host(self) -> str:
        """Where peers reach this instance, without the port."""
        matched = _HOST_PORT.fullmatch(self.advertise or "")
        return matched["host"].strip("[]") if matched is not None else self.resolved().host


class InstanceSection(Section):
    """Who this instance is."""

    id: str | None = setting(None, "Stable name, for people; none: role and port.", flag="--instance-id")
    ready_file: Path | None = setting(
        None, "File that appears when the instance is ready, with its ready line in it.", flag="--ready-file"
    )
    max_requests: int = setting(
        1024, "Requests here at the same time, waiting ones included; more are refused.", flag="--max-requests", ge=1
    )
    core_unready_s: float = setting(5.0, "Seconds of the core's silence after which readiness ends.", gt=0.5)
    core_dead_s: float = setting(30.0, "Seconds of the core's silence after which liveness ends.", gt=0.5)
    load_interval_s: float = setting(0.25, "Seconds between two load reports at the most.", ge=0.02, le=10)


class ModelSection(Section):
    """What is served."""

    folder: Path = setting(..., "Folder of a checkpoint in Hugging Face's form.", flag="--model")
    name: str | None = setting(None, "Name it is served by; none: the folder's.", flag="--served-model-name")
    dtype: Dtype = setting("auto", "Of weights and KV; auto: the checkpoint's own.", flag="--dtype")
    load_format: LoadFormat = setting(
        "auto", "dummy: random weights from config.json alone, for benchmarks.", flag="--load-format"
    )
    max_model_len: int | None = setting(
        None, "Longest prompt + output in tokens; none: the model's own limit.", flag="--max-model-len", ge=2
    )
    seed: int = setting(0, "Seed of dummy weights.", flag="--seed", ge=0)


class EngineSection(Section):
    """How the engine core computes."""

    device: Device = setting("cpu", "Where the core computes.", flag="--device")
    block_size: int = setting(16, "Tokens in one KV block.", flag="--block-size", ge=1)
    num_blocks: int | None = setting(None, "KV blocks; none: kv_cache_bytes by block.", flag="--num-blocks", ge=2)
    kv_cache_bytes: int | None = setting(
        None, "KV memory in bytes; none: a share of what is free.", flag="--kv-cache-bytes", ge=1
    )
    max_num_seqs: int = setting(64, "Requests in one step at the most.", flag="--max-num-seqs", ge=1)
    max_num_batched_tokens: int = setting(
        512, "Token budget of one step: the chunk of chunked prefill.", flag="--max-num-batched-tokens", ge=1
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV of equal prompt beginnings.", flag="--prefix-caching")
    num_threads: int | None = setting(
        None,
        "Threads of the core's products; none: the cores it may use, within a container's quota.",
        flag="--num-threads",
        ge=1,
    )
    cpu_cores: tuple[int, ...] = setting((), "Cores the core is pinned to; empty: any.", flag="--cpu-cores")
    attention_backend: str = setting("auto", "Name of the attention backend.", flag="--attention-backend")


class TransferSection(Section):
    """How KV comes from and goes to other instances."""

    connector: str = setting(
        "shared_storage",
        f"{', '.join(CONNECTORS)}, or module:Class of your own. Several, as in nixl,redis: the first hands over, the"
        " others keep prefixes that instances share.",
        flag="--kv-connector",
    )
    folder: Path | None = setting(
        None, "Folder of shared_storage, or of lmcache on a disk, the same for all instances.", flag="--kv-folder"
    )
    url: str | None = setting(
        None,
        "Server of redis: redis:// or rediss://host:port/db, without a login. Of lmcache: that, or tcp://host:port.",
        flag="--kv-url",
    )
    secret_file: Path | None = setting(
        None, "File with the key of the page digests, the same for all instances.", flag="--kv-secret-file"
    )
    capacity_bytes: int | None = setting(
        None, "Size in bytes the store is swept to; none: the connector's default.", flag="--kv-capacity-bytes", ge=1
    )
    options: dict[str, str | int | float | bool] = setting(
        {},
        "Further keyword arguments of the connector's class; of several connectors: after its name, redis.ttl_s.",
        flag="--kv-options",
    )
    lease_s: float = setting(
        30.0, "Seconds that held KV outlives the last sign of its reader.", flag="--lease-s", gt=0, le=3600
    )
    reservation_s: float = setting(
        30.0, "Seconds that blocks stay reserved without KV or seed.", flag="--reservation-s", gt=0, le=3600
    )
    max_held_fraction: float = setting(0.5, "Share of the blocks that transfers may hold.", gt=0, le=1)

    @field_validator("connector")
    @classmethod
    def _is_known(cls, value: str) -> str:
        return check_names(value)


class InstanceSettings(Settings):
    """One instance: the tree that `python -m prefill_service` and `python -m decode_service` read."""

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
        """Raises SettingsError where strangers could call what is for routers and instances alone."""
        server = self.server.resolved()
        if self.tls.ca_file is None and not server.allow_plaintext and not listens_privately(server.host):
            raise SettingsError(
                f"server.host: without TLS an instance listens on private addresses alone, which {server.host} is not: "
                "give the pod's own address, tls.cert_file, key_file and ca_file, or --server-allow-plaintext"
            )

    @property
    def model_name(self) -> str:
        """The name that requests call the model by."""
        return self.model.name or self.model.folder.resolve().name


RoleName = Literal["prefill", "decode"]


def engine_config(settings: InstanceSettings) -> EngineConfig:
    """What the engine core is told. Raises SettingsError where sections do not fit together."""
    model, engine, transfer = settings.model, settings.engine, settings.transfer
    return EngineConfig(
        model=str(model.folder),
        dtype=model.dtype,
        device=engine.device,
        load_format=model.load_format,
        max_model_len=model.max_model_len,
        block_size=engine.block_size,
        num_blocks=engine.num_blocks,
        kv_cache_bytes=engine.kv_cache_bytes,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        enable_prefix_caching=engine.enable_prefix_caching,
        num_threads=engine.num_threads,
        cpu_cores=engine.cpu_cores,
        attention_backend=engine.attention_backend,
        seed=model.seed,
        lease_s=transfer.lease_s,
        max_held_fraction=transfer.max_held_fraction,
        reservation_s=transfer.reservation_s,
        kv_connector=_connector_config(transfer, settings.server.advertised_host),
        process_setup="serving.logging:configure_process",
        process_setup_options={"level": settings.log.level, "format": settings.log.format},
    )


def _connector_config(transfer: TransferSection, advertised_host: str = "127.0.0.1") -> KVConnectorConfig:
    named = {
        "path": None if transfer.folder is None else str(transfer.folder),
        "url": transfer.url,
        "kv_secret_file": None if transfer.secret_file is None else str(transfer.secret_file),
        "capacity_bytes": transfer.capacity_bytes,
    }
    return connector_config(transfer.connector, named, transfer.options, advertised_host=advertised_host)
