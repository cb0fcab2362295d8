"""Every metric, label and label value that a panel or an alert names is one that the services export."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.core.messages import EngineLoad, KVMoved, KVTotals
from helm.rendering import CHART, render
from instance.metrics import InstanceCollector, RequestMetrics
from protos.tandem.v1 import instance_pb2
from router.request.validation import ServedModel
from tandem.local_stack.pki import StackCa
from tests.certificates import files_of
from tests.chart.promql import Asked, selectors
from tests.chart.rendered import COMPONENTS, NAMESPACE, component_of, manifests, of_kind, pods
from tests.fakes.model_folder import write_model_folder
from tests.router.rig import running

TARGET_LABELS = {"tandem", "component", "pod", "namespace", "cluster"}
"""Set by the monitor's relabelling, by the Prometheus operator, or by the user's own selector in ci/."""
CLOSED = {"role", "state", "stage", "class", "direction", "le", "path", "kind"}
"""Labels whose values are all exported from the start; others (reason, outcome) come as they happen."""
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}


@dataclass
class Exported:
    """Names of samples, and label values by sample and label. A family that has no sample yet has no labels here."""

    names: set[str] = field(default_factory=set)
    values: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def add(self, families: Iterable[Metric]) -> None:
        for family in families:
            self.names |= {f"{family.name}{suffix}" for suffix in SUFFIXES.get(family.type, [])}
            for sample in family.samples:
                self.names.add(sample.name)
                for label, value in sample.labels.items():
                    self.values.setdefault((sample.name, label), set()).add(value)

    def problems(self, asked: Asked) -> Iterator[str]:
        """What is asked for and not there."""
        if asked.metric not in self.names:
            yield f"no metric {asked.metric}"
            return
        known = {label for name, label in self.values if name == asked.metric}
        for label, operator, value in asked.matchers:
            if label in TARGET_LABELS or not known:
                continue
            if label not in known:
                yield f"{asked.metric} has no label {label}"
            elif label in CLOSED:
                wanted = set(value.split("|") if operator == "=~" else [value])
                if missing := wanted - self.values[asked.metric, label]:
                    yield f'{asked.metric} has no {label}="{min(missing)}"'
        for label in asked.grouped_by - TARGET_LABELS - known if known else ():
            yield f"{asked.metric} has no label {label} to group by"


@dataclass
class Report:
    """What an engine core says of itself."""

    load: EngineLoad
    core_silence_s: float = 0.0

    async def wait_load(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


def instance_families() -> Iterator[Metric]:
    moved = KVMoved(num_blocks=1, num_bytes=1, seconds=1.0, failures={"missing": 1})
    load = EngineLoad(kv_totals=[KVTotals(connector="nixl", saved=moved, loaded=moved)])
    info = instance_pb2.GetInstanceInfoResponse(role=instance_pb2.ROLE_DECODE)
    metrics = RequestMetrics(finished=Counter(stop=1))
    report: Any = Report(load)  # as much of an AsyncEngine as is asked
    yield from InstanceCollector(report, metrics, lambda: info).collect()


async def router_families(folder: Path) -> Iterator[Metric]:
    """Of a router between two fakes, after a split request."""
    model = ServedModel.from_folder(folder, "fake")
    async with running(model, folder, metrics={"listen": "127.0.0.1:0"}) as rig:
        await rig.generate(max_tokens=3)
        await rig.until_router_is_idle()
        address = f"http://{rig.app.metrics_address}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=20).read().decode())
    return iter(text_string_to_metric_families(text))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    found = Exported()
    found.add(instance_families())
    found.add(asyncio.run(router_families(write_model_folder(tmp_path_factory.mktemp("model")))))
    files = files_of(tmp_path_factory.mktemp("tls"), "router", StackCa())
    found.add(files.tls().collect())
    return found


def panels() -> dict[str, str]:
    """Query by the panel's title and legend."""
    whole = json.loads((CHART / "dashboards" / "tandem.json").read_text())
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in whole["panels"]
        for target in panel.get("targets", [])
    }


def alerts(name: str) -> dict[str, str]:
    """Query by the alert's name, of one ci/ file."""
    (rule,) = of_kind(manifests(name), "PrometheusRule")
    return {one["alert"]: one["expr"] for group in rule["spec"]["groups"] for one in group["rules"]}


@pytest.mark.parametrize("panel", panels())
def test_panel_asks_for_what_is_exported(panel: str, exported: Exported) -> None:
    for asked in selectors(panels()[panel]):
        assert list(exported.problems(asked)) == []
        assert {("namespace", "=", "$namespace"), ("tandem", "=", "$release")} <= set(asked.matchers)


