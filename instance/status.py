"""What an engine's refusal is on the wire: one mapping, for exceptions and for events that end a request."""

from __future__ import annotations

from engine.errors import CapacityError, EngineDeadError, EngineError, InvalidRequest
from engine.messages import TokensEvent
from serving.errors import (
    Aborted,
    Crashed,
    InternalError,
    Overloaded,
    ServiceError,
    Unavailable,
    invalid_argument,
)

RETRY_AFTER_S = 0.5
"""Blocks come free at the pace of whole requests, so sooner is mostly in vain."""


def service_error(error: EngineError) -> ServiceError:
    """The answer for what the engine raised."""
    match error:
        case InvalidRequest():
            return invalid_argument(f"request.{error.field}", error.problem, error.allowed)
        case CapacityError():
            return Overloaded(str(error), RETRY_AFTER_S)
        case EngineDeadError():
            return (Crashed if error.crashed else Unavailable)("the engine of this instance has ended")
        case _:
            return InternalError(str(error))


def ended_with_error(event: TokensEvent) -> ServiceError:
    """The answer for a request that the core ended with `finish_reason` "error"."""
    text = event.error or "the engine gave the request up"
    match event.error_kind:
        case "no_room":
            return Overloaded(text, RETRY_AFTER_S)
        case "too_large":
            return Overloaded(text, None)
        case "nothing_allowed":
            return invalid_argument("request.sampling", text)
        case "timeout":
            return Aborted(text)  # the reservation's time, not the request's: the router tries again
        case _:
            return InternalError(text)
