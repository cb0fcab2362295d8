"""What goes wrong between a caller and Tandem: one tree.

TandemError            the router answered with a status, or could not be reached
├── StreamError        the answer broke the promise that every token arrives once and in order: a bug, please report it
└── NotRunning         no address was given and no local stack runs
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

_DETAILS_KEY = "grpc-status-details-bin"


class TandemError(Exception):
    """A request that was not answered, or not to its end.

    `status` is the name of the gRPC status code, `violations` the wrong fields with what is wrong about each, and
    `retry_after_s` how long to wait before asking again, None if the answer did not say.
    """

    def __init__(
        self,
        status: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        violations: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.violations = violations
        super().__init__(f"{status}: {message}")


class StreamError(TandemError):
    """A token is missing, repeated or out of order, or the stream ended without saying why."""

    def __init__(self, message: str) -> None:
        super().__init__("DATA_LOSS", message)


class NotRunning(TandemError):
    """There is nothing to talk to; the message says what to type."""

    def __init__(self, flag: str = "--address") -> None:
        super().__init__(
            "UNAVAILABLE", f"no local stack is running. Start one with `tandem up`, or give {flag} host:port"
        )


def from_rpc(error: grpc.RpcError, address: str) -> TandemError:
    """The TandemError of a failed call to `address`."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    status = code().name if callable(code) and code() is not None else "UNKNOWN"
    message = (details() if callable(details) else None) or str(error)
    if status == "UNAVAILABLE" and ("connect" in message.lower() or "dns" in message.lower()):
        hint = "give host:port of a router, such as 127.0.0.1:50051; `tandem doctor` says what runs here"
        return TandemError(status, f"no router answers at {address} ({hint}): {message}")
    if status == "UNIMPLEMENTED" and message == "Method not found!":
        return TandemError(status, f"what answers at {address} is no router: give the router's host:port")
    trailing = getattr(error, "trailing_metadata", None)
    violations, retry_after_s = _details((trailing() if callable(trailing) else None) or ())
    return TandemError(status, message, retry_after_s=retry_after_s, violations=violations)


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[tuple[tuple[str, str], ...], float | None]:
    """Field violations and retry delay from the trailers of a failed call."""
    from google.protobuf.message import DecodeError
    from google.rpc import error_details_pb2, status_pb2

    violations: list[tuple[str, str]] = []
    retry_after_s: float | None = None
    for key, value in metadata:
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            details = status_pb2.Status.FromString(value).details
        except DecodeError:
            continue
        for detail in details:
            bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Is(bad_request.DESCRIPTOR) and detail.Unpack(bad_request):
                violations += [(item.field, item.description) for item in bad_request.field_violations]
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
    return tuple(violations), retry_after_s
