"""The router as one object: pools, service, health, and their beginning and end in the right order.

made ──start──▶ settling, NOT_SERVING ──▶ SERVING ⇄ NOT_SERVING (as the pools allow)
                                             └──drain──▶ NOT_SERVING for good, accepting ──▶ refusing ──▶ stopped
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import time
from typing import TYPE_CHECKING

from protos.tandem.v1 import generation_pb2, pools_pb2
from router.admission.capacity import capacity_of
from router.admission.door import Admission
from router.autoscaler.actuator import Actuator
from router.autoscaler.latencies import RecentLatencies
from router.autoscaler.loop import Autoscaler
from router.autoscaler.observer import Observer
from router.autoscaler.resizer import Resizer
from router.callers import Callers
from router.config import RouterSettings
from router.generate import Generator
from router.metrics import RouterCollector
from router.model import ServedModel
from router.picking.speeds import Speeds
from router.pools.instances import Role
from router.pools.membership import Membership, membership_of, names_services
from router.pools.pool import Dial, Pools
from router.pools_service import PoolsService
from router.releases import Releases
from router.security import Security
from router.service import GenerationService
from router.stack_link import StackLink
from router.vllm_engine import SERVICE as _VLLM_SERVICE
from router.vllm_engine import VllmEngineService
from serving import tracing
from serving.metrics import MetricsServer
from serving.open_calls import CONTROL
from serving.settings import SettingsError
from serving.tls import tls_collectors

if TYPE_CHECKING:
    from router.http.server import HttpServer
    from router.kubernetes.link import KubernetesLink

_log = logging.getLogger(__name__)
_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
_ADMIN_SERVICE = pools_pb2.DESCRIPTOR.services_by_name["PoolsService"]
_LOOK_AGAIN_S = 0.25
_RELEASES_S = 2.0


class RouterApp:
    """Made and started on the running event loop by the composition root, or by a test."""

    def __init__(
        self,
        settings: RouterSettings,
        model: ServedModel,
        *,
        prefill: Membership | None = None,
        decode: Membership | None = None,
        dial: Dial | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        security = Security(settings.tls, settings.auth)
        self._server = security.clients_server(settings.effective_server, settings.health)
        self._admin = security.admin_server(settings.admin_server) if settings.admin_server else None
        # gRPC has a backoff of its own, below which a member's attempts fail without trying.
        connection = settings.channel.model_copy(update={"max_backoff_ms": int(settings.pools.max_backoff_s * 1000)})
        self._releases = Releases()
        self._stack = StackLink(settings.pools.stack) if settings.pools.stack else None
        self._kubernetes = self._kubernetes_link()
        owner = self._stack or self._kubernetes
        self._actuator: Actuator | None = owner.actuator if owner is not None else None
        self.pools = Pools(
            prefill or self._membership("prefill", settings.pools.prefill),
            decode or self._membership("decode", settings.pools.decode),
            dial or (lambda address: security.dial(address, connection)),
            settings.pools,
            tokenizer_digest=model.tokenizer_digest,
            speeds=lambda: Speeds(settings.disaggregation.speed_smoothing, settings.disaggregation.min_tokens),
        )
        self.admission = Admission(
            settings.admission, lambda: capacity_of(self.pools.decode.views(), self.pools.prefill.views())
        )
        generator = Generator(self.pools, self._releases, settings, rng)
        callers = Callers(security.tokens, settings.admission.tenant_key)
        self.affinity = generator.affinity
        self.safeguards = generator.safeguards
        self.service = GenerationService(model, self.pools, self.admission, generator, callers)
        self.resizer = Resizer(self._actuator, self.pools) if self._actuator is not None else None
        self.service.metrics.recent = RecentLatencies(settings.autoscaler)
        self.autoscaler = self._made_autoscaler()
        self._pools_service = PoolsService(
            model,
            self.safeguards,
            self.affinity,
            settings.disaggregation,
            resizer=self.resizer,
            autoscaler=self.autoscaler,
        )
        collector = RouterCollector(
            self.service.metrics, self.safeguards, self.admission, model=model.name, autoscaler=self.autoscaler
        )
        self._metrics_server = MetricsServer(settings.metrics, collector, *tls_collectors(security.files))
        self._http = self._http_server(model, security)
        self._vllm_engine = self._made_vllm_engine(model) if settings.router.vllm_engine else None
        self._readiness: asyncio.Task[None] | None = None
        self._scaling: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port that clients are told; only after `start`."""
        return self._server.address

    @property
    def admin_address(self) -> str | None:
        """host:port of the operators' calls, None where they are not served; only after `start`."""
        return self._admin.address if self._admin is not None else None

    @property
    def metrics_address(self) -> str | None:
        """host:port that serves /metrics, None where they are not served; only after `start`."""
        return self._metrics_server.address

    @property
    def http_address(self) -> str | None:
        """host:port of OpenAI's HTTP API, None where it is not served; only after `start`."""
        return self._http.address if self._http is not None else None

    def _http_server(self, model: ServedModel, security: Security) -> HttpServer | None:
        settings = self._settings
        if settings.http.listen is None:
            return None
        # Imported late: who does not serve HTTP need not wait for FastAPI.
        from router.http.api import OpenAIApi
        from router.http.exchange import Bounds
        from router.http.server import HttpServer
        from router.http.tls import HttpTls

        bounds = Bounds(settings.http.max_body_bytes, settings.http.read_timeout_s, settings.server.max_deadline_s)
        api = OpenAIApi(
            self.service,
            model,
            self._server.calls,
            self._server.bad_callers,
            bounds,
            self._metrics_server.registry,
            lambda: self._is_serving,
            security.tokens.tenant_of if security.tokens is not None else None,
        )
        tls = None
        if security.files is not None:
            required, names = settings.tls.require_client_cert, settings.tls.client_names
            tls = HttpTls(security.files, require_client_cert=required, client_names=names)
        return HttpServer(api.app(), settings.http, write_timeout_s=settings.server.write_timeout_s, tls=tls)

    def _kubernetes_link(self) -> KubernetesLink | None:
        pools = self._settings.pools
        if not (self._settings.kubernetes.workloads or names_services(f"{pools.prefill},{pools.decode}")):
            return None
        # Imported late: who is in no cluster needs neither the package nor the second that it takes.
        try:
            from router.kubernetes.link import KubernetesLink
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"the settings name Kubernetes, and its client is missing ({error}): pip install 'kubernetes>=37'"
            ) from error
        return KubernetesLink(self._settings.kubernetes)

    def _made_vllm_engine(self, model: ServedModel) -> VllmEngineService:
        return VllmEngineService(
            self.service, model, self.pools, lambda: self.admission.num_queued, lambda: self._is_serving
        )

    @property
    def _is_serving(self) -> bool:
        """What the health service says: ready, and not draining."""
        return self._server.health.is_serving(_SERVICE.full_name)

    async def start(self) -> None:
        """Watches the instances and listens. NOT_SERVING until the pools are ready."""
        policies = {"Abort": CONTROL, "GetModelInfo": CONTROL}
        await self._server.register(_SERVICE, tracing.Traced(self.service), policies, ready=False)
        if self._vllm_engine is not None:
            policies |= dict.fromkeys(("GetServerInfo", "GetLoads", "HealthCheck"), CONTROL)
            await self._server.register(_VLLM_SERVICE, tracing.Traced(self._vllm_engine), policies, ready=False)
        if self._admin is not None:
            await self._admin.register(_ADMIN_SERVICE, self._pools_service, {"WatchPools": CONTROL})
            await self._admin.start()
        self._metrics_server.start()
        await self.pools.start()
        self._readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        self._readiness.add_done_callback(_tell_failure)
        if self.autoscaler is not None:
            self._scaling = asyncio.create_task(self.autoscaler.run(), name="autoscaler")
            self._scaling.add_done_callback(_tell_failure)
        await self._server.start()
        if self._http is not None:
            await self._http.start()

    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        needs_prefill = self._settings.disaggregation.mode == "always"
        return self.pools.decode.num_ready() > 0 and (not needs_prefill or self.pools.prefill.num_ready() > 0)

    async def drain(self) -> bool:
        """Says NOT_SERVING, then refuses new requests, lets the running ones finish, and stops; False if some were cut
        off when the grace was over."""
        self._pools_service.end_watches()
        await _cancelled(self._scaling)
        try:
            return await self._server.drain()
        finally:
            await self._let_go()

    async def stop(self) -> bool:
        """Ends everything now; False if a request was cut off."""
        try:
            return await self._server.stop()
        finally:
            await self._let_go()

    async def _let_go(self) -> None:
        if self._http is not None:
            await self._http.stop()
        await _cancelled(self._scaling)
        await _cancelled(self._readiness)
        try:
            async with asyncio.timeout(_RELEASES_S):
                await self._releases.wait()
        except TimeoutError:
            _log.warning("%d releases were not answered", self._releases.num_pending)
        await self.pools.stop()
        for owner in (self._stack, self._kubernetes):
            if owner is not None:
                await owner.close()
        await asyncio.to_thread(self._metrics_server.close)
        if self._admin is not None:
            await self._admin.stop()

    def _made_autoscaler(self) -> Autoscaler | None:
        settings = self._settings.autoscaler
        if not settings.enabled or self._actuator is None or self.resizer is None:
            return None
        observer = Observer(self.safeguards, self.admission, self.service.metrics.recent, settings)
        holder = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        return Autoscaler(self.resizer, self._actuator, observer.look, settings, holder=holder)

    def _membership(self, role: Role, listed: str) -> Membership:
        if self._stack is not None:
            return self._stack.membership(role)
        follow = self._kubernetes.membership if self._kubernetes is not None else None
        return membership_of(listed, self._settings.pools.dns_interval_s, follow=follow)

    async def _settle(self) -> None:
        """Returns when every instance is known, or the first ones have waited long enough for the others.

        A router that began with the first instance it sees would send everything there.
        """
        ready_s: float | None = None
        while not self.pools.all_ready():
            if self.is_ready():
                ready_s = ready_s or time.monotonic()
                if time.monotonic() - ready_s >= self._settings.pools.settle_s:
                    return
            await self.pools.wait_for_news(_LOOK_AGAIN_S)

    async def _follow_readiness(self) -> None:
        await self._settle()
        while True:
            members = (*self.pools.prefill.members, *self.pools.decode.members)
            self.affinity.retain([member.key for member in members if member.key is not None])
            ready = self.is_ready()
            if ready != self._is_serving:
                for service in (_SERVICE, *([_VLLM_SERVICE] if self._vllm_engine is not None else [])):
                    await self._server.health.set_serving(service.full_name, ready)
            await self.pools.wait_for_news(_LOOK_AGAIN_S)


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the task %s has ended", task.get_name(), exc_info=error)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