def test_releases_of_one_name_are_chosen_by_their_namespace() -> None:
    _, namespace, release = json.loads((CHART / "dashboards" / "tandem.json").read_text())["templating"]["list"]
    assert (namespace["name"], namespace["query"]) == ("namespace", "label_values(tandem_router_info, namespace)")
    assert release["query"] == 'label_values(tandem_router_info{namespace="$namespace"}, tandem)'


@pytest.mark.parametrize("panel", panels())
def test_legend_names_labels_that_are_left(panel: str) -> None:
    """A legend of a label that the query has summed away is empty."""
    for label in re.findall(r"{{(\w+)}}", panel):
        assert all(label in asked.grouped_by | {"component", "pod"} for asked in selectors(panels()[panel]))


@pytest.mark.parametrize("alert", alerts("monitoring"))
@pytest.mark.parametrize("name", ["monitoring", "everything"])
def test_alert_asks_for_what_is_exported(name: str, alert: str, exported: Exported) -> None:
    for asked in selectors(alerts(name)[alert]):
        assert list(exported.problems(asked)) == []


def test_the_first_damaged_page_raises_the_alert_and_the_end_of_a_gap_does_not() -> None:
    """Its series begins with it, and `increase` is 0 until a second one. After a gap the series is not new."""
    query = alerts("monitoring")["TandemKvPagesBad"]
    pages = [asked.matchers for asked in selectors(query) if asked.metric == "tandem_kv_transfer_failures_total"]
    assert len(pages) == 6
    assert len(set(pages)) == 1
    compared = re.sub(r"last_over_time\(\w+\{[^}]*\}(\[[^)]*)\)", r"\1", query)
    assert "([15m] != ([1h] offset 15m or 0 * [15m]))" in compared


def test_damaged_pages_after_a_restart_raise_the_alert_whatever_their_number_was_before() -> None:
    """The new process' series may have the old one's value 15 minutes ago, or its last one before."""
    query = alerts("monitoring")["TandemKvPagesBad"]
    compared = re.sub(r"last_over_time\((\w+\{[^}]*\}\[[^)]*)\)", r"\1", query)
    compared = re.sub(r"tandem_kv_transfer_failures_total\{[^}]*\}", "pages", compared)
    compared = re.sub(r"process_start_time_seconds\{[^}]*\}", "start", compared)
    changed, restarted, begun_since = (
        "(pages[15m] != (pages[1h] offset 15m or 0 * pages[15m]))",
        "(pages and on (namespace, pod) (start > time() - 900))",
        "((pages unless pages offset 15m) and on (namespace, pod) (start > time() - 4500))",
    )
    assert compared == f"sum by (connector, reason) ({changed} or {restarted} or {begun_since}) > 0"


def test_requests_that_waited_too_long_for_a_token_that_never_came_raise_the_alert() -> None:
    """Where none gets a token, no time to first token is observed. What ended within the limit says nothing."""
    query = re.sub(r"\{[^}]*?(, le=[^}]*)?\}", r"\1", alerts("monitoring")["TandemFirstTokenLate"])
    query = re.sub(r"sum\(rate\(tandem_router_(\w+)(, le=\"[\d.]+\")?\[10m\]\)\)", r"\1", query)
    got, without = "time_to_first_token_seconds", "time_without_first_token_seconds"
    assert query == f"{got}_bucket < 0.95 * ({got}_count + {without}_count - {without}_bucket)"


def test_sizes_are_those_of_the_router_that_leads() -> None:
    """The others keep their last decision while they cannot reach the Kubernetes API, however old it is."""
    queries = [re.sub(r"\{[^}]*\}", "", query) for query in panels().values()]
    asked = [query for query in queries if re.search(r"autoscaler_(desired_)?size\b", query)]
    assert len(asked) == 2
    for query in asked:
        of_the_leader = r"_size and on \(namespace, pod\) \(tandem_router_autoscaler_leads == 1\)\)"
        assert re.match(rf"max by \(role\) \(tandem_router_autoscaler(_desired)?{of_the_leader}", query), query


@pytest.mark.parametrize("name", ["monitoring", "everything"])
def test_a_change_of_leader_does_not_begin_the_time_of_missing_instances_again(name: str) -> None:
    """Between two leaders no router has `leads` 1, and a leader that was removed has no size: for as long as neither is
    scraped the last one's size counts, or each change would make the alert wait for a whole start again."""
    query = re.sub(r"\{[^}]*\}", "", alerts(name)["TandemInstancesMissing"])
    size = "last_over_time(tandem_router_autoscaler_size[5m])"
    leader = "(max_over_time(tandem_router_autoscaler_leads[5m]) == 1)"
    ready = "max by (role) (tandem_router_instances)"
    assert query == f"max by (role) ({size} and on (namespace, pod) {leader}) > {ready}"


