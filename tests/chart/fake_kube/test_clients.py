"""The real clients: Helm's SDK and kubectl do against the fake what they do against a cluster."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from helm_python import Chart, HelmError

from helm.rendering import CHART, ci_files, read_values
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.helm_client import Helm
from tests.chart.fake_kube.kinds import KINDS, Object
from tests.chart.fake_kube.kubelet import PaperRuntime, named
from tests.chart.fake_kube.workloads import is_ready
from tests.chart.kubectl import program
from tests.chart.rendered import NAMESPACE, manifests, pods

DEPLOYMENT: Object = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web"},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "web", "image": "web:1"}]},
        },
    },
}


# Helm


def left(kube: FakeKube, namespace: str) -> list[tuple[str, str]]:
    """Everything there."""
    return [(kind.kind, one["metadata"]["name"]) for kind in KINDS for one in kube.store.all(kind.kind, namespace)]


@pytest.mark.parametrize("name", ["autoscaling", "everything"])
async def test_a_release_lives_from_install_to_uninstall_and_leaves_what_the_chart_keeps(name: str) -> None:
    """Called `on`, in a namespace with the longest of names, with every option on."""
    values = read_values(ci_files()[name])
    async with FakeKube() as kube:
        brought = _bring_what_is_named(kube, name, NAMESPACE)
        helm = Helm(kube, NAMESPACE)
        with Chart.load(CHART) as chart:
            assert (await helm.install(chart, "on", values))["status"] == "deployed"
            first = kube.pods(namespace=NAMESPACE)
            assert first
            assert all(is_ready(pod) for pod in first)
            assert "is of paper" in (await helm.test("on"))["logs"]
            before = {pod["metadata"]["name"] for pod in first}
            await helm.upgrade(chart, "on", {**values, "model": {**values.get("model", {}), "name": "another"}})
            after = {pod["metadata"]["name"] for pod in kube.pods(namespace=NAMESPACE)}
            assert len(after) == len(before)
            assert not after & before
            await helm.rollback("on")
            assert len(kube.pods(namespace=NAMESPACE)) == len(before)
            await helm.uninstall("on")
        await kube.until(lambda store: not store.all("Pod", NAMESPACE))
        assert set(left(kube, NAMESPACE)) - brought == {
            (one["kind"], one["metadata"]["name"])
            for one in manifests(name)
            if "helm.sh/resource-policy" in (one["metadata"].get("annotations") or {})
        }


def _bring_what_is_named(kube: FakeKube, name: str, namespace: str) -> set[tuple[str, str]]:
    """Secrets and claims that are there before the release."""
    kube.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}, None)
    made = {(one["kind"], one["metadata"]["name"]) for one in manifests(name)}
    wanted = set().union(*(named(pod.spec) for pod in pods(manifests(name)))) - made
    for kind, missing in wanted:
        kube.store.create({"apiVersion": "v1", "kind": kind, "metadata": {"name": missing}}, namespace)
    return wanted


async def test_an_install_waits_for_pods_and_gives_up() -> None:
    runtime = PaperRuntime()
    runtime.unready.add("on-tandem-decode")
    async with FakeKube(runtime) as kube:
        with Chart.load(CHART) as chart, pytest.raises(HelmError, match="decode"):
            await Helm(kube).install(chart, "on", {}, timeout_s=1)


# kubectl


class Kubectl:
    def __init__(self, kube: FakeKube, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "kubeconfig"
        self._config.write_text(kube.kubeconfig())

    async def __call__(self, *args: str, fails: bool = False) -> str:
        """What it writes."""
        process = await asyncio.create_subprocess_exec(
            program(),
            f"--kubeconfig={self._config}",
            *args,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"HOME": str(self._folder), "PATH": os.environ["PATH"]},
        )
        written, _ = await process.communicate()
        assert (process.returncode != 0) is fails, written.decode()
        return written.decode()

    async def apply(self, found: Object, *args: str, fails: bool = False) -> str:
        file = self._folder / "manifest.yaml"
        file.write_text(yaml.safe_dump(found))
        return await self("apply", f"--filename={file}", *args, fails=fails)


async def test_kubectl_applies_scales_waits_and_deletes(tmp_path: Path) -> None:
    async with FakeKube() as kube:
        kubectl = Kubectl(kube, tmp_path)
        await kubectl.apply(DEPLOYMENT)
        await kubectl("rollout", "status", "deployment/web", "--timeout=30s")
        await kubectl("scale", "deployment/web", "--replicas=3")
        await kubectl("rollout", "status", "deployment/web", "--timeout=30s")
        assert len(kube.pods("web")) == 3
        for verb, is_paused in (("pause", True), ("resume", False)):
            await kubectl("rollout", verb, "deployment/web")
            assert kube.store.get("Deployment", "web")["spec"].get("paused", False) is is_paused
        other = {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "minReadySeconds": 1}}
        await kubectl.apply(other)
        assert kube.store.get("Deployment", "web")["spec"]["replicas"] == 2
        await kubectl("delete", "deployment/web", "--timeout=30s")
        await kube.until(lambda store: not store.all("Pod"))


async def test_kubectl_shows_a_second_writer(tmp_path: Path) -> None:
    async with FakeKube() as kube:
        kubectl = Kubectl(kube, tmp_path)
        await kubectl.apply(DEPLOYMENT, "--server-side")
        await kubectl("scale", "deployment/web", "--replicas=3")
        output = await kubectl.apply(DEPLOYMENT, "--server-side", fails=True)
        assert 'conflict with "kubectl" with subresource "scale" using apps/v1: .spec.replicas' in output
        await kubectl.apply(DEPLOYMENT, "--server-side", "--force-conflicts")
        assert kube.store.get("Deployment", "web")["spec"]["replicas"] == 2


async def test_kubectl_shows_a_field_that_does_not_exist(tmp_path: Path) -> None:
    async with FakeKube() as kube:
        kubectl = Kubectl(kube, tmp_path)
        wrong = {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "replica": 3}}
        assert "replica" in await kubectl.apply(wrong, fails=True)
        assert kube.store.find("Deployment", "web") is None
