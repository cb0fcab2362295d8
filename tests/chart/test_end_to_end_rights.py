"""The Role that the chart renders is what the router does with it: enough, and nothing beside it.

The router's half is driven by the settings file that the chart renders beside the Role: what it may resize, and which
Services it follows.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from helm.rendering import Manifest
from router.autoscaler.resizer import ActuatorError
from router.kubernetes.actuator import Election, KubernetesActuator
from router.kubernetes.cluster import Cluster
from router.kubernetes.discovery import EndpointSliceDiscovery
from router.pools.discovery import Target, parse_targets
from router.pools.instance_info import Role
from router.settings import RouterSettings
from tests.chart.fake_kube.cluster import FakeKube
from tests.chart.fake_kube.verbs import mark_deleted
from tests.chart.rendered import NAMESPACE, deployment, manifests, of_kind, released, settings_of_pods

RELEASE = "on-tandem"
LEASE = f"{RELEASE}-autoscaler"
WITH_RIGHTS = ("autoscaling", "endpoints", "secure")
"""ci/ files whose router asks Kubernetes: for sizes and members, for members, for sizes."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
TIMEOUT_S = 60.0


def settings_of(name: str) -> RouterSettings:
    """What the chart tells the router."""
    return RouterSettings(**yaml.safe_load(settings_of_pods(manifests(name), "router")))


@dataclass
class Installed:
    """The release with its router's account."""

    kube: FakeKube
    cluster: Cluster
    settings: RouterSettings

    def actuator(self) -> KubernetesActuator:
        """As a router that has just started."""
        settings = self.settings.kubernetes
        return KubernetesActuator(self.cluster, settings.workloads, Election(self.cluster, settings.lease))

    def target(self, role: Role) -> Target:
        """Follows the members of the pool."""
        (target,) = parse_targets(getattr(self.settings.pools, role))
        return target

    def asked(self) -> set[tuple[str, str]]:
        """(verb, resource) of all that the account was let in with."""
        return {request[1:3] for request in self.kube.requests}


@asynccontextmanager
async def installed(name: str, role: Manifest) -> AsyncIterator[Installed]:
    """What ci/NAME-values.yaml renders, with `role` for its Role."""
    objects = manifests(name)
    account = deployment(objects, "router")["spec"]["template"]["spec"]["serviceAccountName"]
    async with FakeKube() as kube:
        kube.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, None)
        for one in (
            role,
            *of_kind(released(objects), "RoleBinding"),
            *of_kind(objects, "Service"),
            *of_kind(objects, "Lease"),
        ):
            kube.store.create(copy.deepcopy(one), NAMESPACE)
        for pool in ROLES:
            one = copy.deepcopy(deployment(objects, pool))
            one["spec"]["replicas"] = 2
            pod = one["spec"]["template"]["spec"]
            pod["volumes"] = pod["containers"][0]["volumeMounts"] = []
            kube.store.create(one, NAMESPACE)
        await kube.until(lambda store: len([pod for pod in store.all("Pod") if pod.get("status")]) == 4)
        cluster = Cluster(str(kube.account_folder(account, NAMESPACE)), environment=kube.environment)
        try:
            yield Installed(kube, cluster, settings_of(name))
        finally:
            await cluster.close()


async def follow(found: Installed, role: Role) -> None:
    """All that a membership does: lists who there is, and watches who goes and who comes."""
    target = found.target(role)
    addresses = EndpointSliceDiscovery(found.cluster, target.host, target.port).addresses()
    assert len(await anext(addresses)) == 2
    (pod, *_) = found.kube.pods(f"{RELEASE}-{role}", NAMESPACE)
    mark_deleted(found.kube.store, pod)
    async for now in addresses:
        if len(now) == 2 and f"{pod['status']['podIP']}:{target.port}" not in now:
            return


async def autoscale(found: Installed) -> None:
    """All that an autoscaler does: takes the lead and renews it, lets pools grow, and shrink by those that it names."""
    actuator = found.actuator()
    assert await actuator.take_lead("one", 15.0)
    assert await actuator.take_lead("one", 15.0)
    for role in ROLES:
        assert (await actuator.sizes())[role] == 2
        await actuator.resize(role, 3, (), previous_size=2)
        (first, *_) = found.kube.pods(f"{RELEASE}-{role}", NAMESPACE)
        await actuator.resize(role, 1, [f"{first['status']['podIP']}:50051"], previous_size=3)


