"""Rollouts, deletions and what is left behind, as controllers decide them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.kinds import Object, place_of
from tests.chart.fake_kube.kubelet import PaperRuntime
from tests.chart.fake_kube.refusal import Refused
from tests.chart.fake_kube.rights import account, check
from tests.chart.fake_kube.selecting import matches_fields, matches_labels
from tests.chart.fake_kube.store import Store
from tests.chart.fake_kube.test_clients import DEPLOYMENT
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
