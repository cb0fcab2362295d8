"""Charts that are wrong in ways that only a cluster shows: each has to fail in the fake, or the fake proves nothing."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from helm_python import Chart, HelmError

from helm.rendering import CHART, ci_files, read_values
from router.autoscaler.resizer import ActuatorError
from router.kubernetes.actuator import Election, KubernetesActuator
from router.kubernetes.cluster import Cluster
from router.kubernetes.settings import KubernetesSettings
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.helm_client import Helm
from tests.chart.fake_kube.kubelet import missing

VALUES = read_values(ci_files()["autoscaling"])
DECODE = "on-tandem-decode"


def changed(folder: Path, template: str, old: str, new: str) -> Chart:
    """The chart with one passage of one template replaced."""
    copy = folder / "tandem"
    shutil.copytree(CHART, copy)
    path = copy / "templates" / template
    text = path.read_text()
    assert old in text, f"{template} has changed: this test replaces {old!r}"
    path.write_text(text.replace(old, new, 1))
    return Chart.load(copy)


@asynccontextmanager
async def autoscaler_of(kube: FakeKube) -> AsyncIterator[KubernetesActuator]:
    """As the release's router would have it."""
    account = kube.store.get("Deployment", "on-tandem-router")["spec"]["template"]["spec"]["serviceAccountName"]
    cluster = Cluster(str(kube.account_folder(account)), environment=kube.environment)
    workloads = KubernetesSettings(decode=f"deployment/{DECODE}").workloads
    try:
        yield KubernetesActuator(cluster, workloads, Election(cluster, "on-tandem-autoscaler"))
    finally:
        await cluster.close()


async def scale_then_upgrade(kube: FakeKube, chart: Chart) -> None:
    """The autoscaler has its way, and then somebody upgrades."""
    helm = Helm(kube)
    await helm.install(chart, "on", VALUES)
    async with autoscaler_of(kube) as actuator:
        await actuator.resize("decode", 3, (), previous_size=1)
    await helm.upgrade(chart, "on", {**VALUES, "commonLabels": {"team": "serving"}})


async def test_the_chart_leaves_sizes_to_the_autoscaler() -> None:
    async with FakeKube() as kube:
        with Chart.load(CHART) as chart:
            await scale_then_upgrade(kube, chart)
        assert kube.store.get("Deployment", DECODE)["spec"]["replicas"] == 3


async def test_replicas_under_an_autoscaler_break_the_upgrade(tmp_path: Path) -> None:
    rule = '{{- with include "tandem.replicas" $pool }}'
    async with FakeKube() as kube:
        refused = pytest.raises(HelmError, match=r'conflict with "tandem-router" with subresource "scale".*replicas')
        with changed(tmp_path, "pools.yaml", rule, '{{- with "1" }}') as chart, refused:
            await scale_then_upgrade(kube, chart)
        assert kube.store.get("Deployment", DECODE)["spec"]["replicas"] == 3


async def test_a_misspelt_field_is_refused(tmp_path: Path) -> None:
    right, wrong = "terminationGracePeriodSeconds:", "terminationGracePeriod:"
    async with FakeKube() as kube:
        refused = pytest.raises(HelmError, match="terminationGracePeriod")
        with changed(tmp_path, "_workload.tpl", right, wrong) as chart, refused:
            await Helm(kube).install(chart, "on", VALUES)


async def test_a_missing_right_stops_the_autoscaler(tmp_path: Path) -> None:
    async with FakeKube() as kube:
        with changed(tmp_path, "rbac.yaml", "verbs: [get, patch]", "verbs: [get]") as chart:
            await Helm(kube).install(chart, "on", VALUES)
        async with autoscaler_of(kube) as actuator:
            with pytest.raises(ActuatorError, match='cannot patch resource "deployments/scale"'):
                await actuator.resize("decode", 3, (), previous_size=1)
        assert kube.store.get("Deployment", DECODE)["spec"]["replicas"] == 1


async def test_a_secret_that_nobody_makes_keeps_pods_from_starting(tmp_path: Path) -> None:
    async with FakeKube() as kube:
        helm = Helm(kube)
        with Chart.load(CHART) as chart:
            key = {"connector": {"key": {"existingSecret": "nobody-made-it"}}}
            with pytest.raises(HelmError, match="not ready"):
                await helm.install(chart, "on", key, timeout_s=2)
        (pod,) = kube.pods(DECODE)
        assert missing(kube.store, pod) == ["Secret nobody-made-it"]
        assert pod["status"]["phase"] == "Pending"
