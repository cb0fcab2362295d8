"""Values of one's own over the chart's, and a pool's over those of all instances."""

from __future__ import annotations

from typing import Any

import pytest

from helm.rendering import Manifest, check_settings, render
from router.autoscaler.settings import DecodePolicy
from router.pools import discovery
from tests.chart.rendered import COMPONENTS, deployment, settings_of_pods
from tests.chart.started import Read

POOLS = ("prefill", "decode")
NUM_THREADS = "TANDEM_ENGINE__NUM_THREADS"


def container(objects: list[Manifest], component: str) -> dict[str, Any]:
    (one,) = deployment(objects, component)["spec"]["template"]["spec"]["containers"]
    return dict(one)


def checked(values: dict[str, Any]) -> list[Manifest]:
    objects = render(values)
    check_settings(objects)
    return objects


# Variables


def test_variables_of_ones_own_replace_the_charts() -> None:
    own = [{"name": "XDG_CACHE_HOME", "value": "/cache"}, {"name": "GRPC_VERBOSITY", "value": "info"}]
    env = container(render({"instance": {"extraEnv": own}}), "decode")["env"]
    names = [one["name"] for one in env]
    assert len(set(names)) == len(names)
    assert [one for one in env if one["name"] in ("XDG_CACHE_HOME", "GRPC_VERBOSITY")] == own


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("address", ["10.9.8.7", "$(NODE_IP)"])
def test_a_variable_of_ones_own_is_set_before_the_charts_that_contain_it(
    address: str, component: str, read: Read
) -> None:
    """Kubernetes expands $(NAME) only below the variable itself."""
    own = [
        {"name": "NODE_IP", "value": "10.9.8.7"},
        {"name": "OWN", "value": "$(TANDEM_METRICS__LISTEN)"},
        {"name": "POD_IP", "value": address},
        {"name": "XDG_CACHE_HOME", "value": "$(HOME)/cache"},
    ]
    objects = render({"router" if component == "router" else "instance": {"extraEnv": own}})
    settings, process = read(objects, component)
    assert settings.metrics.listen == process.environment["OWN"] == "[10.9.8.7]:9090"
    assert process.environment["XDG_CACHE_HOME"] == "/tmp/cache"
    names = [one["name"] for one in container(objects, component)["env"]]
    assert len(set(names)) == len(names)


# Null


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("what", ["limits", "requests"])
def test_a_pool_without_the_limits_or_requests_of_all(what: str, workers: int) -> None:
    instance = {
        "tensorParallelSize": workers,
        "resources": {"limits": {"cpu": "8", "memory": "9Gi"}, "requests": {"cpu": "4", "memory": "9Gi"}},
    }
    pools = {"decode": {"resources": {what: None}}}
    objects = checked({"instance": instance, "pools": pools, "connector": {"name": "null"}})
    assert container(objects, "prefill")["resources"] == instance["resources"]
    assert container(objects, "decode")["resources"].keys() == {"limits", "requests"} - {what}
    threads = {"limits": 2, "requests": 4}[what]
    assert (f"num_threads: {threads}" in settings_of_pods(objects, "decode")) is (workers == 2)


@pytest.mark.parametrize(("owner", "component"), [("instance", "prefill"), ("pool", "decode"), ("router", "router")])
def test_a_limit_of_null_is_none(owner: str, component: str) -> None:
    given = {"limits": {"cpu": "8", "memory": "9Gi"}, "requests": {"cpu": "2"}}
    none = {"limits": {"cpu": None, "memory": "9Gi"}, "requests": {"cpu": "2"}}
    values: dict[str, Any] = {"instance": {"resources": given}, "pools": {"decode": {"resources": none}}}
    if owner != "pool":
        values = {owner: {"resources": none}}
    started = container(checked(values), component)
    assert started["resources"]["limits"] == {"memory": "9Gi"}
    sources = {one["name"]: one.get("valueFrom") for one in started["env"]}
    if component != "router":
        assert sources[NUM_THREADS]["resourceFieldRef"]["resource"] == "requests.cpu"


def test_null_removes_what_a_pool_inherits() -> None:
    instance = {
        "resources": {"limits": {"memory": "9Gi"}},
        "affinity": {"nodeAffinity": {}, "podAntiAffinity": {}},
        "strategy": {"type": "Recreate"},
        "replicas": 3,
    }
    own = {
        "resources": {"limits": {"memory": None}},
        "affinity": {"podAntiAffinity": None},
        "strategy": None,
        "replicas": None,
    }
    spec = deployment(checked({"instance": instance, "pools": {"decode": own}}), "decode")["spec"]
    assert "replicas" not in spec
    assert spec["strategy"]["type"] == "RollingUpdate"
    pod = spec["template"]["spec"]
    assert pod["affinity"] == {"nodeAffinity": {}}
    assert pod["containers"][0]["resources"]["limits"] == {}


def test_a_setting_of_null_is_one_without_a_value(read: Read) -> None:
    """Which is not the chart's."""
    engine = {"kv_cache_bytes": None}
    objects = render({"pools": {"decode": {"settings": {"engine": engine}}}})
    assert read(objects, "decode")[0].engine.kv_cache_bytes is None
    assert read(objects, "prefill")[0].engine.kv_cache_bytes == 1 << 30


