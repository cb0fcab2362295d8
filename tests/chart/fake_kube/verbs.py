"""The verbs on objects, after faults and rights: checked as the real server checks, then carried out on the store."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.chart.fake_kube import patching, protobuf, validation
from tests.chart.fake_kube.field_owners import Manager, Owners
from tests.chart.fake_kube.kinds import Object, Place
from tests.chart.fake_kube.refusal import Refused, invalid
from tests.chart.fake_kube.selecting import selector_text
from tests.chart.fake_kube.store import Store, not_found, now
from tests.chart.schemas import validate

_UNTYPED = (
    "cert-manager.io",
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
    "keda.sh",
    "monitoring.coreos.com",
)
"""Custom resources: Kubernetes knows their schema by a definition that is not here."""
_PATCHES: dict[str, Callable[[Any, Any], Any]] = {
    patching.MERGE: patching.merged,
    patching.STRATEGIC: patching.strategically_merged,
    patching.JSON: patching.json_patched,
}


@dataclass(frozen=True, slots=True)
class Write:
    """What a client sends with a create, update or patch."""

    body: Any
    content_type: str
    manager: Manager
    force: bool = False
    """Of an apply: take fields from other managers."""
    dry_run: bool = False
    strict: bool = False
    """Refuse fields that do not exist, in place of dropping them."""


def body_of(raw: bytes) -> Any:
    """JSON, YAML or protobuf."""
    return protobuf.object_of(raw) if raw.startswith(protobuf.MAGIC) else yaml.load(raw, yaml.CSafeLoader)


class Verbs:
    """Get, create, update, patch and delete of one object."""

    def __init__(self, store: Store, minor: str) -> None:
        self._store = store
        self._minor = minor
        self._owners: dict[str, Owners] = {}

    def get(self, place: Place, revision: int | None = None) -> Object:
        """As it is, or as it was at `revision`."""
        found = self._store.get(place.kind.kind, place.name or "", place.namespace)
        found = found if revision is None else self._store.as_of(found, revision)
        return scale_of(found) if place.subresource == "scale" else found

    def create(self, place: Place, write: Write) -> Object:
        """Raises Refused."""
        new = _with_defaults(write.body)
        self._check(new, write)
        if write.dry_run:
            return new
        made = self._store.create(new, place.namespace)
        self._of(made).wrote(write.manager, {}, made)
        return made

    def update(self, place: Place, write: Write) -> Object:
        """Raises Refused."""
        return self._replaced(place, write, lambda before: _updated(place, before, write.body))

    def patch(self, place: Place, write: Write) -> Object:
        """Raises Refused."""
        if write.content_type == patching.APPLY:
            return self._apply(place, write)
        apply_to = _PATCHES[write.content_type]
        return self._replaced(place, write, lambda before: apply_to(before, write.body))

    def delete(self, place: Place, grace_s: int | None) -> Object:
        """A running pod is only marked; its kubelet removes it."""
        found = self.get(place)
        runs = found["kind"] == "Pod" and (found.get("status") or {}).get("phase") in (None, "Pending", "Running")
        if not runs or grace_s == 0:
            self._store.delete(found)
            self._owners.pop(found["metadata"]["uid"], None)
            return found
        if "deletionTimestamp" in found["metadata"]:
            return found
        return mark_deleted(self._store, found, grace_s)

    def _apply(self, place: Place, write: Write) -> Object:
        validation.check_keys(write.body)
        before = self._store.find(place.kind.kind, place.name or "", place.namespace)
        if place.subresource == "scale":
            return self._apply_scale(place, before, write)
        if before is None:
            new = _with_defaults(write.body)
            self._check(new, write)
            if write.dry_run:
                return new
            before = self._store.create(new, place.namespace)
            self._of(before).apply(write.manager, before, write.body, force=True)
            return before
        owners = copy.deepcopy(self._of(before))
        new = _with_defaults(owners.apply(write.manager, before, write.body, force=write.force))
        self._check(new, write, before)
        if write.dry_run:
            return new
        self._owners[before["metadata"]["uid"]] = owners
        return self._store.replace(new)

    def _apply_scale(self, place: Place, before: Object | None, write: Write) -> Object:
        """A size that is the same already gets one owner more."""
        if before is None:
            raise not_found(place.kind, place.name or "")
        size = {"apiVersion": before["apiVersion"], "spec": {"replicas": write.body["spec"]["replicas"]}}
        new = self._of(before).apply(write.manager, before, size, force=write.force)
        return scale_of(self._store.replace(new))

    def _replaced(self, place: Place, write: Write, change: Callable[[Object], Object]) -> Object:
        before = self._store.get(place.kind.kind, place.name or "", place.namespace)
        if place.subresource == "scale":
            return scale_of(self._rescaled(place, before, write, change(copy.deepcopy(scale_of(before)))))
        new = change(before)
        self._check(new, write, before)
        return self._written(before, new, write)

    def _rescaled(self, place: Place, before: Object, write: Write, scale: Object) -> Object:
        replicas = scale["spec"].get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            raise invalid("scale.autoscaling", place.name or "", f"spec.replicas: {replicas!r} is no number above 0")
        new = copy.deepcopy(before)
        new["spec"]["replicas"] = replicas
        new["metadata"]["resourceVersion"] = scale["metadata"].get("resourceVersion", "")
        return self._written(before, new, write)

    def _written(self, before: Object, new: Object, write: Write) -> Object:
        if write.dry_run:
            return new
        after = self._store.replace(new)
        self._of(after).wrote(write.manager, before, after)
        return after

    def _of(self, found: Object) -> Owners:
        return self._owners.setdefault(found["metadata"]["uid"], Owners())

    def _check(self, new: Object, write: Write, before: Object | None = None) -> None:
        """By Kubernetes' own schema, which custom resources pass, and by what it checks beside that."""
        if new.get("apiVersion", "").startswith(_UNTYPED):
            return
        bare = copy.deepcopy(new)
        try:
            validate(bare, f"1.{self._minor}", strict=write.strict)
        except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
            code, reason = (400, "BadRequest") if "Additional properties" in str(error) else (422, "Invalid")
            raise Refused(code, reason, f"{new['kind']} {new['metadata'].get('name')!r}: {error}") from error
        validation.check(new, before)


