"""One HTTP request and its answer, within the bounds that every call of this router has.

    gate ──▶ admitted ──▶ body read ──▶ work ──┬──▶ a whole answer
      │          │            │          │     └──▶ headers ─▶ event … event ─▶ end
      └──────────┴────────────┴──────────┴── an error: before the first byte a status, after it an event
                                         └── the client has gone: the work is cancelled at once, nobody is told

The calls are counted, capped and waited for together with the gRPC port's (serving/open_calls.py), so that a drain
finishes both and then refuses both. The client's end is noticed while the work runs: its connection is read all along.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response, status
from starlette.types import Receive, Scope, Send

from router.http.errors import BadHttp, body_of, headers_of, status_of
from serving import tracing
from serving.bad_callers import BadCallers
from serving.errors import DeadlineExceeded, InternalError, InvalidArgument, ServiceError
from serving.logging import set_request_id
from serving.open_calls import REQUEST, OpenCalls

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DISCARDED = 4
"""Times the longest body that is read at most before it is refused."""
_CLOSE = {"connection": "close"}
_log = logging.getLogger(__name__)


Metadata = tuple[tuple[str, str], ...]
"""A request's headers, the names in small letters: what gRPC calls metadata."""
Gate = Callable[[Metadata], object]
"""Looks at who asks, before anything else does. Raises Unauthenticated or PermissionDenied."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What an exchange may take; times in seconds."""

    max_body_bytes: int
    read_timeout_s: float
    max_deadline_s: float


class Exchange(Response):
    """A response that is worked out while it is sent. Owned by its request's task; `work` writes the answer to it."""

    def __init__(
        self,
        calls: OpenCalls,
        bad_callers: BadCallers,
        bounds: Bounds,
        work: Work,
        renamed: Mapping[str, str] | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`renamed` are fields that the client knows by another name; `gate` None lets everybody ask."""
        super().__init__()
        self._calls = calls
        self._bad_callers = bad_callers
        self._bounds = bounds
        self._work = work
        self._renamed = renamed or {}
        self._gate = gate
        self._deadline_s = time.monotonic() + bounds.max_deadline_s
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.metadata: Metadata = tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        )
        given = self.header(REQUEST_ID_HEADER)
        self.request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        """The client's name for it, if that is one; else one of ours."""
        set_request_id(self.request_id)
        tracing.join(self.metadata)
        try:
            if self._gate is not None:
                self._gate(self.metadata)
            await self._bounded(_peer(scope))
        except ClientGone:
            _log.debug("the client has gone")
        except ServiceError as error:
            await self._fail(error)
        except Exception:
            _log.exception("%s failed", scope["path"])
            await self._fail(InternalError("internal error"))

    # What the work uses

    def header(self, name: str) -> str:
        """The value of a header, "" without one."""
        return next((value for key, value in self.metadata if key == name), "")

    def remaining_s(self) -> float:
        """Seconds that this exchange may still take."""
        return max(self._deadline_s - time.monotonic(), 0.0)

    async def read_body(self) -> bytes:
        """The whole JSON body. Raises BadHttp for one that is too long, too slow, or something else."""
        kind = self.header("content-type").partition(";")[0].strip().lower()
        if kind != "application/json":
            problem = f"content-type is {kind!r}; allowed: application/json (curl: -H 'Content-Type: application/json')"
            raise BadHttp(status.HTTP_415_UNSUPPORTED_MEDIA_TYPE, problem)
        if self.header("content-encoding") not in ("", "identity"):
            raise BadHttp(status.HTTP_415_UNSUPPORTED_MEDIA_TYPE, "content-encoding: compressed bodies are not taken")
        try:
            async with asyncio.timeout(self._bounds.read_timeout_s):
                return await self._read()
        except TimeoutError:
            problem = f"the body was not there after {self._bounds.read_timeout_s:g} s"
            raise BadHttp(status.HTTP_408_REQUEST_TIMEOUT, problem) from None

    async def answer(self, content: object, headers: Mapping[str, str], status_code: int = 200) -> None:
        """A whole answer in JSON."""
        await self.answer_bytes(msgspec.json.encode(content), "application/json", headers, status_code)

    async def answer_bytes(
        self, data: bytes, content_type: str, headers: Mapping[str, str] | None = None, status_code: int = 200
    ) -> None:
        """A whole answer as it stands."""
        told = {"content-type": content_type, "content-length": str(len(data)), **(headers or {})}
        await self._start(status_code, told)
        await self._send({"type": "http.response.body", "body": data})

    async def begin_events(self, headers: Mapping[str, str]) -> None:
        """The headers of a stream of server-sent events."""
        await self._start(
            status.HTTP_200_OK,
            # X-Accel-Buffering: nginx would keep the events until it has enough of them.
            {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no", **headers},
        )

    async def event(self, data: bytes) -> None:
        """One server-sent event; returns when it is on its way."""
        await self._send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})

    async def end_events(self) -> None:
        """The end of the stream, as OpenAI marks it."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    # Its bounds

    async def _bounded(self, peer: str) -> None:
        deadline = asyncio.timeout(self._bounds.max_deadline_s)
        with self._calls.admitted(peer, REQUEST):
            try:
                with self._calls.awaited(REQUEST), self._calls.ends_with(deadline, REQUEST):
                    async with deadline:
                        await self._work(self)
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise DeadlineExceeded(f"not finished within {self._bounds.max_deadline_s:g} s") from None
            except (InvalidArgument, BadHttp):
                await self._bad_callers.slow_down(peer)
                raise

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """What is done inside ends when the client goes: raises ClientGone. To be entered once the body is read."""
        scope = asyncio.timeout(None)
        watch = asyncio.create_task(self._watch(scope))
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise ClientGone from None
        finally:
            watch.cancel()

    async def _watch(self, scope: asyncio.Timeout) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not scope.expired():
            scope.reschedule(0.0)

    async def _read(self) -> bytes:
        """Of a body that is too long the rest is read too, within reason: who is still sending does not read a 413."""
        body, num_bytes = bytearray(), 0
        limit = self._bounds.max_body_bytes
        too_long = BadHttp(
            status.HTTP_413_CONTENT_TOO_LARGE, f"the body has more than {limit} bytes, the most that is taken"
        )
        if int(self.header("content-length") or 0) > _DISCARDED * limit:
            raise too_long
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes <= limit:
                body += piece
            elif num_bytes > _DISCARDED * limit:
                raise too_long
            if not message.get("more_body", False):
                break
        if num_bytes > limit:
            raise too_long
        return bytes(body)

    async def _start(self, status_code: int, headers: Mapping[str, str]) -> None:
        self._begun = True
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        pairs.append((REQUEST_ID_HEADER.encode(), self.request_id.encode()))
        await self._send({"type": "http.response.start", "status": status_code, "headers": pairs})

    async def _fail(self, error: ServiceError) -> None:
        body: dict[str, Any] = body_of(error, self._renamed)
        if self._begun:
            await self.event(msgspec.json.encode(body))
            await self.end_events()
            return
        status_code = status_of(error)
        # What the client has not yet sent of its body is not read.
        half_read = status_code in (status.HTTP_408_REQUEST_TIMEOUT, status.HTTP_413_CONTENT_TOO_LARGE)
        await self.answer(body, headers_of(error) | (_CLOSE if half_read else {}), status_code)


Work = Callable[[Exchange], Awaitable[None]]


def _peer(scope: Scope) -> str:
    """The client as gRPC writes it, so that both ports count it as one."""
    host, port = scope.get("client") or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
