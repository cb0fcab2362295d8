"""Who is in a pool: the pods behind a Service, as its EndpointSlices tell.

    listing ──every slice, and a revision──▶ watching from there ──ends by itself──▶ watching from the last revision
       ▲                                        └── the revision is forgotten (410), the connection breaks ──┐
       └────────── a pause, longer each time that nothing is heard; what was known last holds ◀────────────┘

A pod that was told to go is out at once, before it has begun to drain; what runs there runs on (pool.py). One that is
not ready is in: who is well is for the members' watches, and a pod that starts is used with its first report.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TypeVar

import msgspec

from router.kubernetes.cluster import Cluster, ClusterError
from router.kubernetes.objects import EndpointSlice, EndpointSliceList, Status
from router.pools.membership import address_of

_log = logging.getLogger(__name__)

_GROUP, _PLURAL = "discovery.k8s.io/v1", "endpointslices"
_AGAIN_S = 0.25
_MAX_AGAIN_S = 8.0
_GONE = 410

T = TypeVar("T")


class EndpointsMembership:
    """One Service's pods, at one port."""

    def __init__(self, cluster: Cluster, service: str, port: int) -> None:
        """`port`: of the pods, not of the Service."""
        self._cluster = cluster
        self._service = service
        self._port = port
        self._path = cluster.path(_GROUP, _PLURAL)
        self._query = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._problem = ""

    async def addresses(self) -> AsyncIterator[frozenset[str]]:
        known: frozenset[str] | None = None
        async for slices in self._followed():
            ips = frozenset().union(*(one.staying for one in slices.values()))
            told = frozenset(address_of(ip, self._port) for ip in ips)
            if told != known:
                known = told
                _log.info("%s is now %s", self._service, ", ".join(sorted(told)) or "nobody")
                yield told

    async def _followed(self) -> AsyncIterator[dict[str, EndpointSlice]]:
        """The slices by name, again after each change, for ever."""
        again_s = _AGAIN_S
        while True:
            began_s, problem = time.monotonic(), ""
            try:
                listed = await self._cluster.ask("GET", self._path, EndpointSliceList, query=self._query)
                slices = {one.metadata.name: one for one in listed.items or ()}
                yield slices
                async with aclosing(self._watched(slices, listed.metadata.resource_version)) as changes:
                    async for _ in changes:
                        yield slices
            except ClusterError as error:
                problem = str(error)
            if time.monotonic() - began_s > _MAX_AGAIN_S:
                again_s, self._problem = _AGAIN_S, ""
            self._tell(problem)
            await asyncio.sleep(again_s * random.uniform(0.5, 1.0))
            again_s = min(2 * again_s, _MAX_AGAIN_S)

    async def _watched(self, slices: dict[str, EndpointSlice], revision: str) -> AsyncGenerator[None, None]:
        """Changes `slices` as it is told. Returns when they have to be listed again. Raises ClusterError."""
        while True:
            async with aclosing(self._cluster.watch(self._path, self._query, revision)) as events:
                async for event in events:
                    if event.type == "ERROR":
                        status = _decoded(event.object, Status)
                        if status.code == _GONE:
                            return
                        raise ClusterError(f"the watch of {self._service} broke: {status.message}")
                    told = _decoded(event.object, EndpointSlice)
                    revision = told.metadata.resource_version
                    if event.type == "DELETED":
                        slices.pop(told.metadata.name, None)
                    elif event.type in ("ADDED", "MODIFIED"):
                        slices[told.metadata.name] = told
                    yield

    def _tell(self, problem: str) -> None:
        """Once per problem, not per attempt."""
        if problem not in ("", self._problem):
            _log.warning("%s: %s; its last known instances are kept for now", self._service, problem)
        self._problem = problem


def _decoded(raw: msgspec.Raw, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise ClusterError(f"a watch tells something else: {error}") from error
