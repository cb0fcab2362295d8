"""The answers that say no."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A request that fails, as the `Status` object that clients read."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = details

    def status(self) -> dict[str, Any]:
        """The body of the answer."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


def invalid(qualified: str, name: str, why: str) -> Refused:
    """An object that no client may write."""
    return Refused(422, "Invalid", f'{qualified} "{name}" is invalid: {why}', name=name)


def conflict(qualified: str, name: str) -> Refused:
    """A write to an older version than there is."""
    return Refused(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {qualified} "{name}": the object has been modified; please apply your '
        "changes to the latest version and try again",
        name=name,
    )


def expired(revision: int) -> Refused:
    """A watch from a version that is forgotten."""
    return Refused(410, "Expired", f"too old resource version: {revision}")
