"""The kubelet of the one node: what becomes of a pod, whatever its containers are.

created ──waits for its ConfigMaps, Secrets and claims──▶ Pending ──started──▶ Running ⇄ Ready
                                                            │                    │
    ended by itself: Succeeded, Failed ◀────────────────────┴────────────────────┤
    gone ◀── stopped, at the latest after its grace ◀── deletionTimestamp ◀──────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tests.chart.fake_kube.addresses import Network
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.store import Store, now


class SetReady(Protocol):
    """How a runtime tells of a pod that runs."""

    def __call__(self, ready: bool, num_restarts: int = 0) -> None:
        """`num_restarts`: of its container that was started again most often."""


class Runtime(Protocol):
    """What runs a pod's containers. `pod` has its address in `status.podIP`."""

    async def start(self, pod: Object, set_ready: SetReady) -> None:
        """Returns when they run; `set_ready` is called whenever that changes."""

    async def ended(self, pod: Object) -> bool:
        """Returns when they have ended by themselves; whether they succeeded. Cancelled when the pod is deleted."""
        ...

    async def stop(self, pod: Object, grace_s: float) -> None:
        """Returns when nothing of them is left."""

    def log(self, pod: Object) -> str:
        """What they have written."""
        ...


class PaperRuntime:
    """Nothing runs: pods say that they are ready, those of `helm test` that they have succeeded."""

    def __init__(self, start_s: float = 0.0, stop_s: float = 0.0) -> None:
        self.start_s = start_s
        self.stop_s = stop_s
        self.unready: set[str] = set()
        """Prefixes of names of pods that never become ready."""

    async def start(self, pod: Object, set_ready: SetReady) -> None:
        await asyncio.sleep(self.start_s)
        set_ready(not any(pod["metadata"]["name"].startswith(prefix) for prefix in self.unready))

    async def ended(self, pod: Object) -> bool:
        if pod["spec"].get("restartPolicy") != "Never":
            await asyncio.Event().wait()
        return True

    async def stop(self, pod: Object, grace_s: float) -> None:
        await asyncio.sleep(min(self.stop_s, grace_s))

    def log(self, pod: Object) -> str:
        return f"{pod['metadata']['name']} is of paper\n"


class Kubelet:
    """Follows the store until it is cancelled; every pod is on this node."""

    def __init__(self, store: Store, runtime: Runtime, network: Network) -> None:
        """Pods get their addresses from `network`."""
        self._store = store
        self._runtime = runtime
        self._network = network
        self._known: set[str] = set()

    async def run(self) -> None:
        """Gives each pod its life. What fails there fails here."""
        async with asyncio.TaskGroup() as lives:
            while True:
                revision = self._store.revision
                for pod in self._store.all("Pod"):
                    if pod["metadata"]["uid"] not in self._known:
                        self._known.add(pod["metadata"]["uid"])
                        lives.create_task(self._live(pod, self._network.next()))
                await self._store.wait(revision)

    async def _live(self, pod: Object, address: str) -> None:
        """One pod from its creation to its end."""
        going = asyncio.create_task(self._until(pod, lambda now_: "deletionTimestamp" in now_["metadata"]))
        living = asyncio.create_task(self._run_containers(pod, address))
        try:
            await asyncio.wait((going, living), return_when=asyncio.FIRST_COMPLETED)
            if living.done() and not going.done():
                living.result()
                return
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
            pod = self._now(pod) or pod
            await self._runtime.stop(pod, pod["metadata"]["deletionGracePeriodSeconds"])
            self._store.delete(pod)
        finally:
            for task in (going, living):
                task.cancel()
            await asyncio.gather(going, living, return_exceptions=True)

    async def _run_containers(self, pod: Object, address: str) -> None:
        self._tell(pod, phase="Pending", podIP=address, podIPs=[{"ip": address}], hostIP="127.0.0.1")
        await self._until(pod, lambda pod: not missing(self._store, pod))
        pod = self._tell(pod, phase="Running", startTime=now())

        def set_ready(ready: bool, num_restarts: int = 0) -> None:
            self._set_ready(pod, ready, num_restarts)

        await self._runtime.start(pod, set_ready)
        succeeded = await self._runtime.ended(pod)
        set_ready(False)
        self._tell(pod, phase="Succeeded" if succeeded else "Failed")

    def _set_ready(self, pod: Object, ready: bool, num_restarts: int) -> None:
        if self._now(pod) is not None:
            conditions = [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")]
            names = [container["name"] for container in pod["spec"]["containers"]]
            status = {"ready": ready, "restartCount": num_restarts, "image": "", "imageID": ""}
            containers = [{"name": name, **status} for name in names]
            self._tell(pod, conditions=conditions, containerStatuses=containers)

    def _tell(self, pod: Object, **status: object) -> Object:
        return self._store.changed(pod, lambda new: new.setdefault("status", {}).update(status))

    def _now(self, pod: Object) -> Object | None:
        """The same pod as it is; None where it is gone."""
        metadata = pod["metadata"]
        found = self._store.find("Pod", metadata["name"], metadata["namespace"])
        return found if found is not None and found["metadata"]["uid"] == metadata["uid"] else None

    async def _until(self, pod: Object, condition: Callable[[Object], bool]) -> None:
        """Returns when it holds, or the pod is gone."""
        while True:
            revision, found = self._store.revision, self._now(pod)
            if found is None or condition(found):
                return
            await self._store.wait(revision)


def missing(store: Store, pod: Object) -> list[str]:
    """What the pod names and is not there: without it no container starts."""
    namespace = pod["metadata"]["namespace"]
    return [f"{kind} {name}" for kind, name in named(pod["spec"]) if store.find(kind, name, namespace) is None]


def named(spec: Object) -> set[tuple[str, str]]:
    """(kind, name) of the ConfigMaps, Secrets and claims that a pod cannot do without."""
    found: set[tuple[str, str]] = set()
    for volume in spec.get("volumes") or ():
        for field, kind, name in _VOLUMES:
            if field in volume and not volume[field].get("optional"):
                found.add((kind, volume[field][name]))
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        sources = [variable.get("valueFrom") or {} for variable in container.get("env") or ()]
        for source in (*sources, *(container.get("envFrom") or ())):
            for field, kind in _SOURCES:
                if field in source and not source[field].get("optional"):
                    found.add((kind, source[field]["name"]))
    return found


_SOURCES = (
    ("configMapKeyRef", "ConfigMap"),
    ("configMapRef", "ConfigMap"),
    ("secretKeyRef", "Secret"),
    ("secretRef", "Secret"),
)
_VOLUMES = (
    ("configMap", "ConfigMap", "name"),
    ("secret", "Secret", "secretName"),
    ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
)
