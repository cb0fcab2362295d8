"""What Helm says after an install: addresses that exist, and a warning for each choice that is not safe."""

from __future__ import annotations

from typing import Any

import pytest

from helm.rendering import NOTES, ci_files, read_values, render_text
from tests.chart.rendered import NAMES, manifests, of_kind

WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "a branch": ({"model": {"source": "hub", "hub": {"id": "a/b"}}}, "Set a commit"),
    "downloads by each pod": ({"model": {"source": "hub", "hub": {"id": "a/b"}}}, "model.hub.cache.create=true"),
    "open ports": ({"networkPolicy": {"enabled": False}}, "without TLS or authentication"),
    "an open Redis": (
        {"connector": {"name": "redis", "redis": {"bundled": False, "url": "redis://host:6379"}}},
        "without a password",
    ),
    "capabilities that have no effect": (
        {"pools": {"decode": {"addCapabilities": ["IPC_LOCK"]}}},
        "addCapabilities has no effect for a user other than root",
    ),
    "blind alerts": ({"metrics": {"alerts": {"enabled": True}}}, "metrics.alerts.selector"),
    "who sizes": ({"autoscaling": {"mode": "builtin", "decode": {"maxReplicas": 6}}}, "decode 1 to 6"),
    "readable tokens": ({"auth": {"existingSecret": "tenants"}}, "tokens are sent in plaintext"),
    "a test without a token": ({"auth": {"existingSecret": "tenants"}}, "test.existingSecret"),
    "a hub out of reach": (
        {"model": {"source": "hub", "hub": {"id": "a/b"}}, "networkPolicy": {"restrictEgress": True}},
        "blocks the hub",
    ),
    "an LMCache server out of reach": (
        {
            "connector": {"name": "lmcache", "lmcache": {"place": "server", "serverUrl": "tcp://lmcache:65432"}},
            "networkPolicy": {"restrictEgress": True},
        },
        "your LMCache server. Allow them",
    ),
    "a collector out of reach": (
        {"tracing": {"otlp": "otel:4317"}, "networkPolicy": {"restrictEgress": True}},
        "blocks the collector otel:4317. Name its pods in tracing.peers",
    ),
    "an API server out of reach": (
        {"discovery": "endpoints", "networkPolicy": {"restrictEgress": True}},
        "blocks the API server",
    ),
}


def notes(values: dict[str, Any]) -> str:
    return render_text(values, release="on", namespace="llm")[NOTES]


@pytest.mark.parametrize("what", WARNINGS)
def test_notes_warn(what: str) -> None:
    values, warning = WARNINGS[what]
    assert warning in notes(values)
    assert warning not in notes({})


@pytest.mark.parametrize("context", ["podSecurityContext", "containerSecurityContext"])
def test_notes_do_not_warn_of_capabilities_of_root(context: str) -> None:
    text = notes({"instance": {"addCapabilities": ["IPC_LOCK"]}, context: {"runAsUser": 0, "runAsNonRoot": False}})
    assert "addCapabilities" not in text


def test_notes_do_not_warn_of_what_is_closed() -> None:
    text = notes({**read_values(ci_files()["secure"]), "networkPolicy": {"enabled": False}})
    assert "WARNING" not in text


def test_commands_of_the_notes_show_what_the_router_asks_for() -> None:
    text = notes(read_values(ci_files()["secure"]))
    shown = "--ca-file ca.crt --server-name on-tandem-router.llm.svc --cert-file my.crt --key-file my.key --token-file"
    assert f"--address 127.0.0.1:50051 {shown} token" in text
    assert f"--admin 127.0.0.1:50052 {shown} admin-token" in text
    assert "get configmap trusted -o jsonpath='{.data.bundle\\.pem}'" in text
    assert "get secret router-certificate" in notes(read_values(ci_files()["tls"]))


@pytest.mark.parametrize("name", NAMES)
def test_notes_name_services_that_exist(name: str) -> None:
    text = notes(read_values(ci_files()[name]))
    services = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in of_kind(manifests(name), "Service")}
    router, headless = sorted(one for one in services if "-router" in one)
    assert f"{router}.llm:{services[router]}." in text
    assert (f"port-forward service/{router} 50051:{services[router]}" in text) is (name != "everything")
    assert f"dns:///{headless}.llm:{services[headless]}" in text
    assert ("tandem pools --admin" in text) is (name not in ("bare", "everything"))


@pytest.mark.parametrize(
    ("address", "forwarded"), [("", True), ("::", True), ("127.0.0.1", True), ("$(POD_IP)", False), ("10.0.0.1", False)]
)
def test_the_notes_show_a_port_forward_only_where_the_router_listens_for_one(address: str, forwarded: bool) -> None:
    """It leads to the pod's loopback."""
    text = notes({"router": {"bindAddress": address, "service": {"port": 443}}})
    assert ("port-forward service/on-tandem-router 50051:443" in text) is forwarded
    called = "127.0.0.1:50051" if forwarded else "on-tandem-router.llm:443"
    assert f" --address {called}\n" in text
    assert f"http://{called}/tandem.v1" in text


def test_the_notes_ask_for_a_scaled_object_only_where_the_chart_makes_none() -> None:
    external: dict[str, Any] = {"mode": "external"}
    asks = "create an HPA or a ScaledObject"
    assert asks in notes({"autoscaling": external})
    assert asks not in notes({"autoscaling": {**external, "keda": {"enabled": True}}})
