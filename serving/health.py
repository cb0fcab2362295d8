"""grpc.health.v1: liveness of the process and readiness of its services.

The empty name is liveness: the process and its event loop answer. The name of a registered service is its readiness: it
becomes NOT_SERVING when a drain begins, so health-aware clients move elsewhere before any request is rejected.
grpcio's own servicer does not fit: its shutdown ends liveness too, and it writes past the interceptor's limits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from grpc_health.v1 import health_pb2

from serving.broadcast import Broadcast
from serving.errors import NotFound, Unavailable, printable
from serving.interceptor import Context

LIVENESS = ""


class Health:
    """The health servicer of one server. Belongs to one event loop."""

    service = health_pb2.DESCRIPTOR.services_by_name["Health"]

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {LIVENESS: True}
        self._draining = self._ended = False
        self._num_watchers = 0
        self._changed = Broadcast()
        self._watcher_left = Broadcast()

    def is_serving(self, name: str) -> bool:
        return self._serving.get(name, False)

    def set_serving(self, name: str, serving: bool) -> None:
        """Sets the readiness of a service; after a drain has begun only liveness can change."""
        if name != LIVENESS and self._draining:
            serving = False
        self._serving[name] = serving
        self._changed.notify()

    def begin_draining(self) -> None:
        """Makes every service, but not liveness, permanently NOT_SERVING."""
        self._draining = True
        for name in self._serving:
            if name != LIVENESS:
                self.set_serving(name, False)

    async def end(self, within_s: float) -> None:
        """Ends every Watch after its last state, with UNAVAILABLE. Returns when the watchers have been answered, and
        after `within_s` at the latest: a connection that closes earlier may take the last state with it."""
        self.begin_draining()
        self._ended = True
        self._changed.notify()
        with contextlib.suppress(TimeoutError):  # a client that does not read
            async with asyncio.timeout(within_s):
                while self._num_watchers:
                    await self._watcher_left.wait()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._serving:
            raise NotFound(f"no service {printable(request.service, 64)}")
        return self._response(request.service)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        self._num_watchers += 1
        try:
            while True:
                response = self._response(request.service)
                if response != last:
                    last = response
                    yield response  # the state may change during the write
                elif self._ended:
                    raise Unavailable("the server stops")
                else:
                    await self._changed.wait()
        finally:
            self._num_watchers -= 1
            self._watcher_left.notify()

    def _response(self, name: str) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse
        if name not in self._serving:
            return kinds(status=kinds.SERVICE_UNKNOWN)
        return kinds(status=kinds.SERVING if self._serving[name] else kinds.NOT_SERVING)
