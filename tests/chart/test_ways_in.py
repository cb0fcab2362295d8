"""Ingress and routes lead to ports of the routers' Service that are there."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from helm_python import HelmError

from helm.rendering import render
from tests.chart.rendered import component_of, deployment, manifests, of_kind
from tests.chart.started import Read
from tests.chart.test_kubernetes_schemas import NEWEST, check


def ports_of_router(objects: tuple[dict[str, Any], ...]) -> dict[str, int]:
    (service,) = (one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "on-tandem-router")
    return {port["name"]: port["port"] for port in service["spec"]["ports"]}


@pytest.mark.parametrize(("kind", "port"), [("HTTPRoute", "openai"), ("GRPCRoute", "grpc")])
def test_a_route_leads_to_its_port(kind: str, port: str) -> None:
    objects = manifests("routes")
    (route,) = of_kind(objects, kind)
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "on-tandem-router", "port": ports_of_router(objects)[port]}]
    assert route["spec"]["parentRefs"][0]["namespace"] == "gateways"


def test_an_ingress_leads_to_the_http_api() -> None:
    (ingress,) = of_kind(manifests("routes"), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "on-tandem-router", "port": {"name": "openai"}}
    assert "openai" in ports_of_router(manifests("routes"))


def test_an_inference_pool_is_of_the_routers_and_asks_them_where_they_listen(read: Read) -> None:
    objects = manifests("inference-pool")
    (pool,), router = of_kind(objects, "InferencePool"), deployment(objects, "router")
    assert pool["spec"]["selector"] == router["spec"]["selector"]
    assert pool["spec"]["targetPorts"] == [{"number": ports_of_router(objects)["openai"]}]
    picker = pool["spec"]["endpointPickerRef"]
    (service,) = (one for one in of_kind(objects, "Service") if one["metadata"]["name"] == picker["name"])
    (port,) = service["spec"]["ports"]
    assert service["spec"]["selector"] == router["spec"]["selector"]["matchLabels"]
    assert port["port"] == picker["port"]["number"]
    ports = router["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert {"name": port["targetPort"], "containerPort": port["port"]} in ports
    settings, _ = read(objects, "router")
    assert settings.server_beside(settings.endpoint_picker.listen).port == port["port"]
    (route,) = of_kind(objects, "HTTPRoute")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])


def test_only_gateways_ask_the_picker_and_its_name_is_in_the_certificate() -> None:
    objects = manifests("inference-pool")
    (policy,) = (one for one in of_kind(objects, "NetworkPolicy") if component_of(one) == "router")
    (rule,) = (one for one in policy["spec"]["ingress"] if one["ports"] == [{"protocol": "TCP", "port": 50055}])
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
    tls = {"enabled": True, "certManager": {"issuerRef": {"name": "private"}}}
    values = {"tls": tls, "router": {"openai": {"enabled": True}}, "inferencePool": {"enabled": True}}
    (certificate,) = (one for one in of_kind(render(values), "Certificate") if component_of(one) == "router")
    assert "on-tandem-picker.default.svc" in certificate["spec"]["dnsNames"]


@pytest.mark.parametrize(("seconds", "timeouts"), [(0, {"request": "0s"}), (None, None), (90, {"request": "90s"})])
def test_a_time_limit_of_zero_is_none_and_null_is_the_gateways(seconds: int | None, timeouts: object) -> None:
    http = {"enabled": True, "parentRefs": [{"name": "public"}], "timeoutSeconds": seconds}
    (route,) = of_kind(render({"router": {"openai": {"enabled": True}}, "routes": {"http": http}}), "HTTPRoute")
    assert route["spec"]["rules"][0].get("timeouts") == timeouts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ingress": {"enabled": True, "hosts": ["a"]}}, "ingress.enabled: it leads to OpenAI"),
        ({"routes": {"http": {"enabled": True, "parentRefs": [{"name": "g"}]}}}, "routes.http.enabled: it leads"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.enabled: it leads"),
        ({"routes": {"grpc": {"enabled": True}}}, "routes.grpc.parentRefs: name the Gateway"),
        ({"router": {"openai": {"enabled": True}}, "ingress": {"enabled": True}}, "ingress.hosts"),
    ],
)
def test_a_way_from_or_to_nowhere_is_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError, match=message):
        render(values)


@pytest.mark.parametrize("kind", ["HTTPRoute", "GRPCRoute"])
def test_a_misspelt_field_of_a_route_is_seen(kind: str) -> None:
    (route,) = copy.deepcopy(of_kind(manifests("routes"), kind))
    route["spec"]["hostname"] = route["spec"].pop("hostnames")
    with pytest.raises(jsonschema.ValidationError):
        check(route, NEWEST)
