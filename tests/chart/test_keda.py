"""KEDA's objects: they name what the chart makes, and the router answers what they ask."""

from __future__ import annotations

import pytest
from helm_python import HelmError

from helm.rendering import render
from router.pools.discovery import parse_targets
from tests.chart.rendered import component_of, deployment, manifests, of_kind
from tests.chart.started import Read


def test_scaled_objects_ask_the_routers_for_the_pools_that_they_size(read: Read) -> None:
    objects = manifests("keda")
    (scaler,) = (one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "on-tandem-scaler")
    assert scaler["spec"]["selector"] == deployment(objects, "router")["spec"]["selector"]["matchLabels"]
    (port,) = scaler["spec"]["ports"]
    router = deployment(objects, "router")["spec"]["template"]["spec"]["containers"][0]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in router["ports"]
    settings, _ = read(objects, "router")
    assert settings.server_beside(settings.signals.listen).port == port["port"]
    for scaled in of_kind(objects, "ScaledObject"):
        role, spec = component_of(scaled), scaled["spec"]
        assert spec["scaleTargetRef"]["name"] == deployment(objects, role)["metadata"]["name"]
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["pool"] == role
        (address,) = parse_targets(trigger["metadata"]["scalerAddress"])
        assert (address.host.partition(".")[0], address.port) == ("on-tandem-scaler", port["port"])
        assert settings.signals.active_s > spec["pollingInterval"]


def test_the_router_answers_within_the_bounds_and_lets_requests_wait_for_a_first_pod(read: Read) -> None:
    settings, _ = read(manifests("keda"), "router")
    assert not settings.autoscaler.enabled
    assert not settings.kubernetes.workloads
    prefill, decode = settings.autoscaler.prefill, settings.autoscaler.decode
    assert (prefill.min_size, prefill.max_size, prefill.ttft_objective_s) == (1, 4, 0.5)
    assert (decode.min_size, decode.max_size) == (1, 10)
    assert settings.admission.instance_wait_s == 300
    keda = {"autoscaling": {"mode": "external", "keda": {"enabled": True}}}
    assert read(render(keda), "router")[0].admission.instance_wait_s == 0


def test_where_every_request_is_split_requests_wait_for_a_first_prefill_pod_too(read: Read) -> None:
    """A router that has none is not ready otherwise, and no request reaches it that would start one."""
    keda = {"mode": "external", "keda": {"enabled": True}, "prefill": {"minReplicas": 0}}
    for mode, wait_s in (("always", 300), ("auto", 0)):
        router = {"settings": {"disaggregation": {"mode": mode}}}
        settings, _ = read(render({"autoscaling": keda, "router": router}), "router")
        assert settings.admission.instance_wait_s == wait_s


def test_only_keda_and_routers_reach_the_scaler() -> None:
    for name, peers in (("keda", 2), ("default", 1)):
        (policy,) = (one for one in of_kind(manifests(name), "NetworkPolicy") if component_of(one) == "router")
        (rule,) = (one for one in policy["spec"]["ingress"] if one["ports"] == [{"protocol": "TCP", "port": 50054}])
        assert len(rule["from"]) == peers
        assert rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"


def test_without_peers_routers_alone_reach_the_scaler() -> None:
    objects = render({"autoscaling": {"mode": "external", "keda": {"enabled": True, "peers": []}}})
    (policy,) = (one for one in of_kind(objects, "NetworkPolicy") if component_of(one) == "router")
    (rule,) = (one for one in policy["spec"]["ingress"] if one["ports"] == [{"protocol": "TCP", "port": 50054}])
    assert len(rule["from"]) == 1


def test_with_tls_keda_calls_a_name_of_the_certificate() -> None:
    tls = {"enabled": True, "certManager": {"issuerRef": {"name": "private"}}}
    keda = {"enabled": True, "authenticationRef": {"name": "keda-tls"}}
    objects = render({"tls": tls, "autoscaling": {"mode": "external", "keda": keda}}, namespace="llm")
    (certificate,) = (one for one in of_kind(objects, "Certificate") if component_of(one) == "router")
    for scaled in of_kind(objects, "ScaledObject"):
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["metadata"]["scalerAddress"].partition(":")[0] in certificate["spec"]["dnsNames"]
        assert trigger["metadata"]["enableTLS"] == "true"
        assert trigger["authenticationRef"] == {"name": "keda-tls"}


@pytest.mark.parametrize(
    ("values", "least_s"),
    [
        ({}, 100),
        ({"discovery": "endpoints"}, 60),
        ({"pools": {"decode": {"minReadySeconds": 70}}}, 130),
        ({"router": {"settings": {"pools": {"dns_interval_s": 300}}}}, 300),
    ],
)
def test_what_has_just_been_ordered_is_not_removed_before_it_counts(values: dict[str, object], least_s: int) -> None:
    def autoscaling(window_s: int) -> dict[str, object]:
        behavior = {"scaleDown": {"stabilizationWindowSeconds": window_s}}
        return {**values, "autoscaling": {"mode": "external", "keda": {"enabled": True, "behavior": behavior}}}

    render(autoscaling(least_s))
    with pytest.raises(HelmError, match=f"stabilizationWindowSeconds.*{least_s}"):
        render(autoscaling(least_s - 1))


@pytest.mark.parametrize("behavior", [{"scaleDown": None}, {"scaleDown": {"stabilizationWindowSeconds": None}}])
def test_kubernetes_own_window_is_long_enough(behavior: dict[str, object]) -> None:
    """null removes the chart's; an empty object would leave it."""
    scaled = of_kind(
        render({"autoscaling": {"mode": "external", "keda": {"enabled": True, "behavior": behavior}}}), "ScaledObject"
    )
    assert len(scaled) == 2
    for one in scaled:
        assert not one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"].get("scaleDown")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"autoscaling": {"keda": {"enabled": True}}}, "set it to external"),
        (
            {"autoscaling": {"keda": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 15}}}}},
            "stabilizationWindowSeconds",
        ),
        ({"autoscaling": {"mode": "builtin", "decode": {"minReplicas": 0}}}, "0 needs autoscaling.keda.enabled"),
        (
            {
                "autoscaling": {"mode": "external", "keda": {"enabled": True}},
                "tls": {"enabled": True, "existingSecret": "router"},
            },
            "authenticationRef",
        ),
        (
            {
                "autoscaling": {"mode": "external", "keda": {"enabled": True}, "decode": {"minReplicas": 4}},
                "router": {"settings": {"autoscaler": {"max_instances": 4}}},
            },
            "max_instances: 4 is below the sum of both minReplicas, which is 5",
        ),
        (
            {
                "autoscaling": {
                    "mode": "external",
                    "keda": {"enabled": True},
                    "prefill": {"minReplicas": 0},
                    "decode": {"minReplicas": 4},
                },
                "router": {"settings": {"autoscaler": {"max_instances": 4}}},
            },
            r"which is 5 \(0 counts as 1\)",
        ),
    ],
)
def test_values_that_keda_cannot_serve_are_rejected(values: dict[str, object], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(values)
