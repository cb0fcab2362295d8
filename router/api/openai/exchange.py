"""One HTTP request and its response, within the limits of every call of this router.

    authorizer ──▶ admitted ──▶ body read ──▶ handler ──┬──▶ a whole body
      │              │            │             │       └──▶ headers ─▶ event … event ─▶ end
      │              │            │             │                    └─silent for MAX_SILENCE_S─▶ a sign of life
      └──────────────┴────────────┴─────────────┴── an error: a status before the first byte, an event after it
                                                └── the client disconnects: the handler is cancelled at once

The calls are counted, limited and awaited together with the gRPC port's (serving/limits.py), so that a drain finishes
both. FastAPI's StreamingResponse does not fit: it pulls from an iterator, where the request handler pushes each message
and waits until it is written; and it sends its status before the first message, where an error can still set it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response, status
from starlette.types import Receive, Scope, Send

from router.resilience.poison_requests import PoisonRequestRejected
from serving import tracing
from serving.errors import (
    Aborted,
    AlreadyExists,
    ContextLengthExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    NotFound,
    Overloaded,
    PermissionDenied,
    ServiceError,
    Unauthenticated,
    Unavailable,
    printable,
)
from serving.limits import LARGE_BYTES, REQUEST, AbuseLimits, CallPolicy, LargeMessages, OpenCalls, grpc_peer, peer_key
from serving.logging import set_request_id, valid_request_id
from serving.waits import within

REQUEST_ID_HEADER = "x-request-id"
MAX_SILENCE_S = 15.0
"""Without an event in a stream that has begun. Proxies cut silent ones, the most common after 60 s."""
_DISCARDED = 4  # times the longest body: how much of a longer one is read before it is rejected
_log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str], ...]  # A request's headers, names in lower case: gRPC's metadata
Authorizer = Callable[[Metadata], object]
"""Checks the caller before anything else happens. Raises Unauthenticated or PermissionDenied."""
T = TypeVar("T")


class ClientDisconnected(Exception):
    pass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of all exchanges; times in seconds."""

    calls: OpenCalls
    abuse: AbuseLimits
    max_body_bytes: int
    read_timeout_s: float
    max_deadline_s: float
    is_serving: Callable[[], bool] = lambda: True
    """While it is false each response ends its connection: the next one may lead to another router."""
    large: LargeMessages = field(default_factory=LargeMessages)


