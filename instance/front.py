"""The front of one instance: the gRPC server around one engine core, from the process's start to its end.

    start: core up, model loaded ─▶ listening, ready ─SIGTERM | Drain▶ draining ─▶ stopped, exit status 0 | 3
                                        └──────── core dead ────────▶ not ready, streams UNAVAILABLE, exit status 1

The drain (drain.py) lets the streams end and the KV that is held here be fetched, and only then the port is closed.
What still runs when the grace is over is answered UNAVAILABLE, so that the router resumes it elsewhere. A dead core
cannot be replaced here (its KV is gone): the process ends and its supervisor starts a fresh one, with a new epoch.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import ServiceDescriptor

from engine.async_engine import AsyncEngine
from engine.generation_config import GenerationDefaults
from instance import service
from instance.choices import Choices
from instance.config import InstanceSettings, engine_config
from instance.convert import Limits, model_identity
from instance.core_health import watch_core
from instance.drain import Drain, DrainTimes
from instance.followers import Followers
from instance.load import LoadReporter
from instance.metrics import InstanceCollector, RequestMetrics
from instance.peers import Peers
from instance.text import TextMaker
from kv_transfer import holder
from kv_transfer.wire import identity_to_proto
from protos.tandem.v1 import instance_pb2
from serving.credentials import certificate_gate
from serving.lifetime import StopSignals
from serving.metrics import MetricsServer
from serving.open_calls import CallPolicy
from serving.server import Server, ServerTls
from serving.tls import TlsFiles, tls_collectors
from serving.tracing import Traced

_log = logging.getLogger(__name__)
_CUT_OFF_S = 1.0
"""For streams to be answered UNAVAILABLE before the port closes under them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role is made of."""

    choices: Choices
    followers: Followers
    instance_epoch: str


@dataclass(frozen=True, slots=True)
class RoleService:
    """A role, ready to be served."""

    service: ServiceDescriptor
    servicer: object
    metrics: RequestMetrics
    policies: Mapping[str, CallPolicy] = field(default_factory=dict)
    """Of the rpcs that are not ordinary requests."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role as its package offers it: name, the wire's name, and how to make it."""

    name: str
    kind: instance_pb2.Role.ValueType
    make: Callable[[Parts], RoleService]


