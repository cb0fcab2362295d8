"""The gRPC servicer that every instance offers: who it is, how loaded it is, and its drain."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable

from instance.load import LoadReporter
from protos.tandem.v1 import instance_pb2
from serving.calls import Context
from serving.errors import invalid_argument
from serving.open_calls import CONTROL

SERVICE = instance_pb2.DESCRIPTOR.services_by_name["InstanceService"]
POLICIES = dict.fromkeys(("GetInstanceInfo", "WatchLoad", "Drain"), CONTROL)
MAX_GRACE_S = 3600.0


class InstanceServicer:
    """Stateless. `info` may only be asked once the server listens, since it names the port."""

    def __init__(
        self,
        info: Callable[[], instance_pb2.GetInstanceInfoResponse],
        reporter: LoadReporter,
        begin_drain: Callable[[float | None], int],
    ) -> None:
        self._info = info
        self._reporter = reporter
        self._begin_drain = begin_drain

    async def GetInstanceInfo(
        self, request: instance_pb2.GetInstanceInfoRequest, context: Context
    ) -> instance_pb2.GetInstanceInfoResponse:
        return self._info()

    async def WatchLoad(
        self, request: instance_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        async for report in self._reporter.watch():
            yield report

    async def Drain(self, request: instance_pb2.DrainRequest, context: Context) -> instance_pb2.DrainResponse:
        """Begins the drain; a grace of 0 takes this instance's own."""
        grace_s = request.grace_s
        if not math.isfinite(grace_s) or not 0 <= grace_s <= MAX_GRACE_S:
            raise invalid_argument("grace_s", f"is {grace_s}", f"0..{MAX_GRACE_S:g} seconds")
        return instance_pb2.DrainResponse(num_unfinished=self._begin_drain(grace_s or None))
