"""Where weights come from: an image of their own, and a download before any pod changes."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import Chart, HelmError

from engine.checkpoint import _NEEDED, _NOT_NEEDED
from helm.rendering import CHART, render
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.helm_client import Helm
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import PaperRuntime
from tests.chart.rendered import COMPONENTS, component_of, deployment, manifests, of_kind, pods, settings_of_pods


def test_an_image_with_the_model_is_mounted_by_routers_and_instances() -> None:
    objects = manifests("oci")
    for component in ("router", "prefill", "decode"):
        spec = deployment(objects, component)["spec"]["template"]["spec"]
        (volume,) = (one for one in spec["volumes"] if one["name"] == "model")
        assert volume["image"]["reference"].startswith("registry.example.com/models/llama-3.1-8b@sha256:")
        (mount,) = (one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "model")
        assert mount == {"name": "model", "mountPath": "/models", "readOnly": True}
        assert "initContainers" not in spec
    texts = "".join(settings_of_pods(objects, component) for component in COMPONENTS)
    assert texts.count("/models/models/llama\n") == 3
    values = {
        "model": {"source": "oci", "oci": {"reference": "quay.io/models/a:1"}},
        "global": {"imageRegistry": "mirror"},
    }
    volumes = deployment(render(values), "decode")["spec"]["template"]["spec"]["volumes"]
    assert {one["image"]["reference"] for one in volumes if "image" in one} == {"mirror/models/a:1"}


def test_the_preload_fetches_what_an_instance_fetches_to_the_same_place() -> None:
    objects = manifests("everything")
    (job,) = (pod for pod in pods(objects) if component_of(pod.owner) == "preload")
    decode = deployment(objects, "decode")["spec"]["template"]["spec"]
    assert job.spec["containers"] == [decode["initContainers"][0]]
    for name in ("model", "cache"):
        assert name in {one["name"] for one in job.spec["volumes"]}
    (claim,) = (one for one in job.spec["volumes"] if one["name"] == "model")
    assert claim in decode["volumes"]
    hook = job.owner["metadata"]["annotations"]
    assert hook["helm.sh/hook"] == "pre-install,pre-upgrade"
    (policy,) = (one for one in of_kind(objects, "NetworkPolicy") if component_of(one) == "preload")
    assert policy["metadata"]["annotations"] == {**hook, "helm.sh/hook-weight": "-1"}


@pytest.mark.parametrize("component", ["router", "decode"])
def test_a_download_fetches_the_files_that_an_engine_would_fetch(component: str) -> None:
    (init,) = deployment(manifests("hub"), component)["spec"]["template"]["spec"]["initContainers"]
    found = [one.partition("=") for one in init["args"] if "clude=" in one]
    weights = [] if component == "decode" else ["*.safetensors"]
    assert sorted([*weights, *(one for option, _, one in found if option == "--include")]) == sorted(_NEEDED)
    assert [one for option, _, one in found if option == "--exclude"] == _NOT_NEEDED


def revision(commit: str) -> dict[str, Any]:
    cache = {"create": True}
    return {"model": {"source": "hub", "hub": {"id": "a/b", "revision": commit, "cache": cache, "preload": True}}}


async def test_an_upgrade_downloads_before_a_pod_changes_and_an_install_has_no_claim_yet() -> None:
    async with FakeKube() as kube:
        with Chart.load(CHART) as chart:
            helm = Helm(kube)
            await helm.install(chart, "on", revision("1" * 40))
            assert not [one for one in kube.store.since(1) if one.kind.kind == "Job"]
            before = kube.store.revision
            await helm.upgrade(chart, "on", revision("2" * 40))
        changes = [(one.kind.kind, one.change, one.object["metadata"]["name"]) for one in kube.store.since(before)]
        preloaded = changes.index(("Job", "DELETED", "on-tandem-preload"))
        first_pod = next(at for at, one in enumerate(changes) if one[0] == "Pod" and "preload" not in one[2])
        assert preloaded < first_pod


class NoDownload(PaperRuntime):
    """The pods of the preload fail."""

    async def ended(self, pod: Object) -> bool:
        return await super().ended(pod) and "preload" not in pod["metadata"]["name"]


async def test_a_download_that_fails_fails_the_upgrade_and_changes_no_pod() -> None:
    async with FakeKube(NoDownload()) as kube:
        with Chart.load(CHART) as chart:
            helm = Helm(kube)
            await helm.install(chart, "on", revision("1" * 40))
            before = {pod["metadata"]["name"] for pod in kube.pods()}
            with pytest.raises(HelmError, match="preload"):
                await helm.upgrade(chart, "on", revision("2" * 40))
        assert {pod["metadata"]["name"] for pod in kube.pods() if "preload" not in pod["metadata"]["name"]} == before


def test_a_downloads_variables_replace_the_charts() -> None:
    own = [{"name": "HF_HOME", "value": "/models/.hub"}, {"name": "HF_HUB_DOWNLOAD_TIMEOUT", "value": "60"}]
    values: dict[str, Any] = {"model": {"source": "hub", "hub": {"id": "a/b", "extraEnv": own}}}
    (init,) = deployment(render(values), "decode")["spec"]["template"]["spec"]["initContainers"]
    names = [one["name"] for one in init["env"]]
    assert len(set(names)) == len(names)
    assert [one for one in init["env"] if one in own] == own
    values["model"]["hub"]["extraEnv"] = [*own, own[0]]
    with pytest.raises(HelmError, match=r"extraEnv of model\.hub: a variable is there twice"):
        render(values)
