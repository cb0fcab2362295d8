"""Rights: none where the router does not ask Kubernetes, and no more than it needs where it does."""

from __future__ import annotations

import pytest

from helm.rendering import render
from tests.chart.rendered import ASKING, NAMES, NAMESPACE, deployment, manifests, of_kind, released
from tests.chart.started import Read


@pytest.mark.parametrize("name", NAMES)
def test_there_are_rights_only_where_the_router_asks(name: str) -> None:
    assert {"ClusterRole", "ClusterRoleBinding"}.isdisjoint(one["kind"] for one in manifests(name))
    kinds = {one["kind"] for one in released(manifests(name))}
    assert ({"Role", "RoleBinding"} & kinds == {"Role", "RoleBinding"}) is (name in ASKING)


def test_role_names_what_it_may_change() -> None:
    (role,) = of_kind(released(manifests("autoscaling")), "Role")
    rights = {
        (resource, verb, tuple(rule.get("resourceNames", ())))
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    pools = tuple(deployment(manifests("autoscaling"), one)["metadata"]["name"] for one in ("prefill", "decode"))
    assert rights == {
        ("deployments/scale", "get", pools),
        ("deployments/scale", "patch", pools),
        ("pods", "list", ()),
        ("pods", "patch", ()),
        ("leases", "get", ("on-tandem-autoscaler",)),
        ("leases", "patch", ("on-tandem-autoscaler",)),
        ("endpointslices", "list", ()),
        ("endpointslices", "watch", ()),
    }


def test_role_is_bound_to_the_routers_account() -> None:
    objects = released(manifests("autoscaling"))
    (binding,) = of_kind(objects, "RoleBinding")
    account = deployment(objects, "router")["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
    assert binding["roleRef"]["name"] == of_kind(objects, "Role")[0]["metadata"]["name"]


@pytest.mark.parametrize("is_marked", [True, False])
def test_the_right_to_patch_pods_has_a_switch_that_the_router_knows(is_marked: bool, read: Read) -> None:
    objects = render({"autoscaling": {"mode": "builtin", "markPods": is_marked}})
    (role,) = of_kind(released(objects), "Role")
    (rule,) = (one for one in role["rules"] if one["resources"] == ["pods"])
    assert ("patch" in rule["verbs"]) is is_marked
    assert read(objects, "router")[0].kubernetes.mark_pods is is_marked


def test_one_account_for_both_is_one_object_with_the_annotations_of_both() -> None:
    own = {"routerAnnotations": {"role": "r", "of": "router"}, "instanceAnnotations": {"of": "instance"}}
    accounts = {"routerName": "llm", "instanceName": "llm", "annotations": {"both": "1"}, **own}
    (account,) = of_kind(released(render({"serviceAccount": accounts})), "ServiceAccount")
    assert account["metadata"]["name"] == "llm"
    assert account["metadata"]["annotations"] == {"both": "1", "role": "r", "of": "instance"}
