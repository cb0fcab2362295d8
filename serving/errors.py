"""Errors of the services: one tree, each a gRPC status with machine-readable details.

ServiceError                 retrying elsewhere?
├── InvalidArgument          never: the request is wrong; carries field violations
│   └── ContextLengthExceeded  the same: it is too long
├── NotFound                 never: no such model, adapter, request
├── AlreadyExists            never: the id is in use
├── FailedPrecondition       never, until something else has changed
├── PermissionDenied         never
├── Unauthenticated          never, without other credentials
├── Unsupported              never: this server does not implement it
├── DeadlineExceeded         never: the caller's time is up
├── Overloaded               yes, after `retry_after_s`; None: do not retry, a quota is used up
├── Unavailable              yes, at another instance, or here after `retry_after_s`
│   ├── CutOff               yes, at another server
│   ├── Crashed              the same; the request may be the cause
│   └── StreamEnded          yes, here too
├── Aborted                  yes, as a new request
└── InternalError            a bug; the client gets only the request id

The interceptor (interceptor.py) turns these into statuses. Any other exception of a handler becomes INTERNAL: its
traceback goes to the log, and none of it to the client. `from_rpc_error` turns a peer's status back into an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

MAX_MESSAGE_BYTES = 512
_MAX_VIOLATIONS = 8  # all trailers together share 8 KiB
_MAX_VIOLATION_BYTES = 256
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_CRASHED_KEY = "tandem-crashed"
_CUT_OFF_KEY = "tandem-cut-off"
_REQUEST_ID = re.compile(r" \(request id [^()]*\)")
"""As `status_text` adds it."""

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: its name in the caller's API, and the problem with its value."""

    field: str
    description: str


class ServiceError(Exception):
    """Root of every error that a client may see. `message` is text and must contain nothing internal."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    retry_after_s: float | None = None  # seconds after which a new attempt may succeed; None: unknown
    violations: tuple[FieldViolation, ...] = ()

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)


class InvalidArgument(ServiceError):
    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, violations: Iterable[FieldViolation] = ()) -> None:
        super().__init__(message)
        self.violations = tuple(violations)


class ContextLengthExceeded(InvalidArgument):
    """The prompt, or the prompt and `max_tokens` together, do not fit into the context. OpenAI's API has a code for it,
    at which clients shorten the conversation."""


class NotFound(ServiceError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(ServiceError):
    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(ServiceError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class PermissionDenied(ServiceError):
    code = grpc.StatusCode.PERMISSION_DENIED


class Unauthenticated(ServiceError):
    code = grpc.StatusCode.UNAUTHENTICATED


class Unsupported(ServiceError):
    code = grpc.StatusCode.UNIMPLEMENTED


class DeadlineExceeded(ServiceError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Aborted(ServiceError):
    code = grpc.StatusCode.ABORTED


class Unavailable(ServiceError):
    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s: float = retry_after_s


class CutOff(Unavailable):
    """The server ends before the request was finished: what the client has can be continued at another one."""


class Crashed(Unavailable):
    """The instance crashed while it had the request, which may be the cause: the router counts the crash."""


class StreamEnded(Unavailable):
    """The stream in which a call is answered has ended, not the instance. It has no details, as where a connection
    breaks: either end may notice it first."""


class InternalError(ServiceError):
    """A bug, or a peer's status without a class of its own."""


class Overloaded(ServiceError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def invalid_argument(
    field: str, problem: str, allowed: str | None = None, *, kind: type[InvalidArgument] = InvalidArgument
) -> InvalidArgument:
    """An InvalidArgument with one field violation: the shape of `engine.errors.InvalidRequest` on the wire."""
    description = problem + (f"; allowed: {allowed}" if allowed else "")
    return kind(f"{field}: {description}", [FieldViolation(field, description)])


def printable(text: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """`text` in ASCII without control characters, at most `max_bytes` long: fit for a trailer."""
    text = text.replace("…", "...").encode("ascii", "backslashreplace").decode()
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    return text if len(text) <= max_bytes else text[: max_bytes - 3] + "..."


def status_text(error: ServiceError, request_id: str | None) -> str:
    """The status message: the error's text and the request's id if known, at most 512 bytes."""
    suffix = f" (request id {request_id})" if request_id else ""
    return printable(error.message, MAX_MESSAGE_BYTES - len(suffix)) + suffix


def without_request_id(text: str) -> str:
    """A status message without the id that `status_text` adds to it."""
    return _REQUEST_ID.sub("", text)


def trailers(error: ServiceError, text: str) -> Trailers:
    """The trailers that carry the error's details: BadRequest, RetryInfo, the retry pushback."""
    if isinstance(error, StreamEnded):
        return ()
    status = status_pb2.Status(code=error.code.value[0], message=text)
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations[:_MAX_VIOLATIONS]:
            bad_request.field_violations.add(
                field=printable(violation.field, 128),
                description=printable(violation.description, _MAX_VIOLATION_BYTES),
            )
        status.details.add().Pack(bad_request)
    extra: Trailers = ()
    if error.retry_after_s is not None and math.isfinite(error.retry_after_s):
        retry_after_ms = math.ceil(max(error.retry_after_s, 0.0) * 1e3)
        delay = Duration(seconds=retry_after_ms // 1000, nanos=retry_after_ms % 1000 * 1_000_000)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        extra = ((_PUSHBACK_KEY, str(retry_after_ms)),)
    elif isinstance(error, Overloaded) and error.retry_after_s is None:
        extra = ((_PUSHBACK_KEY, "-1"),)  # gRPC's value for "do not retry"
    if isinstance(error, Crashed):
        extra = (*extra, (_CRASHED_KEY, "1"))
    if isinstance(error, CutOff):
        extra = (*extra, (_CUT_OFF_KEY, "1"))
    return (*extra, (_DETAILS_KEY, status.SerializeToString())) if status.details else extra


def is_cut_off(trailing_metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether a failed call ended with CutOff, by its trailers."""
    return any(key == _CUT_OFF_KEY for key, _ in trailing_metadata)


def read_details(
    trailing_metadata: Iterable[tuple[str, str | bytes]],
) -> tuple[list[FieldViolation], float | None]:
    """The field violations and the retry delay of a failed call, out of its trailers."""
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    for key, value in trailing_metadata:
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):
            for detail in status_pb2.Status.FromString(value).details:
                bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
                if detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
                    items = bad_request.field_violations
                    violations += [FieldViolation(item.field, item.description) for item in items]
                elif detail.Is(retry_info.DESCRIPTOR) and detail.Unpack(retry_info):
                    retry_after_s = retry_info.retry_delay.ToTimedelta().total_seconds()
    return violations, retry_after_s


_PLAIN = NotFound, AlreadyExists, FailedPrecondition, PermissionDenied, Unauthenticated, Unsupported
_BY_CODE = {kind.code: kind for kind in (*_PLAIN, DeadlineExceeded, Aborted)}


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """A peer's status as a ServiceError, to be raised `from error`, without the request's id, which this process adds
    to its own answer. The texts of UNAVAILABLE and INTERNAL are dropped:
    gRPC writes addresses into them."""
    message = without_request_id(error.details() or error.code().name.lower())
    violations, retry_after_s = read_details(error.trailing_metadata() or ())
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(message, violations)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message, retry_after_s)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        crashed = any(key == _CRASHED_KEY for key, _ in error.trailing_metadata() or ())
        return (Crashed if crashed else Unavailable)("the instance is unavailable")
    kind = _BY_CODE.get(error.code())
    return kind(message) if kind else InternalError("internal error at the instance")