async def drive(found: Installed) -> None:
    """All that the release's router does."""
    async with asyncio.timeout(TIMEOUT_S):
        for role in ROLES:
            if found.target(role).is_service:
                await follow(found, role)
        if found.settings.kubernetes.workloads:
            await autoscale(found)


async def refusal(found: Installed, caplog: pytest.LogCaptureFixture) -> str:
    """What the router says when it is first refused; it need not give up for that."""
    driving = asyncio.create_task(drive(found))
    while not driving.done() and "cannot" not in caplog.text:
        await asyncio.sleep(0.02)
    driving.cancel()
    (error,) = await asyncio.gather(driving, return_exceptions=True)
    return f"{error if isinstance(error, ActuatorError) else ''}{caplog.text}"


def the_role(name: str) -> Manifest:
    (role,) = of_kind(released(manifests(name)), "Role")
    return copy.deepcopy(role)


def given(name: str) -> set[tuple[str, str]]:
    """(verb, resource) of each right of the Role."""
    return {(verb, one) for rule in the_role(name)["rules"] for one in rule["resources"] for verb in rule["verbs"]}


def rights(name: str) -> list[tuple[int, str]]:
    """(rule, verb) of each right that the chart gives."""
    return [(number, verb) for number, rule in enumerate(the_role(name)["rules"]) for verb in rule["verbs"]]


def test_each_way_to_ask_kubernetes_is_here() -> None:
    settings = {name: settings_of(name) for name in WITH_RIGHTS}
    links = {
        name: (bool(one.kubernetes.workloads), any(target.is_service for target in parse_targets(one.pools.decode)))
        for name, one in settings.items()
    }
    assert links == {"autoscaling": (True, True), "endpoints": (False, True), "secure": (True, False)}
    assert given("autoscaling") == given("endpoints") | given("secure")


@pytest.mark.parametrize("name", WITH_RIGHTS)
async def test_the_role_is_enough_and_every_right_of_it_is_used(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with installed(name, the_role(name)) as found:
            await drive(found)
            assert found.asked() == given(name)
    assert caplog.text == ""


@pytest.mark.parametrize(("number", "verb"), rights("autoscaling"))
async def test_without_any_one_right_something_is_refused(
    number: int, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the Role that has them all."""
    role = the_role("autoscaling")
    role["rules"][number]["verbs"].remove(verb)
    (resource,) = role["rules"][number]["resources"]
    async with installed("autoscaling", role) as found:
        with caplog.at_level(logging.WARNING):
            assert f'cannot {verb} resource "{resource}"' in await refusal(found, caplog)


OF_NOBODY = [
    ("GET", "apps/v1", "deployments", f"{RELEASE}-decode"),
    ("GET", "apps/v1", "deployments", f"{RELEASE}-router/scale"),
    ("GET", "v1", "secrets", f"{RELEASE}-kv-key"),
    ("GET", "v1", "pods", "any"),
    ("DELETE", "v1", "pods", "any"),
    ("GET", "v1", "services", f"{RELEASE}-decode"),
    ("GET", "coordination.k8s.io/v1", "leases", "another"),
    ("DELETE", "coordination.k8s.io/v1", "leases", LEASE),
    ("GET", "discovery.k8s.io/v1", "endpointslices", f"{RELEASE}-decode-0"),
    ("DELETE", "discovery.k8s.io/v1", "endpointslices", f"{RELEASE}-decode-0"),
]
OF_AN_AUTOSCALER = [
    ("GET", "apps/v1", "deployments", f"{RELEASE}-decode/scale"),
    ("GET", "v1", "pods", ""),
    ("GET", "coordination.k8s.io/v1", "leases", LEASE),
]
OF_A_MEMBERSHIP = [("GET", "discovery.k8s.io/v1", "endpointslices", "")]


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("autoscaling", OF_NOBODY),
        ("endpoints", [*OF_NOBODY, *OF_AN_AUTOSCALER]),
        ("secure", [*OF_NOBODY, *OF_A_MEMBERSHIP]),
    ],
)
async def test_anything_else_is_refused(name: str, requests: list[tuple[str, str, str, str]]) -> None:
    async with installed(name, the_role(name)) as found:
        for method, group, plural, one in requests:
            path = found.cluster.path(group, plural, *([one] if one else []))
            with pytest.raises(ActuatorError, match=r"\(403\)"):
                await found.cluster.request(method, path, dict[str, Any])
