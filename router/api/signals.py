"""tandem.v1.SignalsService: what this router's requests show of the pools, for the other routers."""

from __future__ import annotations

from dataclasses import dataclass

from protos.tandem.v1 import signals_pb2
from router.admission.controller import AdmissionController
from router.autoscaler.observation import router_signals_of
from router.metrics import RouterMetrics
from serving.interceptor import Context


@dataclass(eq=False)
class SignalsService:
    """Belongs to one event loop."""

    router_id: str
    admission: AdmissionController
    metrics: RouterMetrics

    async def GetSignals(
        self, request: signals_pb2.GetSignalsRequest, context: Context
    ) -> signals_pb2.GetSignalsResponse:
        return router_signals_of(self.admission, self.metrics.recent).to_wire(self.router_id)
