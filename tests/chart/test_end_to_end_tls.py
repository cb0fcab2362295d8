"""The chart with TLS and tokens, a process behind every container: probes pass, `helm test` generates, strangers do not
get in.

Certificates carry what the chart's cert-manager objects ask for, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from helm_python import Chart

from helm.rendering import CHART, render
from protos.tandem.v1 import instance_pb2, instance_pb2_grpc
from serving.channel import ChannelSettings, open_channel
from tandem.client.client import AsyncClient
from tandem.client.credentials import PLAINTEXT, Credentials
from tandem.client.errors import TandemError
from tandem.demo import MODEL_DIR
from tandem.local_stack.pki import Issued, StackCa
from tests.certificates import Files
from tests.chart.fake_kube.container_view import ACCOUNT_MOUNT
from tests.chart.fake_kube.helm_client import Helm
from tests.chart.fake_kube.process_kube import ProcessKube
from tests.chart.rendered import of_kind

pytestmark = pytest.mark.timeout(400)

WAIT_S = 180
"""A hang guard."""
CLAIM = "models"
GATEWAY = "gateway.example.com"
TOKEN = "a-token-of-alice"
CERTIFICATES = {"certManager": {"issuerRef": {"name": "private-ca"}}}
TLS: dict[str, Any] = {"enabled": True, "clients": {"certificateRequired": True, "names": [GATEWAY]}}
VALUES: dict[str, Any] = {
    "tls": {**TLS, "existingSecret": "routers", "existingInstanceSecret": "instances"},
    "auth": {"existingSecret": "tenants"},
    "test": {"existingSecret": "smoke-test"},
    "model": {"source": "claim", "claim": {"name": CLAIM, "path": "demo"}},
    "connector": {"name": "shared_storage"},
    "discovery": "endpoints",
    "router": {
        "bindAddress": "$(POD_IP)",
        "adminListen": "$(POD_IP):50052",
        "openai": {"enabled": True},
        "settings": {"disaggregation": {"mode": "always"}, "pools": {"beat_timeout_s": 30}},
        "extraEnv": [{"name": "TANDEM_KUBERNETES__ACCOUNT_FOLDER", "value": ACCOUNT_MOUNT}],
    },
    "instance": {"settings": {"engine": {"num_blocks": 256}, "peers": {"ping_timeout_ms": 30_000}}},
}


@dataclass
class Secured:
    """The release, and files of those who call it."""

    kube: ProcessKube
    helm: Helm
    authority: StackCa
    folder: Path

    def address(self, component: str, port: int) -> str:
        """Of its only pod."""
        (pod,) = self.kube.pods(f"on-tandem-{component}")
        return f"{pod['status']['podIP']}:{port}"

    def files_of(self, name: str) -> Files:
        """A certificate for that name, of the release's CA."""
        files = Files(*(self.folder / f"{name}.{end}" for end in ("ca", "crt", "key")))
        files.replace(self.authority.issue(name), self.authority)
        return files

    def client(self, credentials: Credentials) -> AsyncClient:
        """Of the router."""
        return AsyncClient(self.address("router", 50051), credentials=credentials, retries=0, timeout_s=WAIT_S)


def asked_for(component: str) -> list[str]:
    """DNS names of the certificate that cert-manager would be asked for."""
    objects = render({**VALUES, "tls": {**TLS, **CERTIFICATES}}, release="on")
    (names,) = (
        one["spec"]["dnsNames"]
        for one in of_kind(objects, "Certificate")
        if one["metadata"]["name"].endswith(component)
    )
    return list(names)


def secret(name: str, **data: bytes) -> dict[str, Any]:
    encoded = {key.replace("_", "."): base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}


def certificate(name: str, issued: Issued, authority: StackCa) -> dict[str, Any]:
    return secret(name, tls_crt=issued.certificate, tls_key=issued.key, ca_crt=authority.certificate)


@asynccontextmanager
async def secured(folder: Path) -> AsyncIterator[Secured]:
    """Installed, which waits until the kubelet's plaintext probes pass."""
    authority = StackCa("Private CA")
    (router, *others), (instance,) = asked_for("router-tls"), asked_for("instance-tls")
    tokens = f"alice: {hashlib.sha256(TOKEN.encode()).hexdigest()}\n".encode()
    async with ProcessKube() as kube:
        kube.store.create(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": {}}
        )
        shutil.copytree(MODEL_DIR, kube.claim_folder(CLAIM) / "demo")
        kube.store.create(certificate("routers", authority.issue(router, others), authority))
        kube.store.create(certificate("instances", authority.issue(instance), authority))
        kube.store.create(secret("tenants", tokens=tokens))
        kube.store.create(secret("smoke-test", token=TOKEN.encode()))
        try:
            with Chart.load(CHART) as chart:
                await Helm(kube).install(chart, "on", VALUES, timeout_s=WAIT_S)
            yield Secured(kube, Helm(kube), authority, folder)
        except BaseException as error:
            for pod, log in kube.processes.logs.items():
                error.add_note("\n  ".join([pod, *log.splitlines()[-15:]]))
            raise


async def drains(found: Secured, name: str | None) -> str:
    """What a decode instance says to somebody of that name who wants it to drain; None shows no certificate."""
    tls = found.files_of(name).tls() if name else None
    peer_name = "on-tandem-instance.default.svc" if name else None
    async with open_channel(found.address("decode", 50051), ChannelSettings(), tls=tls, peer_name=peer_name) as channel:
        stub = instance_pb2_grpc.InstanceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Drain(instance_pb2.DrainRequest(), timeout=20)
    return str(refused.value.code().name)


async def metric(found: Secured, component: str, name: str) -> float:
    """The sum of a metric; the port is plaintext."""
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://{found.address(component, 9090)}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def test_only_those_who_are_known_are_served(tmp_path: Path) -> None:
    async with secured(tmp_path) as found:
        # `helm test`, by the router's Service, with the certificate and the token that the chart gives it.
        tested = await found.helm.test("on", timeout_s=WAIT_S)
        assert "16 tokens" in tested["logs"]
        assert await metric(found, "decode", "tandem_kv_external_tokens_total") > 0
        assert await metric(found, "decode", "tandem_kv_recomputed_blocks_total") == 0

        # Clients: a certificate of the right name and a token.
        gateway, other = found.files_of(GATEWAY), found.files_of("somebody.example.com")
        name = "on-tandem-router.default.svc"
        async with found.client(gateway.credentials(server_name=name, token=TOKEN)) as client:
            assert (await client.generate("Once upon a time", max_tokens=4)).text
        for credentials in (
            gateway.credentials(server_name=name, token="another"),
            other.credentials(server_name=name, token=TOKEN),
            Credentials(ca_file=gateway.ca, server_name=name, token=TOKEN),
            PLAINTEXT,
        ):
            async with found.client(credentials) as client:
                with pytest.raises(TandemError):
                    await client.generate("Once upon a time", max_tokens=4)

        # OpenAI's port takes the same.
        context = ssl.create_default_context(cafile=str(gateway.ca))
        context.load_cert_chain(gateway.certificate, gateway.key)
        async with httpx.AsyncClient(verify=context, trust_env=False) as http:
            answer = await http.get(
                f"https://{found.address('router', 8000)}/v1/models",
                headers={"authorization": f"Bearer {TOKEN}"},
                extensions={"sni_hostname": name},
            )
            assert answer.status_code == 200

        # Instances: the release's own names alone.
        assert await drains(found, GATEWAY) == "PERMISSION_DENIED"
        assert await drains(found, None) == "UNAVAILABLE"
