"""The addresses of Services: each connection to one goes to a pod behind it that is ready, as kube-proxy sends it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from functools import partial
from typing import Self

from tests.chart.fake_kube.addresses import Network
from tests.chart.fake_kube.endpoints import SERVICE_NAME
from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.store import Store
from tests.tcp import TcpServer

_CHUNK = 65_536


class Services:
    """An async context manager. Headless Services have no address; whoever wants their pods asks for the slices."""

    def __init__(self, store: Store, network: Network) -> None:
        self._store = store
        self._network = network
        self._addresses: dict[str, str] = {}
        self._servers: dict[str, list[TcpServer]] = {}
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following
        await self._exits.aclose()

    def addresses(self, namespace: str) -> dict[str, str]:
        """IP by name."""
        return {
            service["metadata"]["name"]: self._address(service)
            for service in self._store.all("Service", namespace)
            if _has_address(service)
        }

    def _address(self, service: Object) -> str:
        uid = service["metadata"]["uid"]
        if uid not in self._addresses:
            self._addresses[uid] = self._network.next()
        return self._addresses[uid]

    async def _follow(self) -> None:
        while True:
            revision = self._store.revision
            there = {one["metadata"]["uid"]: one for one in self._store.all("Service") if _has_address(one)}
            for uid in self._servers.keys() - there.keys():
                self._close(uid)
            for uid in there.keys() - self._servers.keys():
                self._servers[uid] = [await self._listen(there[uid], port) for port in there[uid]["spec"]["ports"]]
            await self._store.wait(revision)

    def _close(self, uid: str) -> None:
        for server in self._servers.pop(uid):
            server.stop_listening()

    async def _listen(self, service: Object, port: Object) -> TcpServer:
        serve = partial(self._connect, service, port)
        return await self._exits.enter_async_context(TcpServer(serve, (self._address(service), port["port"])))

    async def _connect(
        self, service: Object, port: Object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """To any pod that is ready now, for as long as either end likes. With none the connection is refused."""
        ready = self._ready(service)
        if not ready:
            return
        pod = random.choice(ready)
        upstream = await asyncio.open_connection(pod["status"]["podIP"], container_port(pod, port["targetPort"]))
        try:
            await asyncio.gather(_pump(reader, upstream[1]), _pump(upstream[0], writer))
        finally:
            upstream[1].close()

    def _ready(self, service: Object) -> list[Object]:
        metadata = service["metadata"]
        slices = [
            one
            for one in self._store.all("EndpointSlice", metadata["namespace"])
            if one["metadata"]["labels"][SERVICE_NAME] == metadata["name"]
        ]
        endpoints = [endpoint for one in slices for endpoint in one["endpoints"] or ()]
        names = [endpoint["targetRef"]["name"] for endpoint in endpoints if endpoint["conditions"]["ready"]]
        pods = (self._store.find("Pod", name, metadata["namespace"]) for name in names)
        return [pod for pod in pods if pod is not None]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


def _has_address(service: Object) -> bool:
    return service["spec"].get("clusterIP") != "None"


def container_port(pod: Object, port: int | str) -> int:
    """A port's number, by number or by its name in the pod."""
    if isinstance(port, int):
        return port
    containers = pod["spec"]["containers"]
    return next(
        int(one["containerPort"]) for its in containers for one in its.get("ports") or () if one["name"] == port
    )