class Exchange(Response):
    """A response that is made while it is sent. Owned by its request's task; `handler` writes to it."""

    def __init__(
        self,
        limits: HttpLimits,
        handler: Handler,
        authorizer: Authorizer | None,
        renamed: Mapping[str, str] | None = None,
        *,
        policy: CallPolicy = REQUEST,
    ) -> None:
        """`authorizer` None admits every caller."""
        super().__init__()
        self._limits = limits
        self._handler = handler
        self._authorizer = authorizer
        self._policy = policy
        self.renamed = renamed or {}
        """The client's names of wire fields, for errors."""
        self._deadline_s = time.monotonic() + limits.max_deadline_s
        self._has_begun = False
        self._has_read = False
        """Whether the body has been read, or a part of it."""
        self.num_events = 0
        """Sent so far."""
        self._last_event_s = 0.0
        self._silence_timer: asyncio.TimerHandle | None = None
        """One for the whole stream, which checks the clock when it fires."""
        self._sending_sign: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._request_headers = Request(scope).headers
        self.metadata = _with_bearer(tuple(self._request_headers.items()))
        given = self._request_headers.get(REQUEST_ID_HEADER)
        self.request_id = valid_request_id(given)
        self.answer_id = valid_request_id(None) if self.request_id == given else self.request_id
        """Of this answer alone: a mesh gives several requests the same X-Request-Id."""
        set_request_id(self.request_id)
        tracing.attach_caller_context(self.metadata)
        try:
            if self._authorizer is not None:
                self._authorizer(self.metadata)
            self._peer = grpc_peer(*(scope.get("client") or ("", 0)))
            await self._handle_within_limits()
        except ClientDisconnected:
            _log.debug("the client has disconnected")
        except ServiceError as error:
            await self._send_error(error)
        except Exception:
            _log.exception("%s failed", scope["path"])
            await self._send_error(InternalError("internal error"))
        finally:
            self._end_signs()

    def remaining_s(self) -> float:
        return max(self._deadline_s - time.monotonic(), 0.0)

    async def parsed_body(self, parse: Callable[[bytes], T]) -> T:
        """`parse` of the complete JSON body, in a thread if it is large. Raises as `read_body` and `parse` do,
        Overloaded, and ClientDisconnected."""
        peer, body = peer_key(self._peer), await self.read_body()
        async with self.while_connected() if len(body) >= LARGE_BYTES else nullcontext():  # it may wait for its turn
            return await self._limits.large.parsed(peer, body, parse, self.metadata)

    async def read_body(self) -> bytes:
        """The complete JSON body. Raises HttpError for one that is too long, too slow, or of another type."""
        kind = self._request_headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            problem = f"content-type is {kind!r}; allowed: application/json (curl: -H 'Content-Type: application/json')"
            raise HttpError(status.HTTP_415_UNSUPPORTED_MEDIA_TYPE, problem)
        if self._request_headers.get("content-encoding", "identity") not in ("", "identity"):
            problem = "content-encoding: compressed bodies are not supported"
            raise HttpError(status.HTTP_415_UNSUPPORTED_MEDIA_TYPE, problem)
        try:
            async with asyncio.timeout(self._limits.read_timeout_s):
                return await self._read()
        except TimeoutError:
            problem = f"the body was not received within {self._limits.read_timeout_s:g} s"
            raise HttpError(status.HTTP_408_REQUEST_TIMEOUT, problem) from None

    async def send_json(
        self, content: object, headers: Mapping[str, str] | None = None, status_code: int = status.HTTP_200_OK
    ) -> None:
        await self.send(Response(msgspec.json.encode(content), status_code, headers, "application/json"))

    async def send(self, response: Response) -> None:
        self._has_begun = True
        response.headers.update(self.last_headers())
        await response(self._scope, self._receive, self._send)

    async def begin_events(self, headers: Mapping[str, str]) -> None:
        self._has_begun = True
        head = {
            "content-type": "text/event-stream; charset=utf-8",  # without charset Python's requests reads Latin-1
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # nginx would hold events back
            **headers,
            **self.last_headers(),
        }
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in head.items()]
        await self._send({"type": "http.response.start", "status": status.HTTP_200_OK, "headers": pairs})
        self._last_event_s = time.monotonic()
        self._check_silence()

    async def send_event(self, data: bytes, name: str = "") -> None:
        """Returns when the event has been written."""
        self.num_events += 1
        self._last_event_s = time.monotonic()
        head = b"event: %s\n" % name.encode() if name else b""
        body = head + b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self, mark: bytes | None = b"[DONE]") -> None:
        """Ends the stream with a last event, by default that of OpenAI's chats."""
        self._end_signs()
        await self._send({"type": "http.response.body", "body": b"" if mark is None else b"data: " + mark + b"\n\n"})

    def _check_silence(self) -> None:
        left_s = self._last_event_s + MAX_SILENCE_S - time.monotonic()
        is_sending = self._sending_sign is not None and not self._sending_sign.done()  # to a client that reads nothing
        if left_s <= 0 and not is_sending:
            self._sending_sign = asyncio.create_task(self._send_sign())
        wait_s = left_s if left_s > 0 else MAX_SILENCE_S
        self._silence_timer = asyncio.get_running_loop().call_later(wait_s, self._check_silence)

    async def _send_sign(self) -> None:
        await self._send({"type": "http.response.body", "body": self.sign_of_life(), "more_body": True})

    def _end_signs(self) -> None:
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        if self._sending_sign is not None:
            self._sending_sign.cancel()

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels its body when the client disconnects: raises ClientDisconnected. Enter it after reading the body."""
        connected = asyncio.timeout(None)
        watch = asyncio.create_task(self._watch(connected))
        try:
            async with within(connected, ClientDisconnected):
                yield
        finally:
            watch.cancel()

    async def _watch(self, connected: asyncio.Timeout) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not connected.expired():
            connected.reschedule(0.0)

    async def _handle_within_limits(self) -> None:
        policy = self._policy
        deadline = asyncio.timeout(self._limits.max_deadline_s if policy.cap_deadline else None)
        with self._limits.calls.admitted(self._peer, policy):
            try:
                with self._limits.calls.awaited(deadline, policy):
                    async with deadline:
                        await self._handler(self)
            except TimeoutError:
                if not deadline.expired():
                    raise
                raise DeadlineExceeded(f"not finished within {self._limits.max_deadline_s:g} s") from None
            except (InvalidArgument, HttpError):
                await self._limits.abuse.delay_invalid(self._peer)
                raise

    # What another API of this port does otherwise

    def last_headers(self) -> dict[str, str]:
        """Of every response."""
        ends = {} if self._limits.is_serving() else {"connection": "close"}
        return {REQUEST_ID_HEADER: self.request_id, **ends}

    def sign_of_life(self) -> bytes:
        """What a silent stream sends, which clients ignore."""
        return b":\n\n"

    def error_body(self, error: ServiceError) -> dict[str, Any]:
        return body_of(error, self.renamed)

    async def send_failure(self, body: dict[str, Any]) -> None:
        """Ends a stream that has begun."""
        await self.send_event(msgspec.json.encode(body))
        await self.end_events()

    async def _read(self, *, keep: bool = True) -> bytes:
        """Reads the rest of a body that is too long too, within reason: a client that is sending reads no 413.
        `keep` False: empty."""
        self._has_read = True
        body, num_bytes, limit = bytearray(), 0, self._limits.max_body_bytes
        too_long = HttpError(status.HTTP_413_CONTENT_TOO_LARGE, f"the body is longer than {limit} bytes")
        if int(self._request_headers.get("content-length") or 0) > _DISCARDED * limit:
            raise too_long
        has_more = True
        while has_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if keep and num_bytes <= limit:
                body += piece
            elif num_bytes > _DISCARDED * limit:
                raise too_long
            has_more = message.get("more_body", False)
        if num_bytes > limit:
            raise too_long
        return bytes(body)

    async def _send_error(self, error: ServiceError) -> None:
        body = self.error_body(error)
        if self._has_begun:
            await self.send_failure(body)
            return
        await self._discard_unread()
        status_code, headers = status_of(error), headers_of(error)
        unread = (status.HTTP_408_REQUEST_TIMEOUT, status.HTTP_413_CONTENT_TOO_LARGE)
        if isinstance(error, HttpError) and status_code in unread:
            headers["connection"] = "close"  # the rest of the body is not read
        await self.send_json(body, headers, status_code)

    async def _discard_unread(self) -> None:
        """Before the last answer of a connection: one that closes with an unread body is reset, and its answer lost."""
        headers = self._request_headers
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        is_waiting = headers.get("expect", "").lower() == "100-continue"  # reading would ask for the body
        if self._has_read or not has_body or is_waiting or not self._is_last():
            return
        with suppress(HttpError, TimeoutError, ClientDisconnected):
            async with asyncio.timeout(self._limits.read_timeout_s):
                await self._read(keep=False)

    def _is_last(self) -> bool:
        """Whether the connection ends with this answer."""
        tokens = ",".join(self._request_headers.getlist("connection")).lower().split(",")
        wants_end = self._scope["http_version"] < "1.1" or "close" in map(str.strip, tokens)
        return wants_end or "connection" in self.last_headers()


def _with_bearer(headers: Metadata) -> Metadata:
    """Anthropic's clients send their token as `x-api-key`."""
    if any(name == "authorization" for name, _ in headers):
        return headers
    return (*headers, *(("authorization", f"Bearer {value}") for name, value in headers if name == "x-api-key"))


