"""The server of one instance: gRPC services around one engine core, from the process's start to its end.

    start: core up, model loaded ─▶ listening, ready ─SIGTERM | Drain▶ draining ─▶ stopped, exit status 0 | 3
                                        └──────── core dead ────────▶ not ready, streams UNAVAILABLE, exit status 1

The drain (drain.py) lets streams end and held KV be fetched before the port is closed. Calls still running when the
grace is over are answered UNAVAILABLE, so that the router resumes them elsewhere. A dead core cannot be replaced here,
because its KV is lost: the process ends and its supervisor starts a new one, with a new epoch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from google.protobuf.descriptor import ServiceDescriptor

from engine.core.async_engine import AsyncEngine
from engine.errors import EngineError, may_pass
from engine.generation_config import GenerationDefaults
from engine.sampling.constraints import CONSTRAINTS, has_xgrammar
from engine.text.tokenizer import Tokenizer, missing_tokenizer, supports_constraints
from instance import decoding
from instance.convert import Limits, checked_seconds, common_fields
from instance.drain import DrainController
from instance.load import LoadReporter
from instance.metrics import InstanceCollector, RequestMetrics
from instance.requests import ActiveChoices
from instance.settings import InstanceSettings, ModelSection, engine_config
from instance.transfers import PeerChannels, TransferClients
from kv_transfer.transfer import server as transfer_server
from kv_transfer.transfer.client import identity_to_proto
from protos.tandem.v1 import instance_pb2
from serving.auth import certificate_authorizer
from serving.interceptor import Context
from serving.lifecycle import (
    EXIT_CANNOT_START,
    EXIT_CUT_OFF,
    EXIT_FAILED,
    EXIT_STOPPED,
    StopSignals,
    announce_ready,
    bind_to_parent,
    freeze_heap,
    raise_open_files_limit,
    serve_until_stopped,
    stop_signals,
)
from serving.limits import CONTROL
from serving.logging import configure as configure_logging
from serving.metrics import MetricsServer
from serving.server import LIVENESS, Server, ServerTls
from serving.settings import SettingsError
from serving.tls import TlsFiles
from serving.tracing import exporting_spans
from serving.waits import end_tasks

_log = logging.getLogger(__name__)
SERVICE = instance_pb2.DESCRIPTOR.services_by_name["InstanceService"]
POLICIES = dict.fromkeys(("GetInstanceInfo", "WatchLoad", "Drain"), CONTROL)
_POLL_S = 0.25
_STEPS_OF_SILENCE = 5
_KILL_FACTOR = 2
"""Of the silence that ends liveness: after so much more the core is killed."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role as its package defines it."""

    name: str
    kind: instance_pb2.Role.ValueType
    service: ServiceDescriptor
    """Probes ask for its health."""
    make_servicer: Callable[[InstanceServer], object] | None = None
    """Of `service`, if that is not the one that every instance serves."""


