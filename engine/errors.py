"""The engine's errors: one tree, whose types say whether a retry can help."""

from __future__ import annotations

_MAX_SHOWN = 64


def shown(value: object) -> str:
    """`value` for an error message: escaped, at most 64 characters."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def to_install(extra: str) -> str:
    """What to type for an optional dependency, an extra of pyproject.toml."""
    return f"pip install -c constraints.txt -e '.[{extra}]' in the checkout"


class EngineError(Exception):
    """Base class of the engine's errors."""


class InvalidRequest(EngineError):
    """A request that will always be rejected. `field` is the caller's name of the value, `allowed` what is accepted."""

    def __init__(self, field: str, problem: str, allowed: str | None = None) -> None:
        self.field = field
        self.problem = problem
        self.allowed = allowed
        super().__init__(f"{field}: {problem}" + (f"; allowed: {allowed}" if allowed else ""))


class NotSupported(InvalidRequest):
    """A valid value that this version does not support."""

    def __init__(self, field: str, value: str, allowed: str | None = None) -> None:
        super().__init__(field, f"{value} is not supported yet", allowed)


class UnsupportedModel(EngineError):
    """The checkpoint's config needs a feature that this engine does not support; the message names it."""


class InvalidCheckpoint(EngineError):
    """The model's files are missing, damaged or do not fit its config.json; the message names file and tensor."""


class CapacityError(EngineError):
    """The request is valid but this engine has no room for it, now or ever; the message gives both sizes."""


class EngineDeadError(EngineError):
    """The engine core has ended; another instance can serve the request. `crashed`: without being shut down, so that
    the requests it was computing may be the cause."""

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.crashed = crashed
