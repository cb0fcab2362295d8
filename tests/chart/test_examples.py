"""helm/tandem/examples: values files as platform teams write them. Each is valid for the oldest and the newest
Kubernetes, needs what its header says and nothing else, and installs into a cluster that has just that."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from helm_python import Chart

from helm.rendering import CHART, Manifest, check_settings, read_values, render
from tests.chart import test_policy as policy
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.helm_client import Helm
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.kubelet import named
from tests.chart.fake_kube.workloads import is_ready
from tests.chart.rendered import EXAMPLES, component_of, deployment, manifests, of_kind, pods
from tests.chart.test_kubernetes_schemas import NEWEST, OLDEST, check

CHECKS = (
    policy.test_pods_meet_the_restricted_profile,
    policy.test_root_is_read_only_and_what_is_written_to_is_mounted,
    policy.test_images_are_pinned_and_memory_is_bounded,
    policy.test_labels_and_annotations_are_text,
    policy.test_selectors_find_their_component_and_no_other,
    policy.test_no_secret_is_in_an_argument_a_variable_or_a_config_map,
    policy.test_what_is_referred_to_is_there,
)
LONGEST_RELEASE = "production-eu-central-1-tenant-0042-qwen3-coder-480b"
RELEASES = {"two-releases": ("chat", "code"), "long-names": (LONGEST_RELEASE,)}
"""By example: what it is installed as, if not `on`."""


def needs(objects: Iterable[Manifest]) -> set[tuple[str, str]]:
    """(kind, name) of all that pods and an Ingress name and that neither the chart nor cert-manager makes."""
    objects = list(objects)
    made = {(one["kind"], one["metadata"]["name"]) for one in objects}
    made |= {("Secret", one["spec"]["secretName"]) for one in of_kind(objects, "Certificate")}
    found = {("Secret", tls["secretName"]) for one in of_kind(objects, "Ingress") for tls in one["spec"].get("tls", ())}
    for pod in pods(objects):
        found |= named(pod.spec) | {("Secret", one["name"]) for one in pod.spec.get("imagePullSecrets", ())}
    return found - made


def documented_needs(name: str) -> set[tuple[str, str]]:
    """Of its header."""
    (line,) = re.findall(r"^# needs:(.*)$", EXAMPLES[name].read_text(), re.MULTILINE)
    return {(kind, its) for kind, _, its in (one.strip().partition("/") for one in line.split(",") if one.strip())}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid_and_needs_what_it_says(name: str) -> None:
    objects = manifests(name)
    for version in (OLDEST, NEWEST):
        for one in objects:
            check(one, version)
    check_settings(objects)
    for policy_check in CHECKS:
        policy_check(name)
    assert needs(objects) == documented_needs(name)


def given(kind: str, name: str) -> Object:
    """An object that an administrator or cert-manager has made."""
    head = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
    if kind != "PersistentVolumeClaim":
        return {**head, "data": {}}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {**head, "spec": spec}


def prepare(kube: FakeKube, name: str) -> None:
    """What the example needs is there, and what cert-manager makes of its Certificates."""
    issued = {("Secret", one["spec"]["secretName"]) for one in of_kind(manifests(name), "Certificate")}
    for kind, needed in documented_needs(name) | issued:
        kube.store.create(given(kind, needed))


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_installs_into_a_cluster_with_what_it_needs(name: str) -> None:
    releases = RELEASES.get(name, ("on",))
    async with FakeKube(minor=OLDEST.partition(".")[2]) as kube:
        prepare(kube, name)
        with Chart.load(CHART) as chart:
            for release in releases:
                await Helm(kube).install(chart, release, read_values(EXAMPLES[name]))
        wanted = sum(one["spec"]["replicas"] for one in kube.store.all("Deployment"))
        assert [is_ready(pod) for pod in kube.pods()] == [True] * wanted
        assert wanted >= 3 * len(releases)


def test_two_releases_of_one_namespace_share_no_object_and_find_no_pod_of_the_other() -> None:
    values = read_values(EXAMPLES["two-releases"])
    chat, code = (render(values, release=release) for release in RELEASES["two-releases"])
    names = Counter((one["kind"], one["metadata"]["name"]) for one in (*chat, *code))
    assert names.most_common(1)[0][1] == 1
    assert {name.partition("-")[0] for _, name in names} == {"chat", "code"}
    labels = [pod.metadata["labels"].items() for pod in pods(code)]
    for selector in selectors(chat):
        assert not any(selector.items() <= own for own in labels)
    for query in alerts(chat):
        assert 'namespace="default", tandem="chat-tandem"' in query
    files = Counter(file for one in of_kind((*chat, *code), "ConfigMap") for file in one["data"])
    assert max(files.values(), default=1) == 1, "Grafana's sidecar deletes a file with any of its maps"


def selectors(objects: Iterable[Manifest]) -> Iterator[dict[str, str]]:
    """Every set of labels by which an object finds pods, those of peers in network policies too."""
    stack: list[object] = list(objects)
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            if "matchLabels" in one:
                yield one["matchLabels"]
            if one.get("kind") == "Service":
                yield one["spec"]["selector"]
            stack += one.values()
        elif isinstance(one, list):
            stack += one


def alerts(objects: list[Manifest]) -> list[str]:
    (rule,) = of_kind(objects, "PrometheusRule")
    return [one["expr"] for group in rule["spec"]["groups"] for one in group["rules"]]


def test_gitops_renders_are_equal_and_without_secrets() -> None:
    values = read_values(EXAMPLES["gitops"])
    assert render(values) == render(values)
    assert not of_kind(render(values), "Secret")
    assert render({"connector": {"name": "redis"}}) != render({"connector": {"name": "redis"}})


def test_a_quota_that_wants_limits_and_a_namespace_that_denies_let_every_pod_run() -> None:
    objects = manifests("corporate-proxy")
    allowed = {component_of(one) for one in of_kind(objects, "NetworkPolicy")}
    for pod in pods(objects):
        assert component_of(pod.owner) in allowed
        for container in pod.containers:
            assert {"cpu", "memory"} <= container["resources"]["limits"].keys(), container["name"]
            assert container["image"].startswith("mirror.example.com:5000/"), container["image"]
    assert {one["image"] for pod in pods(objects) for one in pod.containers} == {
        "mirror.example.com:5000/llm/tandem:0.1.0",
        "mirror.example.com:5000/redis:7.4.6-alpine",
    }


def test_an_image_of_any_form_gets_the_mirrors_registry() -> None:
    for image, mirrored in (
        ("redis:7", "mirror/redis:7"),
        ("library/redis:7", "mirror/library/redis:7"),
        ("docker.io/library/redis:7", "mirror/library/redis:7"),
        ("localhost/redis:7", "mirror/redis:7"),
        ("registry:5000/redis:7", "mirror/redis:7"),
    ):
        values = {"global": {"imageRegistry": "mirror/"}, "connector": {"name": "redis", "redis": {"image": image}}}
        (container,) = deployment(render(values), "redis")["spec"]["template"]["spec"]["containers"]
        assert container["image"] == mirrored


@pytest.mark.parametrize(
    ("release", "values"),
    [
        ("7b-chat", {}),
        ("llm.eu", {}),
        ("on", {"fullnameOverride": "llm.eu"}),
        ("on", {"nameOverride": "x" * 63}),
        ("a" * 53, {"nameOverride": "-".join("a-chart" for _ in range(8))}),
    ],
)
async def test_a_release_of_any_name_installs(release: str, values: dict[str, str]) -> None:
    async with FakeKube() as kube:
        with Chart.load(CHART) as chart:
            await Helm(kube).install(chart, release, values)
