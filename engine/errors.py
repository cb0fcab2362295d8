"""The engine's errors: one tree, and the type says whether trying again can help.

EngineError
├── InvalidRequest       the caller's request is wrong; the same request will always be refused
│   └── NotServed        the request is right, but asks for something that this version does not do
├── UnsupportedModel     the checkpoint needs something this engine does not have, named in the message
├── InvalidCheckpoint    the model's files are missing, damaged or do not fit its config, named in the message
├── CapacityError        the request is fine but does not fit this engine's KV memory or queue
└── EngineDeadError      the engine core is gone; another instance can serve the request
"""

from __future__ import annotations

_MAX_SHOWN = 64


def shown(value: object) -> str:
    """`value` as an error message may show it: escaped, at most 64 characters."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


class InvalidRequest(EngineError):
    """A request that can never be served as it stands.

    `field` is the name the caller knows the value by, `allowed` what would have been accepted.
    """

    def __init__(self, field: str, problem: str, allowed: str | None = None) -> None:
        self.field = field
        self.problem = problem
        self.allowed = allowed
        super().__init__(f"{field}: {problem}" + (f"; allowed: {allowed}" if allowed else ""))


class NotServed(InvalidRequest):
    """A field with a value that is right and that a later version may serve. The same request is refused until then."""

    def __init__(self, field: str, value: str, allowed: str | None = None) -> None:
        super().__init__(field, f"{value} is not supported yet", allowed)


class UnsupportedModel(EngineError):
    """The checkpoint's config asks for something this engine does not implement; the message names it."""


class InvalidCheckpoint(EngineError):
    """The model's files are missing, damaged or do not fit its config.json; the message names file and tensor."""


class CapacityError(EngineError):
    """The request is valid but this engine has no room for it, now or ever; the message gives both sizes."""


class EngineDeadError(EngineError):
    """The engine core has ended. Nothing sent to it will be answered.

    `crashed` says that nobody had told it to: whatever it computed last may be the cause.
    """

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.crashed = crashed
