"""Resizes the pools of a release: Deployments or StatefulSets, by their scale subresource.

    sizes ──what was read, with its version──▶ resize: mark those that go first (best effort), write over that version
                                                 ├── another version by now, of the same size: write over that one
                                                 └── another version by now, of another size: somebody else resizes

A size is only written over the one that the decision was made for. So a request that was held up for long, or a router
that reads a stale answer, changes nothing that somebody else has changed since.

Kubernetes takes the pods of a smaller Deployment away by their pod-deletion-cost among those that are ready, and sends
them SIGTERM: that is where they drain (docs/operations.md). A StatefulSet gives up its last pods, whoever they are.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Mapping, Sequence

from router.autoscaler.actuator import ActuatorError
from router.autoscaler.resizer import MAX_SIZE
from router.kubernetes.cluster import MERGE_PATCH, Cluster, ClusterError, Conflict
from router.kubernetes.election import Election
from router.kubernetes.objects import Pod, PodList, Scale
from router.kubernetes.settings import Workload
from router.pools.instances import Role

_log = logging.getLogger(__name__)

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_LOWEST_COST = -(2**31)
"""Of the first to go, and one more for each after it: below what anybody else would write."""
_MARKING_S = 2.0
_MAX_WRITES = 5
"""A rollout changes the version with every pod; the size it leaves alone."""


class KubernetesActuator:
    """An Actuator over a cluster that somebody else closes."""

    def __init__(self, cluster: Cluster, workloads: Mapping[Role, Workload], election: Election) -> None:
        self._cluster = cluster
        self._workloads = workloads
        self._election = election
        self._seen: dict[Role, Scale] = {}

    async def sizes(self) -> Mapping[Role, int]:
        """What `spec.replicas` of each workload is. Raises ActuatorError."""
        for role in self._workloads:
            self._seen[role] = await self._read(role)
        return {role: scale.size for role, scale in self._seen.items()}

    async def resize(self, role: Role, size: int, victims: Sequence[str]) -> None:
        """Returns when the size is written. Raises ActuatorError, also if somebody else has resized since `sizes`."""
        if role not in self._workloads:
            raise ActuatorError(f"nobody can resize the {role} pool: set kubernetes.{role}")
        scale = self._seen.get(role) or await self._read(role)
        if victims and self._workloads[role].plural == "deployments":
            await self._mark(scale.status.selector, victims)
        self._seen[role] = await self._write(role, scale, size)

    async def take_lead(self, holder: str, ttl_s: float) -> bool:
        """Whether `holder` has the Lease for `ttl_s` from now on. Raises ActuatorError."""
        return await self._election.take(holder, ttl_s)

    async def _read(self, role: Role) -> Scale:
        return await self._cluster.ask("GET", self._path(role), Scale)

    async def _write(self, role: Role, scale: Scale, size: int) -> Scale:
        for _ in range(_MAX_WRITES):
            body = {"metadata": {"resourceVersion": scale.metadata.resource_version}, "spec": {"replicas": size}}
            try:
                return await self._cluster.ask("PATCH", self._path(role), Scale, body=body, content_type=MERGE_PATCH)
            except Conflict:
                now = await self._read(role)
            if now.size == size:
                return now
            if now.size != scale.size:
                self._seen[role] = now
                raise ActuatorError(
                    f"somebody else has resized the {role} pool from {scale.size} to {now.size} meanwhile; it stays so"
                )
            scale = now
        raise ActuatorError(f"the {role} pool changes too fast to be resized to {size}; it is tried again")

    def _path(self, role: Role) -> str:
        workload = self._workloads[role]
        return self._cluster.path("apps/v1", workload.plural, workload.name, "scale")

    async def _mark(self, selector: str, victims: Sequence[str]) -> None:
        """Best effort: which pods go is a matter of cost, not of correctness, since all of them drain."""
        try:
            async with asyncio.timeout(_MARKING_S):
                listed = await self._cluster.ask(
                    "GET", self._cluster.path("v1", "pods"), PodList, query={"labelSelector": selector}
                )
                costs = _costs(listed.items or (), victims)
                await asyncio.gather(*(self._set_cost(name, cost) for name, cost in costs.items()))
        except (ClusterError, TimeoutError) as error:
            why = str(error) or f"no answer within {_MARKING_S:g} s"
            _log.warning("the pods that go first could not be marked, others may go: %s", why)

    async def _set_cost(self, pod: str, cost: str | None) -> None:
        body = {"metadata": {"annotations": {DELETION_COST: cost}}}
        await self._cluster.ask(
            "PATCH", self._cluster.path("v1", "pods", pod), Pod, body=body, content_type=MERGE_PATCH
        )


def _costs(pods: Sequence[Pod], victims: Sequence[str]) -> dict[str, str | None]:
    """The costs to write, by pods' names: of the victims in their order, and None for marks of an earlier resize."""
    order = {_plain(address.rpartition(":")[0].strip("[]")): rank for rank, address in enumerate(victims)}
    costs: dict[str, str | None] = {}
    for pod in pods:
        if pod.metadata.deletion_timestamp is not None:
            continue
        ranks = [order[_plain(one.ip)] for one in pod.status.pod_ips or () if _plain(one.ip) in order]
        cost = str(_LOWEST_COST + ranks[0]) if ranks else None
        written = (pod.metadata.annotations or {}).get(DELETION_COST)
        if cost != written and (cost is not None or _is_ours(written)):
            costs[pod.metadata.name] = cost
    return costs


def _is_ours(cost: str | None) -> bool:
    return cost is not None and cost.lstrip("-").isdecimal() and int(cost) < _LOWEST_COST + MAX_SIZE


def _plain(host: str) -> str:
    """An IP address in one spelling; a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host
