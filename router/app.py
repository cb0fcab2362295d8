"""The router as one object: pools, service, health, and their beginning and end in the right order.

made ──start──▶ settling, NOT_SERVING ──▶ SERVING ⇄ NOT_SERVING (as the pools allow)
                                             └──drain──▶ NOT_SERVING for good, accepting ──▶ refusing ──▶ stopped
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

from protos.tandem.v1 import generation_pb2, pools_pb2
from router.admission.capacity import capacity_of
from router.admission.door import Admission
from router.config import RouterSettings
from router.generate import Generator
from router.metrics import RouterCollector
from router.model import ServedModel
from router.picking.speeds import Speeds
from router.pools.membership import Membership, membership_of
from router.pools.pool import Dial, Pools
from router.pools_service import PoolsService
from router.releases import Releases
from router.service import GenerationService
from serving import tracing
from serving.channel import open_channel
from serving.metrics import MetricsServer
from serving.open_calls import CONTROL
from serving.server import Server

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
        self._server = Server(settings.effective_server)
        self._admin = Server(settings.admin_server) if settings.admin_server else None
        # gRPC has a backoff of its own, below which a member's attempts fail without trying.
        connection = settings.channel.model_copy(update={"max_backoff_ms": int(settings.pools.max_backoff_s * 1000)})
        self._releases = Releases()
        self.pools = Pools(
            prefill or membership_of(settings.pools.prefill, settings.pools.dns_interval_s),
            decode or membership_of(settings.pools.decode, settings.pools.dns_interval_s),
            dial or (lambda address: open_channel(address, connection)),
            settings.pools,
            tokenizer_digest=model.tokenizer_digest,
            speeds=lambda: Speeds(settings.disaggregation.speed_smoothing, settings.disaggregation.min_tokens),
        )
        self.admission = Admission(
            settings.admission, lambda: capacity_of(self.pools.decode.views(), self.pools.prefill.views())
        )
        generator = Generator(self.pools, self._releases, settings, rng)
        self.affinity = generator.affinity
        self.safeguards = generator.safeguards
        self.service = GenerationService(model, self.pools, self.admission, generator)
        self._pools_service = PoolsService(model, self.safeguards, self.affinity, settings.disaggregation)
        collector = RouterCollector(self.service.metrics, self.safeguards, self.admission, model=model.name)
        self._metrics_server = MetricsServer(settings.metrics, collector)
        self._readiness: asyncio.Task[None] | None = None

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

    async def start(self) -> None:
        """Watches the instances and listens. NOT_SERVING until the pools are ready."""
        policies = {"Abort": CONTROL, "GetModelInfo": CONTROL}
        await self._server.register(_SERVICE, tracing.Traced(self.service), policies, ready=False)
        if self._admin is not None:
            await self._admin.register(_ADMIN_SERVICE, self._pools_service)
            await self._admin.start()
        self._metrics_server.start()
        await self.pools.start()
        self._readiness = asyncio.create_task(self._follow_readiness(), name="readiness")
        self._readiness.add_done_callback(_tell_failure)
        await self._server.start()

    def is_ready(self) -> bool:
        """Whether a request could be served now."""
        needs_prefill = self._settings.disaggregation.mode == "always"
        return self.pools.decode.num_ready() > 0 and (not needs_prefill or self.pools.prefill.num_ready() > 0)

    async def drain(self) -> bool:
        """Says NOT_SERVING, then refuses new requests, lets the running ones finish, and stops; False if some were cut
        off when the grace was over."""
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
        if self._readiness is not None:
            self._readiness.cancel()
            await asyncio.gather(self._readiness, return_exceptions=True)
        try:
            async with asyncio.timeout(_RELEASES_S):
                await self._releases.wait()
        except TimeoutError:
            _log.warning("%d releases were not answered", self._releases.num_pending)
        await self.pools.stop()
        await asyncio.to_thread(self._metrics_server.close)
        if self._admin is not None:
            await self._admin.stop()

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
        health, name = self._server.health, _SERVICE.full_name
        await self._settle()
        while True:
            members = (*self.pools.prefill.members, *self.pools.decode.members)
            self.affinity.retain([member.key for member in members if member.key is not None])
            ready = self.is_ready()
            if ready != health.is_serving(name):
                await health.set_serving(name, ready)
            await self.pools.wait_for_news(_LOOK_AGAIN_S)


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("readiness is no longer followed", exc_info=error)
