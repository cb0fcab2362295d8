"""A whole router in a fake cluster: it finds its pods, resizes them by hand and by itself, and loses no request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from router.autoscaler.resizer import Resizer
from router.kubernetes.settings import KubernetesSettings
from router.settings import RouterSettings
from serving.settings import SettingsError
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.kubernetes.fake_pods import FakePods
from tests.router.kubernetes.release import ACCOUNT, LEASE, FakeRelease, fake_release
from tests.router.rig import Answer, Rig
from tests.waiting import until

HANG_S = 60.0
QUICK = {
    "enabled": True,
    "interval_s": 0.1,
    "stale_s": 2.0,
    "lead_ttl_s": 5.0,
    "prefill": {"max_size": 1},
    "decode": {
        "max_size": 3,
        "scale_out_window_s": 0.2,
        "scale_in_window_s": 1.0,
        "cool_down_s": 0.3,
        "warm_up_s": 0.0,
        "start_timeout_s": 5.0,
    },
}


@dataclass
class InCluster:
    """A router, and the cluster that it is in."""

    rig: Rig
    found: FakeRelease
    pods: FakePods

    @property
    def resizer(self) -> Resizer:
        assert self.rig.app.resizer is not None
        return self.rig.app.resizer

    async def until_ready(self, decode: int) -> None:
        """Returns when the router sees exactly so many decode instances."""
        async with asyncio.timeout(HANG_S):
            pool = self.rig.app.pools.decode
            while (pool.num_ready(), len(pool.instances)) != (decode, decode):
                await asyncio.sleep(0.01)

    async def load(self, streams: int, until: asyncio.Event) -> list[Answer]:
        """So many requests at one time until then; every answer, all of them whole."""
        answers: list[Answer] = []

        async def one(first: int) -> None:
            number = first
            while not until.is_set():
                answer = await self.rig.generate(max_tokens=30, seed=number)
                assert answer.is_exactly(30, seed=number)
                answers.append(answer)
                number += streams

        await asyncio.gather(*(one(number) for number in range(streams)))
        return answers


@asynccontextmanager
async def in_cluster(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, token_s: float = 0.0, **sections: object
) -> AsyncIterator[InCluster]:
    pods = FakePods(token_s)
    try:
        async with fake_release(pods) as found:
            for name, value in found.kube.environment.items():
                monkeypatch.setenv(name, value)
            pools = {pool: f"kubernetes:{pool}:{pods.port}" for pool in ("prefill", "decode")}
            folder = str(found.kube.account_folder(ACCOUNT))
            kubernetes = {"prefill": "deployment/prefill", "decode": "deployment/decode", "account_folder": folder}
            sections = {"admission": {"queue_timeout_s": HANG_S}, **sections}  # a busy machine serves slowly
            async with run(prefill=0, decode=0, wait=False, pools=pools, kubernetes=kubernetes, **sections) as rig:
                made = InCluster(rig, found, pods)
                await made.until_ready(2)
                yield made
    finally:
        await pods.close()


async def test_pods_are_found_and_serve(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_cluster(run, monkeypatch) as made:
        assert (await made.rig.generate()).is_exactly(12)
        assert made.resizer is not None
        assert await made.resizer.actuator.sizes() == {"prefill": 1, "decode": 2}


async def test_an_operator_s_resize_loses_no_request(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_cluster(run, monkeypatch, token_s=0.01) as made:
        done = asyncio.Event()
        load = asyncio.create_task(made.load(6, done))
        for size in (4, 1, 2):
            await made.resizer.resize({"decode": size}, cause="operator", reason="a test")
            await made.until_ready(size)
            await made.found.until_ready("decode", size)
        done.set()
        assert len(await load) >= 6
        assert made.pods.ended_early == []


async def test_the_idlest_pod_goes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with in_cluster(run, monkeypatch, token_s=0.02) as made:
        stream = asyncio.create_task(made.rig.generate(max_tokens=100))
        async with asyncio.timeout(HANG_S):
            while not (busy := [name for name, fake in _decodes(made) if fake.num_open_calls]):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # load reports come every 50 ms
        await made.resizer.resize({"decode": 1}, cause="operator", reason="a test")
        await made.until_ready(1)
        assert made.found.names("decode") == busy
        assert (await stream).is_exactly(100)


async def test_the_autoscaler_grows_with_the_load_and_shrinks_after_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_cluster(run, monkeypatch, token_s=0.01, autoscaler=QUICK) as made:
        await made.until_ready(1)  # nothing to do
        done = asyncio.Event()
        load = asyncio.create_task(made.load(16, done))
        await made.until_ready(3)
        holder = made.found.kube.store.get("Lease", LEASE)["spec"]["holderIdentity"]
        done.set()
        assert len(await load) >= 16
        await made.until_ready(1)
        assert made.found.size("decode") == 1
        assert made.found.kube.store.get("Lease", LEASE)["spec"]["holderIdentity"] == holder
        assert made.pods.ended_early == []


async def test_the_autoscaler_leaves_the_sizes_while_kubernetes_fails(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_cluster(run, monkeypatch, autoscaler=QUICK) as made:
        await made.until_ready(1)
        faults = [
            made.found.kube.order(verb, resource, 500, times=None)
            for verb, resource in (("get", "deployments/scale"), ("get", "leases"), ("list", "endpointslices"))
        ]
        made.found.kube.drop_watches()
        autoscaler = made.rig.app.autoscaler
        assert autoscaler is not None
        await until(lambda: autoscaler.num_failures >= 2, HANG_S)
        assert not autoscaler.leads
        assert (await made.rig.generate()).is_exactly(12)
        assert made.found.size("decode") == 1
        for fault in faults:
            made.found.kube.withdraw(fault)
        await until(lambda: autoscaler.leads, HANG_S)
        await made.until_ready(1)


def test_settings_say_what_a_workload_is() -> None:
    with pytest.raises(ValueError, match="write deployment/NAME or statefulset/NAME"):
        KubernetesSettings(decode="on-tandem-decode")
    with pytest.raises(ValueError, match="no name of an object"):
        KubernetesSettings(lease="My Lease")


def test_an_autoscaler_requires_an_owner_of_the_instances() -> None:
    router = {"model": "m"}
    autoscaler = {"enabled": True}
    with pytest.raises(ValueError, match=r"kubernetes\.prefill and kubernetes\.decode"):
        RouterSettings.model_validate({"router": router, "autoscaler": autoscaler})
    owned = {"decode": "deployment/decode"}
    assert RouterSettings.model_validate({"router": router, "autoscaler": autoscaler, "kubernetes": owned})
    with pytest.raises(ValueError, match="both own the instances"):
        RouterSettings.model_validate({"router": router, "kubernetes": owned, "pools": {"stack": "unix:/s"}})


async def test_a_router_outside_of_a_cluster_does_not_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match=r"no account of a Kubernetes cluster.*automountServiceAccountToken"):
        async with run(prefill=0, decode=0, wait=False, pools={"decode": "kubernetes:decode:50051"}):
            pass


async def test_a_missing_package_is_named_with_what_to_type(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("router.kubernetes.actuator", "router.kubernetes.cluster"):
        monkeypatch.delitem(sys.modules, module)
    for module in [name for name in sys.modules if name == "kubernetes" or name.startswith("kubernetes.")]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=r"pip install 'kubernetes>=37'"):
        async with run(prefill=0, decode=0, wait=False, kubernetes={"decode": "deployment/decode"}):
            pass


def _decodes(made: InCluster) -> list[tuple[str, FakeInstance]]:
    return [(name, fake) for name, fake in made.pods.running.items() if fake.role == "decode"]