class InstanceServer:
    """Owns the engine and the gRPC server, and serves `InstanceService`. Belongs to one event loop."""

    def __init__(
        self,
        settings: InstanceSettings,
        role: Role,
        signals: StopSignals,
        engine: AsyncEngine,
        tokenizer: Tokenizer | None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.instance_epoch = uuid.uuid4().hex
        self._role = role
        self._signals = signals
        self.identity = engine.info.model_identity
        self._grace_s = settings.server.drain_grace_s
        self._stopping: asyncio.Task[bool] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.grpc_server = Server(
            settings.server.resolved(),
            tls=None if tls is None else ServerTls(tls, require_client_cert=True),
            authorizer=certificate_authorizer(settings.tls.client_names) if settings.tls.client_names else None,
            probes=settings.health,
        )
        self.peers = PeerChannels(
            settings.peers, tls=tls, peer_name=settings.tls.peer_name, allow_public=settings.server.allow_plaintext
        )
        self._drain = DrainController(self.grpc_server.health, self.grpc_server.calls, engine)
        self.reporter = LoadReporter(
            engine,
            instance_epoch=self.instance_epoch,
            drain=self._drain,
            interval_s=settings.instance.load_interval_s,
        )
        transfer = settings.transfer
        self.transfer_server = transfer_server.TransferServer(
            identity=self.identity,
            instance_epoch=self.instance_epoch,
            send_command=engine.send,
            settings=transfer_server.TransferServerSettings(
                lease_s=transfer.lease_s,
                attach_wait_s=transfer.reservation_s,
                max_attached=max(1024, 2 * settings.instance.max_requests),  # one may still read what has ended here
            ),
        )
        engine.on_transfer_event = self.transfer_server.on_event
        self.transfers = TransferClients(
            self.peers,
            self.identity,
            engine.send,
            lease_s=transfer.lease_s,
            attach_timeout_s=transfer.reservation_s,
            connector=engine.info.kv_connector,
        )
        self.choices = ActiveChoices(engine, tokenizer, self._limits(tokenizer))
        self.metrics = RequestMetrics()
        collector = InstanceCollector(engine, self.metrics, self.info)
        self.metrics_server = MetricsServer(settings.metrics, collector, tls)

    @classmethod
    async def start(
        cls, settings: InstanceSettings, role: Role, signals: StopSignals, *, engine: AsyncEngine | None = None
    ) -> InstanceServer:
        """Starts a core, unless given one, then listens. Raises EngineError or OSError, leaving nothing behind."""
        config = engine_config(settings)
        settings.check_network()
        tls = settings.tls.files()
        loading = asyncio.create_task(asyncio.to_thread(_load_tokenizer, settings.model))
        try:
            engine = engine or await AsyncEngine.start(config)
            server = cls(settings, role, signals, engine, await loading, tls)
            await server._listen()
        except BaseException:
            loading.cancel()
            if engine is not None:
                await engine.shutdown()
            raise
        return server

    async def _listen(self) -> None:
        await self.grpc_server.register(SERVICE, self, POLICIES)
        await self.grpc_server.register(transfer_server.SERVICE, self.transfer_server, transfer_server.POLICIES)
        await self.grpc_server.register(decoding.SERVICE, decoding.DecodeServicer(self), decoding.POLICIES)
        if self._role.make_servicer is not None:
            await self.grpc_server.register(self._role.service, self._role.make_servicer(self))
        await self.grpc_server.start()
        try:
            self.metrics_server.start()
        except OSError:
            await self.grpc_server.stop()
            raise
        tasks = self.reporter.report_until_cancelled(), self._watch_core()
        self._tasks = [asyncio.create_task(task) for task in tasks]

    async def _watch_core(self) -> None:
        """Derives readiness and liveness from the core's silence, until cancelled; kills a core that hangs.

        The core reports every 250 ms, but not during a step. Silence of seconds, and of several times the predicted
        step, means that no work gets done (not ready: no new requests); half a minute means that the core hangs (not
        alive: Kubernetes restarts the process). After twice as long it is killed. The core's death is noticed at once,
        by `wait_dead`: the instance ends, and is restarted by what started it.
        """
        health, limits = self.grpc_server.health, self.settings.instance
        ready = alive = True
        while True:
            await asyncio.sleep(_POLL_S)
            silent_s, long_step_s = self.engine.core_silence_s, _STEPS_OF_SILENCE * self.engine.load.step_s
            if (silent_s < max(limits.core_unready_s, long_step_s)) != ready:
                ready = not ready
                what = "reports again: ready" if ready else f"silent for {silent_s:.1f} s: not ready"
                _log.warning("engine core %s", what)
                for service in {self._role.service.full_name, decoding.SERVICE.full_name}:
                    health.set_serving(service, ready)
            hung_s = max(limits.core_dead_s, long_step_s)
            if (silent_s < hung_s) != alive:
                alive = not alive
                health.set_serving(LIVENESS, alive)
            if silent_s >= _KILL_FACTOR * hung_s:
                self.engine.kill(f"it was silent for {silent_s:.1f} s and was killed")
                return

    # InstanceService

    async def GetInstanceInfo(
        self, request: instance_pb2.GetInstanceInfoRequest, context: Context
    ) -> instance_pb2.GetInstanceInfoResponse:
        return self.info()

    async def WatchLoad(
        self, request: instance_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        async for report in self.reporter.watch(request.max_interval_s):
            yield report

    async def Drain(self, request: instance_pb2.DrainRequest, context: Context) -> instance_pb2.DrainResponse:
        """Begins the drain, with this instance's own grace if the request has none; returns how many calls run."""
        grace_s = checked_seconds("grace_s", request.grace_s)
        if not self._signals.drain.is_set():
            self._grace_s = grace_s or self._grace_s
            self._signals.drain.set()
        return instance_pb2.DrainResponse(num_unfinished=self.grpc_server.calls.num_awaited)

    # Identity and end

    @property
    def address(self) -> str:
        """The advertised host:port; only once it listens."""
        return self.grpc_server.address

    @property
    def instance_id(self) -> str:
        return self.settings.instance.id or f"{self._role.name}-{self.grpc_server.port}"

    def info(self) -> instance_pb2.GetInstanceInfoResponse:
        """Identity and sizes of this instance; only once it listens."""
        is_constraining = has_xgrammar() and supports_constraints(self.choices.tokenizer)
        return instance_pb2.GetInstanceInfoResponse(
            instance_id=self.instance_id,
            instance_epoch=self.instance_epoch,
            role=self._role.kind,
            address=self.address if self.settings.server.has_peer_address else "",  # the router has one
            identity=identity_to_proto(self.identity),
            model=self.settings.model_name,
            domain=self.settings.instance.domain,
            block_size=self.identity.block_size,
            supports_constraints=is_constraining,
            constraints=CONSTRAINTS if is_constraining else (),
            **common_fields(self.engine.info, instance_pb2.GetInstanceInfoResponse),
        )

    async def wait_dead(self) -> str:
        """Returns, with the reason, when the core has ended without being shut down."""
        reason = await self.engine.wait_dead()
        if self._stopping is not None:
            await asyncio.Event().wait()
        return reason

    async def drain(self) -> bool:
        """Stops the instance without losing anything; False if something was cut off when the grace was over."""
        server = self.settings.server
        times_s = {"accept_s": server.drain_accept_s, "grace_s": self._grace_s, "move_s": server.drain_move_s}
        limiting = asyncio.create_task(self._limit_drain())
        try:
            return await self._drain.drain(self.reporter.publish, **times_s)
        finally:
            limiting.cancel()
            await self.stop()

    async def _limit_drain(self) -> None:
        """After a signal a supervisor waits for this instance's own grace, whatever a call has asked for before."""
        await self._signals.signalled.wait()
        self._drain.limit(self.settings.server.drain_accept_s + self.settings.server.drain_grace_s)

    async def stop(self) -> bool:
        """Stops everything now: streams are answered UNAVAILABLE, the core ends, the port closes last. Idempotent.

        False if a call, or KV that a reader may still have fetched, was cut off.
        """
        self._stopping = self._stopping or asyncio.create_task(self._stop())
        return await asyncio.shield(self._stopping)

    async def _stop(self) -> bool:
        num_cut_off = self._drain.num_pending
        self.grpc_server.health.begin_draining()
        for task in self._tasks:
            task.cancel()
        await self.grpc_server.end_calls(cut_off=self.engine.death is None)  # those of a dead core end with its error
        await self.engine.shutdown()
        await self.transfers.close()
        await asyncio.to_thread(self.metrics_server.close)
        await self.grpc_server.stop()
        await self.peers.close()
        _log.info("stopped", extra={"fields": self.metrics.totals()})
        return num_cut_off == 0

    def _limits(self, tokenizer: Tokenizer | None) -> Limits:
        info, transfer = self.engine.info, self.settings.transfer
        defaults = GenerationDefaults.from_folder(self.settings.model.folder, tokenizer)
        return Limits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=defaults.eos_ids_within(info.vocab_size),
            max_requests=self.settings.instance.max_requests,
            max_lease_s=transfer.lease_s,
            max_reservation_s=transfer.reservation_s,
            lora_adapters=frozenset(info.lora_adapters),
        )


def _load_tokenizer(model: ModelSection) -> Tokenizer | None:
    """None where the folder has none, as for benchmarks with dummy weights, and for clients that send token ids."""
    problem = missing_tokenizer(model.folder)
    if problem is None:
        return Tokenizer.from_folder(model.folder)
    if model.load_format != "dummy":
        _log.warning("requests must have token ids, and no stop strings or constraints: %s", problem)
    return None


# The process: composition root of both roles


def run_instance(settings: InstanceSettings, role: Role) -> int:
    """Serves until a stop signal or the core's death; returns the exit status."""
    bind_to_parent()
    raise_open_files_limit()
    configure_logging(settings.log)
    settings.log_ignored_variables()
    try:
        with exporting_spans(settings.tracing, f"tandem-{role.name}"):
            return asyncio.run(_run(settings, role))
    except (EngineError, OSError, SettingsError) as error:
        _log.error("cannot start: %s", error)
        return EXIT_FAILED if may_pass(error) else EXIT_CANNOT_START


async def _run(settings: InstanceSettings, role: Role) -> int:
    if not (settings.model.folder / "config.json").is_file():
        raise SettingsError(f"model.folder: {settings.model.folder} has no config.json")
    with stop_signals() as signals:
        starting = asyncio.ensure_future(InstanceServer.start(settings, role, signals))
        stopped = asyncio.ensure_future(signals.drain.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return EXIT_STOPPED  # stopped while the model was loading
            server = starting.result()
        finally:
            stopped.cancel()
            await end_tasks(starting)
        freeze_heap()
        line = f"ready address={server.address} instance={server.instance_id}\n"
        try:
            announce_ready(line, settings.instance.ready_file)
        except OSError:
            await server.stop()  # the core has files, and pages in the store
            raise
        return await serve(server, signals)


async def serve(server: InstanceServer, signals: StopSignals) -> int:
    """Waits for a stop signal or the core's death, stops the server and returns the exit status."""
    stopped = asyncio.ensure_future(serve_until_stopped(server, signals))
    dead = asyncio.ensure_future(server.wait_dead())
    try:
        await asyncio.wait({stopped, dead}, return_when=asyncio.FIRST_COMPLETED)
        if stopped.done():
            return EXIT_STOPPED if stopped.result() else EXIT_CUT_OFF
        _log.error("the engine core is dead: %s", dead.result())
        await server.stop()
        return EXIT_FAILED
    finally:
        await end_tasks(stopped, dead)