# Strategy


def test_a_pool_that_is_recreated_has_no_rolling_update() -> None:
    """Kubernetes rejects one beside it."""
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    objects = render({"instance": {"strategy": rolling}, "pools": {"decode": {"strategy": {"type": "Recreate"}}}})
    assert deployment(objects, "decode")["spec"]["strategy"] == {"type": "Recreate"}
    assert deployment(objects, "prefill")["spec"]["strategy"] == rolling


CACHED_S = 30
"""A cluster's DNS keeps an answer for at most as long (CoreDNS as kubeadm configures it)."""


@pytest.mark.parametrize("interval_s", [None, 20])
def test_an_old_instance_drains_when_routers_have_resolved_its_successor(interval_s: int | None, read: Read) -> None:
    """With surge 1 and one instance, requests would be rejected until then."""
    own = {} if interval_s is None else {"router": {"settings": {"pools": {"dns_interval_s": interval_s}}}}
    objects = checked(own)
    longest_s = read(objects, "router")[0].pools.dns_interval_s * (1 + discovery._JITTER) + CACHED_S
    for pool in POOLS:
        assert deployment(objects, pool)["spec"]["minReadySeconds"] > longest_s


@pytest.mark.parametrize("values", [{}, {"discovery": "endpoints"}, {"instance": {"minReadySeconds": 0}}])
def test_an_old_router_drains_when_clients_have_resolved_its_successor(values: dict[str, Any]) -> None:
    """They find it by the headless Service, however routers find instances."""
    spec = deployment(checked(values), "router")["spec"]
    assert CACHED_S < spec["minReadySeconds"] < spec["progressDeadlineSeconds"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_a_router_that_is_recreated_does_not_wait_for_clients() -> None:
    objects = checked({"router": {"strategy": {"type": "Recreate"}}})
    assert "minReadySeconds" not in deployment(objects, "router")["spec"]


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({"discovery": "endpoints"}, (None, None)),
        ({"pools": {"decode": {"strategy": {"type": "Recreate"}}}}, (40, None)),
        ({"instance": {"minReadySeconds": 9}, "pools": {"decode": {"minReadySeconds": 0}}}, (9, None)),
        ({"instance": {"minReadySeconds": 9}, "pools": {"decode": {"minReadySeconds": None}}}, (9, 40)),
        ({"router": {"settings": {"pools": {"dns_interval_s": 3600}}}}, (240, 240)),
    ],
)
def test_pools_wait_as_long_as_they_need(values: dict[str, Any], seconds: tuple[int | None, int | None]) -> None:
    specs = [deployment(checked(values), pool)["spec"] for pool in POOLS]
    assert tuple(spec.get("minReadySeconds") for spec in specs) == seconds
    assert all(spec["progressDeadlineSeconds"] > spec.get("minReadySeconds", 0) for spec in specs)


@pytest.mark.parametrize("keda", [True, False])
def test_an_autoscaler_outside_does_not_count_what_a_rollout_adds_meanwhile(keda: bool, read: Read) -> None:
    """The chart's ScaledObjects, or one's own, of instances that are as soon warm as others."""
    outside = {"autoscaling": {"mode": "external", "keda": {"enabled": keda}}}
    policies = read(checked({**outside, "pools": {"decode": {"minReadySeconds": 55}}}), "router")[0].autoscaler
    assert (policies.prefill.min_ready_s, policies.decode.min_ready_s) == (40, 55)
    for policy in (policies.prefill, policies.decode):
        assert policy.warm_up_s == DecodePolicy().warm_up_s
    for values in ({**outside, "discovery": "endpoints"}, {"autoscaling": {"mode": "builtin"}}):
        assert read(checked(values), "router")[0].autoscaler.decode.min_ready_s == 0


def test_a_rollout_may_wait_for_the_room_of_an_old_pod_that_drains() -> None:
    """A new pod may get its GPU when the old one has ended, and loads after that; a router is ready with the first."""
    graces = {"prefill": 900, "decode": 1800}
    pools = {role: {"settings": {"server": {"drain_grace_s": grace_s}}} for role, grace_s in graces.items()}
    objects = render({"instance": {"gpu": {"count": 1}}, "pools": pools})
    start_s = 300 + 900
    for role, grace_s in graces.items():
        spec = deployment(objects, role)["spec"]
        drain_s = spec["template"]["spec"]["terminationGracePeriodSeconds"]
        assert drain_s > grace_s
        assert spec["progressDeadlineSeconds"] == start_s + drain_s
        assert deployment(objects, "router")["spec"]["progressDeadlineSeconds"] > spec["progressDeadlineSeconds"]


def test_a_rollout_of_routers_may_wait_for_one_that_drains() -> None:
    spec = deployment(render({"router": {"settings": {"server": {"drain_grace_s": 3600}}}}), "router")["spec"]
    assert spec["progressDeadlineSeconds"] > spec["template"]["spec"]["terminationGracePeriodSeconds"] > 3600
