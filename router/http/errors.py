"""From this project's errors to OpenAI's: an HTTP status, headers, and `{"error": {message, type, param, code}}`.

InvalidArgument, FailedPrecondition, OutOfRange, Unsupported ─▶ 400      Overloaded ─▶ 429, Retry-After
Unauthenticated ─▶ 401   PermissionDenied ─▶ 403   NotFound ─▶ 404       Unavailable ─▶ 503, Retry-After
DeadlineExceeded ─▶ 408  AlreadyExists, Aborted ─▶ 409                   InternalError ─▶ 500

OpenAI's own clients try 408, 409, 429 and 5xx again by themselves; `x-should-retry` tells them where that is of no use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc
from fastapi import status
from pydantic import ValidationError

from engine.errors import shown
from serving.errors import (
    Aborted,
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    NotFound,
    Overloaded,
    PermissionDenied,
    ServiceError,
    Unauthenticated,
    Unavailable,
    invalid_argument,
    printable,
)


class _Kind(NamedTuple):
    """How one class of errors looks."""

    status: int
    type: str
    code: str | None = None


_KINDS: tuple[tuple[type[ServiceError], _Kind], ...] = (
    (Unauthenticated, _Kind(status.HTTP_401_UNAUTHORIZED, "authentication_error", "invalid_api_key")),
    (PermissionDenied, _Kind(status.HTTP_403_FORBIDDEN, "permission_error")),
    (NotFound, _Kind(status.HTTP_404_NOT_FOUND, "invalid_request_error", "model_not_found")),
    (DeadlineExceeded, _Kind(status.HTTP_408_REQUEST_TIMEOUT, "timeout_error", "deadline_exceeded")),
    (AlreadyExists, _Kind(status.HTTP_409_CONFLICT, "conflict_error")),
    (Aborted, _Kind(status.HTTP_409_CONFLICT, "conflict_error")),
    (Overloaded, _Kind(status.HTTP_429_TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded")),
    (Unavailable, _Kind(status.HTTP_503_SERVICE_UNAVAILABLE, "service_unavailable_error")),
    (InternalError, _Kind(status.HTTP_500_INTERNAL_SERVER_ERROR, "server_error")),
)
_SERVERS_FAULT = _Kind(status.HTTP_500_INTERNAL_SERVER_ERROR, "server_error", "quarantined")
_INVALID = _Kind(status.HTTP_400_BAD_REQUEST, "invalid_request_error")
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]-]*")


class BadHttp(ServiceError):
    """What is wrong with the HTTP itself: a path, a method, a body that is too long or too slow."""

    def __init__(self, status_code: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.error_code = code


def status_of(error: ServiceError) -> int:
    """The HTTP status that says `error`."""
    return error.status_code if isinstance(error, BadHttp) else _kind(error).status


def body_of(error: ServiceError, renamed: Mapping[str, str]) -> dict[str, Any]:
    """OpenAI's error object. `renamed` are the fields that the client knows by another name."""
    if isinstance(error, BadHttp):
        return _body(error.message, _INVALID.type, None, error.error_code)
    kind = _kind(error)
    if isinstance(error, InternalError):
        return _body("internal error", kind.type, None, kind.code)
    message, param = error.message, None
    if error.violations:
        name, bracket, rest = error.violations[0].field.partition("[")
        param = renamed.get(name, name) + bracket + rest
        message = f"{param}: {error.violations[0].description}"
    elif kind.status < status.HTTP_500_INTERNAL_SERVER_ERROR:
        named, colon, _ = message.partition(":")
        param = named if colon and _FIELD.fullmatch(named) else None
    return _body(message, kind.type, param, kind.code)


def headers_of(error: ServiceError) -> dict[str, str]:
    """When to come again, where coming again helps, and what else the status asks for."""
    if isinstance(error, BadHttp):
        return {}
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if error.code is grpc.StatusCode.INTERNAL and error.retry_after_s is not None:
        return {"x-should-retry": "false"}  # refused for minutes: a client's own retries come too early
    if error.retry_after_s is not None:
        return {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(math.ceil(error.retry_after_s * 1e3)),
            "x-should-retry": "true",
        }
    if isinstance(error, (Overloaded, DeadlineExceeded, AlreadyExists)):
        return {"x-should-retry": "false"}
    return {}


def invalid_body(error: ValidationError) -> ServiceError:
    """What pydantic has found first, in the words of this project."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = _path(first["loc"])
    if first["type"] == "json_invalid":
        return invalid_argument("body", first["msg"], "a JSON object")
    if first["type"] == "missing":
        return invalid_argument(field, "is required")
    if not field:
        return invalid_argument("body", "is not a JSON object", "a JSON object")
    return invalid_argument(field, f"{shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def _kind(error: ServiceError) -> _Kind:
    other = _SERVERS_FAULT if error.code is grpc.StatusCode.INTERNAL else _INVALID
    return next((kind for cls, kind in _KINDS if isinstance(error, cls)), other)


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": printable(message), "type": kind, "param": param, "code": code}}


def _path(loc: tuple[int | str, ...]) -> str:
    """messages[0].role of ("messages", 0, "role")."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")
