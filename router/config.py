"""The router's settings: one section per concern, read once by the composition root."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import field_validator, model_validator

from router.autoscaler.policy import AutoscalerSettings
from router.http.settings import HttpSettings
from router.kubernetes.settings import KubernetesSettings
from router.picking.scorers import Scoring
from router.pools.membership import targets
from router.security import AuthSettings, RouterTlsSettings
from serving.channel import ChannelSettings
from serving.logging import LogSettings
from serving.metrics import MetricsSettings
from serving.server_settings import HealthSettings, ServerSettings
from serving.settings import Section, Settings, setting
from serving.trace_export import TracingSettings


class RouterSection(Section):
    """What this router serves, and where."""

    listen: str | None = setting(
        None, "host:port to listen on; wins over server.host and server.port.", flag="--listen"
    )
    model: str = setting(..., "Folder with the model's tokenizer and generation_config.json.", flag="--model")
    model_name: str | None = setting(None, "Name clients know the model by; none: the folder's.", flag="--model-name")
    admin_listen: str | None = setting(
        None,
        "host:port for the operators' calls (tandem pools), apart from the clients'; none: they are not served.",
        flag="--admin-listen",
    )
    ready_file: str | None = setting(None, "File that gets the line `ready address=host:port`.", flag="--ready-file")
    vllm_engine: bool = setting(True, "Answer vLLM's gRPC service, vllm.grpc.engine.VllmEngine, on the same port.")

    @field_validator("listen", "admin_listen")
    @classmethod
    def _host_and_port(cls, listen: str | None) -> str | None:
        if listen is not None:
            _split(listen)
        return listen


class PoolSettings(Section):
    """The instances, and when one counts as gone."""

    prefill: str = setting(
        "", "Prefill instances: host:port, dns:name:port, kubernetes:service:port; comma-separated.", flag="--prefill"
    )
    decode: str = setting(
        "", "Decode instances: host:port, dns:name:port, kubernetes:service:port; comma-separated.", flag="--decode"
    )
    stack: str = setting(
        "",
        "unix:/PATH of the local stack that owns the instances, in place of the two lists: who there is, and resizing.",
        flag="--stack",
    )
    dns_interval_s: float = setting(5.0, "Seconds after which dns: names are resolved again, within a fifth.", gt=0)
    check_tokenizer: bool = setting(True, "Leave out instances whose tokenizer files differ from the router's.")
    beat_timeout_s: float = setting(2.0, "Seconds without a load report after which an instance is out.", gt=0)
    core_silence_timeout_s: float = setting(
        2.0, "Seconds of silence of an engine core after which its instance is out, or 5 of its steps if longer.", gt=0
    )
    settle_s: float = setting(
        1.0,
        "Seconds that a starting router which could serve waits for the rest of its instances before it is ready.",
        ge=0,
    )
    min_backoff_s: float = setting(0.1, "First wait in seconds before an instance is tried again.", gt=0)
    max_backoff_s: float = setting(0.5, "Longest wait in seconds before an instance is tried again.", ge=0.1)

    @field_validator("prefill", "decode")
    @classmethod
    def _is_list_of_targets(cls, value: str) -> str:
        targets(value)
        return value

    @field_validator("stack")
    @classmethod
    def _is_socket(cls, stack: str) -> str:
        if stack and not stack.startswith("unix:/"):
            raise ValueError("is not unix:/PATH, the socket of a local stack; `tandem up` gives it to its router")
        return stack

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if self.stack and (self.prefill or self.decode):
            raise ValueError("stack tells who is in both pools: leave out prefill and decode, or stack")
        return self


class DisaggregationSettings(Section):
    """When a request is split between the pools."""

    mode: Literal["always", "auto", "never"] = setting(
        "auto", "Split requests always, where it pays, or never.", flag="--disaggregation"
    )
    min_tokens: int = setting(
        64,
        "In auto: uncached tokens up to which a prompt is never split; while nothing is measured, longer ones are.",
        ge=0,
    )
    interruption_weight: float = setting(
        1.0, "In auto: what a second's delay of one running stream counts as, in seconds of time to first token.", ge=0
    )
    expected_streams: float = setting(
        1.0, "In auto: streams taken to begin at a decode instance while it prefills, besides those that run.", ge=0
    )
    probe_s: float = setting(
        30.0, "In auto: seconds without a split request after which one is split to measure the speeds again.", gt=0
    )
    speed_smoothing: float = setting(
        0.2,
        "Weight of the newest measurement in a speed; 0: none is measured, and min_tokens decides alone.",
        ge=0,
        le=1,
    )
    lease_s: float = setting(30.0, "Seconds that a prefill instance holds KV without a sign of its reader.", gt=0)
    reservation_s: float = setting(
        30.0, "Seconds that a decode instance keeps blocks reserved without KV or seed.", gt=0
    )
    reserve_timeout_s: float = setting(10.0, "Seconds to wait for a decode instance's reservation.", gt=0)


class TenantSettings(Section):
    """What a tenant is entitled to while others are there too."""

    weight: float = setting(1.0, "Its part of a full house, relative to the other tenants' weights.", gt=0)
    max_requests: int | None = setting(None, "Its requests in flight; none: as many as there is room for.", ge=1)
    max_tokens: int | None = setting(
        None, "Its tokens in flight, prompt and expected output; none: as many as there is room for.", ge=1
    )


class AdmissionSettings(Section):
    """What the router takes on at one time, who waits, and who is refused. docs/admission.md says why."""

    max_requests: int = setting(1024, "Requests in flight at this router.", ge=1)
    max_tokens: int = setting(
        1 << 23, "Prompt and expected output tokens of the requests in flight, every choice counted.", ge=1
    )
    sequence_fraction: float = setting(
        1.1, "Choices in flight as a part of those that the decode instances run at one time.", gt=0
    )
    block_fraction: float = setting(
        1.0, "KV blocks of the requests in flight, as expected, as a part of the decode instances' blocks.", gt=0
    )
    prefill_steps: float = setting(
        16.0, "Steps of the instances that prefill which the prompts without a first token may fill.", gt=0
    )
    expected_tokens: int = setting(
        256, "Output tokens expected of a choice (at most its max_tokens) until enough have ended to know.", ge=1
    )
    num_routers: int = setting(1, "Routers that send to these pools; each is sure of its equal part of them.", ge=1)
    queue_timeout_s: float = setting(5.0, "Seconds that a request may wait for room.", gt=0)
    max_queued: int = setting(256, "Requests of one tenant that may wait; 0: none waits.", ge=0)
    max_queued_tokens: int = setting(
        1 << 20, "Tokens of all waiting requests, above which no tenant may have more than its part.", ge=0
    )
    retry_after_s: float = setting(1.0, "Shortest hint in seconds when to come again.", gt=0)
    max_retry_after_s: float = setting(10.0, "Longest hint in seconds, to which up to a half is added at random.", gt=0)
    tenant_key: str = setting(
        "",
        "Metadata key in which a trusted gateway names the tenant; empty: everybody is one tenant. The gateway must "
        "remove it from what clients send.",
    )
    tenants: dict[str, TenantSettings] = setting({}, "Tenants with a weight or bounds of their own, by name.")
    other_tenants: TenantSettings = TenantSettings()
    max_tenants: int = setting(1024, "Tenants that are told apart at one time; more share one place.", ge=1)

    @field_validator("tenant_key")
    @classmethod
    def _is_metadata_key(cls, key: str) -> str:
        if key and (not re.fullmatch(r"[a-z0-9_.-]+", key) or key.endswith("-bin")):
            raise ValueError("must be a metadata key of text: of [a-z0-9_.-], not ending in -bin")
        return key


class PickingSettings(Section):
    """Which instance of a pool a request goes to: the one with the lowest score."""

    decode_scorers: str = setting(
        "queue=1",
        "Scorers of the decode pool with their weights, as in queue=1,prefix=3; the lowest sum is picked. "
        "queue, waiting_tokens, kv_pressure, prefix, session, or module:Name.",
        flag="--decode-scorers",
    )
    prefill_scorers: str = setting("queue=1", "The same for the prefill pool.", flag="--prefill-scorers")
    max_prefix_blocks: int = setting(
        100_000, "KV blocks whose place is remembered, all instances together; 200 bytes each.", ge=1
    )
    max_sessions: int = setting(10_000, "Sessions whose instances are remembered.", ge=1)

    @field_validator("decode_scorers", "prefill_scorers")
    @classmethod
    def _known_scorers(cls, text: str) -> str:
        Scoring.parse(text)
        return text

    @property
    def decode_scoring(self) -> Scoring:
        return Scoring.parse(self.decode_scorers)

    @property
    def prefill_scoring(self) -> Scoring:
        return Scoring.parse(self.prefill_scorers)


class FailoverSettings(Section):
    """How often a request moves to other instances before it is given up."""

    max_retries: int = setting(2, "Attempts in a row that may fail without a token before the request does.", ge=0)
    max_resumptions: int = setting(3, "Times that a stream that has begun goes on elsewhere.", ge=0)
    resume_wait_s: float = setting(5.0, "Seconds that a stream that has begun waits for an instance to go on at.", ge=0)
    retry_share: float = setting(
        0.2, "Retries that may be under way at once, as a share of the active choices of requests.", ge=0, le=1
    )
    min_retries_under_way: int = setting(3, "Retries that may be under way at once, however few are active.", ge=1)
    retry_wait_s: float = setting(5.0, "Seconds that a retry waits for its turn before it is refused.", ge=0)


class EjectionSettings(Section):
    """When an instance that beats and yet fails is left out for a while."""

    failures: int = setting(5, "Failures in a row, with no token between them, that eject an instance.", ge=1)
    ejection_s: float = setting(30.0, "Seconds of the first ejection; the n-th lasts n times as long.", gt=0)
    max_share: float = setting(0.5, "Share of a pool that may be ejected at once.", ge=0, le=1)


class QuarantineSettings(Section):
    """When a request is held to break the instances that compute it."""

    ttl_s: float = setting(300.0, "Seconds for which the same content is refused.", gt=0)
    memory_s: float = setting(60.0, "Seconds for which the death of an instance is evidence.", gt=0)
    trial_wait_s: float = setting(
        1.0, "Longest wait in seconds of a suspect for another one's trial at the same instance.", ge=0
    )
    max_entries: int = setting(1024, "Entries of each table: suspects, deaths, refused contents.", ge=1)


class RouterSettings(Settings):
    """The whole tree of `python -m router`."""

    router: RouterSection
    server: ServerSettings = ServerSettings()
    http: HttpSettings = HttpSettings()
    pools: PoolSettings = PoolSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    channel: ChannelSettings = ChannelSettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    picking: PickingSettings = PickingSettings()
    admission: AdmissionSettings = AdmissionSettings()
    failover: FailoverSettings = FailoverSettings()
    ejection: EjectionSettings = EjectionSettings()
    quarantine: QuarantineSettings = QuarantineSettings()
    autoscaler: AutoscalerSettings = AutoscalerSettings()
    tls: RouterTlsSettings = RouterTlsSettings()
    auth: AuthSettings = AuthSettings()
    health: HealthSettings = HealthSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _autoscaler_can_resize(self) -> Self:
        if self.autoscaler.enabled and not (self.pools.stack or self.kubernetes.workloads):
            raise ValueError(
                "autoscaler.enabled needs the owner of the instances' processes: set pools.stack (`tandem up` does) or "
                "kubernetes.prefill and kubernetes.decode, or leave autoscaler.enabled out"
            )
        if self.pools.stack and self.kubernetes.workloads:
            raise ValueError("pools.stack and kubernetes both own the instances: leave one of them out")
        return self

    @property
    def effective_server(self) -> ServerSettings:
        """The server's section with `router.listen` applied."""
        return self.server if self.router.listen is None else self._listening_on(self.router.listen)

    @property
    def admin_server(self) -> ServerSettings | None:
        """The server's section for the admin listener; None where there is none."""
        if self.router.admin_listen is None:
            return None
        return self._listening_on(self.router.admin_listen).model_copy(update={"advertise": None})

    def _listening_on(self, listen: str) -> ServerSettings:
        host, port = _split(listen)
        return self.server.model_copy(update={"host": host, "port": port})


def _split(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError("is not host:port, such as 127.0.0.1:7000")
    return host.strip("[]"), int(port)