Handler = Callable[[Exchange], Awaitable[None]]


# This project's errors as HTTP statuses, headers and OpenAI's error object `{"error": {message, type, param, code}}`:
#
#     InvalidArgument, FailedPrecondition, Unsupported ─▶ 400                  Overloaded ─▶ 429, Retry-After
#     Unauthenticated ─▶ 401   PermissionDenied ─▶ 403   NotFound ─▶ 404       Unavailable ─▶ 503, Retry-After
#     DeadlineExceeded ─▶ 408  AlreadyExists, Aborted ─▶ 409                   InternalError ─▶ 500
#
# OpenAI's clients retry 408, 409, 429 and 5xx by themselves; `x-should-retry` prevents that where it is useless.


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


_KINDS: dict[type[ServiceError], _Kind] = {
    Unauthenticated: _Kind(status.HTTP_401_UNAUTHORIZED, "authentication_error", "invalid_api_key"),
    PermissionDenied: _Kind(status.HTTP_403_FORBIDDEN, "permission_error"),
    NotFound: _Kind(status.HTTP_404_NOT_FOUND, "invalid_request_error", "model_not_found"),
    DeadlineExceeded: _Kind(status.HTTP_408_REQUEST_TIMEOUT, "timeout_error", "deadline_exceeded"),
    AlreadyExists: _Kind(status.HTTP_409_CONFLICT, "conflict_error"),
    Aborted: _Kind(status.HTTP_409_CONFLICT, "conflict_error"),
    Overloaded: _Kind(status.HTTP_429_TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded"),
    Unavailable: _Kind(status.HTTP_503_SERVICE_UNAVAILABLE, "service_unavailable_error"),
    InternalError: _Kind(status.HTTP_500_INTERNAL_SERVER_ERROR, "server_error"),
    ContextLengthExceeded: _Kind(status.HTTP_400_BAD_REQUEST, "invalid_request_error", "context_length_exceeded"),
    PoisonRequestRejected: _Kind(status.HTTP_500_INTERNAL_SERVER_ERROR, "server_error", "quarantined"),
}
_INVALID = _Kind(status.HTTP_400_BAD_REQUEST, "invalid_request_error")
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]-]*")


