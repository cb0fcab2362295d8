"""Which of several routers leads, by a Lease, as Kubernetes' own controllers do it.

    nobody's ──patch──▶ ours ──renewed before it is over──▶ ours
                         └──not renewed for lease_duration_seconds, as the others see it──▶ another's

Clocks of different machines are never compared: a lease of somebody else is over when *this* process has seen it
unchanged for as long as it holds (k8s.io/client-go/tools/leaderelection). A patch names the version that was read,
so that of two who find it free one gets it. The object itself belongs to whoever installed the router.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from router.kubernetes.cluster import MERGE_PATCH, Cluster, ClusterError, Conflict, Missing
from router.kubernetes.objects import Lease, LeaseSpec

_GROUP, _PLURAL = "coordination.k8s.io/v1", "leases"


class Election:
    """One per router, for one Lease."""

    def __init__(self, cluster: Cluster, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._name = name
        self._clock = clock
        self._seen: LeaseSpec | None = None
        self._seen_s = clock()

    async def take(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` leads for `ttl_s` seconds from when this was called. Raises ClusterError."""
        path = self._cluster.path(_GROUP, _PLURAL, self._name)
        try:
            lease = await self._cluster.ask("GET", path, Lease)
        except Missing as error:
            raise ClusterError(
                f"there is no Lease {self._name} in {self._cluster.namespace}: the chart makes it; otherwise see "
                "docs/kubernetes.md"
            ) from error
        if self._is_another_s(lease.spec, holder, ttl_s):
            return False
        taken = msgspec.to_builtins(_taken(lease.spec, holder, ttl_s))
        body = {"metadata": {"resourceVersion": lease.metadata.resource_version}, "spec": taken}
        try:
            await self._cluster.ask("PATCH", path, Lease, body=body, content_type=MERGE_PATCH)
        except Conflict:
            return False
        return True

    def _is_another_s(self, spec: LeaseSpec, holder: str, ttl_s: float) -> bool:
        if spec != self._seen:
            self._seen, self._seen_s = spec, self._clock()
        if spec.holder_identity in (None, "", holder):
            return False
        return self._clock() - self._seen_s <= (spec.lease_duration_seconds or ttl_s)


def _taken(spec: LeaseSpec, holder: str, ttl_s: float) -> LeaseSpec:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    renewed = msgspec.structs.replace(
        spec, holder_identity=holder, lease_duration_seconds=math.ceil(ttl_s), renew_time=now
    )
    if spec.holder_identity == holder:
        return renewed
    return msgspec.structs.replace(renewed, acquire_time=now, lease_transitions=(spec.lease_transitions or 0) + 1)
