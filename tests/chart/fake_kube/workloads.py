"""Controllers of Deployments, StatefulSets, ReplicaSets and Jobs: reconciliation, one object at a time.

Deployment ──one ReplicaSet per template──▶ ReplicaSet ──replicas──▶ Pods
   rollout: the new one grows to replicas + maxSurge in all, old ones shrink as new pods become available,
   never below replicas - maxUnavailable
   paused: all ReplicaSets stay; where only one has pods, it still follows replicas
   Progressing: ReplicaSetUpdated ──all are updated and available──▶ NewReplicaSetAvailable
                       └── nothing has changed for progressDeadlineSeconds ──▶ ProgressDeadlineExceeded
Job ──one pod at a time, until one succeeds or more than backoffLimit have failed──▶ Complete, Failed
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.store import Store, is_owned_by, now, owned_by
from tests.chart.fake_kube.verbs import mark_deleted

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_HASH = "pod-template-hash"


def is_ready(pod: Object) -> bool:
    """As its kubelet says."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def is_terminating(pod: Object) -> bool:
    """On its way out."""
    return "deletionTimestamp" in pod["metadata"]


def _owned(store: Store, kind: str, owner: Object) -> list[Object]:
    return [found for found in store.all(kind, owner["metadata"]["namespace"]) if is_owned_by(found, owner)]


def deletion_rank(pod: Object) -> tuple[bool, bool, int, str]:
    """Who goes first, comparable (kubernetes/pkg/controller/controller_utils.go, ActivePodsWithRanks): not running,
    not ready, the lowest deletion cost, the newest."""
    annotations = pod["metadata"].get("annotations") or {}
    age = "".join(chr(0x10FFFF - ord(char)) for char in pod["metadata"]["creationTimestamp"])
    phase = (pod.get("status") or {}).get("phase")
    return (phase == "Running", is_ready(pod), int(annotations.get(DELETION_COST, "0")), age)


def reconcile_replica_set(store: Store, replica_set: Object) -> None:
    """As many pods as it is to have."""
    pods = [pod for pod in _owned(store, "Pod", replica_set) if not is_terminating(pod)]
    wanted = replica_set["spec"]["replicas"]
    for _ in range(wanted - len(pods)):
        name = {"generateName": f"{replica_set['metadata']['name']}-"}
        store.create(_pod(replica_set, name), replica_set["metadata"]["namespace"])
    for pod in sorted(pods, key=deletion_rank)[: max(len(pods) - wanted, 0)]:
        mark_deleted(store, pod)
    _tell(store, replica_set, wanted, pods)


def reconcile_stateful_set(store: Store, stateful_set: Object) -> None:
    """The same, by ordinals: the last one goes first, whatever it costs. Pods keep the template that made them."""
    pods = {pod["metadata"]["name"]: pod for pod in _owned(store, "Pod", stateful_set)}
    wanted = [f"{stateful_set['metadata']['name']}-{ordinal}" for ordinal in range(stateful_set["spec"]["replicas"])]
    for name in wanted:
        if name not in pods:
            store.create(_pod(stateful_set, {"name": name}), stateful_set["metadata"]["namespace"])
    for name, pod in pods.items():
        if name not in wanted:
            mark_deleted(store, pod)
    _tell(store, stateful_set, len(wanted), [pod for pod in pods.values() if not is_terminating(pod)])


def reconcile_deployment(store: Store, deployment: Object) -> None:
    """One step of a rollout, or of a scaling."""
    namespace = deployment["metadata"]["namespace"]
    sets = _owned(store, "ReplicaSet", deployment)
    template_hash = hash_of(deployment["spec"]["template"])
    current = next((one for one in sets if one["metadata"]["labels"][_HASH] == template_hash), None)
    if deployment["spec"].get("paused"):
        _pause(store, deployment, sets, current)
        return
    if current is None:
        current = store.create(_replica_set(deployment, template_hash), namespace)
    old = [one for one in sets if one["metadata"]["uid"] != current["metadata"]["uid"]]
    ready = {one["metadata"]["name"]: _num_ready(store, one) for one in sets} or {current["metadata"]["name"]: 0}
    for replica_set, replicas in _step(deployment, current, old, ready).items():
        found = store.get("ReplicaSet", replica_set, namespace)
        store.changed(found, lambda new, replicas=replicas: new["spec"].update(replicas=replicas))  # type: ignore[misc]
    pods = [pod for one in (current, *old) for pod in _owned(store, "Pod", one) if not is_terminating(pod)]
    updated = [pod for pod in pods if is_owned_by(pod, current)]
    _tell(store, deployment, deployment["spec"]["replicas"], pods, len(updated))


def _pause(store: Store, deployment: Object, sets: list[Object], current: Object | None) -> None:
    replicas = deployment["spec"]["replicas"]
    active = [one for one in sets if one["spec"]["replicas"]]
    if len(active) == 1:
        store.changed(active[0], lambda new: new["spec"].update(replicas=replicas))
    pods = [pod for one in sets for pod in _owned(store, "Pod", one) if not is_terminating(pod)]
    num_updated = 0 if current is None else sum(is_owned_by(pod, current) for pod in pods)
    _tell(store, deployment, replicas, pods, num_updated)


