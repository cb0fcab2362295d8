"""Two pools in a fake Kubernetes, and a router's account with the rights that docs/kubernetes/security.md lists."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.kubernetes.actuator import Election, KubernetesActuator
from router.kubernetes.cluster import Cluster
from router.kubernetes.settings import KubernetesSettings
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import Runtime
from tests.chart.fake_kube.workloads import is_ready

ACCOUNT = "router"
LEASE = "tandem-autoscaler"
RIGHTS: list[Object] = [
    {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale", "statefulsets/scale"],
        "resourceNames": ["prefill", "decode"],
        "verbs": ["get", "patch"],
    },
    {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
    {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": [LEASE],
        "verbs": ["get", "patch"],
    },
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
]


@dataclass
class FakeRelease:
    """The two pools, and clients with the router's account."""

    kube: FakeKube
    _clusters: list[Cluster] = field(default_factory=list)

    def cluster(self) -> Cluster:
        """A client with the router's account; closed with the release."""
        made = Cluster(str(self.kube.account_folder(ACCOUNT)), environment=self.kube.environment)
        self._clusters.append(made)
        return made

    def actuator(self, *, kind: str = "deployment", **workloads: str) -> KubernetesActuator:
        """Of both pools, if `workloads` does not name others."""
        named = workloads or {"prefill": f"{kind}/prefill", "decode": f"{kind}/decode"}
        cluster = self.cluster()
        settings = KubernetesSettings.model_validate(named)
        return KubernetesActuator(cluster, settings.workloads, Election(cluster, LEASE))

    def size(self, pool: str, kind: str = "Deployment") -> int:
        """Desired replicas of its workload."""
        return int(self.kube.store.get(kind, pool)["spec"]["replicas"])

    def names(self, pool: str) -> list[str]:
        """Of its pods, without those that terminate."""
        return [pod["metadata"]["name"] for pod in self.kube.pods(pool)]

    def addressed(self, pool: str) -> bool:
        """Whether each of its pods has an address."""
        return all("podIP" in pod.get("status", {}) for pod in self.kube.pods(pool))

    def address(self, pod: str) -> str:
        """As the router knows it."""
        return f"{self.kube.store.get('Pod', pod)['status']['podIP']}:50051"

    async def until_ready(self, pool: str, size: int) -> None:
        """Returns when it has exactly `size` pods, all ready."""
        await self.kube.until(
            lambda store: (
                [is_ready(pod) for pod in store.all("Pod") if pod["metadata"]["name"].startswith(pool)] == [True] * size
            )
        )

    def asked(self, verb: str, resource: str) -> int:
        """How often the router has sent that request."""
        return sum(request[1:3] == (verb, resource) for request in self.kube.requests)

    async def close(self) -> None:
        for cluster in self._clusters:
            await cluster.close()


def workload(pool: str, size: int, kind: str = "Deployment") -> Object:
    """A Deployment or StatefulSet."""
    labels = {"app": pool}
    container = {"name": pool, "image": "tandem:0", "ports": [{"containerPort": 50051}]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec: Object = {"replicas": size, "selector": {"matchLabels": labels}, "template": template}
    if kind == "StatefulSet":
        spec["serviceName"] = pool
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": pool}, "spec": spec}


def service(pool: str) -> Object:
    """Headless."""
    spec = {"clusterIP": "None", "selector": {"app": pool}, "ports": [{"name": "grpc", "port": 50051}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": pool}, "spec": spec}


def role(rules: list[Object]) -> list[Object]:
    """A Role with these rules, bound to the router's account."""
    group = "rbac.authorization.k8s.io"
    named = {"apiVersion": f"{group}/v1", "metadata": {"name": ACCOUNT}}
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": "default"}
    reference = {"apiGroup": group, "kind": "Role", "name": ACCOUNT}
    return [
        {**named, "kind": "Role", "rules": copy.deepcopy(rules)},
        {**named, "kind": "RoleBinding", "subjects": [subject], "roleRef": reference},
    ]


@asynccontextmanager
async def fake_release(
    runtime: Runtime | None = None,
    *,
    kind: str = "Deployment",
    rights: list[Object] = RIGHTS,
    ready: bool = True,
    **sizes: int,
) -> AsyncIterator[FakeRelease]:
    """One prefill and two decode pods by default; all are removed at the end."""
    wanted: dict[str, Any] = {"prefill": 1, "decode": 2, **sizes}
    async with FakeKube(runtime) as kube:
        found = FakeRelease(kube)
        for one in role(rights):
            kube.store.create(one)
        kube.store.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE}})
        for pool, size in wanted.items():
            kube.store.create(service(pool))
            kube.store.create(workload(pool, size, kind))
        if ready:
            for pool, size in wanted.items():
                await found.until_ready(pool, size)
        try:
            yield found
        finally:
            await found.close()
