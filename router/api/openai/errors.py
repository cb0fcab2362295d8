"""This project's errors as HTTP statuses, headers and OpenAI's error object `{"error": {message, type, param, code}}`.

InvalidArgument, FailedPrecondition, Unsupported ─▶ 400                  Overloaded ─▶ 429, Retry-After
Unauthenticated ─▶ 401   PermissionDenied ─▶ 403   NotFound ─▶ 404       Unavailable ─▶ 503, Retry-After
DeadlineExceeded ─▶ 408  AlreadyExists, Aborted ─▶ 409                   InternalError ─▶ 500

OpenAI's clients retry 408, 409, 429 and 5xx by themselves; `x-should-retry` prevents that where it is useless.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fastapi import status
from pydantic import ValidationError

from engine.errors import shown
from router.resilience.poison_requests import PoisonRequestRejected
from serving import errors
from serving.errors import ServiceError, invalid_argument, printable


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


_KINDS: dict[type[ServiceError], _Kind] = {
    errors.Unauthenticated: _Kind(status.HTTP_401_UNAUTHORIZED, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: _Kind(status.HTTP_403_FORBIDDEN, "permission_error"),
    errors.NotFound: _Kind(status.HTTP_404_NOT_FOUND, "invalid_request_error", "model_not_found"),
    errors.DeadlineExceeded: _Kind(status.HTTP_408_REQUEST_TIMEOUT, "timeout_error", "deadline_exceeded"),
    errors.AlreadyExists: _Kind(status.HTTP_409_CONFLICT, "conflict_error"),
    errors.Aborted: _Kind(status.HTTP_409_CONFLICT, "conflict_error"),
    errors.Overloaded: _Kind(status.HTTP_429_TOO_MANY_REQUESTS, "rate_limit_error", "rate_limit_exceeded"),
    errors.Unavailable: _Kind(status.HTTP_503_SERVICE_UNAVAILABLE, "service_unavailable_error"),
    errors.InternalError: _Kind(status.HTTP_500_INTERNAL_SERVER_ERROR, "server_error"),
    PoisonRequestRejected: _Kind(status.HTTP_500_INTERNAL_SERVER_ERROR, "server_error", "quarantined"),
}
_INVALID = _Kind(status.HTTP_400_BAD_REQUEST, "invalid_request_error")
UNION_TAGS = FUNCTION, NAMESPACE, WEB_SEARCH = "<function>", "<namespace>", "<web_search>"
"""Which class a value is validated as; pydantic places them among the names of members."""
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
    if isinstance(error, errors.InternalError):
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
    if isinstance(error, errors.Unauthenticated):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, PoisonRequestRejected):
        return {"x-should-retry": "false"}  # rejected for minutes: a client's own retries come too early
    if error.retry_after_s is not None:
        return {
            "retry-after": str(math.ceil(error.retry_after_s)),
            "retry-after-ms": str(math.ceil(error.retry_after_s * 1e3)),
            "x-should-retry": "true",
        }
    if isinstance(error, (errors.Overloaded, errors.DeadlineExceeded, errors.AlreadyExists, errors.Aborted)):
        return {"x-should-retry": "false"}
    return {}


def invalid_body(error: ValidationError) -> ServiceError:
    """The first of pydantic's errors as an InvalidArgument."""
    first = error.errors(include_url=False, include_context=False)[0]
    # tools[0].name of ("tools", 0, "<function>", "name")
    parts = [part for part in first["loc"] if part not in UNION_TAGS]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    if first["type"] == "json_invalid":
        return invalid_argument("body", first["msg"], "a JSON object")
    if first["type"] == "missing":
        return invalid_argument(field, "is required")
    if not field:
        return invalid_argument("body", "is not a JSON object", "a JSON object")
    return invalid_argument(field, f"{shown(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}")


def _kind(error: ServiceError) -> _Kind:
    if isinstance(error, HttpError):
        return _INVALID._replace(status=error.status_code)
    return next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), _INVALID)
