"""Resizes the pools of a release (Deployments or StatefulSets, by their scale subresource), if this router leads.

    sizes ──▶ resize: read the scale, mark the pods to remove (best effort), write over the version that was read
                 ├── another version by now, of the assumed size: write over that one
                 └── another size than the assumed one: resized elsewhere, an error

A size is only written over the one that the decision assumed. So a request that was delayed for long, or a router that
reads a stale answer, overwrites no change made since.

Of a smaller Deployment, Kubernetes removes the ready pods with the lowest pod-deletion-cost and sends them SIGTERM:
then they drain (docs/operations.md). A StatefulSet always removes its last pods.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from router.autoscaler.resizer import ActuatorError
from router.autoscaler.settings import MAX_SIZE
from router.kubernetes.cluster import (
    Cluster,
    ClusterError,
    Conflict,
    Lease,
    LeaseSpec,
    Listed,
    Missing,
    Pod,
    Scale,
)
from router.kubernetes.discovery import EndpointSliceDiscovery
from router.kubernetes.settings import KubernetesSettings, Workload
from router.pools.instance_info import Role

_log = logging.getLogger(__name__)

PAUSED = "tandem/paused"
"""Annotation of the Lease by which an operator stops automatic resizing; any value but `false`."""
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_LOWEST_COST = -(2**31)
"""Of the first pod to remove; one more for each further one. Below any cost that is likely to be set otherwise."""
_MARKING_S = 2.0
_MAX_WRITES = 5
"""A rollout changes the version with every pod, but not the size."""


@dataclass(slots=True, eq=False)
class Election:
    """Leader election among several routers, by a Lease, as Kubernetes' own controllers do it. One per router.

        free ──patch──▶ ours ──renewed before it expires──▶ ours
                         └──not renewed for lease_duration_seconds, as the others see it──▶ another router's

    Clocks of different machines are never compared: another router's lease has expired when *this* process has seen it
    unchanged for its duration (k8s.io/client-go/tools/leaderelection). A patch names the version that was read, so
    that only one of two routers that find it free gets it. The object itself is created by the chart.
    """

    cluster: Cluster
    name: str
    clock: Callable[[], float] = time.monotonic
    pause: str | None = None
    """Why no pool is to be resized, as the Lease said last."""
    _seen: LeaseSpec | None = None
    _seen_s: float = 0.0

    async def take(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` leads for `ttl_s` seconds from when this was called. Raises ClusterError."""
        path = self.cluster.path("coordination.k8s.io/v1", "leases", self.name)
        try:
            lease = await self.cluster.request("GET", path, Lease)
        except Missing as error:
            raise ClusterError(
                f"there is no Lease {self.name} in {self.cluster.namespace}: the chart creates it; otherwise see "
                "docs/kubernetes/security.md"
            ) from error
        is_paused = (lease.metadata.annotations or {}).get(PAUSED, "false") != "false"
        self.pause = f"paused by the annotation {PAUSED} of the Lease {self.name}" if is_paused else None
        if self._is_held_by_another(lease.spec, holder, ttl_s):
            return False
        taken = msgspec.to_builtins(held_by(lease.spec, holder, ttl_s))
        body = {"metadata": {"resourceVersion": lease.metadata.resource_version}, "spec": taken}
        try:
            await self.cluster.request("PATCH", path, Lease, body=body)
        except Conflict:
            return False
        return True

    def _is_held_by_another(self, spec: LeaseSpec, holder: str, ttl_s: float) -> bool:
        if spec != self._seen:
            self._seen, self._seen_s = spec, self.clock()
        if spec.holder_identity in (None, "", holder):
            return False
        return self.clock() - self._seen_s <= (spec.lease_duration_seconds or ttl_s)


