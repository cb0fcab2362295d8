"""TLS and tokens as the chart gives them: names that fit each other, files that are there, and that may be replaced."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from helm.rendering import render
from serving.auth import BearerTokens
from serving.errors import Unauthenticated
from serving.settings import parse_address
from serving.tls import TlsFiles
from tandem.commands.generate import command as generate_command
from tandem.commands.options import given_credentials
from tandem.local_stack.pki import Issued, StackCa
from tests.chart.rendered import COMPONENTS, ENCRYPTED, NAMES, NAMESPACE, component_of, manifests, of_kind, pods
from tests.chart.started import Read, started

ROUTER, INSTANCE = f"on-tandem-router.{NAMESPACE}.svc", f"on-tandem-instance.{NAMESPACE}.svc"


def names_of(component: str) -> list[str]:
    """DNS names in the certificate that cert-manager is asked for."""
    (asked,) = (one for one in of_kind(manifests("secure"), "Certificate") if component_of(one) == component)
    return list(asked["spec"]["dnsNames"])


def project(folder: Path, version: str, **files: bytes) -> None:
    """A mounted Secret, as the kubelet writes and replaces it: files, folder and link, all by one rename."""
    own = folder / f"..{version}"
    own.mkdir(parents=True)
    for name, content in files.items():
        (own / name.replace("_", ".")).write_bytes(content)
        link = folder / name.replace("_", ".")
        if not link.is_symlink():
            link.symlink_to(Path("..data") / link.name)
    (folder / "..data_tmp").symlink_to(own.name)
    (folder / "..data_tmp").replace(folder / "..data")


def project_tls(folder: Path, version: str, authority: StackCa) -> Issued:
    issued = authority.issue("tandem-instance")
    project(folder, version, tls_crt=issued.certificate, tls_key=issued.key, ca_crt=authority.certificate)
    return issued


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize("name", NAMES)
def test_files_are_mounted_where_the_settings_name_them(name: str, component: str, read: Read) -> None:
    settings, process = read(manifests(name), component)
    files = [settings.tls.cert_file, settings.tls.key_file, settings.tls.ca_file]
    assert all(files) is any(files) is (name in ENCRYPTED)
    if component == "router" and name == "secure":
        files += [settings.auth.tokens_file, settings.auth.admin_tokens_file]
    assert all(process.has(str(path)) for path in files if path is not None)


@pytest.mark.parametrize("component", ["prefill", "decode"])
def test_instances_let_in_those_whom_the_certificates_name(component: str, read: Read) -> None:
    instance, _ = read(manifests("secure"), component)
    router, _ = read(manifests("secure"), "router")
    assert instance.tls.client_names == (ROUTER, INSTANCE)
    assert ROUTER in names_of("router")
    assert names_of("instance") == [INSTANCE] == [instance.tls.peer_name] == [router.tls.peer_name]


@pytest.mark.parametrize("component", COMPONENTS)
def test_names_of_ones_own_reach_every_component(component: str, read: Read) -> None:
    settings, _ = read(manifests("tls"), component)
    assert settings.tls.peer_name == "tandem-instance"
    assert settings.tls.client_names == (() if component == "router" else ("tandem-router", "tandem-instance"))


def test_routers_certificate_has_every_name_that_clients_call_it_by(read: Read) -> None:
    services = [one["metadata"]["name"] for one in of_kind(manifests("secure"), "Service")]
    called = {f"{name}{end}" for name in services if "-router" in name for end in ("", f".{NAMESPACE}")}
    assert len(called) == 4
    assert called | {"tandem.example.com"} <= set(names_of("router"))
    settings, _ = read(manifests("secure"), "router")
    assert settings.tls.client_names == ("gateway.example.com", ROUTER)
    assert settings.tls.require_client_cert is True


@pytest.mark.parametrize("name", sorted(ENCRYPTED))
def test_helm_test_shows_what_the_router_asks_for(name: str, tmp_path: Path, read: Read) -> None:
    (pod,) = (one for one in pods(manifests(name)) if component_of(one.owner) == "test")
    process = started(pod.owner, manifests(name), tmp_path)
    settings, _ = read(manifests(name), "router")
    with generate_command.make_context("generate", process.args):
        shown = given_credentials(None)
    assert shown is not None
    assert shown.server_name == (ROUTER if name == "secure" else "tandem-router")
    assert (shown.cert_file is not None) is (shown.key_file is not None) is settings.tls.require_client_cert
    assert (shown.token_file is not None) is (settings.auth.tokens_file is not None)
    files = (shown.ca_file, shown.cert_file, shown.key_file, shown.token_file)
    assert all(process.has(str(path)) for path in files if path is not None)


def test_helm_test_gets_no_key_that_it_does_not_need() -> None:
    (pod,) = (one for one in pods(manifests("tls")) if component_of(one.owner) == "test")
    (secret,) = (volume["secret"] for volume in pod.spec["volumes"] if "secret" in volume)
    assert secret["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


@pytest.mark.parametrize("name", NAMES)
def test_services_say_which_of_their_ports_are_tls(name: str) -> None:
    plain = {"grpc": "kubernetes.io/h2c", "openai": "http"}
    for service in of_kind(manifests(name), "Service"):
        for port in service["spec"]["ports"]:
            if port["name"] in plain:
                assert port["appProtocol"] == ("https" if name in ENCRYPTED else plain[port["name"]])


@pytest.mark.parametrize("pod_ip", ["10.1.2.3", "fd00::1:2"])
@pytest.mark.parametrize("component", COMPONENTS)
def test_kubelet_finds_plaintext_health_in_both_families(component: str, pod_ip: str, read: Read) -> None:
    for name in ("secure", "default"):
        settings, _ = read(manifests(name), component, pod_ip=pod_ip)
        assert parse_address(settings.health.listen) == (pod_ip, 50053)


@pytest.mark.parametrize(("context", "mode"), [({}, 0o440), ({"podSecurityContext": None}, 0o444)])
def test_pods_without_a_group_can_read_their_secrets(context: dict[str, Any], mode: int) -> None:
    """The kubelet gives the files to root, and to the pod's group if it has one."""
    values = {"tls": {"enabled": True, "existingSecret": "tls"}, "auth": {"existingSecret": "tokens"}}
    secrets = [
        volume["secret"]
        for pod in pods(render({"connector": {"name": "redis"}, **values, **context}))
        for volume in pod.spec.get("volumes", ())
        if "secret" in volume
    ]
    assert {one["secretName"] for one in secrets} >= {"tls", "tokens"}
    assert {one["defaultMode"] for one in secrets} == {mode}


