"""HTTP: one request after the other through authentication, faults and rights to the verbs; lists and watches."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any

from aiohttp import web

from tests.chart.fake_kube import discovery, rights
from tests.chart.fake_kube.faults import Fault, Faults
from tests.chart.fake_kube.field_owners import Manager
from tests.chart.fake_kube.kinds import Object, Place, place_of
from tests.chart.fake_kube.refusal import Refused
from tests.chart.fake_kube.store import Store
from tests.chart.fake_kube.verbs import Verbs, Write, body_of
from tests.chart.fake_kube.watching import Interest, watched

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}
_MAX_BODY = 8 << 20


class ApiServer:
    """Listens from `start` to `stop` on the running event loop. `users` are the names behind the tokens."""

    def __init__(self, store: Store, users: dict[str, str], minor: str, log_of: Callable[[Object], str]) -> None:
        """`minor`: of the Kubernetes that it is. `log_of`: what a pod has written."""
        self._store = store
        self._users = users
        self._minor = minor
        self._log_of = log_of
        self._verbs = Verbs(store, minor)
        self.faults = Faults()
        self.requests: list[tuple[str, str, str, str]] = []
        """(user, verb, resource, name) of all that were let in, in their order."""
        self._watches: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext, port: int = 0) -> int:
        """The port: the one given, or a free one."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Ends all watches too."""
        self.drop_watches()
        if self._runner is None or self._runner.server is None:
            return
        transports = [one.transport for one in self._runner.server.connections if one.transport is not None]
        await self._runner.cleanup()
        for transport in transports:  # they would wait for their peers' part of the TLS shutdown
            transport.abort()
        await asyncio.sleep(0)

    def drop_watches(self) -> None:
        """Breaks the connection of everybody who watches."""
        for watch in self._watches:
            watch.cancel()

    @property
    def num_watches(self) -> int:
        """Those that are open."""
        return len(self._watches)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._served(request)
        except Refused as refused:
            headers = {}
            if "retryAfterSeconds" in refused.details:
                headers["Retry-After"] = str(refused.details["retryAfterSeconds"])
            return web.json_response(refused.status(), status=refused.code, headers=headers)

    async def _served(self, request: web.Request) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        user = self._users.get(token) if scheme.lower() == "bearer" else None
        if user is None:
            raise Refused(401, "Unauthorized", "Unauthorized")
        answer = discovery.document(request.path, self._minor)
        if answer is not None:
            return web.json_response(answer)
        place = place_of(request.path)
        verb = _verb(request, place)
        rights.check(self._store, user, verb, place)
        self.requests.append((user, verb, place.resource, place.name or ""))
        return await self._tried(request, place, verb)

    async def _tried(self, request: web.Request, place: Place, verb: str) -> web.StreamResponse:
        """With the fault that is due."""
        fault = self.faults.due(verb, place.resource) or Fault(verb, place.resource)
        await asyncio.sleep(fault.delay_s)
        refusal = fault.refusal()
        if refusal is not None and not fault.is_done:
            raise refusal
        if verb == "watch":
            return await self._watch(request, place)
        answer = await self._carried_out(request, place, verb, fault.revision)
        if refusal is not None:
            raise refusal
        return answer

    async def _carried_out(
        self, request: web.Request, place: Place, verb: str, revision: int | None
    ) -> web.StreamResponse:
        if verb == "list":
            return web.json_response(self._list(_interest(request, place)))
        if verb == "get" and place.subresource == "log":
            return web.Response(text=self._log_of(self._verbs.get(place)))
        if verb == "get":
            return web.json_response(self._verbs.get(place, revision))
        raw = await request.read()
        body = body_of(raw) if raw else {}
        if verb in ("delete", "deletecollection"):
            return web.json_response(self._deleted(request, place, body))
        carry_out = {"create": self._verbs.create, "update": self._verbs.update, "patch": self._verbs.patch}[verb]
        answer = carry_out(place, _write(request, place, body))
        return web.json_response(answer, status=201 if verb == "create" else 200)

    def _list(self, interest: Interest) -> Object:
        kind = interest.kind
        answer = {"kind": f"{kind.kind}List", "apiVersion": kind.group_version}
        metadata = {"resourceVersion": str(self._store.revision)}
        return {**answer, "metadata": metadata, "items": interest.listed(self._store)}

    def _deleted(self, request: web.Request, place: Place, body: Object) -> Object:
        grace = body.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        grace_s = None if grace is None else int(grace)
        if place.name:
            return self._verbs.delete(place, grace_s)
        for found in _interest(request, place).listed(self._store):
            self._verbs.delete(Place(place.kind, place.namespace, found["metadata"]["name"], None), grace_s)
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    async def _watch(self, request: web.Request, place: Place) -> web.StreamResponse:
        query = dict(request.query)
        from_list = query.get("sendInitialEvents") == "true" or query.get("resourceVersion", "0") in ("", "0")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.ensure_future(self._tell(response, _interest(request, place), query, from_list=from_list))
        self._watches.add(task)
        try:
            await asyncio.wait_for(task, float(query.get("timeoutSeconds", 3600)))
        except TimeoutError:
            await response.write_eof()
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            task.cancel()
            self._watches.discard(task)
        return response

    async def _tell(
        self, response: web.StreamResponse, interest: Interest, query: dict[str, str], *, from_list: bool
    ) -> None:
        async for answer in watched(self._store, interest, query, from_list=from_list):
            await response.write(json.dumps(answer).encode() + b"\n")


def _verb(request: web.Request, place: Place) -> str:
    if request.method == "GET":
        watches = request.query.get("watch") in ("true", "1")
        return "get" if place.name else "watch" if watches else "list"
    if request.method == "DELETE":
        return "delete" if place.name else "deletecollection"
    return _VERBS[request.method]


def _interest(request: web.Request, place: Place) -> Interest:
    labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
    return Interest(place.kind, place.namespace, labels, fields)


def _write(request: web.Request, place: Place, body: Any) -> Write:
    query = request.query
    agent = request.headers.get("User-Agent", "unknown").partition("/")[0]
    return Write(
        body,
        request.content_type,
        Manager(query.get("fieldManager", agent), place.subresource),
        force=query.get("force") == "true",
        dry_run="All" in query.getall("dryRun", []),
        strict=query.get("fieldValidation") == "Strict",
    )
