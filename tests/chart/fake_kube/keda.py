"""KEDA's operator and its HPAs: every ScaledObject's scaler is asked over gRPC, and its Deployment gets the size.

    0 ──active: pushed, or asked for each pollingInterval──▶ max(minReplicaCount, 1)
    n ──the metric over its target, as an HPA orders it──▶ 1..maxReplicaCount
    n ──not active for cooldownPeriod, with a minReplicaCount of 0──▶ 0

An HPA at most doubles a size, or adds four; it shrinks to the most that the window of its `behavior` has wanted.
Without an answer the size stays. Sizes go to the store, since rights and owners of fields have tests of their own
(test_sizes.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Self

import grpc.aio

from protos.externalscaler import externalscaler_pb2 as keda
from protos.externalscaler import externalscaler_pb2_grpc as keda_grpc
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.process_kube import ProcessKube

_TOLERANCE = 0.1
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_ANSWER_S = 10.0
_AGAIN_S = 1.0


class Keda:
    """An async context manager; the ScaledObjects are those that are there when it begins."""

    def __init__(self, kube: ProcessKube) -> None:
        self._kube = kube

    async def __aenter__(self) -> Self:
        scaled = self._kube.store.all("ScaledObject")
        self._tasks = [asyncio.create_task(_Scaled(self._kube, one).run()) for one in scaled]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


class _Scaled:
    """One ScaledObject, with one trigger and a target in the same namespace."""

    def __init__(self, kube: ProcessKube, scaled: Object) -> None:
        metadata, self._spec = scaled["metadata"], scaled["spec"]
        [trigger] = self._spec["triggers"]
        host, _, port = trigger["metadata"]["scalerAddress"].partition(":")
        self._address = f"{kube.service_addresses(metadata['namespace'])[host.partition('.')[0]]}:{port}"
        self._reference = keda.ScaledObjectRef(
            name=metadata["name"], namespace=metadata["namespace"], scalerMetadata=trigger["metadata"]
        )
        self._kube = kube
        self._pushed = asyncio.Event()
        self._active_s = time.monotonic()
        self._wanted: list[tuple[float, int]] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel, asyncio.TaskGroup() as tasks:
            stub = keda_grpc.ExternalScalerStub(channel)
            tasks.create_task(self._listen(stub))
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await self._scale(stub)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._spec["pollingInterval"]):
                        await self._pushed.wait()
                self._pushed.clear()

    async def _listen(self, stub: keda_grpc.ExternalScalerStub) -> None:
        """Connects again whenever the stream ends, as when its router goes."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for answer in stub.StreamIsActive(self._reference):
                    if answer.result:
                        self._pushed.set()
            await asyncio.sleep(_AGAIN_S)

    async def _scale(self, stub: keda_grpc.ExternalScalerStub) -> None:
        size, now_s = self._size, time.monotonic()
        is_active = (await stub.IsActive(self._reference, timeout=_ANSWER_S)).result
        if is_active:
            self._active_s = now_s
        least = self._spec["minReplicaCount"]
        if size == 0:
            new = max(least, 1) if is_active else 0
        elif least == 0 and now_s - self._active_s >= self._spec["cooldownPeriod"]:
            new = 0
        else:
            new = self._ordered(size, await self._metric(stub))
        self._kube.store.changed(self._target, lambda found: found["spec"].update(replicas=new))

    async def _metric(self, stub: keda_grpc.ExternalScalerStub) -> float:
        """Over its target."""
        [spec] = (await stub.GetMetricSpec(self._reference, timeout=_ANSWER_S)).metricSpecs
        request = keda.GetMetricsRequest(scaledObjectRef=self._reference, metricName=spec.metricName)
        [value] = (await stub.GetMetrics(request, timeout=_ANSWER_S)).metricValues
        return value.metricValueFloat / spec.targetSizeFloat

    def _ordered(self, size: int, metric: float) -> int:
        """By the HPA, whose window begins with the size that it finds."""
        wanted = size if abs(metric / size - 1) <= _TOLERANCE else math.ceil(metric)
        wanted = max(1, min(wanted, self._spec["maxReplicaCount"], max(2 * size, size + 4)))
        window_s = self._spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        begin_s = time.monotonic() - window_s["stabilizationWindowSeconds"]
        before = [one for one in self._wanted if one[0] >= begin_s] if self._wanted else [(time.monotonic(), size)]
        self._wanted = [*before, (time.monotonic(), wanted)]
        return max(wanted, min(size, max(its for _, its in self._wanted)))

    @property
    def _target(self) -> Object:
        return self._kube.store.get("Deployment", self._spec["scaleTargetRef"]["name"], self._reference.namespace)

    @property
    def _size(self) -> int:
        return int(self._target["spec"]["replicas"])
