"""A Service's address: who is behind it, and who is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.chart.fake_kube.addresses import Network
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.process_kube import ProcessKube
from tests.chart.fake_kube.store import Store
from tests.chart.fake_kube.test_processes import condition, pod, until_written

ECHO = """
import os, socketserver
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(os.environ["WHO"].encode() + b" " + self.rfile.readline())
print("up", flush=True)
socketserver.ThreadingTCPServer((os.environ["POD_IP"], 7000), Handler).serve_forever()
"""
ENV = [
    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
]


def echo(name: str, **fields: Any) -> Object:
    """Answers with its name and what it was told."""
    made = pod("", name=name, env=ENV, ports=[{"name": "echo", "containerPort": 7000}], **fields)
    made["spec"]["containers"][0]["command"] = ["python", "-c", ECHO]
    made["metadata"]["labels"] = {"app": "echo"}
    return made


def service(**fields: Any) -> Object:
    spec = {"selector": {"app": "echo"}, "ports": [{"port": 80, "targetPort": "echo"}], **fields}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "front"}, "spec": spec}


async def until_connections_are(kube: ProcessKube, *, refused: bool, address: str = "") -> None:
    """As soon as whoever listens has heard of the Service."""
    while True:
        try:
            _, writer = await asyncio.open_connection(address or kube.service_addresses("default")["front"], 80)
            writer.close()
            if not refused:
                return
        except (ConnectionRefusedError, ConnectionResetError):
            if refused:
                return
        await asyncio.sleep(0.02)


def has_a_ready_endpoint(store: Store) -> bool:
    endpoints = [endpoint for one in store.all("EndpointSlice") for endpoint in one["endpoints"] or ()]
    return any(endpoint["conditions"]["ready"] for endpoint in endpoints)


async def ask(kube: ProcessKube, line: bytes = b"hello\n") -> str:
    """What whoever is behind `front` answers; nothing where the connection ends."""
    await until_connections_are(kube, refused=False)
    reader, writer = await asyncio.open_connection(kube.service_addresses("default")["front"], 80)
    writer.write(line)
    told = await reader.read()
    writer.close()
    return told.decode()


@pytest.mark.timeout(120)
async def test_a_connection_goes_to_a_pod_that_is_ready() -> None:
    never_ready = {"readinessProbe": {"tcpSocket": {"port": 1}}}
    async with ProcessKube() as kube:
        kube.store.create(service())
        ready, unready = kube.store.create(echo("ready")), kube.store.create(echo("unready", **never_ready))
        for made in (ready, unready):
            await until_written(kube, made, "up")
        await kube.until(has_a_ready_endpoint)
        assert [await ask(kube) for _ in range(8)] == ["ready hello\n"] * 8


@pytest.mark.timeout(120)
async def test_with_nobody_ready_a_connection_ends_and_without_a_service_there_is_none() -> None:
    async with ProcessKube() as kube:
        made = kube.store.create(service())
        await kube.until(lambda store: store.all("EndpointSlice"))
        assert await ask(kube, b"") == ""
        address = kube.service_addresses("default")["front"]
        kube.store.delete(made)
        await until_connections_are(kube, refused=True, address=address)


@pytest.mark.timeout(120)
async def test_a_services_name_in_an_argument_is_its_address() -> None:
    async with ProcessKube() as kube:
        kube.store.create(service())
        asking = pod("echo front:80 front-end:80 http://front:80/front", name="two", never=True)
        made = kube.store.create(asking)
        await kube.until(condition("two", "Succeeded"))
        address = kube.service_addresses("default")["front"]
        assert kube.processes.log(made) == f"{address}:80 front-end:80 http://{address}:80/front\n"


@pytest.mark.timeout(120)
async def test_a_headless_service_has_no_address() -> None:
    async with ProcessKube() as kube:
        kube.store.create(service(clusterIP="None"))
        assert kube.service_addresses("default") == {}


def test_two_clusters_have_no_address_in_common() -> None:
    one, other = Network(), Network()
    try:
        assert not {one.next() for _ in range(300)} & {other.next() for _ in range(300)}
    finally:
        one.close()
        other.close()
