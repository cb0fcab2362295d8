"""The controller of EndpointSlices: for each Service with a selector, the pods behind it, in slices of a few."""

from __future__ import annotations

from typing import Any

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.selecting import matches_labels, selector_text
from tests.chart.fake_kube.store import Store, owned_by
from tests.chart.fake_kube.workloads import is_ready, is_terminating

SERVICE_NAME = "kubernetes.io/service-name"


def reconcile_service(store: Store, service: Object, per_slice: int) -> None:
    """Slices of at most `per_slice` endpoints, none where there is no pod but the first, which stays and is empty."""
    selector = service["spec"].get("selector")
    if not selector:
        return
    metadata = service["metadata"]
    text = selector_text({"matchLabels": selector})
    pods = [
        pod
        for pod in store.all("Pod", metadata["namespace"])
        if matches_labels(pod["metadata"].get("labels"), text) and _has_address(pod)
    ]
    chunks = [pods[at : at + per_slice] for at in range(0, len(pods), per_slice)] or [[]]
    known = {
        found["metadata"]["name"]: found
        for found in store.all("EndpointSlice", metadata["namespace"])
        if found["metadata"]["labels"][SERVICE_NAME] == metadata["name"]
    }
    for number, chunk in enumerate(chunks):
        found = known.pop(f"{metadata['name']}-{number}", None)
        _write(store, service, number, [_endpoint(pod) for pod in chunk], found)
    for left in known.values():
        store.delete(left)


def _write(store: Store, service: Object, number: int, endpoints: list[Any], found: Object | None) -> None:
    # An empty list is written as null, as the real controller does.
    content = {"endpoints": endpoints or None, "ports": [_port(port) for port in service["spec"].get("ports", ())]}
    if found is not None:
        store.changed(found, lambda new: new.update(content))
        return
    metadata = {
        "name": f"{service['metadata']['name']}-{number}",
        "labels": {SERVICE_NAME: service["metadata"]["name"]},
        "ownerReferences": owned_by(service),
    }
    head = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata, "addressType": "IPv4"}
    store.create({**head, **content}, service["metadata"]["namespace"])


def _port(port: Object) -> Object:
    return {"name": port.get("name", ""), "port": port["port"], "protocol": port.get("protocol", "TCP")}


def _has_address(pod: Object) -> bool:
    status = pod.get("status") or {}
    return "podIP" in status and status.get("phase") not in ("Succeeded", "Failed")


def _endpoint(pod: Object) -> Object:
    serving, terminating = is_ready(pod), is_terminating(pod)
    metadata = pod["metadata"]
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": serving and not terminating, "serving": serving, "terminating": terminating},
        "targetRef": {"kind": "Pod", "name": metadata["name"], "namespace": metadata["namespace"]},
    }
