"""Names fit into DNS labels whatever a release is called, and two releases never share one. Values of maps are text."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helm.rendering import CHART, Manifest, render
from tests.chart.rendered import COMPONENTS, NAMESPACE, deployment, of_kind

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
RELEASES = st.from_regex(r"[a-z]([a-z0-9-]{0,51}[a-z0-9])?", fullmatch=True)
"""What Helm takes for a release's name: 53 characters at the most."""


def names(objects: list[Manifest]) -> list[tuple[str, str]]:
    return [(one["kind"], one["metadata"]["name"]) for one in objects]


@settings(max_examples=25)
@given(release=RELEASES)
@example(release="a" * 53)
@example(release=f"tandem-{'b' * 46}")
def test_names_are_dns_labels_and_labels_are_short(release: str) -> None:
    objects = render({"connector": {"name": "nixl,redis"}}, release=release, namespace=NAMESPACE)
    assert len(set(names(objects))) == len(objects)
    for one in objects:
        assert _LABEL.fullmatch(one["metadata"]["name"]), one["metadata"]["name"]
        assert all(len(value) <= 63 for value in one["metadata"]["labels"].values())


def test_long_names_that_begin_alike_stay_apart() -> None:
    long = "a-release-with-a-name-that-differs-in-its-last-one"
    first, second = (render({}, release=f"{long}-{end}") for end in ("1", "2"))
    assert not set(names(first)) & set(names(second))


def test_a_release_called_on_keeps_its_name() -> None:
    (service,) = (
        one for one in of_kind(render({}, release="on"), "Service") if one["metadata"]["name"].endswith("router")
    )
    assert service["metadata"]["name"] == "on-tandem-router"
    assert service["spec"]["selector"]["app.kubernetes.io/instance"] == "on"


@pytest.mark.parametrize("name", ["on", "null", "1e3"])
def test_a_name_that_yaml_reads_otherwise_is_text_everywhere(name: str) -> None:
    values = {"fullnameOverride": name, "metrics": {"alerts": {"enabled": True}, "monitor": {"kind": "PodMonitor"}}}
    objects = render(values)
    (rule,) = of_kind(objects, "PrometheusRule")
    (group,) = rule["spec"]["groups"]
    expected = rule["metadata"]["name"].removesuffix("-alerts")
    assert group["name"] == expected
    assert {one["labels"]["tandem"] for one in group["rules"]} == {expected}
    assert all(isinstance(one["metadata"]["name"], str) for one in objects)


def test_a_release_that_says_tandem_does_not_say_it_twice() -> None:
    assert ("Service", "tandem-eu-router") in names(render({}, release="tandem-eu"))


def of_parent(folder: Path, alias: str, values: dict[str, Any]) -> list[Manifest]:
    """What a chart renders whose one dependency is this one, on the condition `enabled`."""
    shutil.copytree(CHART, folder / "charts" / CHART.name)
    [version] = re.findall(r"^version: (\S+)$", (CHART / "Chart.yaml").read_text(), re.MULTILINE)
    dependency = {"name": CHART.name, "version": version, "alias": alias, "condition": f"{alias}.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "0.1.0", "dependencies": [dependency]}
    (folder / "Chart.yaml").write_text(yaml.safe_dump(parent))
    with Chart.load(folder) as chart:
        rendered = chart.render({alias: values}, name="on", namespace=NAMESPACE)
    return [one for name, text in rendered.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text) if one]


@pytest.mark.parametrize(("alias", "name"), [("tandem", "on-tandem"), ("llmChat", "on-llmchat")])
def test_a_parent_chart_may_have_it_on_a_condition_and_under_another_name(
    tmp_path: Path, alias: str, name: str
) -> None:
    objects = of_parent(tmp_path / "on", alias, {"enabled": True})
    assert ("Deployment", f"{name}-decode") in names(objects)
    for one in objects:
        assert _LABEL.fullmatch(one["metadata"]["name"]), one["metadata"]["name"]
    assert names(of_parent(tmp_path / "without", alias, {})) == names(objects)
    assert not of_parent(tmp_path / "off", alias, {"enabled": False})


def test_numbers_and_switches_are_text_where_kubernetes_wants_it() -> None:
    """Helm reads every number as a float: 12345678 is 1.2345678e+07 to a template that prints it."""
    odd = {"cost": 12345678, "on": True, "7": 0.5}
    text = {"cost": "12345678", "on": "true", "7": "0.5"}
    env = [{"name": name, "value": value} for name, value in odd.items()]
    pod = {"podLabels": odd, "podAnnotations": odd, "nodeSelector": odd, "extraEnv": env}
    service = {"type": "LoadBalancer", "annotations": odd}
    values: dict[str, Any] = {
        "router": {**pod, "service": service},
        "instance": pod,
        "serviceAccount": {"annotations": odd},
        "connector": {"nixl": {"ucxEnv": {"UCX_RCACHE_MAX_SIZE": 1 << 30}}},
        "commonLabels": odd,
        "test": {"nodeSelector": odd},
    }
    objects = render(values)
    for one in objects:
        assert one["metadata"]["labels"].items() >= text.items()
    for component in COMPONENTS:
        template = deployment(objects, component)["spec"]["template"]
        variables = {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}
        assert template["metadata"]["annotations"].items() >= text.items()
        assert template["spec"]["nodeSelector"] == text
        assert variables.items() >= text.items()
        assert variables.get("UCX_RCACHE_MAX_SIZE", "1073741824") == "1073741824"
    annotated = [one["metadata"].get("annotations") for one in of_kind(objects, "ServiceAccount")]
    assert annotated.count(text) == 2
    assert text in [one["metadata"].get("annotations") for one in of_kind(objects, "Service")]
    assert of_kind(objects, "Pod")[0]["spec"]["nodeSelector"] == text


def test_a_long_tag_is_a_valid_label() -> None:
    tag = "_a-branch-with-a-long-name-20261128-0123456789abcdef-cuda-12-8-.amd64"
    assert tag[62] in "-_."
    for one in render({"image": {"tag": tag}}):
        label = one["metadata"]["labels"]["app.kubernetes.io/version"]
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label)


def test_values_of_ones_own_replace_common_ones_also_where_they_are_false_or_empty() -> None:
    common, own = {"inject": True, "tier": "x", "size": 5}, {"inject": False, "tier": "", "size": 0}
    values = {
        "commonLabels": common,
        "router": {"podLabels": own},
        "serviceAccount": {"annotations": common, "routerAnnotations": own},
    }
    objects, text = render(values), {"inject": "false", "tier": "", "size": "0"}
    assert deployment(objects, "router")["spec"]["template"]["metadata"]["labels"].items() >= text.items()
    annotations = [one["metadata"].get("annotations", {}) for one in of_kind(objects, "ServiceAccount")]
    assert text in annotations
