"""A bearer token on every call of a blocking channel, for callers that hand the stub to others."""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc

from tandem.credentials import Credentials


class _Details(NamedTuple):
    """As grpc.ClientCallDetails, which cannot be made."""

    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class BearerToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """For grpc.intercept_channel."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: Any) -> _Details:
        return _Details(
            details.method,
            details.timeout,
            (*(details.metadata or ()), *self._credentials.metadata()),
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
