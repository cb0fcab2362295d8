"""The router as one object: makes its parts, starts them and stops them in the right order.

made ──start──▶ settling, NOT_SERVING ──▶ SERVING ⇄ NOT_SERVING (as the pools allow)
                                             └──drain──▶ NOT_SERVING for good, accepting ──▶ refusing ──▶ stopped

A worker opens its clients' and health ports when it has settled, at the latest after a few seconds: others that know
the pools answer there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from protos.externalscaler import externalscaler_pb2
from protos.tandem.v1 import generation_pb2, pools_pb2, signals_pb2
from router.admission.capacity import Capacity, capacity_of
from router.admission.controller import AdmissionController
from router.api.admin import PoolsService
from router.api.endpoint_picker import SERVICE as _PICKER_SERVICE
from router.api.endpoint_picker import EndpointPicker, RouterEndpoint
from router.api.grpc import GenerationService
from router.api.security import Security
from router.api.signals import ExternalScaler, SignalsService
from router.api.vllm import SERVICE as _VLLM_SERVICE
from router.api.vllm import VllmEngineService
from router.autoscaler.loop import Autoscaler
from router.autoscaler.observation import Observer
from router.autoscaler.resizer import Actuator, Resizer, StackLink
from router.autoscaler.router_signals import Peers, RecentLatencies
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.instance_call import TransferReleases
from router.metrics import RouterCollector, RouterMetrics
from router.picking.affinity import Affinity
from router.picking.placement import AimSource
from router.picking.plan import servable
from router.pools.discovery import ServiceDiscovery, discovery_of, parse_targets
from router.pools.instance_info import InstanceView, Role
from router.pools.pool import Pools
from router.pools.throughput import ThroughputEstimator
from router.request.caller import Callers
from router.request.request_log import RequestLog
from router.request.validation import ServedModel
from router.resilience.safeguards import Safeguards
from router.settings import RouterSettings
from serving.limits import CONTROL, PICK
from serving.metrics import MetricsServer
from serving.server import Server
from serving.settings import SettingsError, format_address, parse_address
from serving.waits import end_tasks, wait_at_most

if TYPE_CHECKING:
    from router.api.live.endpoints import LivePage
    from router.api.openai.exchange import HttpLimits
    from router.api.openai.server import HttpServer, HttpSettings
    from router.kubernetes.actuator import KubernetesLink

_log = logging.getLogger(__name__)
_SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
_ADMIN_SERVICE = pools_pb2.DESCRIPTOR.services_by_name["PoolsService"]
_KEDA_SERVICE = externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"]
_SIGNALS_SERVICE = signals_pb2.DESCRIPTOR.services_by_name["SignalsService"]
_CHECK_INTERVAL_S = 0.25
_MAX_SETTLE_S = 5.0
"""A worker's wait for the pools before it listens, in which no signal stops it."""
_RELEASES_S = 2.0


