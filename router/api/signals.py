"""The services of the listener `signals`, which the other routers and KEDA call.

SignalsService    tandem.v1: what this router's requests show of the pools
ExternalScaler    externalscaler: the sizes of the pools, and whether they are needed at all
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from protos.externalscaler import externalscaler_pb2 as keda
from protos.tandem.v1 import signals_pb2
from router.autoscaler.decide import Hold, ScaleDecision, balance, decide_now
from router.autoscaler.observation import Observer, counts_of, router_signals_of, samples_of
from router.pools.instance_info import ROLES, Role
from serving.errors import Unavailable, invalid_argument
from serving.interceptor import Context
from serving.waits import wait_at_most

_CHECK_S = 0.1
"""How soon a stream reports that a pool is needed."""
_PROBLEMS: frozenset[Hold | None] = frozenset({"missing", "stale", "nonsense"})


@dataclass(eq=False)
class SignalsService:
    """What this router's requests show of the pools. Belongs to one event loop."""

    router_id: str
    observer: Observer
    is_serving: Callable[[], bool]

    async def GetSignals(
        self, request: signals_pb2.GetSignalsRequest, context: Context
    ) -> signals_pb2.GetSignalsResponse:
        signals = router_signals_of(self.observer.admission, self.observer.latencies)
        return replace(signals, is_serving=self.is_serving()).to_wire(self.router_id)


@dataclass(eq=False)
class ExternalScaler:
    """KEDA asks for the sizes of the pools. Belongs to one event loop.

        trigger {pool: decode} ──GetMetrics──▶ observation of now ─▶ decide_now of both pools ─▶ balance ─▶ its size
                                                     └─ a problem, an unknown load, or all are young ─▶ UNAVAILABLE
                               ──IsActive────▶ requests at this router, or at another one; unknown counts as active

    The metric is the number of instances with a target of one for each, so that an HPA orders that number. Windows and
    steps are the HPA's; bounds, targets, ratio and max_instances are the section `autoscaler`, which need not be
    enabled.
    """

    observer: Observer
    active_s: float
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the router is about to stop: KEDA connects to another one."""

    async def IsActive(self, request: keda.ScaledObjectRef, context: Context) -> keda.IsActiveResponse:
        _pool_of(request)
        return keda.IsActiveResponse(result=self._is_active())

    async def StreamIsActive(
        self, request: keda.ScaledObjectRef, context: Context
    ) -> AsyncIterator[keda.IsActiveResponse]:
        _pool_of(request)
        before: bool | None = None
        while not self.ending.is_set():
            if (is_active := self._is_active()) != before:
                before = is_active
                yield keda.IsActiveResponse(result=is_active)
            await wait_at_most(self.ending, _CHECK_S)

    async def GetMetricSpec(self, request: keda.ScaledObjectRef, context: Context) -> keda.GetMetricSpecResponse:
        spec = keda.MetricSpec(metricName=_metric(_pool_of(request)), targetSize=1, targetSizeFloat=1.0)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: keda.GetMetricsRequest, context: Context) -> keda.GetMetricsResponse:
        role = _pool_of(request.scaledObjectRef)
        if request.metricName != _metric(role):
            raise invalid_argument("metricName", f"is {request.metricName[:64]!r}", _metric(role))
        decision = self._decision(role)
        if decision.hold in _PROBLEMS:
            raise Unavailable(f"the size of the {role} pool should stay: {decision.reason}")
        size = decision.new_size
        value = keda.MetricValue(metricName=request.metricName, metricValue=size, metricValueFloat=size)
        return keda.GetMetricsResponse(metricValues=[value])

    def _decision(self, role: Role) -> ScaleDecision:
        settings, safeguards = self.observer.settings, self.observer.safeguards
        policies = settings.policies
        # KEDA alone knows how many are ordered.
        counts = {each: counts_of([*samples_of(each, safeguards)], policy) for each, policy in policies.items()}
        observed = self.observer.observe({each: count.num_ready for each, count in counts.items()})
        prefill, decode = (decide_now(observed[each], policy) for each, policy in policies.items())
        num_ending = sum(count.num_ending for count in counts.values())
        num_present = observed["prefill"].num_present, observed["decode"].num_present
        prefill, decode = balance(prefill, decode, num_ending, settings, num_present)
        return prefill if role == "prefill" else decode

    def _is_active(self) -> bool:
        return self.observer.idle_s() < self.active_s


def _pool_of(request: keda.ScaledObjectRef) -> Role:
    name = request.scalerMetadata.get("pool", "")
    for role in ROLES.values():
        if role == name:
            return role
    raise invalid_argument("scalerMetadata", f"pool is {name[:64]!r}", "the metadata pool: prefill or pool: decode")


def _metric(role: Role) -> str:
    return f"tandem-{role}-instances"
