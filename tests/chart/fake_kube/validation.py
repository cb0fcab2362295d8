"""What the API server refuses beyond its schemas: names that are none, selectors that miss their own pods, elements of
a list that are there twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tests.chart.fake_kube.kinds import Object, kind_of
from tests.chart.fake_kube.patching import key_of
from tests.chart.fake_kube.refusal import Refused, invalid
from tests.chart.fake_kube.selecting import matches_labels, selector_text

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_PORT = re.compile(r"(?=.*[a-z])(?!.*--)[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?")
_KEY = re.compile(rf"({_SUBDOMAIN.pattern}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_SECOND_KEYS = {"ports": "protocol", "topologySpreadConstraints": "whenUnsatisfiable"}
_WORKLOADS = ("Deployment", "StatefulSet", "ReplicaSet")


def check(new: Object, before: Object | None = None) -> None:
    """Raises Refused (422) for an object that is to be written; `before` is what it replaces."""
    name = new["metadata"].get("name", "generated")
    for why in _complaints(new, before):
        raise invalid(kind_of(new["kind"]).qualified, name, why)


def check_keys(manifest: Object) -> None:
    """Raises Refused where server-side apply cannot tell two elements of one list apart."""
    if manifest["kind"] == "NetworkPolicy":  # whose lists are each one value
        return
    for path, field, elements in _lists(manifest):
        keys = [(key_of(field, element), element.get(_SECOND_KEYS.get(field))) for element in elements]
        for (key, _), count in Counter(one for one in keys if one[0] is not None).items():
            if key is not None and count > 1:
                why = f'{path}: duplicate entries for key [{key[0]}="{key[1]}"]'
                raise Refused(500, "InternalError", f"failed to create typed patch object: {why}")


def _complaints(new: Object, before: Object | None) -> Iterator[str]:
    metadata = new["metadata"]
    rule = _SERVICE if new["kind"] == "Service" else _SUBDOMAIN
    if "name" in metadata and not rule.fullmatch(metadata["name"]):
        yield f'metadata.name: Invalid value: "{metadata["name"]}"'
    yield from _of_labels("metadata.labels", metadata.get("labels"))
    spec = new.get("spec") or {}
    if new["kind"] == "Service":
        yield from _twice("spec.ports", (port.get("name", "") for port in spec.get("ports") or ()))
        yield from _twice("spec.ports", ((one["port"], one.get("protocol")) for one in spec.get("ports") or ()))
    if new["kind"] == "Pod":
        yield from _of_pod("spec", spec)
    if new["kind"] in _WORKLOADS:
        yield from _of_workload(spec, before)
    if new["kind"] == "Deployment":
        yield from _of_strategy(spec.get("strategy") or {})


def _of_workload(spec: Object, before: Object | None) -> Iterator[str]:
    labels = spec["template"].get("metadata", {}).get("labels")
    yield from _of_labels("spec.template.metadata.labels", labels)
    if not matches_labels(labels, selector_text(spec["selector"])):
        yield f"spec.template.metadata.labels: Invalid value: {labels}: `selector` does not match template `labels`"
    if before is not None and before["spec"]["selector"] != spec["selector"]:
        yield f"spec.selector: Invalid value: {spec['selector']}: field is immutable"
    yield from _of_pod("spec.template.spec", spec["template"]["spec"])


def _of_strategy(strategy: Object) -> Iterator[str]:
    rolling = strategy.get("rollingUpdate") or {}
    if [str(rolling.get(bound, "25%")).rstrip("%") for bound in ("maxSurge", "maxUnavailable")] == ["0", "0"]:
        yield "spec.strategy.rollingUpdate.maxUnavailable: may not be 0 when `maxSurge` is 0"


def _of_pod(path: str, spec: Object) -> Iterator[str]:
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _twice(f"{path}.containers", (one["name"] for one in containers))
    yield from _twice(f"{path}.volumes", volumes)
    for name in (*volumes, *(one["name"] for one in containers)):
        if not re.fullmatch(_LABEL, name):
            yield f'{path}: Invalid value: "{name}": a lowercase RFC 1123 label must consist of lower case characters'
    for one in containers:
        mounts = one.get("volumeMounts") or ()
        yield from _twice(f"{path}.containers.volumeMounts", (mount["mountPath"] for mount in mounts))
        for mount in mounts:
            if mount["name"] not in volumes:
                yield f'{path}.containers.volumeMounts.name: Not found: "{mount["name"]}"'
        names = [port["name"] for port in one.get("ports") or () if "name" in port]
        yield from _twice(f"{path}.containers.ports", names)
        for name in names:
            if not _PORT.fullmatch(name):
                yield f'{path}.containers.ports.name: Invalid value: "{name}"'


def _of_labels(path: str, labels: dict[str, str] | None) -> Iterator[str]:
    for key, value in (labels or {}).items():
        if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            yield f'{path}: Invalid value: "{key}={value}"'


def _twice(path: str, values: Iterable[Any]) -> Iterator[str]:
    for value, count in Counter(values).items():
        if count > 1:
            yield f"{path}: Duplicate value: {value!r}"


def _lists(value: Any, path: str = "", field: str = "") -> Iterator[tuple[str, str, list[Any]]]:
    if isinstance(value, list):
        yield path, field, [item for item in value if isinstance(item, dict)]
        for item in value:
            yield from _lists(item, f"{path}[]", field)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _lists(item, f"{path}.{key}", key)