def mark_deleted(store: Store, pod: Object, grace_s: int | None = None) -> Object:
    """Begins a pod's termination, with the grace of its own if none is given. Twice is once."""
    own_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
    mark = {"deletionTimestamp": now(), "deletionGracePeriodSeconds": own_s if grace_s is None else grace_s}
    if "deletionTimestamp" in pod["metadata"]:
        return pod
    return store.changed(pod, lambda new: new["metadata"].update(mark))


def scale_of(found: Object) -> Object:
    """The subresource. A size of zero is left out, as Kubernetes writes it."""
    metadata = found["metadata"]
    replicas = found["spec"].get("replicas", 1)
    current = (found.get("status") or {}).get("replicas", 0)
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
        "spec": {"replicas": replicas} if replicas else {},
        "status": {"replicas": current, "selector": selector_text(found["spec"]["selector"])},
    }


def _updated(place: Place, before: Object, body: Object) -> Object:
    """A status is written by itself, and nothing else with it. The path says what is written to."""
    metadata = {**body["metadata"], "name": place.name}
    body = {**body, "metadata": {**metadata, "namespace": place.namespace} if place.namespace else metadata}
    kept, written = (body, before) if place.subresource != "status" else (before, body)
    new = {key: value for key, value in kept.items() if key != "status"}
    return {**new, "status": written["status"]} if "status" in written else new


def _with_defaults(new: Object) -> Object:
    """Those that clients and controllers here read."""
    new = copy.deepcopy(new)
    if new["kind"] in ("Deployment", "StatefulSet", "ReplicaSet"):
        new["spec"].setdefault("replicas", 1)
    if new["kind"] == "Service":
        new["spec"].setdefault("clusterIP", "10.96.0.1")  # nobody routes it
    for key, text in new.pop("stringData", {}).items():
        new.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
    return new
