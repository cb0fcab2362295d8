"""The live page's endpoints at the HTTP port, for browsers; docs/live_page.md describes them.

GET  /, /page/{file}                the page itself: no data, so no token
GET  /live                          the data, as server-sent events
POST /pools/resize, /pools/drain    the operators' calls of the admin listener
"""

from __future__ import annotations

import hashlib
from contextlib import aclosing
from dataclasses import dataclass
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from router.api.admin import PoolsService
from router.api.live.feed import LiveFeed
from router.api.openai.api import add_get
from router.api.openai.exchange import Authorizer, Exchange, Handler, HttpLimits
from router.api.openai.strict_model import StrictModel
from router.pools.instance_info import Role
from serving.limits import CONTROL

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_INDEX = "index.html"
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again each time, so that it fits the router; unchanged files cost a 304
}


class ResizeBody(StrictModel):
    """The new sizes; a pool without one keeps its own."""

    prefill: int | None = None
    decode: int | None = None

    def sizes(self) -> dict[Role, int]:
        given: dict[Role, int | None] = {"prefill": self.prefill, "decode": self.decode}
        return {role: size for role, size in given.items() if size is not None}


class DrainBody(StrictModel):
    instance: str
    """Its name or address."""
    grace_s: float = 0.0
    """How long running requests may take; 0: the instance's own setting."""


@dataclass(frozen=True, slots=True)
class _Asset:
    content: bytes
    media_type: str
    etag: str


def _assets() -> dict[str, _Asset]:
    """The page's files by name."""
    found: dict[str, _Asset] = {}
    for file in files(__package__).joinpath("page").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            content = file.read_bytes()
            found[file.name] = _Asset(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


class LivePage:
    """Belongs to the router's event loop."""

    def __init__(self, feed: LiveFeed, operations: PoolsService, limits: HttpLimits, authorizer: Authorizer) -> None:
        self.feed = feed
        self._operations = operations
        self._limits = limits
        self._authorizer = authorizer
        self._assets = _assets()

    def add_to(self, app: FastAPI) -> None:
        add_get(app, "/page/{name}", self.asset, in_schema=False)
        add_get(app, "/live", self.live)
        app.post("/pools/resize")(self.resize)
        app.post("/pools/drain")(self.drain)

    def index(self, request: Request) -> Response:
        """The page."""
        return self._served(_INDEX, request)

    async def asset(self, name: str, request: Request) -> Response:
        """A file of the page."""
        return self._served(name, request)

    async def live(self, request: Request) -> Response:
        """The router's state, as server-sent events: a snapshot, then patches."""

        async def handler(exchange: Exchange) -> None:
            async with exchange.while_connected(), aclosing(self.feed.watch()) as events:
                await exchange.begin_events({})
                if request.method != "HEAD":
                    async for event in events:
                        await exchange.send_event(event)
                await exchange.end_events()

        return self._exchange(handler)

    async def resize(self) -> Response:
        """Begins to resize the pools."""

        async def handler(exchange: Exchange) -> None:
            body = await exchange.parsed_body(ResizeBody.parse)
            changes = await self._operations.resize(body.sizes())
            shown = [{"pool": change.role, "from": change.previous_size, "to": change.size} for change in changes]
            await exchange.send_json({"changes": shown})

        return self._exchange(handler)

    async def drain(self) -> Response:
        """Begins to drain an instance."""

        async def handler(exchange: Exchange) -> None:
            body = await exchange.parsed_body(DrainBody.parse)
            answer = await self._operations.drain(body.instance, body.grace_s)
            await exchange.send_json({"instance": answer.instance_id, "unfinished": answer.num_unfinished})

        return self._exchange(handler)

    def _exchange(self, handler: Handler) -> Exchange:
        return Exchange(self._limits, handler, self._authorizer, policy=CONTROL)

    def _served(self, name: str, request: Request) -> Response:
        asset = self._assets.get(name)
        if asset is None:
            return PlainTextResponse("the live page has no such file\n", 404)
        headers = {**_HEADERS, "etag": asset.etag, "vary": "accept"}
        if request.headers.get("if-none-match") == asset.etag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, media_type=asset.media_type, headers=headers)
