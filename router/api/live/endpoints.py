"""The live page at the HTTP port, and its data as events; docs/live_page.md describes both.

    GET  /, /page/{file}                the page itself: no data, so no token
    GET  /live                          the data, as server-sent events: a snapshot, then each second what has changed
    POST /pools/resize, /pools/drain    the operators' calls of the admin listener

    idle ──the first watcher──▶ sampling: read ─▶ LiveState ─▶ snapshot and patch ─▶ every watcher, then sleep
     ▲                             └──────────────────── interval_s ◀────────────────────┘
     └──the last watcher has gone, or `close`

While there is no watcher there is no task, no timer and no state. All watchers share one sampling; one that was too
slow for a patch gets a snapshot instead, so that a slow client delays only itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from router.api.admin import PoolsService
from router.api.grpc import GenerationService
from router.api.live.state import Json, LiveState, PoolReading, Reading
from router.api.openai.api import add_get
from router.api.openai.exchange import Authorizer, Exchange, Handler, HttpLimits
from router.api.openai.strict_model import StrictModel
from router.autoscaler.observation import samples_of
from router.pools.instance_info import Role
from serving.limits import CONTROL
from serving.waits import Broadcast

_log = logging.getLogger(__name__)
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
    """How long running requests may take, 0..3600; 0: the instance's own setting."""


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
        add_get(app, "/live", self.live, in_schema=False)
        app.post("/pools/resize", include_in_schema=False)(self.resize)
        app.post("/pools/drain", include_in_schema=False)(self.drain)

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


# The data


class LiveFeed:
    """Belongs to one event loop."""

    def __init__(self, read: Callable[[], Awaitable[Reading]], interval_s: float = 1.0) -> None:
        self._read = read
        self._interval_s = interval_s
        self._published = Broadcast()
        self._num_watchers = 0
        self._sampling: asyncio.Task[None] | None = None
        self._is_closed = False
        self._reset()

    @property
    def is_sampling(self) -> bool:
        return self._sampling is not None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events as JSON: {"snapshot": state}, then {"patch": RFC 7396} or another snapshot, until `close`."""
        self._num_watchers += 1
        if self._sampling is None and not self._is_closed:
            self._sampling = asyncio.create_task(self._sample(), name="live")
        sampling, seen = self._sampling, 0
        try:
            while sampling is not None and sampling is self._sampling:
                if self._version == seen:
                    await self._published.wait()
                    continue
                event = self._patch if self._version == seen + 1 and seen else self._snapshot()
                seen = self._version
                yield event
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._stop()

    def close(self) -> None:
        """Ends all watches; the router is about to stop. Idempotent."""
        self._is_closed = True
        self._stop()

    def _stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None
            self._reset()
            self._published.notify()

    def _reset(self) -> None:
        self._version = 0
        self._state: Json = {}
        self._patch = b""
        self._encoded: bytes | None = None

    async def _sample(self) -> None:
        states = LiveState()
        try:
            while True:
                state = states.next(await self._read())
                self._patch = msgspec.json.encode({"patch": patch_of(self._state, state)})
                self._state, self._encoded = state, None
                self._version += 1
                self._published.notify()
                await asyncio.sleep(self._interval_s)
        except Exception:
            _log.exception("the live page's data cannot be read")
            self._stop()

    def _snapshot(self) -> bytes:
        if self._encoded is None:
            self._encoded = msgspec.json.encode({"snapshot": self._state})
        return self._encoded


def patch_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json:
    """The JSON merge patch (RFC 7396) that makes `after` of `before`. Null means: the member is gone. So a state has no
    nulls, and a list is replaced as a whole."""
    patch: Json = {name: None for name in before if name not in after}
    for name, value in after.items():
        old = before.get(name)
        if old is value or old == value:
            continue
        patch[name] = patch_of(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return patch


async def router_reading(
    operations: PoolsService, service: GenerationService, is_serving: Callable[[], bool]
) -> Reading:
    """The router's state for the live page, on its event loop: the one place that reads it."""
    sizes = await operations.sizes()  # first: everything after it is one snapshot
    safeguards, autoscaler, resizer = service.dispatcher.safeguards, operations.autoscaler, operations.resizer
    by_role, log = safeguards.pools.by_role, service.metrics.log
    statuses = autoscaler.statuses if autoscaler is not None else {}
    assert log is not None, "requests are kept where there is a page"
    return Reading(
        at_s=time.time(),
        now_s=time.monotonic(),
        router={**_totals(service), "epoch": log.epoch, "serving": is_serving(), "resizable": resizer is not None},
        pools={
            role: PoolReading(pool.num_ready(), sizes.get(role), statuses.get(role)) for role, pool in by_role.items()
        },
        instances=[(role, sample) for role in by_role for sample in samples_of(role, safeguards)],
        running=[summary() for summary in log.running.values()],
        ended=log.ended,
        changes=tuple(resizer.recent) if resizer is not None else (),
    )


def _totals(service: GenerationService) -> Json:
    model, admission, metrics = service.model, service.admission, service.metrics
    return {
        "model": model.name,
        "version": version("tandem-llm"),
        "chat": model.tokenizer is not None and model.tokenizer.chat_template is not None,
        "in_flight": admission.in_use.num_requests,
        "queued": admission.num_queued,
        "received": metrics.num_received,
        "ended": dict(metrics.ended),
        "rejected": dict(admission.num_rejected),
        "prompt_tokens": metrics.num_prompt_tokens,
        "output_tokens": metrics.num_output_tokens,
        "retried": metrics.num_retried,
        "resumed": metrics.num_resumed,
    }