def _step(deployment: Object, current: Object, old: list[Object], ready: dict[str, int]) -> dict[str, int]:
    """Next sizes of the ReplicaSets, by their names; `ready` counts their pods."""
    replicas = deployment["spec"]["replicas"]
    surge, unavailable = _bounds(deployment["spec"].get("strategy") or {}, replicas)
    sizes = {one["metadata"]["name"]: one["spec"]["replicas"] for one in (current, *old)}
    name = current["metadata"]["name"]
    if sum(sizes[one["metadata"]["name"]] for one in old) == 0:
        return {name: replicas}
    sizes[name] = min(replicas, max(sizes[name], sizes[name] + replicas + surge - sum(sizes.values())))
    staying = {its: min(count, sizes[its]) for its, count in ready.items()}
    spare = sum(staying.values()) - (replicas - unavailable)
    for one in old:
        its = one["metadata"]["name"]
        unready = sizes[its] - staying[its]
        going = min(sizes[its], unready + max(spare, 0))
        sizes[its] -= going
        spare -= max(going - unready, 0)
    return sizes


def _num_ready(store: Store, replica_set: Object) -> int:
    """Of its pods: a status would be of the past."""
    return sum(is_ready(pod) and not is_terminating(pod) for pod in _owned(store, "Pod", replica_set))


def _bounds(strategy: Object, replicas: int) -> tuple[int, int]:
    """maxSurge, rounded up, and maxUnavailable, rounded down; of `Recreate`, nothing more and everything less."""
    if strategy.get("type") == "Recreate":
        return 0, replicas
    rolling = strategy.get("rollingUpdate") or {}
    return (
        _amount(rolling.get("maxSurge", "25%"), replicas, math.ceil),
        _amount(rolling.get("maxUnavailable", "25%"), replicas, math.floor),
    )


def _amount(value: int | str, replicas: int, rounded: Any) -> int:
    return int(rounded(int(value.rstrip("%")) * replicas / 100)) if isinstance(value, str) else value


def hash_of(template: Object) -> str:
    """What tells one pod template from another."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _replica_set(deployment: Object, template_hash: str) -> Object:
    template = copy.deepcopy(deployment["spec"]["template"])
    template["metadata"]["labels"] = {**template["metadata"]["labels"], _HASH: template_hash}
    selector = {"matchLabels": {**deployment["spec"]["selector"]["matchLabels"], _HASH: template_hash}}
    return {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {
            "name": f"{deployment['metadata']['name']}-{template_hash}",
            "labels": template["metadata"]["labels"],
            "ownerReferences": owned_by(deployment),
        },
        "spec": {"replicas": 0, "selector": selector, "template": template},
    }


def _pod(owner: Object, name: Object) -> Object:
    template = copy.deepcopy(owner["spec"]["template"])
    metadata = {**template.get("metadata", {}), **name, "ownerReferences": owned_by(owner)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _tell(store: Store, found: Object, wanted: int, pods: Iterable[Object], num_updated: int | None = None) -> None:
    """Its status, as far as Helm and the scale subresource read it."""
    pods = list(pods)
    num_ready = sum(is_ready(pod) for pod in pods)
    status = {
        "observedGeneration": found["metadata"]["generation"],
        "replicas": len(pods),
        "readyReplicas": num_ready,
        "availableReplicas": num_ready,
    }
    if found["kind"] != "ReplicaSet":
        status["updatedReplicas"] = len(pods) if num_updated is None else num_updated
        available = {"type": "Available", "status": str(num_ready >= wanted), "reason": "", "message": ""}
        status["conditions"] = [available, _progressing(found, status, wanted)]
    store.changed(found, lambda new: new.update(status=status))


def _progressing(found: Object, status: Object, wanted: int) -> Object:
    """The condition that follows the present one (kubernetes/pkg/controller/deployment/progress.go)."""
    before = found.get("status") or {}
    present = next((one for one in before.get("conditions") or () if one["type"] == "Progressing"), None)
    was_paused = present is not None and present["reason"] == "DeploymentPaused"
    if found["spec"].get("paused"):
        return _condition("Unknown", "DeploymentPaused", present if was_paused else None)
    counts = [status[count] for count in ("updatedReplicas", "replicas", "availableReplicas")]
    is_done = present is not None and present["reason"] == "NewReplicaSetAvailable" and counts[0] == counts[1]
    if is_done or counts == [wanted] * 3:
        return _condition("True", "NewReplicaSetAvailable", present if is_done else None)
    has_moved = any(before.get(count) != status[count] for count in status if count.endswith("Replicas"))
    if present is None or was_paused or has_moved:
        return _condition("True", "ReplicaSetUpdated")
    deadline_s = found["spec"].get("progressDeadlineSeconds", 600)
    if datetime.now(UTC) - datetime.fromisoformat(present["lastUpdateTime"]) > timedelta(seconds=deadline_s):
        return _condition("False", "ProgressDeadlineExceeded", present if present["status"] == "False" else None)
    return present


def _condition(status: str, reason: str, present: Object | None = None) -> Object:
    updated = present["lastUpdateTime"] if present else now()
    return {"type": "Progressing", "status": status, "reason": reason, "message": "", "lastUpdateTime": updated}


def reconcile_job(store: Store, job: Object) -> None:
    """One pod at a time."""
    if (job.get("status") or {}).get("conditions"):
        return
    pods = _owned(store, "Pod", job)
    phases = [(pod.get("status") or {}).get("phase", "Pending") for pod in pods]
    num_failed = phases.count("Failed")
    status: Object = {"succeeded": phases.count("Succeeded"), "failed": num_failed, "active": 0}
    if "Succeeded" in phases:
        status["conditions"] = [{"type": "Complete", "status": "True", "reason": "", "message": ""}]
    elif num_failed > job["spec"].get("backoffLimit", 6):
        status["conditions"] = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": ""}]
    elif num_failed == len(pods):
        store.create(_pod(job, {"generateName": f"{job['metadata']['name']}-"}), job["metadata"]["namespace"])
    store.changed(job, lambda new: new.update(status=status))
