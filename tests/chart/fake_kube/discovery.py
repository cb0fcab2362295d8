"""What the server says of itself: versions, groups, resources, and enough OpenAPI that clients ask it to validate."""

from __future__ import annotations

from typing import Any

from tests.chart.fake_kube.kinds import KINDS, Kind
from tests.chart.fake_kube.refusal import Refused

_VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SHORT = {"deployments": ["deploy"], "pods": ["po"], "services": ["svc"], "statefulsets": ["sts"]}
_OPENAPI = "/openapi/v3"


def document(path: str, minor: str) -> Any | None:
    """The answer to `path` on Kubernetes 1.`minor`; None: it is none of this. Raises Refused for unknown groups."""
    fixed = {
        "/version": lambda: _version(minor),
        "/api": lambda: {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        "/apis": _groups,
        _OPENAPI: _schemas,
    }
    if path in fixed:
        return fixed[path]()
    if path.startswith(f"{_OPENAPI}/"):
        return _schema(_of_root(path.removeprefix(f"{_OPENAPI}/")))
    parts = path.strip("/").split("/")
    if (parts[0] == "api" and len(parts) == 2) or (parts[0] == "apis" and len(parts) == 3):
        return _resources(_of_root(path.strip("/")))
    return None


def _version(minor: str) -> dict[str, str]:
    fields = {"major": "1", "minor": minor, "gitVersion": f"v1.{minor}.0", "platform": "linux/amd64"}
    return {**fields, "gitCommit": "", "gitTreeState": "clean", "buildDate": "", "goVersion": "", "compiler": ""}


def _root(kind: Kind) -> str:
    return f"apis/{kind.group_version}" if kind.group else f"api/{kind.version}"


def _of_root(root: str) -> list[Kind]:
    found = [kind for kind in KINDS if _root(kind) == root]
    if not found:
        raise Refused(404, "NotFound", "the server could not find the requested resource")
    return found


def _groups() -> dict[str, Any]:
    versions = {kind.group: kind for kind in KINDS if kind.group}
    groups = [
        {
            "name": group,
            "versions": [{"groupVersion": kind.group_version, "version": kind.version}],
            "preferredVersion": {"groupVersion": kind.group_version, "version": kind.version},
        }
        for group, kind in versions.items()
    ]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(kinds: list[Kind]) -> dict[str, Any]:
    resources: list[dict[str, Any]] = []
    for kind in kinds:
        named = {"singularName": kind.kind.lower(), "shortNames": _SHORT.get(kind.plural, [])}
        fields = {"name": kind.plural, "namespaced": kind.namespaced, "kind": kind.kind, "verbs": _VERBS}
        resources.append({**fields, **named})
        for subresource in kind.subresources:
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"} if subresource == "scale" else {}
            below = {"name": f"{kind.plural}/{subresource}", "singularName": "", "verbs": ["get", "patch", "update"]}
            resources.append({**fields, **below, **scale})
    version = kinds[0].group_version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _schemas() -> dict[str, Any]:
    roots = dict.fromkeys(_root(kind) for kind in KINDS)
    return {"paths": {root: {"serverRelativeURL": f"{_OPENAPI}/{root}?hash=1"} for root in roots}}


def _schema(kinds: list[Kind]) -> dict[str, Any]:
    """Paths alone: kubectl looks there whether the server validates fields, and then leaves it to the server."""
    validates = [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}]
    paths = {}
    for kind in kinds:
        where = "namespaces/{namespace}/" if kind.namespaced else ""
        patch = {
            "parameters": validates,
            "responses": {},
            "x-kubernetes-group-version-kind": {"group": kind.group, "version": kind.version, "kind": kind.kind},
        }
        paths[f"/{_root(kind)}/{where}{kind.plural}/{{name}}"] = {"patch": patch}
    info = {"title": "Kubernetes", "version": "v1"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}