def held_by(spec: LeaseSpec, holder: str, ttl_s: float) -> LeaseSpec:
    """`spec` when `holder` has the Lease for `ttl_s` from now."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    renewed = msgspec.structs.replace(
        spec, holder_identity=holder, lease_duration_seconds=math.ceil(ttl_s), renew_time=now
    )
    if spec.holder_identity == holder:
        return renewed
    return msgspec.structs.replace(renewed, acquire_time=now, lease_transitions=(spec.lease_transitions or 0) + 1)


@dataclass(slots=True, eq=False)
class KubernetesActuator:
    """An Actuator over a cluster, which the caller closes."""

    cluster: Cluster
    workloads: Mapping[Role, Workload]
    election: Election
    mark_pods: bool = True

    async def sizes(self) -> Mapping[Role, int]:
        """`spec.replicas` of each workload. Raises ActuatorError."""
        return {role: (await self._read(role)).size for role in self.workloads}

    async def resize(self, role: Role, size: int, victims: Sequence[str], *, previous_size: int) -> None:
        """Returns when the size is written. Raises ActuatorError, also if the pool has another size by now than
        `previous_size`."""
        if role not in self.workloads:
            raise ActuatorError(f"the {role} pool cannot be resized: set kubernetes.{role}")
        scale = await self._read(role)
        if victims and self.mark_pods and self.workloads[role].plural == "deployments":
            await self._mark(scale.status.selector, victims)
        await self._write(role, scale, size, previous_size)

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        return await self.election.take(holder, ttl_s)

    @property
    def pause(self) -> str | None:
        return self.election.pause

    async def no_room(self, role: Role) -> str | None:
        """By the pods that no node takes. Raises ActuatorError, but not without permission for pods."""
        scale = await self._read(role)
        try:
            pods = await self._pods(scale.status.selector)
        except ClusterError as error:
            _log.warning("could not look for pending pods: %s", error)
            return None
        unscheduled = [pod.status.unscheduled for pod in pods if pod.status.unscheduled is not None]
        if not unscheduled:
            return None
        return f"no node takes {len(unscheduled)} of {len(pods)} pods: {unscheduled[0]}"

    async def _pods(self, selector: str) -> Sequence[Pod]:
        """Those that are to stay."""
        path = self.cluster.path("v1", "pods")
        listed = await self.cluster.request("GET", path, Listed[Pod], query={"labelSelector": selector})
        return [pod for pod in listed.items or () if pod.metadata.deletion_timestamp is None]

    async def _read(self, role: Role) -> Scale:
        return await self.cluster.request("GET", self._path(role), Scale)

    async def _write(self, role: Role, scale: Scale, size: int, previous_size: int) -> None:
        for _ in range(_MAX_WRITES):
            if scale.size == size:
                return
            if scale.size != previous_size:
                raise ActuatorError(
                    f"the {role} pool was resized from {previous_size} to {scale.size} meanwhile, and keeps that size"
                )
            body = {"metadata": {"resourceVersion": scale.metadata.resource_version}, "spec": {"replicas": size}}
            try:
                await self.cluster.request("PATCH", self._path(role), Scale, body=body)
            except Conflict:
                scale = await self._read(role)
            else:
                return
        raise ActuatorError(f"the {role} pool changes too fast to be resized to {size}: try again")

    def _path(self, role: Role) -> str:
        workload = self.workloads[role]
        return self.cluster.path("apps/v1", workload.plural, workload.name, "scale")

    async def _mark(self, selector: str, victims: Sequence[str]) -> None:
        """Best effort: which pods are removed is a matter of cost, not of correctness, since all of them drain."""
        try:
            async with asyncio.timeout(_MARKING_S):
                costs = _costs(await self._pods(selector), victims)
                await asyncio.gather(*(self._set_cost(name, cost) for name, cost in costs.items()))
        except (ClusterError, TimeoutError) as error:
            why = str(error) or f"no answer within {_MARKING_S:g} s"
            _log.warning("could not set pod-deletion-cost; other pods may be removed first: %s", why)

    async def _set_cost(self, pod: str, cost: str | None) -> None:
        body = {"metadata": {"annotations": {DELETION_COST: cost}}}
        await self.cluster.request("PATCH", self.cluster.path("v1", "pods", pod), Pod, body=body)


def _costs(pods: Sequence[Pod], victims: Sequence[str]) -> dict[str, str | None]:
    """The costs to write, by pods' names: of the victims in their order, and None for marks of an earlier resize."""
    order = {_normalized(address.rpartition(":")[0].strip("[]")): rank for rank, address in enumerate(victims)}
    costs: dict[str, str | None] = {}
    for pod in pods:
        ips = [_normalized(one.ip) for one in pod.status.pod_ips or ()]
        rank = next((order[ip] for ip in ips if ip in order), None)
        cost = None if rank is None else str(_LOWEST_COST + rank)
        written = (pod.metadata.annotations or {}).get(DELETION_COST)
        if cost != written and (cost is not None or _is_ours(written)):
            costs[pod.metadata.name] = cost
    return costs


def _is_ours(cost: str | None) -> bool:
    return cost is not None and cost.lstrip("-").isdecimal() and int(cost) < _LOWEST_COST + MAX_SIZE


def _normalized(host: str) -> str:
    """An IP address in its canonical form; a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


class KubernetesLink:
    """The router's connection to its cluster, for discovery and resizing. Made on the running event loop."""

    def __init__(self, settings: KubernetesSettings) -> None:
        """Raises SettingsError outside of a pod."""
        self._cluster = Cluster(settings.account_folder, settings.namespace)
        self.actuator: KubernetesActuator | None = None
        """None where no workload may be resized."""
        if settings.workloads:
            election = Election(self._cluster, settings.lease)
            self.actuator = KubernetesActuator(self._cluster, settings.workloads, election, settings.mark_pods)

    def discovery(self, service: str, port: int) -> EndpointSliceDiscovery:
        return EndpointSliceDiscovery(self._cluster, service, port)

    async def close(self) -> None:
        await self._cluster.close()