class RouterApp:
    """Made and started on the running event loop, by the composition root or a test."""

    def __init__(
        self,
        settings: RouterSettings,
        model: ServedModel,
        *,
        prefill: ServiceDiscovery | None = None,
        decode: ServiceDiscovery | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._settings = settings
        security = Security(settings.tls, settings.auth, is_worker=settings.router.workers > 1)
        self._server = security.clients_server(settings.effective_server, settings.health)
        admin = settings.server_beside(settings.router.admin_listen)
        self._admin = security.admin_server(admin) if admin else None
        signals = settings.server_beside(settings.signals.listen)
        self._signals = security.signals_server(signals) if signals else None
        picker = settings.server_beside(settings.endpoint_picker.listen)
        self._picker = security.picker_server(picker) if picker else None
        self._router_id = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        # Attempts that come faster than gRPC's own backoff fail without a connection attempt.
        connection = settings.channel.model_copy(update={"max_backoff_ms": int(settings.pools.max_backoff_s * 1000)})
        self._releases = TransferReleases()
        self._stack = StackLink(settings.pools.stack) if settings.pools.stack else None
        self._kubernetes = self._kubernetes_link()
        self._actuator: Actuator | None = self._stack or (self._kubernetes.actuator if self._kubernetes else None)
        self.pools = Pools(
            prefill or self._discovery("prefill", settings.pools.prefill),
            decode or self._discovery("decode", settings.pools.decode),
            lambda address: security.dial(address, connection),
            settings.pools,
            tokenizer_digest=model.tokenizer_digest,
            throughput=lambda: ThroughputEstimator(
                settings.disaggregation.speed_smoothing, settings.disaggregation.min_tokens
            ),
        )
        self.peers = peers = self._peers(security)
        self.admission = AdmissionController(
            settings.admission,
            self._capacity,
            (lambda: peers.num_routers) if settings.signals.routers else None,
            ttft_s=settings.slo.ttft_s,
        )
        self.affinity = Affinity(settings.picking)
        self.safeguards = Safeguards(
            self.pools,
            settings.failover,
            settings.ejection,
            settings.quarantine,
            beat_timeout_s=settings.pools.beat_timeout_s,
        )
        lengths, late_wait_s = self.admission.lengths, settings.admission.queue_timeout_s
        aims = AimSource(settings.slo, lengths.expected, lengths.short, late_wait_s)
        dispatcher = Dispatcher(
            self.pools,
            self.safeguards,
            self.affinity,
            self._releases,
            disaggregation=settings.disaggregation,
            failover=settings.failover,
            retry_after_s=settings.admission.retry_after_s,
            aims=aims,
            rng=rng or random.Random(),
        )
        callers = Callers(security.tokens, settings.admission.tenant_key)
        self._server.large.tenant_of = lambda metadata: callers.of(metadata).tenant
        metrics = RouterMetrics(recent=RecentLatencies(settings.autoscaler))
        self.service = GenerationService(model, self.admission, dispatcher, callers, metrics=metrics)
        needs_prefill = settings.disaggregation.mode == "always"
        self.resizer: Resizer | None = None
        if self._actuator is not None:
            self.resizer = Resizer(self._actuator, self.pools, needs_prefill=needs_prefill)
        self._observer = Observer(self.safeguards, self.admission, metrics.recent, settings.autoscaler, self.peers)
        self._ending = asyncio.Event()
        self._scaler = ExternalScaler(self._observer, settings.signals.active_s, self._ending)
        self.autoscaler: Autoscaler | None = None
        if settings.autoscaler.enabled and self.resizer is not None:
            observe, holder = self._observer.observe, self._router_id
            self.autoscaler = Autoscaler(self.resizer, observe, settings.autoscaler, holder=holder)
        self._pools_service = PoolsService(model, dispatcher, self.resizer, self.autoscaler, self._ending)
        collector = RouterCollector(
            metrics, self.safeguards, self.admission, model=model.name, autoscaler=self.autoscaler
        )
        self._metrics_server = MetricsServer(settings.metrics, collector, security.files)
        self._page: LivePage | None = None
        self._http = self._http_server(security)
        self._settled = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def admin_address(self) -> str | None:
        """host:port of the operators' calls, None if they are not served; only after `start`."""
        return self._admin.address if self._admin is not None else None

    @property
    def signals_address(self) -> str | None:
        """host:port of the routers' calls among each other, None if they are not served; only after `start`."""
        return self._signals.address if self._signals is not None else None

    @property
    def endpoint_picker_address(self) -> str | None:
        """host:port of the endpoint picker, None if it is not served; only after `start`."""
        return self._picker.address if self._picker is not None else None

    @property
    def metrics_address(self) -> str | None:
        return self._metrics_server.address

    @property
    def http_address(self) -> str | None:
        """host:port of the OpenAI API, None if it is not served; only after `start`."""
        return self._http.address if self._http is not None else None

    def _http_server(self, security: Security) -> HttpServer | None:
        settings = self._settings
        if settings.http.listen is None:
            return None
        # Imported late: FastAPI takes long to import.
        from router.api.openai.api import OpenAIApi
        from router.api.openai.exchange import HttpLimits
        from router.api.openai.server import HttpServer, HttpTls

        limits = HttpLimits(
            self._server.calls,
            self._server.abuse_limits,
            settings.http.max_body_bytes,
            settings.http.read_timeout_s,
            settings.server.max_deadline_s,
            self.is_serving,
            self._server.large,
        )
        authorizer = security.http_authorizer(settings.http.listen)
        self._page = self._live_page(settings.http, limits, security)
        api = OpenAIApi(
            self.service,
            limits,
            self._metrics_server.registry,
            authorizer,
            settings.http.allowed_origins,
            None if self._page is None else self._page.index,
        )
        app = api.app()
        if self._page is not None:
            self._page.add_to(app)
        required, names = settings.tls.require_client_cert, settings.tls.client_names
        tls = HttpTls(security.files, require_client_cert=required, client_names=names) if security.files else None
        reuse_port, timeout_s = settings.router.workers > 1, settings.server.write_timeout_s
        return HttpServer(app, settings.http, write_timeout_s=timeout_s, tls=tls, reuse_port=reuse_port)

    def _live_page(self, settings: HttpSettings, limits: HttpLimits, security: Security) -> LivePage | None:
        if not settings.page or settings.listen is None:
            return None
        try:
            authorizer = security.page_authorizer(settings.listen)
        except SettingsError as error:
            if settings.page != "auto":
                raise
            _log.info("no live page: %s", error)
            return None
        from router.api.live.endpoints import LiveFeed, LivePage, router_reading

        self.service.metrics.log = RequestLog()
        feed = LiveFeed(partial(router_reading, self._pools_service, self.service, self.is_serving))
        return LivePage(feed, self._pools_service, limits, authorizer)

    def _end_watches(self) -> None:
        self._ending.set()
        if self._page is not None:
            self._page.feed.close()

    def _kubernetes_link(self) -> KubernetesLink | None:
        pools, routers = self._settings.pools, self._settings.signals.routers
        targets = parse_targets(f"{pools.prefill},{pools.decode},{routers}")
        if not (self._settings.kubernetes.workloads or any(target.is_service for target in targets)):
            return None
        # Imported late: optional, and takes a second to import.
        try:
            from router.kubernetes.actuator import KubernetesLink
        except ModuleNotFoundError as error:
            raise SettingsError(
                f"the settings name Kubernetes, and its client is missing ({error}): pip install 'kubernetes>=37'"
            ) from error
        return KubernetesLink(self._settings.kubernetes)

    def is_serving(self) -> bool:
        """Whether the health service reports SERVING: ready, and not draining."""
        return self._server.health.is_serving(_SERVICE.full_name)

    async def start(self) -> None:
        """Watches the instances and listens. NOT_SERVING until the pools are ready; a worker waits for them first."""
        policies = {"Abort": CONTROL, "GetModelInfo": CONTROL}
        await self._server.register(_SERVICE, self.service, policies, ready=False)
        if self._settings.router.vllm_engine:
            policies |= dict.fromkeys(("GetServerInfo", "GetLoads", "HealthCheck"), CONTROL)
            engine = VllmEngineService(self.service, self.is_serving)
            await self._server.register(_VLLM_SERVICE, engine, policies, ready=False)
        if self._admin is not None:
            await self._admin.register(_ADMIN_SERVICE, self._pools_service, {"WatchPools": CONTROL})
            await self._admin.start()
        if self._signals is not None:
            await self._serve_signals(self._signals)
        if self._picker is not None:
            picker = EndpointPicker(self._endpoints)
            await self._picker.register(_PICKER_SERVICE, picker, {"Process": PICK})
            await self._picker.start()
        self._metrics_server.start()
        await self.pools.start()
        self._start_task("peers", self.peers.run())
        self._start_task("readiness", self._follow_readiness())
        if self.autoscaler is not None:
            self._start_task("autoscaler", self.autoscaler.run())
        if self._settings.router.workers > 1:
            longest_s = self._settings.pools.beat_timeout_s + self._settings.pools.settle_s
            # Without an instance, the worker that gets a request rejects it.
            await wait_at_most(self._settled, min(longest_s, _MAX_SETTLE_S))
        await self._server.start()
        if self._http is not None:
            await self._http.start()

    async def _serve_signals(self, server: Server) -> None:
        signals = SignalsService(self._router_id, self._observer, self.is_serving)
        await server.register(_SIGNALS_SERVICE, signals, {"GetSignals": CONTROL})
        names = ("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics")
        await server.register(_KEDA_SERVICE, self._scaler, dict.fromkeys(names, CONTROL))
        await server.start()

    def is_ready(self) -> bool:
        """Whether requests are answered: by an instance, or once one has started."""
        return bool(self._servable()) or self._settings.admission.instance_wait_s > 0

    def _servable(self) -> list[InstanceView]:
        """The decode instances that new requests can go to now."""
        return servable(self.pools.decode.views(), self.pools.prefill.views(), self._settings.disaggregation)

    def _capacity(self) -> Capacity:
        """For new requests; in `never` no prefill instance computes a prompt."""
        uses_prefill = self._settings.disaggregation.mode != "never"
        return capacity_of(self._servable(), self.pools.prefill.views() if uses_prefill else ())

    async def drain(self) -> bool:
        """Drains as the module says; False if requests were cut off at the end of the grace."""
        self._end_watches()
        await self._end_task("autoscaler")
        try:
            return await self._server.drain()
        finally:
            await self._close()

    async def stop(self) -> bool:
        """Ends everything now; False if a request was cut off."""
        try:
            return await self._server.stop()
        finally:
            await self._close()

    async def _close(self) -> None:
        self._end_watches()
        if self._http is not None:
            await self._http.stop()
        for name in ("autoscaler", "readiness", "peers"):
            await self._end_task(name)
        await self._releases.wait(_RELEASES_S)
        await self.pools.stop()
        for server in (self._admin, self._signals, self._picker):  # before the owners, which their calls ask
            if server is not None:
                await server.stop()
        for owner in (self._stack, self._kubernetes):
            if owner is not None:
                await owner.close()
        await asyncio.to_thread(self._metrics_server.close)

    def _endpoints(self) -> list[RouterEndpoint]:
        """Of the routers that answer and serve; all of them serve HTTP on one port."""
        _, port = parse_address(self._settings.http.listen or "")
        own = self.admission.num_queued
        hosts = [*self.peers.hosts]
        if all(signals is not None for _, signals in hosts) and (host := self._own_host()):
            hosts.append((host, None))
        return [
            RouterEndpoint(format_address(host, port), own if signals is None else signals.queue.num_queued)
            for host, signals in hosts
            if (self.is_serving() if signals is None else signals.is_serving)
        ]

    def _own_host(self) -> str | None:
        """Where Gateways ask it: for while its discovery does not have this router, as a DNS that caches answers."""
        listen = self._settings.endpoint_picker.listen
        host = parse_address(listen)[0] if listen is not None else ""
        return host if host not in ("", "0.0.0.0", "::") else None

    def _peers(self, security: Security) -> Peers:
        settings = self._settings
        discovery, name = self._discovery_of(settings.signals.routers), settings.signals.router_name
        return Peers(
            self._router_id, discovery, lambda one: security.dial_router(one, settings.channel, name), settings.signals
        )

    def _discovery(self, role: Role, listed: str) -> ServiceDiscovery:
        if self._stack is not None:
            return self._stack.discovery(role)
        return self._discovery_of(listed)

    def _discovery_of(self, listed: str) -> ServiceDiscovery:
        discover_service = self._kubernetes.discovery if self._kubernetes is not None else None
        return discovery_of(listed, self._settings.pools.dns_interval_s, discover_service=discover_service)

    def _start_task(self, name: str, running: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(running, name=name)
        self._tasks[name].add_done_callback(_log_failure)

    async def _end_task(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            await end_tasks(task)

    async def _settle(self) -> None:
        """Waits for all instances, at most `pools.settle_s` after the first: it would get every request otherwise."""
        ready_s: float | None = None
        while not self.pools.all_ready():
            if self.is_ready():
                ready_s = ready_s or time.monotonic()
                if time.monotonic() - ready_s >= self._settings.pools.settle_s:
                    return
            await self.pools.wait_for_change(_CHECK_INTERVAL_S)

    async def _follow_readiness(self) -> None:
        await self._settle()
        while True:
            self.admission.refresh()
            instances = [instance for pool in self.pools.by_role.values() for instance in pool.instances]
            self.affinity.index.retain([instance.key for instance in instances if instance.key is not None])
            ready = self.is_ready()
            if ready != self.is_serving():
                for service in (_SERVICE, *([_VLLM_SERVICE] if self._settings.router.vllm_engine else [])):
                    self._server.health.set_serving(service.full_name, ready)
            self._settled.set()
            await self.pools.wait_for_change(_CHECK_INTERVAL_S)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the task %s has ended", task.get_name(), exc_info=error)
