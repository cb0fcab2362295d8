"""grpc.health.v1: what is alive, and which services take work.

The empty name is liveness: the process and its loop answer. Every registered service has a name of its own, which is
readiness: it turns NOT_SERVING when a drain begins, and health-aware clients go elsewhere before anything is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from grpc_health.v1 import health_pb2

from serving.calls import Context
from serving.errors import NotFound, printable

LIVENESS = ""


class Health:
    """The health servicer of one server and the state it reports. Belongs to one event loop."""

    service = health_pb2.DESCRIPTOR.services_by_name["Health"]

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {LIVENESS: True}
        self._draining = False
        self._changed = asyncio.Condition()

    def is_serving(self, name: str) -> bool:
        return self._serving.get(name, False)

    async def set_serving(self, name: str, serving: bool) -> None:
        """Sets the readiness of a service; once a drain has begun only liveness can still change."""
        if name != LIVENESS and self._draining:
            serving = False
        self._serving[name] = serving
        async with self._changed:
            self._changed.notify_all()

    async def begin_draining(self) -> None:
        """Makes every service, but not liveness, NOT_SERVING for good."""
        self._draining = True
        for name in self._serving:
            if name != LIVENESS:
                await self.set_serving(name, False)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            raise NotFound(f"no service {printable(request.service, 64)}")
        return self._response(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            response = self._response(request.service)
            if response != last:
                last = response
                yield response
                continue  # what changed while the message was written must not be missed
            async with self._changed:
                if self._response(request.service) == last:
                    await self._changed.wait()

    def _response(self, name: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if name not in self._serving:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._serving[name] else kinds.NOT_SERVING)
