"""Processes in the place of containers: each pod's commands run on this machine, as its spec says.

    init containers, one after the other, each until it succeeds ──▶ containers side by side (process_container.py)
        ──restartPolicy Always──▶ kept running until the pod is stopped
        ──otherwise──▶ ended, with success or without

Each container leads a process group. `close` ends every one that is left and looks that nobody is; should this process
be killed, the services end by their bond to it (serving/lifecycle.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from serving.lifecycle import ParentBond
from tests.chart.fake_kube.container_view import Node
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import SetReady
from tests.chart.fake_kube.process_container import Container, running_in
from tests.process_logs import LOGS

_INIT_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class End:
    """How a container that was told to end did so."""

    pod: str
    status: int
    """Exit status; negative for a signal."""
    took_s: float


class _Pod:
    """Its containers and what goes on with them."""

    def __init__(self, node: Node, pod: Object, folder: Path, bond: ParentBond) -> None:
        spec = pod["spec"]
        self.name = pod["metadata"]["name"]
        self.inits = [Container(node, pod, one, folder, bond) for one in spec.get("initContainers") or ()]
        self.containers = [Container(node, pod, one, folder, bond) for one in spec["containers"]]
        self._is_to_restart = spec.get("restartPolicy", "Always") == "Always"
        self._ready = [False] * len(self.containers)
        self.life: asyncio.Task[bool] | None = None

    @property
    def everybody(self) -> list[Container]:
        return [*self.inits, *self.containers]

    async def initialise(self) -> None:
        """One init container after the other, each until it succeeds."""
        for container in self.inits:
            while await container.run() != 0:
                await asyncio.sleep(_INIT_BACKOFF_S)

    async def live(self, set_ready: SetReady) -> bool:
        """Whether all have succeeded; of a pod that is to be restarted, never."""
        if not self._is_to_restart:
            set_ready(True)
            return not any(await asyncio.gather(*(container.run() for container in self.containers)))
        await asyncio.gather(
            *(one.keep_running(self._teller(index, set_ready)) for index, one in enumerate(self.containers))
        )
        raise AssertionError("containers are kept running until they are stopped")

    def _teller(self, index: int, set_ready: SetReady) -> SetReady:
        def tell(ready: bool, num_restarts: int = 0) -> None:
            self._ready[index] = ready
            set_ready(all(self._ready), num_restarts)

        return tell

    async def leave_alone(self) -> None:
        """No probe and no restart any more. Raises what had gone wrong with them."""
        if self.life is not None:
            self.life.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.life


class ProcessRuntime:
    """A Runtime. `close` it when the cluster is gone."""

    def __init__(self, node: Node) -> None:
        self.ends: list[End] = []
        """Of all containers that were told to end so far, as pods went."""
        self._node = node
        self._bond = ParentBond()
        # Short: programs make sockets below it.
        self._folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
        self._pods: dict[str, _Pod] = {}

    async def start(self, pod: Object, set_ready: SetReady) -> None:
        folder = self._folder / str(len(self._pods))
        folder.mkdir()
        found = self._pods[pod["metadata"]["uid"]] = _Pod(self._node, pod, folder, self._bond)
        await found.initialise()
        found.life = asyncio.create_task(found.live(set_ready))

    async def ended(self, pod: Object) -> bool:
        life = self._pods[pod["metadata"]["uid"]].life
        assert life is not None
        await asyncio.wait((life,))  # which leaves it alone when this is cancelled
        return life.result()

    async def stop(self, pod: Object, grace_s: float) -> None:
        found = self._pods.get(pod["metadata"]["uid"])
        if found is None:
            return
        await found.leave_alone()
        began_s = time.monotonic()
        for status in await asyncio.gather(*(container.end(grace_s) for container in found.everybody)):
            if status is not None:
                self.ends.append(End(found.name, status, time.monotonic() - began_s))

    def log(self, pod: Object) -> str:
        found = self._pods.get(pod["metadata"]["uid"])
        return "" if found is None else "".join(container.log for container in found.everybody)

    @property
    def logs(self) -> dict[str, str]:
        """What every pod that ever was has written, by its name."""
        return {pod.name: "".join(one.log for one in pod.everybody) for pod in self._pods.values()}

    @property
    def left(self) -> list[int]:
        """Processes of any container, one that is gone too, that still run."""
        return running_in({container.group for container in self._everybody})

    @property
    def num_restarts(self) -> int:
        """Of all containers of all pods that ever were."""
        return sum(container.num_restarts for container in self._everybody)

    @property
    def _everybody(self) -> list[Container]:
        return [container for pod in self._pods.values() for container in pod.everybody]

    async def close(self) -> None:
        """Ends all that is left, at once; raises AssertionError if somebody stays, or what went wrong meanwhile."""
        try:
            results = await asyncio.gather(*(pod.leave_alone() for pod in self._pods.values()), return_exceptions=True)
            await asyncio.gather(*(container.kill() for container in self._everybody))
            assert not self.left, f"these do not end: {self.left}"
        finally:
            self._bond.close()
            for log in self._folder.rglob("*.log"):
                LOGS.read(log)
            shutil.rmtree(self._folder, ignore_errors=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