@pytest.mark.parametrize("admin", ["", "operators"])
def test_each_file_of_tokens_may_be_alone(admin: str, read: Read) -> None:
    auth: dict[str, Any] = {"existingSecret": "tenants", "existingSecretAdminTokensKey": admin}
    settings, process = read(render({"auth": {**auth, **({"existingSecretTokensKey": ""} if admin else {})}}), "router")
    files = [path for path in (settings.auth.tokens_file, settings.auth.admin_tokens_file) if path is not None]
    assert [path.name for path in files] == ["admin-tokens" if admin else "tokens"]
    assert process.has(str(files[0]))


def test_a_renewed_certificate_is_taken_from_a_mounted_secret(tmp_path: Path) -> None:
    folder, authority = tmp_path / "tls", StackCa("Private CA")
    first = project_tls(folder, "2026_01", authority)
    files = TlsFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    assert files.current().chain == first.certificate
    second = project_tls(folder, "2026_02", authority)
    assert files.current().chain == second.certificate
    assert (files.num_reloads, files.num_rejected) == (1, 0)


def test_a_bundle_with_the_next_ca_is_taken_from_a_mounted_map(tmp_path: Path) -> None:
    old, new = StackCa("Private CA"), StackCa("Private CA")
    project_tls(tmp_path / "tls", "2026_01", old)
    project(tmp_path / "ca", "2026_01", ca_crt=old.certificate)
    files = TlsFiles(tmp_path / "ca" / "ca.crt", tmp_path / "tls" / "tls.crt", tmp_path / "tls" / "tls.key")
    both = old.certificate + new.certificate
    project(tmp_path / "ca", "2026_02", ca_crt=both)
    assert files.current().ca == both
    project_tls(tmp_path / "tls", "2026_02", new)
    assert files.num_rejected == 0


def test_changed_tokens_are_taken_from_a_mounted_secret(tmp_path: Path) -> None:
    def line(tenant: str, token: str) -> bytes:
        return f"{tenant}: {hashlib.sha256(token.encode()).hexdigest()}\n".encode()

    first, second = ((("authorization", f"Bearer {token}"),) for token in ("first", "second"))
    project(tmp_path / "auth", "2026_01", tokens=line("alice", "first"))
    tokens = BearerTokens(tmp_path / "auth" / "tokens", "auth.tokens_file")
    assert tokens.tenant_of(first) == "alice"
    project(tmp_path / "auth", "2026_02", tokens=line("alice", "second"))
    assert tokens.tenant_of(second) == "alice"
    with pytest.raises(Unauthenticated):
        tokens.tenant_of(first)
