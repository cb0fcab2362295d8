"""Rollouts, deletions and what is left behind, as controllers decide them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.field_owners import Manager
from tests.chart.fake_kube.kinds import Object, place_of
from tests.chart.fake_kube.kubelet import PaperRuntime
from tests.chart.fake_kube.patching import APPLY, MERGE
from tests.chart.fake_kube.refusal import Refused
from tests.chart.fake_kube.rights import account, check
from tests.chart.fake_kube.selecting import matches_fields, matches_labels
from tests.chart.fake_kube.store import Store
from tests.chart.fake_kube.test_clients import DEPLOYMENT
from tests.chart.fake_kube.verbs import Verbs, Write
from tests.chart.fake_kube.workloads import deletion_rank, is_ready


def created(**spec: Any) -> Object:
    return {**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], **spec}}


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1), (2, 1), ("25%", "25%")])
async def test_a_rollout_keeps_its_bounds_and_ends(surge: int | str, unavailable: int | str) -> None:
    rolling = {"maxSurge": surge, "maxUnavailable": unavailable}
    async with FakeKube(PaperRuntime(start_s=0.01)) as kube:
        kube.store.create(created(replicas=4, strategy={"type": "RollingUpdate", "rollingUpdate": rolling}))
        await kube.until(lambda _: sum(map(is_ready, kube.pods("web"))) == 4)
        old = {pod["metadata"]["name"] for pod in kube.pods("web")}
        most, least = 0, 4

        def rolled(_: Store) -> bool:
            nonlocal most, least
            pods = kube.pods("web")
            most, least = max(most, len(pods)), min(least, sum(map(is_ready, pods)))
            return len(pods) == 4 and not {pod["metadata"]["name"] for pod in pods} & old and all(map(is_ready, pods))

        change = {"annotations": {"checksum": "2"}}
        web = kube.store.get("Deployment", "web")
        kube.store.changed(web, lambda new: new["spec"]["template"]["metadata"].update(change))
        await kube.until(rolled)
        assert most <= 4 + (surge if isinstance(surge, int) else 1)
        assert least >= 4 - (unavailable if isinstance(unavailable, int) else 1)


def pod(name: str, *, cost: str | None = None, ready: bool = True, created_at: str = "2026-01-01T00:00:00Z") -> Object:
    annotations = {} if cost is None else {"controller.kubernetes.io/pod-deletion-cost": cost}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    metadata = {"name": name, "annotations": annotations, "creationTimestamp": created_at}
    return {"metadata": metadata, "status": status}


def test_who_goes_first_is_unready_then_cheap_then_new() -> None:
    pods = [
        pod("old"),
        pod("new", created_at="2026-01-02T00:00:00Z"),
        pod("cheap", cost="-1"),
        pod("dear", cost="1"),
        pod("unready and dear", cost="9", ready=False),
    ]
    assert [one["metadata"]["name"] for one in sorted(pods, key=deletion_rank)] == [
        "unready and dear",
        "cheap",
        "new",
        "old",
        "dear",
    ]


async def test_who_loses_its_owner_goes_too() -> None:
    async with FakeKube() as kube:
        web = kube.store.create(DEPLOYMENT)
        await kube.until(lambda _: len(kube.pods("web")) == 2)
        kube.store.delete(web)
        await kube.until(lambda store: not store.all("Pod") and not store.all("ReplicaSet"))


async def test_a_pod_without_its_secret_does_not_start_until_it_is_there() -> None:
    needy = copy.deepcopy(DEPLOYMENT)
    needy["spec"]["template"]["spec"]["volumes"] = [{"name": "key", "secret": {"secretName": "key"}}]
    async with FakeKube() as kube:
        kube.store.create(needy)
        await kube.until(lambda _: [one.get("status", {}).get("phase") for one in kube.pods("web")] == ["Pending"] * 2)
        kube.store.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}})
        await kube.until(lambda _: sum(map(is_ready, kube.pods("web"))) == 2)


# The store


def test_an_older_version_is_not_written_over_a_newer_one() -> None:
    store = Store()
    store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}, None)
    first = store.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}})
    second = store.replace({**first, "data": {"a": "1"}})
    with pytest.raises(Refused, match="the object has been modified"):
        store.replace({**first, "data": {"a": "2"}})
    assert store.get("ConfigMap", "a") == second
    assert store.as_of(second, int(first["metadata"]["resourceVersion"])) == first
    assert [event.change for event in store.since(2)] == ["ADDED", "MODIFIED"]
    store.compact()
    with pytest.raises(Refused, match="too old resource version"):
        store.since(2)


# Rights


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("get", "deployments/decode/scale", True),
        ("patch", "deployments/decode/scale", False),
        ("get", "deployments/decode", False),
        ("get", "deployments/prefill/scale", False),
        ("get", "statefulsets/decode/scale", False),
        ("list", "deployments", False),
    ],
)
def test_a_right_is_for_its_verb_resource_and_name_alone(verb: str, path: str, allowed: bool) -> None:
    store = Store()
    store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}, None)
    named = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "router"}}
    scale = {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": ["decode"], "verbs": ["get"]}
    store.create({**named, "kind": "Role", "rules": [scale]})
    subject = {"kind": "ServiceAccount", "name": "router", "namespace": "default"}
    store.create({**named, "kind": "RoleBinding", "subjects": [subject], "roleRef": {"name": "router"}})
    place = place_of(f"/apis/apps/v1/namespaces/default/{path}")
    for user, gives in ((account("default", "router"), allowed), (account("default", "another"), False)):
        if gives:
            check(store, user, verb, place)
        else:
            with pytest.raises(Refused, match="is forbidden"):
                check(store, user, verb, place)


# Selectors


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ("", True),
        ("app=web", True),
        ("app==web,tier!=back", True),
        ("app!=web", False),
        ("app in (web, db),tier", True),
        ("app notin (web)", False),
        ("!tier", False),
        ("!other", True),
        ("other=1", False),
    ],
)
def test_label_selectors(selector: str, matches: bool) -> None:
    assert matches_labels({"app": "web", "tier": "front"}, selector) is matches


def test_field_selectors() -> None:
    found = {"metadata": {"name": "a"}, "status": {}}
    assert matches_fields(found, "metadata.name=a,status.phase!=Running")
    assert not matches_fields(found, "metadata.name=b")


# What is refused, and when a rollout has failed


def template(**fields: Any) -> Object:
    changed = copy.deepcopy(DEPLOYMENT)
    changed["spec"]["template"]["spec"]["containers"][0].update(fields)
    return changed


def applied(*manifests: Object) -> Object:
    """One after the other, by Helm."""
    store = Store()
    store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}, None)
    verbs = Verbs(store, "37")
    for one in manifests:
        place = place_of(f"/apis/apps/v1/namespaces/default/deployments/{one['metadata']['name']}")
        result = verbs.patch(place, Write(copy.deepcopy(one), APPLY, Manager("helm")))
    return result


def with_labels(**labels: str) -> Object:
    changed = copy.deepcopy(DEPLOYMENT)
    changed["spec"]["template"]["metadata"]["labels"] = labels
    return changed


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (with_labels(app="other"), "`selector` does not match template `labels`"),
        (with_labels(app="web", team="a b"), 'Invalid value: "team=a b"'),
        ({**DEPLOYMENT, "metadata": {"name": "Web_1"}}, "metadata.name: Invalid value"),
        (
            template(env=[{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
            'duplicate entries for key \\[name="A"',
        ),
        (
            template(ports=[{"name": "a", "containerPort": 1}, {"name": "b", "containerPort": 1}]),
            'duplicate entries for key \\[containerPort="1"',
        ),
        (
            template(ports=[{"name": "a", "containerPort": 1}, {"name": "a", "containerPort": 2}]),
            "Duplicate value: 'a'",
        ),
        (template(ports=[{"name": "a_port", "containerPort": 1}]), 'Invalid value: "a_port"'),
        (template(volumeMounts=[{"name": "none", "mountPath": "/a"}]), 'Not found: "none"'),
        (
            created(strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}),
            "may not be 0 when `maxSurge` is 0",
        ),
    ],
)
def test_what_the_schemas_allow_and_a_server_does_not_is_refused(wrong: Object, why: str) -> None:
    with pytest.raises(Refused, match=why):
        applied(wrong)
    assert applied(DEPLOYMENT)["spec"]["replicas"] == 2


def test_a_selector_stays_what_it_is() -> None:
    changed = with_labels(app="web", tier="a")
    changed["spec"]["selector"] = {"matchLabels": {"app": "web", "tier": "a"}}
    with pytest.raises(Refused, match="field is immutable"):
        applied(DEPLOYMENT, changed)


def progress(store: Store) -> str:
    return reason_of(store.get("Deployment", "web"))


def reason_of(deployment: Object) -> str:
    """Of its condition `Progressing`; empty: it has none."""
    conditions = (deployment.get("status") or {}).get("conditions") or ()
    return next((str(one["reason"]) for one in conditions if one["type"] == "Progressing"), "")


async def test_a_rollout_without_progress_fails_at_its_deadline_and_a_finished_one_never() -> None:
    runtime = PaperRuntime()
    async with FakeKube(runtime) as kube:
        kube.store.create(created(progressDeadlineSeconds=1))
        await kube.until(lambda store: progress(store) == "NewReplicaSetAvailable")
        runtime.unready.add("web")
        kube.store.changed(kube.store.get("Deployment", "web"), lambda new: new["spec"].update(replicas=3))
        await kube.until(lambda _: len(kube.pods("web")) == 3)
        change = {"annotations": {"checksum": "2"}}
        web, revision = kube.store.get("Deployment", "web"), kube.store.revision
        kube.store.changed(web, lambda new: new["spec"]["template"]["metadata"].update(change))
        await kube.until(lambda store: progress(store) == "ProgressDeadlineExceeded")
        # In the log: as times are whole seconds, the deadline may pass before anything else gets a turn.
        reasons = [reason_of(event.object) for event in kube.store.since(revision) if event.kind.kind == "Deployment"]
        assert reasons.index("ReplicaSetUpdated") < reasons.index("ProgressDeadlineExceeded")
        runtime.unready.clear()


async def test_a_paused_rollout_stays_where_it_is_and_goes_on_when_it_is_resumed() -> None:
    runtime = PaperRuntime()

    def pause(*, paused: bool) -> None:
        kube.store.changed(kube.store.get("Deployment", "web"), lambda new: new["spec"].update(paused=paused))

    def checksums() -> list[str]:
        annotations = [pod["metadata"].get("annotations") or {} for pod in kube.pods("web")]
        return sorted(one.get("checksum", "") for one in annotations)

    async with FakeKube(runtime) as kube:
        kube.store.create(created(progressDeadlineSeconds=1))
        await kube.until(lambda store: progress(store) == "NewReplicaSetAvailable")
        runtime.unready.add("web")
        change = {"annotations": {"checksum": "2"}}
        web = kube.store.get("Deployment", "web")
        kube.store.changed(web, lambda new: new["spec"]["template"]["metadata"].update(change))
        await kube.until(lambda _: len(kube.pods("web")) == 3)
        pause(paused=True)
        runtime.unready.clear()
        await kube.until(lambda _: all(map(is_ready, kube.pods("web"))))
        await kube.until(lambda store: progress(store) == "DeploymentPaused")
        revision = kube.store.revision
        kube.store.create({**DEPLOYMENT, "metadata": {"name": "other"}})  # the controllers have looked again
        await kube.until(lambda _: len(kube.pods("other")) == 2)
        assert checksums() == ["", "", "2"]
        assert not [event for event in kube.store.since(revision) if event.object["metadata"]["name"] == "web"]
        pause(paused=False)
        await kube.until(lambda _: checksums() == ["2", "2"])


async def test_a_job_tries_again_until_it_has_failed_too_often() -> None:
    class Failing(PaperRuntime):
        async def ended(self, pod: Object) -> bool:
            return False

    container = {"name": "one", "image": "one:1"}
    pod_template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    job: Object = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once"}, "spec": {"backoffLimit": 1}}
    job["spec"]["template"] = pod_template
    for runtime, expected, num_pods in ((PaperRuntime(), "Complete", 1), (Failing(), "Failed", 2)):
        async with FakeKube(runtime) as kube:
            kube.store.create(job)
            await kube.until(lambda store: (store.get("Job", "once").get("status") or {}).get("conditions"))
            assert kube.store.get("Job", "once")["status"]["conditions"][0]["type"] == expected
            assert len(kube.store.all("Pod")) == num_pods
            kube.store.delete(kube.store.get("Job", "once"))
            await kube.until(lambda store: not store.all("Pod"))


def test_a_size_that_is_applied_by_scale_keeps_it_when_its_first_owner_leaves_it_out() -> None:
    store = Store()
    store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}, None)
    verbs = Verbs(store, "37")
    path = "/apis/apps/v1/namespaces/default/deployments/web"

    def apply(body: Object, manager: Manager, *, where: str = "") -> None:
        verbs.patch(place_of(f"{path}{where}"), Write(copy.deepcopy(body), APPLY, manager))

    without = {**DEPLOYMENT, "spec": {key: value for key, value in DEPLOYMENT["spec"].items() if key != "replicas"}}
    for keeps, left in ((False, 1), (True, 4)):
        apply({**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "replicas": 4}}, Manager("helm"))
        if keeps:
            apply({"kind": "Scale", "spec": {"replicas": 4}}, Manager("sizes", "scale"), where="/scale")
        apply(without, Manager("helm"))
        assert store.get("Deployment", "web")["spec"]["replicas"] == left
    verbs.patch(place_of(f"{path}/scale"), Write({"spec": {"replicas": 6}}, MERGE, Manager("hpa", "scale")))
    with pytest.raises(Refused, match='conflict with "hpa" with subresource "scale"'):
        apply({**DEPLOYMENT, "spec": {**DEPLOYMENT["spec"], "replicas": 4}}, Manager("helm"))
