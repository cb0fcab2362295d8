"""All controllers as one loop over the store: every object, again and again until nothing changes any more."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tests.chart.fake_kube.endpoints import reconcile_service
from tests.chart.fake_kube.kinds import KINDS, Object
from tests.chart.fake_kube.store import Store
from tests.chart.fake_kube.verbs import mark_deleted
from tests.chart.fake_kube.workloads import (
    reconcile_deployment,
    reconcile_job,
    reconcile_replica_set,
    reconcile_stateful_set,
)

_RECONCILERS = {
    "Deployment": reconcile_deployment,
    "StatefulSet": reconcile_stateful_set,
    "ReplicaSet": reconcile_replica_set,
    "Job": reconcile_job,
}
_TICK_S = 0.5
"""A deadline passes without any change."""


class Controllers:
    """`endpoints_per_slice`: few, so that several slices are the rule."""

    def __init__(self, store: Store, endpoints_per_slice: int = 2) -> None:
        self._store = store
        self._endpoints_per_slice = endpoints_per_slice

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            revision = self._store.revision
            self._reconcile()
            if self._store.revision == revision:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._store.wait(revision)

    def _reconcile(self) -> None:
        self._collect()
        for kind, reconcile in _RECONCILERS.items():
            for found in self._store.all(kind):
                reconcile(self._store, found)
        for service in self._store.all("Service"):
            reconcile_service(self._store, service, self._endpoints_per_slice)
            if service["spec"].get("type") == "LoadBalancer":
                balancer = {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}
                self._store.changed(service, lambda new, balancer=balancer: new.update(status=balancer))  # type: ignore[misc]
        for claim in self._store.all("PersistentVolumeClaim"):
            self._store.changed(claim, lambda new: new.update(status={"phase": "Bound"}))

    def _collect(self) -> None:
        """Removes what is left of owners that are gone."""
        everything = [found for kind in KINDS for found in self._store.all(kind.kind)]
        there = {found["metadata"]["uid"] for found in everything}
        for found in everything:
            owners = found["metadata"].get("ownerReferences") or []
            if owners and not any(owner["uid"] in there for owner in owners):
                _remove(self._store, found)


def _remove(store: Store, found: Object) -> None:
    has_ended = (found.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if found["kind"] == "Pod" and not has_ended:
        mark_deleted(store, found)
    else:
        store.delete(found)
