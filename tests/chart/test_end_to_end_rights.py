"""The Role that the chart renders is what the router's autoscaler needs: enough, and nothing beside it."""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from helm.rendering import Manifest
from router.autoscaler.actuator import ActuatorError
from router.kubernetes.actuator import KubernetesActuator
from router.kubernetes.cluster import Cluster
from router.kubernetes.election import Election
from router.kubernetes.settings import KubernetesSettings
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.rendered import NAMESPACE, deployment, manifests, of_kind

RELEASE = "on-tandem"
LEASE = f"{RELEASE}-autoscaler"
WORKLOADS = {"prefill": f"deployment/{RELEASE}-prefill", "decode": f"deployment/{RELEASE}-decode"}


@dataclass
class Installed:
    """The release with its autoscaler's account."""

    kube: FakeKube
    cluster: Cluster

    def actuator(self) -> KubernetesActuator:
        """As a router that has just started."""
        workloads = KubernetesSettings.model_validate(WORKLOADS).workloads
        return KubernetesActuator(self.cluster, workloads, Election(self.cluster, LEASE))

    def asked(self) -> set[tuple[str, str]]:
        """(verb, resource) of all that the account was let in with."""
        return {request[1:3] for request in self.kube.requests}


@asynccontextmanager
async def installed(role: Manifest) -> AsyncIterator[Installed]:
    """What the chart renders for an autoscaler, with `role` for its Role."""
    objects = manifests("autoscaling")
    account = deployment(objects, "router")["spec"]["template"]["spec"]["serviceAccountName"]
    async with FakeKube() as kube:
        kube.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, None)
        for one in (role, *of_kind(objects, "RoleBinding")):
            kube.store.create(one, NAMESPACE)
        for name in ("prefill", "decode"):
            one = copy.deepcopy(deployment(objects, name))
            one["spec"]["replicas"] = 2
            one["spec"]["template"]["spec"]["volumes"] = []
            kube.store.create(one, NAMESPACE)
        await kube.until(lambda store: len([pod for pod in store.all("Pod") if pod.get("status")]) == 4)
        cluster = Cluster(str(kube.account_folder(account, NAMESPACE)), environment=kube.environment)
        try:
            yield Installed(kube, cluster)
        finally:
            await cluster.close()


async def autoscale(found: Installed) -> None:
    """All that an autoscaler does: takes the lead and renews it, lets pools grow, and shrink by those that it names."""
    actuator = found.actuator()
    assert await actuator.take_lead("one", 15.0)
    assert await actuator.take_lead("one", 15.0)
    for role in ("prefill", "decode"):
        assert (await actuator.sizes())[role] == 2
        await actuator.resize(role, 3, ())
        (first, *_) = found.kube.pods(f"{RELEASE}-{role}", NAMESPACE)
        await actuator.resize(role, 1, [f"{first['status']['podIP']}:50051"])


def the_role() -> Manifest:
    (role,) = of_kind(manifests("autoscaling"), "Role")
    return copy.deepcopy(role)


def rights() -> list[tuple[int, str]]:
    """(rule, verb) of each right that the chart gives."""
    return [(number, verb) for number, rule in enumerate(the_role()["rules"]) for verb in rule["verbs"]]


async def test_the_role_is_enough_and_every_right_of_it_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with installed(the_role()) as found:
            await autoscale(found)
            given = {
                (verb, resource)
                for rule in the_role()["rules"]
                for resource in rule["resources"]
                for verb in rule["verbs"]
            }
            assert given - found.asked() <= DISCOVERY
            assert found.asked() <= given
    assert "could not be marked" not in caplog.text


DISCOVERY = {("list", "endpointslices"), ("watch", "endpointslices")}
"""Rights of another part of the router, with tests of its own."""


@pytest.mark.parametrize(("number", "verb"), rights())
async def test_without_any_one_right_something_is_refused(
    number: int, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = the_role()
    if "endpointslices" in role["rules"][number]["resources"]:
        pytest.skip("of another part of the router")
    role["rules"][number]["verbs"].remove(verb)
    async with installed(role) as found:
        refused = ""
        try:
            with caplog.at_level(logging.WARNING):
                await autoscale(found)
        except ActuatorError as error:
            refused = str(error)
        assert f"cannot {verb} resource" in refused + caplog.text


@pytest.mark.parametrize(
    ("method", "group", "plural", "name"),
    [
        ("GET", "apps/v1", "deployments", f"{RELEASE}-decode"),
        ("GET", "apps/v1", "deployments", f"{RELEASE}-router/scale"),
        ("GET", "v1", "secrets", f"{RELEASE}-kv-key"),
        ("GET", "v1", "pods", "any"),
        ("DELETE", "v1", "pods", "any"),
        ("GET", "coordination.k8s.io/v1", "leases", "another"),
        ("DELETE", "coordination.k8s.io/v1", "leases", LEASE),
    ],
)
async def test_anything_else_is_refused(method: str, group: str, plural: str, name: str) -> None:
    async with installed(the_role()) as found:
        with pytest.raises(ActuatorError, match=r"\(403\)"):
            await found.cluster.ask(method, found.cluster.path(group, plural, name), dict[str, Any])