def test_alerts_find_their_own_release() -> None:
    for name, own in (
        ("monitoring", {("namespace", "=", "llm"), ("cluster", "=", "eu")}),
        ("everything", {("namespace", "=", NAMESPACE), ("tandem", "=", "a-name-that-is-longer-than-fort-300835e5")}),
    ):
        for query in alerts(name).values():
            assert all(own <= set(asked.matchers) for asked in selectors(query))


def test_alerts_have_a_selector_as_it_was_given() -> None:
    """Whatever YAML makes of it."""
    own = "team=~\"a: b #c|d\", note='x'"
    (rule,) = of_kind(render({"metrics": {"alerts": {"enabled": True, "selector": own}}}), "PrometheusRule")
    queries = [one["expr"] for group in rule["spec"]["groups"] for one in group["rules"]]
    assert queries
    assert all(own in query for query in queries)


def test_alerts_name_their_release() -> None:
    """Most queries sum every label away; equal alerts of two releases would be one to the Alertmanager."""
    (rule,) = of_kind(manifests("monitoring"), "PrometheusRule")
    for alert in (one for group in rule["spec"]["groups"] for one in group["rules"]):
        assert alert["labels"].items() >= {"namespace": NAMESPACE, "tandem": "on-tandem"}.items()


@pytest.mark.parametrize("name", ["monitoring", "everything"])
def test_monitor_sets_the_labels_that_queries_use(name: str) -> None:
    (monitor,) = (one for one in manifests(name) if one["kind"].endswith("Monitor"))
    (endpoint,) = monitor["spec"].get("podMetricsEndpoints") or monitor["spec"]["endpoints"]
    fullname = monitor["metadata"]["name"].removesuffix("-metrics")
    assert endpoint["relabelings"] == [
        {"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "namespace"},
        {"targetLabel": "tandem", "replacement": fullname},
        {"sourceLabels": ["__meta_kubernetes_pod_label_app_kubernetes_io_component"], "targetLabel": "component"},
    ]
    assert (endpoint["port"], endpoint["honorLabels"]) == ("metrics", True)
    # where Prometheus overrides that, as OpenShift's for users does
    renamed = {"sourceLabels": ["exported_instance"], "regex": "(.+)", "targetLabel": "instance"}
    assert endpoint["metricRelabelings"] == [renamed]


@pytest.mark.parametrize("name", ["monitoring", "everything"])
def test_monitor_finds_every_component_once(name: str) -> None:
    (monitor,) = (one for one in manifests(name) if one["kind"].endswith("Monitor"))
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    if monitor["kind"] == "PodMonitor":
        ports = [
            component_of(pod.owner)
            for pod in pods(manifests(name))
            if wanted <= pod.metadata["labels"].items()
            for port in pod.containers[-1].get("ports", [])
            if port["name"] == "metrics"
        ]
    else:
        ports = [
            component_of(one)
            for one in of_kind(manifests(name), "Service")
            if wanted <= one["metadata"]["labels"].items()
            for port in one["spec"]["ports"]
            if port["name"] == "metrics"
        ]
    assert sorted(ports) == sorted(COMPONENTS)


def test_every_alert_is_explained() -> None:
    """With its severity, where to look and what to do."""
    text = (CHART.parents[1] / "docs" / "kubernetes" / "alerts.md").read_text()
    sections = dict(re.findall(r"^## (Tandem\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    (rule,) = of_kind(manifests("monitoring"), "PrometheusRule")
    severities = {one["alert"]: one["labels"]["severity"] for its in rule["spec"]["groups"] for one in its["rules"]}
    assert sections.keys() == severities.keys()
    for alert, section in sections.items():
        assert section.strip().startswith(f"*{severities[alert]}.* "), alert
        assert re.search(r"^\*\*Look( and do)?:\*\* ", section, re.MULTILINE), alert
        assert re.search(r"^\*\*(Look and d|D)o:\*\* ", section, re.MULTILINE), alert
        assert f"](#{alert.lower()})" in text, alert


def test_what_is_not_exported_is_seen(exported: Exported) -> None:
    """Or the tests above prove nothing."""

    def problems(query: str) -> list[str]:
        return [problem for asked in selectors(query) for problem in exported.problems(asked)]

    assert problems('tandem_router_instance{state="ready"}') == ["no metric tandem_router_instance"]
    assert problems('tandem_router_instances{status="ready"}') == ["tandem_router_instances has no label status"]
    assert problems('tandem_router_instances{state="up"}') == ['tandem_router_instances has no state="up"']
    assert problems("sum by (pool) (tandem_router_instances{})") == [
        "tandem_router_instances has no label pool to group by"
    ]
    with pytest.raises(ValueError, match="tandem_router_instances is no selector"):
        selectors('sum(tandem_router_instances) + up{job="a"}')
