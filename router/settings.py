"""The router's settings: one section per concern, read once by the composition root."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from router.admission.settings import AdmissionSettings
from router.api.endpoint_picker import EndpointPickerSettings
from router.api.openai.server import HttpSettings
from router.api.security import AuthSettings, RouterTlsSettings
from router.autoscaler.settings import AutoscalerSettings, SignalSettings
from router.kubernetes.settings import KubernetesSettings
from router.picking.settings import DisaggregationSettings, PickingSettings, SloSettings
from router.pools.settings import PoolSettings
from router.resilience.poison_requests import QuarantineSettings
from router.resilience.retry import FailoverSettings
from router.resilience.safeguards import EjectionSettings
from serving.channel import ChannelSettings
from serving.logging import LogSettings
from serving.metrics import MetricsSettings
from serving.server import HealthSettings, ServerSettings
from serving.settings import Address, Section, Settings, parse_address, setting
from serving.tracing import TracingSettings


class RouterSection(Section):
    """What this router serves, and where."""

    listen: Address | None = setting(
        None, "host:port to listen on; wins over server.host and server.port.", flag="--listen"
    )
    model: str = setting(
        ...,
        "Folder with the model's tokenizer, generation_config.json and config.json, whose EOS ids end every answer.",
        flag="--model",
    )
    model_name: str | None = setting(None, "Name clients know the model by; none: the folder's.", flag="--model-name")
    admin_listen: Address | None = setting(
        None,
        "host:port for the operators' calls (tandem pools), apart from the clients'; none: they are not served.",
        flag="--admin-listen",
    )
    workers: int = setting(
        1,
        "Processes that answer on the same ports and share the limits, so that one router uses several cores. Each "
        "connection belongs to one of them: clients spread over as many connections.",
        flag="--workers",
        ge=1,
        le=64,
    )
    ready_file: Path | None = setting(None, "File that gets the line `ready address=host:port`.", flag="--ready-file")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "harmony", "none"] = setting(
        "auto",
        "How the model writes tool calls; auto: by its chat template; none: no tools.",
        flag="--tool-call-parser",
    )
    reasoning_parser: Literal["auto", "think", "harmony", "none"] = setting(
        "auto",
        "How answers begin: think: with <think>…</think>; harmony: they are messages in channels, as gpt-oss writes "
        "them; auto: by the chat template.",
        flag="--reasoning-parser",
    )
    vllm_engine: bool = setting(True, "Answer vLLM's gRPC service, vllm.grpc.engine.VllmEngine, on the same port.")


class RouterSettings(Settings):
    """The whole tree of `python -m router`."""

    of_other_programs = frozenset({("server", "drain_move_s")})  # but not server.listen, which is router.listen here
    router: RouterSection
    server: ServerSettings = ServerSettings()
    http: HttpSettings = HttpSettings()
    pools: PoolSettings = PoolSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    channel: ChannelSettings = ChannelSettings()
    disaggregation: DisaggregationSettings = DisaggregationSettings()
    picking: PickingSettings = PickingSettings()
    slo: SloSettings = SloSettings()
    admission: AdmissionSettings = AdmissionSettings()
    failover: FailoverSettings = FailoverSettings()
    ejection: EjectionSettings = EjectionSettings()
    quarantine: QuarantineSettings = QuarantineSettings()
    autoscaler: AutoscalerSettings = AutoscalerSettings()
    signals: SignalSettings = SignalSettings()
    endpoint_picker: EndpointPickerSettings = EndpointPickerSettings()
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

    @model_validator(mode="after")
    def _page_has_a_port(self) -> Self:
        if self.http.page is True and self.http.listen is None:
            raise ValueError("http.page needs http.listen, the port that serves the page")
        return self

    @model_validator(mode="after")
    def _picker_knows_routers(self) -> Self:
        if self.endpoint_picker.listen is not None and not (self.http.listen and self.signals.routers):
            raise ValueError(
                "endpoint_picker.listen needs http.listen, the port of the routers that it picks, and signals.routers, "
                "by which it knows them"
            )
        return self

    @property
    def effective_server(self) -> ServerSettings:
        """The server's section with `router.listen` applied."""
        return self.server if self.router.listen is None else self._listening_on(self.router.listen)

    def server_beside(self, listen: str | None) -> ServerSettings | None:
        """The server's section for one of the other listeners; None where that is not set."""
        return None if listen is None else self._listening_on(listen).model_copy(update={"advertise": None})

    def _listening_on(self, listen: str) -> ServerSettings:
        host, port = parse_address(listen)
        return self.server.model_copy(update={"host": host, "port": port})