class Front:
    """Owns the engine, the server and everything between them. Belongs to one event loop."""

    def __init__(
        self,
        settings: InstanceSettings,
        role: Role,
        signals: StopSignals,
        engine: AsyncEngine,
        texts: TextMaker,
        tls: TlsFiles | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.instance_epoch = uuid.uuid4().hex
        self._role = role
        self._signals = signals
        self.identity = model_identity(engine.info)
        self._grace_s = settings.server.drain_grace_s
        self._stopping: asyncio.Task[bool] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.server = Server(
            settings.server.resolved(),
            tls=None if tls is None else ServerTls(tls, require_client_cert=True),
            gate=certificate_gate(settings.tls.client_names) if settings.tls.client_names else None,
            probes=settings.health,
        )
        self.peers = Peers(
            settings.peers, tls=tls, peer_name=settings.tls.peer_name, anywhere=settings.server.allow_plaintext
        )
        self._drain = Drain(self.server.health, self.server.calls, engine)
        self.reporter = LoadReporter(
            engine,
            instance_epoch=self.instance_epoch,
            draining=lambda: self._drain.begun,
            moving_out=lambda: self._drain.moving_out,
            interval_s=settings.instance.load_interval_s,
        )
        transfer = settings.transfer
        self.holder = holder.TransferHolder(
            identity=self.identity,
            instance_epoch=self.instance_epoch,
            send=engine.send,
            settings=holder.HolderSettings(
                lease_s=transfer.lease_s, max_lease_s=transfer.lease_s, attach_wait_s=transfer.reservation_s
            ),
        )
        engine.on_transfer_event = self.holder.on_event
        self.followers = Followers(
            self.peers,
            self.identity,
            engine.send,
            lease_s=transfer.lease_s,
            attach_timeout_s=transfer.reservation_s,
            connector=engine.info.kv_connector,
        )
        self.choices = Choices(engine, texts, self._limits())
        self.role_service = role.make(Parts(self.choices, self.followers, self.instance_epoch))
        collector = InstanceCollector(engine, self.role_service.metrics, self.info)
        self.metrics_server = MetricsServer(settings.metrics, collector, *tls_collectors(tls))

    @classmethod
    async def start(
        cls, settings: InstanceSettings, role: Role, signals: StopSignals, *, engine: AsyncEngine | None = None
    ) -> Front:
        """Starts a core (unless given one), then listens. Raises EngineError or OSError, leaving nothing behind."""
        config = engine_config(settings)
        settings.check_network()
        tls = settings.tls.files()
        reading = asyncio.create_task(asyncio.to_thread(TextMaker.from_folder, settings.model.folder))
        try:
            engine = engine or await AsyncEngine.start(config)
            front = cls(settings, role, signals, engine, await reading, tls)
            await front._listen()
        except BaseException:
            reading.cancel()
            if engine is not None:
                await engine.shutdown()
            raise
        return front

    async def _listen(self) -> None:
        servicer = service.InstanceServicer(self.info, self.reporter, self._begin_drain)
        await self.server.register(service.SERVICE, servicer, service.POLICIES)
        await self.server.register(holder.SERVICE, self.holder, holder.POLICIES)
        role = self.role_service
        await self.server.register(role.service, Traced(role.servicer), role.policies)
        await self.server.start()
        try:
            self.metrics_server.start()
        except OSError:
            await self.server.stop()
            raise
        watch = watch_core(
            self.server.health,
            [self.role_service.service.full_name],
            lambda: self.engine.core_silence_s,
            predicted_step_s=lambda: self.engine.load.step_s,
            unready_s=self.settings.instance.core_unready_s,
            dead_s=self.settings.instance.core_dead_s,
        )
        self._tasks = [asyncio.create_task(self.reporter.run()), asyncio.create_task(watch)]

    @property
    def instance_id(self) -> str:
        """The stable name, for people."""
        return self.settings.instance.id or f"{self._role.name}-{self.server.port}"

    def info(self) -> instance_pb2.GetInstanceInfoResponse:
        """Who this is; only once it listens."""
        info = self.engine.info
        return instance_pb2.GetInstanceInfoResponse(
            instance_id=self.instance_id,
            instance_epoch=self.instance_epoch,
            role=self._role.kind,
            address=self.server.address,
            identity=identity_to_proto(self.identity),
            model=self.settings.model_name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            bytes_per_block=info.bytes_per_block,
            kv_connector=info.kv_connector,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
        )

    async def wait_dead(self) -> str:
        """Returns, with the reason, when the core has ended without having been told to."""
        reason = await self.engine.wait_dead()
        if self._stopping is not None:
            await asyncio.Event().wait()
        return reason

    async def drain(self) -> bool:
        """Ends the instance without losing anything; False if something was cut off when the grace was over."""
        server = self.settings.server
        times = DrainTimes(server.drain_accept_s, self._grace_s, server.drain_move_s)
        try:
            return await self._drain.run(times, self.reporter.publish)
        finally:
            await self.stop()

    async def stop(self) -> bool:
        """Ends everything now: streams are answered UNAVAILABLE, the core ends, the port closes last. Idempotent.

        False if a call, or KV that somebody may have wanted, was cut off.
        """
        self._stopping = self._stopping or asyncio.create_task(self._stop())
        return await asyncio.shield(self._stopping)

    async def _stop(self) -> bool:
        num_cut_off = self._drain.num_awaited
        await self.server.health.begin_draining()
        self.server.calls.begin_draining()
        for task in self._tasks:
            task.cancel()
        if self.engine.death is None:
            self.server.calls.cut_off()  # those of a dead core have been told of it
        try:
            async with asyncio.timeout(_CUT_OFF_S):
                await self.server.calls.wait_idle()
        except TimeoutError:
            _log.warning("%d calls did not end by themselves", self.server.calls.num_awaited)
        await self.engine.shutdown()
        await self.followers.close()
        await asyncio.to_thread(self.metrics_server.close)
        await self.server.stop()
        await self.peers.close()
        _log.info("stopped", extra={"fields": self.role_service.metrics.totals()})
        return num_cut_off == 0

    def _begin_drain(self, grace_s: float | None) -> int:
        """What the Drain call does; returns how many calls still run."""
        if not self._signals.drain.is_set():
            self._grace_s = self._grace_s if grace_s is None else grace_s
            self._signals.drain.set()
        return self.server.calls.num_awaited

    def _limits(self) -> Limits:
        info, transfer = self.engine.info, self.settings.transfer
        return Limits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            eos_token_ids=GenerationDefaults.from_folder(self.settings.model.folder).eos_ids_within(info.vocab_size),
            max_requests=self.settings.instance.max_requests,
            max_lease_s=transfer.lease_s,
            max_reservation_s=transfer.reservation_s,
        )
