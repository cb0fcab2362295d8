"""The engine's errors: one tree, whose types say whether a retry can help."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable

_MAX_SHOWN = 64


def shown(value: object) -> str:
    """`value` for an error message: escaped, at most 64 characters."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """How the message about an unknown `name` ends: with the most similar of `known`, else with `otherwise`."""
    similar = difflib.get_close_matches(name[:_MAX_SHOWN], known, n=1)
    hint = f"did you mean {similar[0]}?" if similar else otherwise
    return f"; {hint}" if hint else ""


def to_install(extra: str | None = None) -> str:
    """What to type for an optional dependency, an extra of pyproject.toml; None: for those of every installation."""
    if extra is None:
        return "pip install -c constraints.txt -e . in the checkout"
    return f"pip install -c constraints.txt -e '.[{extra}]' in the checkout"


class EngineError(Exception):
    """Base class of the engine's errors."""

    may_pass = False
    """Whether the same start may succeed later."""


class InvalidRequest(EngineError):
    """A request that will always be rejected. `field` is the caller's name of the value, `allowed` what is accepted."""

    def __init__(self, field: str, problem: str, allowed: str | None = None) -> None:
        self.field = field
        self.problem = problem
        self.allowed = allowed
        super().__init__(f"{field}: {problem}" + (f"; allowed: {allowed}" if allowed else ""))


class ContextExceeded(InvalidRequest):
    """The prompt, or the prompt and `max_tokens` together, do not fit into the context."""


class NotSupported(InvalidRequest):
    """A valid value that this version does not support."""

    def __init__(self, field: str, value: str, allowed: str | None = None) -> None:
        super().__init__(field, f"{value} is not supported yet", allowed)


class UnsupportedModel(EngineError):
    """The checkpoint's config needs a feature that this engine does not support; the message names it."""


class InvalidCheckpoint(EngineError):
    """The model's files are missing, damaged or do not fit its config.json; the message names file and tensor."""


class CheckpointChanged(EngineError):
    """The model's files were replaced while they were loaded: what was loaded has no identity."""

    may_pass = True


class CapacityError(EngineError):
    """The request is valid but this engine has no room for it, now or ever; the message gives both sizes."""


class DeviceUnavailable(EngineError):
    """The GPU or its driver cannot be used now; the message says why."""

    may_pass = True


class EngineStartError(EngineError):
    """The engine core has ended while it loaded: settings, model or installation are wrong. A start fails again."""


class EngineDeadError(EngineError):
    """The engine core has ended; another instance can serve the request. `crashed`: without being shut down, so that
    the requests it was computing may be the cause."""

    may_pass = True

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.crashed = crashed


CANNOT_START = 2
"""Exit status of a core whose start failed, and would fail again; that of the services is the same."""
_PASSING = {
    getattr(errno, name) for name in ("EAGAIN", "EDQUOT", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ENOSPC", "ESTALE")
}
"""Of the machine: no process, memory, descriptor or disk space is left, or a disk does not answer."""
_PASSING_REASONS = tuple(os.strerror(number) for number in _PASSING)
"""With which the dynamic loader ends a message; its errors have no errno."""


def may_pass(error: BaseException) -> bool:
    """Whether a start that failed with `error`, or with what `error` was raised from, may succeed later; not if its
    settings, its model or its address are wrong."""
    if isinstance(error, EngineError) and error.may_pass:
        return True
    if isinstance(error, OSError) and error.errno in _PASSING:
        return True
    if isinstance(error, OSError | ImportError) and str(error).endswith(_PASSING_REASONS):
        return True
    return error.__cause__ is not None and may_pass(error.__cause__)


def start_problem(error: BaseException, install: str) -> str:
    """Why an engine does not start, as one line of its log. `install`: what to type where a module is missing."""
    if not isinstance(error, ImportError):
        return str(error)
    return f"{error.name or 'a module'} cannot be imported: {' '.join(str(error).split())}: {install}"


def start_status(error: BaseException) -> int:
    """Exit status of a core that does not start because of `error`."""
    return 1 if may_pass(error) else CANNOT_START
