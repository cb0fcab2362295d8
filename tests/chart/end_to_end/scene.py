"""The chart installed by Helm where pods are processes, with models on a volume, and clients of its Service."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from helm_python import Chart

from protos.tandem.v1 import generation_pb2_grpc
from tandem.client.channel import open_async_channel
from tandem.client.credentials import PLAINTEXT
from tests.chart.fake_kube.container_view import ACCOUNT_MOUNT
from tests.chart.fake_kube.helm_client import Helm
from tests.chart.fake_kube.kinds import KINDS, Object
from tests.chart.fake_kube.process_kube import ProcessKube
from tests.chart.fake_kube.workloads import is_ready
from tests.engine_under_test import BLOCK_SIZE
from tests.lively import CHUNK
from tests.system.load import Load, Outcome
from tests.system.questions import Question

RELEASE, FULLNAME = "on", "on-tandem"
CLAIM = "models"
WAIT_S = 240
"""A hang guard: of what takes seconds on a machine with nothing else to do."""
STEP_S = 0.03
"""A decode instance's step takes at least as long, so that streams last while pods come and go."""
MAX_NUM_SEQS = 4
MAX_CONNECTIONS = 64
"""Of the router."""
_PATIENT_S = 30
"""Silence is what a machine with two cores makes of those that live."""


def values(model: str, mode: str = "builtin", decode: int | None = None) -> dict[str, Any]:
    """The release that serves the folder `model` of the claim, with `decode` instances at the least. Windows are short,
    and what is shared between pods of one node here (addresses, cores) is set so; all else is as the chart has
    it."""
    drain = {"drain_accept_s": 1, "drain_grace_s": 60}
    pool = {"warm_up_s": 0.5, "scale_out_window_s": 1.5, "scale_in_window_s": 4, "cool_down_s": 1}
    slow_steps = [
        {"name": "TANDEM_ENABLE_FAILPOINTS", "value": "1"},
        {"name": "TANDEM_FAILPOINTS", "value": f"engine.step=sleep:{STEP_S}"},
    ]
    return {
        "model": {"name": "lively", "source": "claim", "claim": {"name": CLAIM, "path": model}, "startupSeconds": 300},
        "discovery": "endpoints",
        "autoscaling": {
            "mode": mode,
            "prefill": {"maxReplicas": 1},
            "decode": {"minReplicas": decode or 1, "maxReplicas": 3},
        },
        "router": {
            "bindAddress": "$(POD_IP)",
            "adminListen": "$(POD_IP):50052",
            "settings": {
                "server": {**drain, "max_connections": MAX_CONNECTIONS},
                "pools": {"beat_timeout_s": _PATIENT_S, "core_silence_timeout_s": _PATIENT_S},
                "admission": {"queue_timeout_s": WAIT_S},
                "autoscaler": {"interval_s": 0.5, "stale_s": 10, "lead_ttl_s": 10, "decode": pool},
            },
            "extraEnv": [{"name": "TANDEM_KUBERNETES__ACCOUNT_FOLDER", "value": ACCOUNT_MOUNT}],
        },
        "instance": {
            "settings": {
                "model": {"dtype": "float32"},
                "server": drain,
                "engine": {
                    "block_size": BLOCK_SIZE,
                    "num_blocks": 512,
                    "max_num_seqs": MAX_NUM_SEQS,
                    "max_num_batched_tokens": CHUNK,
                },
                "peers": {"ping_timeout_ms": 1000 * _PATIENT_S},
            }
        },
        "pools": {"decode": {"extraEnv": slow_steps, "replicas": decode}},
    }


@dataclass
class Release:
    """`on`, in the namespace `default`."""

    kube: ProcessKube
    helm: Helm
    before: list[tuple[str, str]]
    """(kind, name) of what was there before it."""

    @property
    def address(self) -> str:
        """Of the router's Service."""
        return f"{self.kube.service_addresses('default')[f'{FULLNAME}-router']}:50051"

    def pods(self, component: str = "") -> list[Object]:
        """Those that are to stay."""
        return self.kube.pods(f"{FULLNAME}-{component}")

    def names(self) -> set[str]:
        """Of all pods that are to stay."""
        return {pod["metadata"]["name"] for pod in self.pods()}

    def size(self, component: str) -> int:
        """What its Deployment is told to have."""
        return int(self.kube.store.get("Deployment", f"{FULLNAME}-{component}")["spec"]["replicas"])

    async def until_settled(self) -> None:
        """All pods are ready, and nobody is still on the way out."""
        await self.until(lambda: all(map(is_ready, pods := self.kube.store.all("Pod"))) and len(pods) == self._wanted())

    def _wanted(self) -> int:
        return sum(self.size(component) for component in ("router", "prefill", "decode"))

    async def until(self, condition: Callable[[], object]) -> None:
        """Looks until it holds, whatever it looks at."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.1)

    async def assert_nothing_is_left(self) -> None:
        """After the uninstall: no process, no object, and whoever was told to end has lost nothing by it."""
        await self.until(lambda: not self.kube.store.all("Pod"))
        processes = self.kube.processes
        assert not processes.left
        assert [end for end in processes.ends if end.status != 0] == []
        assert set(there(self.kube)) <= set(self.before)


@asynccontextmanager
async def cluster(**models: Path) -> AsyncIterator[Release]:
    """Before the install, with a claim that has these folders. What the pods wrote last stands below a failure."""
    async with ProcessKube() as kube:
        kube.store.create(_claim())
        for name, folder in models.items():
            shutil.copytree(folder, kube.claim_folder(CLAIM) / name)
        try:
            yield Release(kube, Helm(kube), there(kube))
        except BaseException as error:
            for pod, log in kube.processes.logs.items():
                error.add_note("\n  ".join([pod, *log.splitlines()[-15:]]))
            raise


def _claim() -> Object:
    spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec}


def there(kube: ProcessKube) -> list[tuple[str, str]]:
    """(kind, name) of every object."""
    return [(kind.kind, one["metadata"]["name"]) for kind in KINDS for one in kube.store.all(kind.kind)]


class Tide(Load):
    """Clients of a Service, at most `num_clients`, of whom as many ask as `num_asking` says. Each request has a
    connection of its own: a Service's address sends connections to pods, not calls."""

    def __init__(self, address: str, questions: Sequence[Question], num_clients: int) -> None:
        super().__init__(address, questions, num_clients)
        self.timeout_s = WAIT_S
        self.num_asking = num_clients
        self._numbers = itertools.count()

    @property
    def num_answered(self) -> int:
        return sum(outcome.is_over for outcome in list(self.outcomes))

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.finish)  # the Service's address is on this event loop

    async def next(self) -> Outcome:
        """Of a question that is asked from now on."""
        number = len(self.outcomes)
        async with asyncio.timeout(WAIT_S):
            while len(self.outcomes) <= number or not self.outcomes[number].is_over:
                await asyncio.sleep(0.05)
        return self.outcomes[number]

    async def _ask_in_turn(self, stub: Any) -> None:
        number = next(self._numbers)
        while not self._finishing.is_set():
            if number < self.num_asking:
                await self._ask_connected()
            else:
                await asyncio.sleep(0.05)

    async def _ask_connected(self) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        async with open_async_channel(self._address, options, PLAINTEXT) as channel:
            await self._ask_next(generation_pb2_grpc.GenerationServiceStub(channel))


async def install(release: Release, chart: Path, model: str, *, timeout_s: int = WAIT_S) -> None:
    """`helm install --wait`."""
    with Chart.load(chart) as loaded:
        await release.helm.install(loaded, RELEASE, values(model), timeout_s=timeout_s)
