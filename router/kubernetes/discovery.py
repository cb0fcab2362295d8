"""Discovers the pods behind a Service, by its EndpointSlices.

    listing ──every slice, and a revision──▶ watching from there ──ends in time──▶ watching from the last revision
       ▲                                        └── the revision is forgotten (410), the connection breaks ──┐
       └────────── a pause, longer after each failure; the known addresses stay ◀────────────────────────────┘

A pod that terminates is out at once, before it drains. A pod that is not ready is in: health is for the instances'
watches, and a pod that starts is used with its first report.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

import msgspec

from router.kubernetes.cluster import Cluster, ClusterError, EndpointSlice, Listed, Status
from router.pools.discovery import DiscoveryLog
from serving.settings import format_address

_GROUP, _PLURAL = "discovery.k8s.io/v1", "endpointslices"
_RETRY_S = 0.25
_MAX_RETRY_S = 8.0
_GONE = 410
_SHORT_S = 0.1
"""A watch that ends sooner by itself is not repeated at once."""

T = TypeVar("T")


class EndpointSliceDiscovery:
    """One Service's pods, at one port."""

    def __init__(self, cluster: Cluster, service: str, port: int) -> None:
        """`port`: of the pods, not of the Service."""
        self._cluster = cluster
        self._service = service
        self._port = port
        self._path = cluster.path(_GROUP, _PLURAL)
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._log = DiscoveryLog(service)

    def addresses(self) -> AsyncIterator[frozenset[str]]:
        return self._log.changes(self._found())

    async def _found(self) -> AsyncIterator[frozenset[str]]:
        async for slices in self._follow():
            ips = frozenset().union(*(one.staying for one in slices.values()))
            yield frozenset(format_address(ip, self._port) for ip in ips)

    async def _follow(self) -> AsyncIterator[dict[str, EndpointSlice]]:
        """The slices by name, after each change; never ends."""
        retry_s = _RETRY_S
        while True:
            listed_s, problem = math.inf, None
            try:
                listed = await self._cluster.request("GET", self._path, Listed[EndpointSlice], query=self._query)
                listed_s = time.monotonic()
                slices = {one.metadata.name: one for one in listed.items or ()}
                yield slices
                async with aclosing(self._watch(slices, listed.metadata.resource_version)) as changes:
                    async for _ in changes:
                        yield slices
            except ClusterError as error:
                problem = str(error)
            if time.monotonic() - listed_s > _MAX_RETRY_S:  # the watch has worked
                retry_s = _RETRY_S
                self._log.set_problem(None)
            self._log.set_problem(problem)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    async def _watch(self, slices: dict[str, EndpointSlice], revision: str) -> AsyncGenerator[None, None]:
        """Applies each event to `slices`. Returns when they have to be listed again. Raises ClusterError."""
        while True:
            began_s = time.monotonic()
            async with aclosing(self._cluster.watch(self._path, self._query, revision)) as events:
                async for event in events:
                    if event.type == "ERROR":
                        status = _decoded(event.object, Status)
                        if status.code == _GONE:
                            return
                        raise ClusterError(f"the watch of {self._service} broke: {status.message}")
                    changed = _decoded(event.object, EndpointSlice)
                    revision = changed.metadata.resource_version
                    if event.type == "DELETED":
                        slices.pop(changed.metadata.name, None)
                    elif event.type in ("ADDED", "MODIFIED"):
                        slices[changed.metadata.name] = changed
                    yield
            if time.monotonic() - began_s < _SHORT_S:
                return


def _decoded(raw: msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ClusterError(f"unexpected object in a watch: {error}") from error
