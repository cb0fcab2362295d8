"""Who sizes the pools changes, by an upgrade or a rollback, and the sizes stay: at no moment has a pool collapsed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from helm_python import Chart

from helm.rendering import CHART, render
from router.autoscaler.resizer import ActuatorError
from router.kubernetes.actuator import Election, KubernetesActuator
from router.kubernetes.cluster import Cluster, Scale
from router.kubernetes.settings import KubernetesSettings
from router.kubernetes.sizes import main as sizes_command
from router.kubernetes.sizes import prepare
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.helm_client import Helm
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import PaperRuntime
from tests.chart.rendered import deployment

pytestmark = pytest.mark.timeout(400)

FIXED = {"prefill": 4, "decode": 8}
MODES: dict[str, dict[str, Any]] = {
    "fixed": {"pools": {role: {"replicas": size} for role, size in FIXED.items()}},
    "none": {"autoscaling": {"mode": "none"}},
    "builtin": {"autoscaling": {"mode": "builtin", "prefill": {"minReplicas": 2}}},
    "external": {"autoscaling": {"mode": "external"}, "instance": {"replicas": 3}},
}
SCALER: Object = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "scaler"}}
ANY_SCALE = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "verbs": ["get", "patch"]}


class HookRuntime(PaperRuntime):
    """Pods are of paper, but the hook's command runs, with its pod's account."""

    kube: FakeKube
    num_runs = 0

    async def ended(self, pod: Object) -> bool:
        if pod["metadata"]["labels"].get("app.kubernetes.io/component") == "sizes":
            self.num_runs += 1
            (container,) = pod["spec"]["containers"]
            assert container["command"] == ["python", "-m", "router.kubernetes.sizes"]
            params = sizes_command.make_context("sizes", list(container["args"])).params
            async with account(self.kube, pod["spec"]["serviceAccountName"]) as cluster:
                await prepare(cluster, params["kept"], params["written"], params["lease"])
        return await super().ended(pod)


@asynccontextmanager
async def account(kube: FakeKube, name: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(str(kube.account_folder(name)), environment=kube.environment)
    try:
        yield cluster
    finally:
        await cluster.close()


class Sizes:
    """Of the release's pools, as the store has had them."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube
        subject = {"kind": "ServiceAccount", "name": "scaler", "namespace": "default"}
        kube.store.create({**SCALER, "kind": "Role", "rules": [ANY_SCALE]})
        kube.store.create({**SCALER, "kind": "RoleBinding", "subjects": [subject], "roleRef": {"name": "scaler"}})

    def now(self) -> dict[str, int]:
        return {role: self._kube.store.get("Deployment", f"on-tandem-{role}")["spec"]["replicas"] for role in FIXED}

    def least_since(self, revision: int) -> dict[str, int]:
        """The smallest size of each pool after that revision of the store."""
        least = self.now()
        for event in self._kube.store.since(revision):
            role = event.object["metadata"]["name"].removeprefix("on-tandem-")
            if event.kind.kind == "Deployment" and role in least:
                least[role] = min(least[role], event.object["spec"]["replicas"])
        return least

    async def scale(self, sizes: dict[str, int]) -> None:
        """As an HPA, KEDA, `kubectl scale` or the router does it."""
        async with account(self._kube, "scaler") as cluster:
            for role, size in sizes.items():
                path = cluster.path("apps/v1", "deployments", f"on-tandem-{role}", "scale")
                await cluster.request("PATCH", path, Scale, body={"spec": {"replicas": size}})


@pytest.mark.parametrize("first", ["fixed", pytest.param("none", marks=pytest.mark.slow), "builtin", "external"])
async def test_sizes_survive_every_change_of_who_writes_them_and_its_rollback(first: str) -> None:
    runtime = HookRuntime()
    async with FakeKube(runtime) as kube:
        runtime.kube, helm, sizes = kube, Helm(kube), Sizes(kube)
        with Chart.load(CHART) as chart:
            await helm.install(chart, "on", MODES[first])
            if first != "fixed":
                assert sizes.now() == {"prefill": 1, "decode": 1}
                await sizes.scale({"prefill": 5, "decode": 9})
            for second in (mode for mode in MODES if mode not in (first, "none")):
                for mode in (second, first):
                    before, revision = sizes.now(), kube.store.revision
                    await (helm.upgrade(chart, "on", MODES[mode]) if mode == second else helm.rollback("on"))
                    expected = FIXED if mode == "fixed" else before
                    assert sizes.now() == expected
                    least = {role: min(before[role], expected[role]) for role in FIXED}
                    assert sizes.least_since(revision) == least
                    if mode != "fixed":
                        await sizes.scale({role: size + 1 for role, size in sizes.now().items()})


