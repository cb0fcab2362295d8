"""The resources that the server has, and their paths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tests.chart.fake_kube.refusal import Refused

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """One resource."""

    group: str
    version: str
    plural: str
    kind: str
    subresources: tuple[str, ...] = ()
    namespaced: bool = True

    @property
    def group_version(self) -> str:
        """As in `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """As in messages."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


_SCALABLE = ("scale", "status")
KINDS = (
    Kind("", "v1", "namespaces", "Namespace", ("status",), namespaced=False),
    Kind("", "v1", "nodes", "Node", ("status",), namespaced=False),
    Kind("", "v1", "pods", "Pod", ("log", "status")),
    Kind("", "v1", "services", "Service", ("status",)),
    Kind("", "v1", "configmaps", "ConfigMap"),
    Kind("", "v1", "secrets", "Secret"),
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", ("status",)),
    Kind("", "v1", "events", "Event"),
    Kind("apps", "v1", "deployments", "Deployment", _SCALABLE),
    Kind("apps", "v1", "statefulsets", "StatefulSet", _SCALABLE),
    Kind("apps", "v1", "replicasets", "ReplicaSet", _SCALABLE),
    Kind("batch", "v1", "jobs", "Job", ("status",)),
    Kind("cert-manager.io", "v1", "certificates", "Certificate", ("status",)),
    Kind("coordination.k8s.io", "v1", "leases", "Lease"),
    Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
    Kind("gateway.networking.k8s.io", "v1", "grpcroutes", "GRPCRoute", ("status",)),
    Kind("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute", ("status",)),
    Kind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool", ("status",)),
    Kind("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject", ("status",)),
    Kind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
    Kind("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
    Kind("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
    Kind("networking.k8s.io", "v1", "ingresses", "Ingress", ("status",)),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", ("status",)),
    Kind("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding"),
    Kind("rbac.authorization.k8s.io", "v1", "roles", "Role"),
)
_BY_PATH = {(one.group, one.version, one.plural): one for one in KINDS}
_BY_NAME = {one.kind: one for one in KINDS}

_PATH = re.compile(
    r"(?:/api/(?P<core>v1)|/apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[a-z]+))?"
    r"/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+)(?:/(?P<subresource>[a-z]+))?)?"
)


@dataclass(frozen=True, slots=True)
class Place:
    """What a path names: a resource, perhaps in a namespace, perhaps one object of it."""

    kind: Kind
    namespace: str | None
    name: str | None
    subresource: str | None

    @property
    def resource(self) -> str:
        """As a Role names it."""
        return f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural


def kind_of(name: str) -> Kind:
    """By the `kind` of a manifest."""
    return _BY_NAME[name]


def place_of(path: str) -> Place:
    """Raises Refused where there is no such resource."""
    found = _PATH.fullmatch(path)
    kind = _BY_PATH.get((found["group"] or "", found["version"] or "v1", found["plural"])) if found else None
    if found is None or kind is None or (found["subresource"] or "status") not in (*kind.subresources, "status"):
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    return Place(kind, found["namespace"], found["name"], found["subresource"])
