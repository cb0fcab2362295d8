"""What a service may answer besides a result: one tree of errors, each a gRPC status with machine-readable details.

ServiceError                 retrying elsewhere?
├── InvalidArgument          never: the request is wrong; carries field violations
├── NotFound                 never: no such model, adapter, request
├── AlreadyExists            never: the id is in use
├── FailedPrecondition       never, until something else has changed
├── OutOfRange               never: a position past the end
├── PermissionDenied         never
├── Unauthenticated          never, without other credentials
├── Unsupported              never: this server does not implement it
├── DeadlineExceeded         the caller's time is up
├── Overloaded               yes, after `retry_after_s`; None means: do not retry, a quota is used up
├── Unavailable              yes, at another instance, or here after `retry_after_s`
│   └── Crashed              the same; the request may be the cause
├── Aborted                  yes, as a new request
└── InternalError            our fault; the text never says more than the request id

The runtime's one call guard (calls.py) turns these into statuses; anything else that a handler raises becomes INTERNAL,
its traceback goes to the log, and nothing of it to the client. The router uses `received` for the way back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

MAX_MESSAGE_BYTES = 512
_MAX_VIOLATIONS = 8  # all trailers together share 8 KiB
_MAX_VIOLATION_BYTES = 256
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_CRASHED_KEY = "tandem-crashed"

Trailers = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request: the name the caller knows it by, and what is wrong with which value."""

    field: str
    description: str


class ServiceError(Exception):
    """Root of every error that a client may see. `message` is for people and must hold nothing internal."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str) -> None:
        self.message = message
        super().__init__(message)

    @property
    def retry_after_s(self) -> float | None:
        """Seconds after which a new attempt may succeed; None where the error does not say."""
        return None

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        """The fields that are wrong."""
        return ()


class InvalidArgument(ServiceError):
    """The request can never be served as it stands."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, message: str, violations: Iterable[FieldViolation] = ()) -> None:
        super().__init__(message)
        self._violations = tuple(violations)

    @property
    def violations(self) -> tuple[FieldViolation, ...]:
        return self._violations


class NotFound(ServiceError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(ServiceError):
    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(ServiceError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfRange(ServiceError):
    code = grpc.StatusCode.OUT_OF_RANGE


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
    """This instance cannot serve now; another one can, or this one after `retry_after_s` seconds."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s

    @property
    def retry_after_s(self) -> float:
        return self._retry_after_s


class Crashed(Unavailable):
    """What computed here has crashed while it had the request, which may be the cause. Another instance can serve it,
    but whoever sends it there should remember."""


class InternalError(ServiceError):
    """Our own fault, or a peer's answer that no other class fits."""


class Overloaded(ServiceError):
    """There is no room. `retry_after_s` None tells the client not to retry at all (a quota is used up)."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self._retry_after_s = retry_after_s

    @property
    def retry_after_s(self) -> float | None:
        return self._retry_after_s


def invalid_argument(field: str, problem: str, allowed: str | None = None) -> InvalidArgument:
    """An InvalidArgument with one field violation: the shape of `engine.errors.InvalidRequest` on the wire."""
    description = problem + (f"; allowed: {allowed}" if allowed else "")
    return InvalidArgument(f"{field}: {description}", [FieldViolation(field, description)])


def printable(text: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """`text` in ASCII without control characters, at most `max_bytes` long: fit for a trailer."""
    text = text.encode("ascii", "backslashreplace").decode()
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    return text if len(text) <= max_bytes else text[: max_bytes - 3] + "..."


def status_text(error: ServiceError, request_id: str | None) -> str:
    """The status message: the error's own text and, when known, the request's id, at most 512 bytes."""
    suffix = f" (request id {request_id})" if request_id else ""
    return printable(error.message, MAX_MESSAGE_BYTES - len(suffix)) + suffix


def trailers(error: ServiceError, text: str) -> Trailers:
    """The trailers that carry the error's details: BadRequest, RetryInfo, the retry pushback."""
    status = status_pb2.Status(code=error.code.value[0], message=text)
    if error.violations:
        bad_request = error_details_pb2.BadRequest()
        for violation in error.violations[:_MAX_VIOLATIONS]:
            bad_request.field_violations.add(
                field=printable(violation.field, 128),
                description=printable(violation.description, _MAX_VIOLATION_BYTES),
            )
        status.details.append(_packed(bad_request))
    extra: Trailers = ()
    if error.retry_after_s is not None:
        retry_after_ms = math.ceil(max(error.retry_after_s, 0.0) * 1e3)
        delay = Duration(seconds=retry_after_ms // 1000, nanos=retry_after_ms % 1000 * 1_000_000)
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        extra = ((_PUSHBACK_KEY, str(retry_after_ms)),)
    elif isinstance(error, Overloaded):
        extra = ((_PUSHBACK_KEY, "-1"),)  # gRPC's own word for "do not retry"
    if isinstance(error, Crashed):
        extra = (*extra, (_CRASHED_KEY, "1"))
    return (*extra, (_DETAILS_KEY, status.SerializeToString())) if status.details else extra


def _packed(message: error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _by_code() -> dict[grpc.StatusCode, type[ServiceError]]:
    plain = (NotFound, AlreadyExists, FailedPrecondition, OutOfRange, PermissionDenied, Unauthenticated)
    return {kind.code: kind for kind in (*plain, Unsupported, DeadlineExceeded, Aborted)}


def received(error: grpc.aio.AioRpcError) -> ServiceError:
    """The ServiceError that a peer answered with, with the field violations and the retry delay it sent.

    The texts of UNAVAILABLE and INTERNAL are not taken over: gRPC itself writes addresses into them, which are no
    client's business. They stay in `error`, so raise the result `from error`.
    """
    message = error.details() or error.code().name.lower()
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            details = status_pb2.Status.FromString(value).details
        except DecodeError:
            continue
        for detail in details:
            bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
                violations += [FieldViolation(item.field, item.description) for item in bad_request.field_violations]
            elif detail.Is(retry_info.DESCRIPTOR) and detail.Unpack(retry_info):
                retry_after_s = retry_info.retry_delay.ToTimedelta().total_seconds()
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidArgument(message, violations)
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message, retry_after_s)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        crashed = any(key == _CRASHED_KEY for key, _ in error.trailing_metadata() or ())
        return (Crashed if crashed else Unavailable)("the instance is unavailable")
    kind = _by_code().get(error.code())
    return kind(message) if kind else InternalError("internal error at the instance")