class HttpError(ServiceError):
    """A problem of the HTTP itself: path, method, a body that is too long or too slow."""

    def __init__(self, status_code: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.headers = dict(headers or {})


def status_of(error: ServiceError) -> int:
    return _kind(error).status


def body_of(error: ServiceError, renamed: Mapping[str, str]) -> dict[str, Any]:
    """OpenAI's error object. `renamed` maps wire fields to the client's names for them; one that ends with [ is a list
    whose items are not the client's."""
    kind, message, param = _kind(error), error.message, None
    if isinstance(error, InternalError):
        message = "internal error"
    elif error.violations:
        name, bracket, rest = error.violations[0].field.partition("[")
        param = renamed.get(name + bracket) or renamed.get(name, name) + bracket + rest
        message = f"{param}: {error.violations[0].description}"
    elif kind.status < status.HTTP_500_INTERNAL_SERVER_ERROR and not isinstance(error, HttpError):
        named, colon, _ = message.partition(":")
        param = named if colon and _FIELD.fullmatch(named) else None
    return {"error": {"message": printable(message), "type": kind.type, "param": param, "code": kind.code}}


def headers_of(error: ServiceError) -> dict[str, str]:
    """When to retry, where a retry can help, and what else the status requires."""
    if isinstance(error, HttpError):
        return error.headers
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, PoisonRequestRejected):
        return {"x-should-retry": "false"}  # rejected for minutes: a client's own retries come too early
    if error.retry_after_s is not None and not math.isfinite(error.retry_after_s):
        return {}
    if error.retry_after_s is not None:
        return {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(math.ceil(error.retry_after_s * 1e3)),
            "x-should-retry": "true",
        }
    if isinstance(error, (Overloaded, DeadlineExceeded, AlreadyExists, Aborted)):
        return {"x-should-retry": "false"}
    return {}


def _kind(error: ServiceError) -> _Kind:
    if isinstance(error, HttpError):
        return _INVALID._replace(status=error.status_code)
    return next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), _INVALID)