class Contender:
    """A router that resizes the pools as soon as it leads, with its pod's account."""

    def __init__(self, kube: FakeKube, size: int) -> None:
        self._kube = kube
        self._size = size
        self.num_resizes = 0

    async def run(self) -> None:
        async with account(self._kube, "on-tandem-router") as cluster:
            named = {role: f"deployment/on-tandem-{role}" for role in FIXED}
            workloads = KubernetesSettings.model_validate(named).workloads
            actuator = KubernetesActuator(cluster, workloads, Election(cluster, "on-tandem-autoscaler"))
            while True:
                with contextlib.suppress(ActuatorError):  # its Lease and its Role go with the upgrade
                    await self._step(actuator)
                await asyncio.sleep(0.01)

    async def _step(self, actuator: KubernetesActuator) -> None:
        if not await actuator.take_lead("router", ttl_s=2):
            return
        for role, size in (await actuator.sizes()).items():
            if size != self._size:
                await actuator.resize(role, self._size, (), previous_size=size)
                self.num_resizes += 1


@pytest.mark.parametrize("how", ["upgrade", "rollback"])
async def test_an_autoscaler_that_resizes_meanwhile_neither_fails_the_change_nor_undoes_it(how: str) -> None:
    runtime = HookRuntime()
    async with FakeKube(runtime) as kube:
        runtime.kube, helm, sizes = kube, Helm(kube), Sizes(kube)
        with Chart.load(CHART) as chart:
            if how == "rollback":
                await helm.install(chart, "on", MODES["fixed"])
                await helm.upgrade(chart, "on", MODES["builtin"])
            else:
                await helm.install(chart, "on", MODES["builtin"])
            contender = Contender(kube, size=2)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(contender.run())
                await kube.until(lambda _: sizes.now() == dict.fromkeys(FIXED, 2))
                await (helm.rollback("on") if how == "rollback" else helm.upgrade(chart, "on", MODES["fixed"]))
                await asyncio.sleep(0.1)  # some of its steps
                running.cancel()
            assert contender.num_resizes >= len(FIXED)
            assert sizes.now() == FIXED


async def test_the_hook_before_an_upgrade_runs_only_where_the_writer_or_the_size_changes() -> None:
    runtime = HookRuntime()
    async with FakeKube(runtime) as kube:
        runtime.kube, helm, sizes = kube, Helm(kube), Sizes(kube)
        with Chart.load(CHART) as chart:
            await helm.install(chart, "on", MODES["fixed"])
            await helm.upgrade(chart, "on", {**MODES["fixed"], "commonLabels": {"a": "b"}})
            await helm.upgrade(chart, "on", {"instance": {"replicas": 2}})
            assert (runtime.num_runs, sizes.now()) == (1, {"prefill": 2, "decode": 2})
            await helm.upgrade(chart, "on", {"instance": {"replicas": 2}, "commonLabels": {"a": "b"}})
            assert runtime.num_runs == 1
            await sizes.scale({"decode": 5})
            await helm.upgrade(chart, "on", {"instance": {"replicas": 3}})  # kubectl scale owns the field by now
            assert (runtime.num_runs, sizes.now()) == (2, {"prefill": 3, "decode": 3})
            await helm.upgrade(chart, "on", {"instance": {"replicas": 4}})  # and now the hook, beside Helm
            assert (runtime.num_runs, sizes.now()) == (3, {"prefill": 4, "decode": 4})
            await helm.upgrade(chart, "on", MODES["builtin"])
            await helm.upgrade(chart, "on", {**MODES["builtin"], "commonLabels": {"a": "b"}})
            assert (runtime.num_runs, sizes.now()) == (4, {"prefill": 4, "decode": 4})
        assert not kube.store.all("Job")
        assert not kube.store.find("Role", "on-tandem-sizes")


@pytest.mark.parametrize(("replicas", "written"), [(2, 2), (0, 0), (None, None)])
def test_a_size_of_null_is_no_size_and_a_size_of_zero_is_zero(replicas: int | None, written: int | None) -> None:
    values = {"instance": {"replicas": 3}, "pools": {"prefill": {"replicas": replicas}}}
    assert deployment(render(values), "prefill")["spec"].get("replicas") == written
    assert deployment(render(values), "decode")["spec"]["replicas"] == 3
    assert "replicas" not in deployment(render({}), "decode")["spec"]
