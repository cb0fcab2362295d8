"""Structured logs over the standard library: one line a record, as JSON or for people, with the request's id.

Whoever handles a call holds its id in a context variable, so every record written meanwhile carries it. What a client
sent may appear in a record, so control characters are escaped (a newline must not fake a line, an ESC must not reach a
terminal), credentials are blanked and lines are cut.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, TextIO

from serving.events import RequestEvent
from serving.settings import Section, setting

_MAX_VALUE_CHARS = 8192
_request_id: ContextVar[str | None] = ContextVar("tandem_request_id", default=None)

_SECRET_NAMES = frozenset({"authorization", "api_key", "credentials", "password", "secret", "access_token"})
_CREDENTIALS = (
    (re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+@"), r"\1[redacted]@"),  # scheme://user:password@host
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), r"\1 [redacted]"),
    (re.compile(r"(?i)\b(password|api[_-]?key|secret|access[_-]?token)(\s*[=:]\s*)[^\s,;&]+"), r"\1\2[redacted]"),
)


class LogSettings(Section):
    """How this process writes its log, always to standard error."""

    level: Literal["debug", "info", "warning", "error"] = setting("info", "Least severe level that is written.")
    format: Literal["human", "json"] = setting("human", "human: lines for a terminal; json: one object a line.")


def request_id() -> str | None:
    """The id of the request that the current context works for."""
    return _request_id.get()


def set_request_id(value: str | None) -> None:
    """Names the request of the current context (task), for its log records and error messages, from now on."""
    _request_id.set(value)


@contextmanager
def request_context(value: str | None) -> Iterator[None]:
    """Names the request inside the `with` alone."""
    token = _request_id.set(value)
    try:
        yield
    finally:
        _request_id.reset(token)


def log_event(logger: logging.Logger, event: RequestEvent, message: str = "", /, **fields: object) -> None:
    """One INFO record for a request's event; `fields` are numbers and short strings, never prompts."""
    logger.info(message or event.value, extra={"event": event.value, "fields": fields})


def escaped(text: str, *, keep_newlines: bool = False) -> str:
    """`text` with every control character, and whatever a terminal could act on, as an escape; cut at 8 KiB."""
    if len(text) > _MAX_VALUE_CHARS:
        text = text[:_MAX_VALUE_CHARS] + "...[cut]"
    return "".join(
        char if char.isprintable() or (keep_newlines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )


def redacted(text: str) -> str:
    """`text` with what looks like a credential blanked."""
    for pattern, replacement in _CREDENTIALS:
        text = pattern.sub(replacement, text)
    return text


def _clean(name: str, value: object) -> object:
    """A field's value as a record may show it: finite numbers as they are, everything else as safe text."""
    if name.lower() in _SECRET_NAMES:
        return "[redacted]"
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return escaped(redacted(str(value)))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return {name: _clean(name, value) for name, value in fields.items()}


class _Formatter(logging.Formatter):
    """The parts that both formats share: time, cleaned message, request id, event, fields and traceback."""

    def _time(self, record: logging.LogRecord) -> str:
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _message(self, record: logging.LogRecord) -> str:
        return escaped(redacted(record.getMessage()))

    def _traceback(self, record: logging.LogRecord) -> str | None:
        if not record.exc_info:
            return None
        return escaped(redacted(self.formatException(record.exc_info)), keep_newlines=True)


class JsonFormatter(_Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self._time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
            "pid": record.process,
        }
        if (current := _request_id.get()) is not None:
            line["request_id"] = escaped(current)
        if event := getattr(record, "event", None):
            line["event"] = event
        if fields := _fields(record):
            line["fields"] = fields
        if traceback := self._traceback(record):
            line["traceback"] = traceback
        return json.dumps(line, allow_nan=False)


class HumanFormatter(_Formatter):
    """`12:34:56.789 INFO router.generate [request] message name=value`; a traceback is indented below its line."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        current = _request_id.get()
        parts = [f"{clock}.{int(record.msecs):03d}", f"{record.levelname:<7}", record.name]
        parts += [f"[{escaped(current)}]"] if current is not None else []
        parts += [self._message(record), *(f"{name}={value}" for name, value in _fields(record).items())]
        line = " ".join(parts)
        traceback = self._traceback(record)
        return line if traceback is None else line + "\n    | " + traceback.replace("\n", "\n    | ")


def configure(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Sets up this process's root logger; call once, from the composition root."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else HumanFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    logging.getLogger("grpc").setLevel(max(root.level, logging.WARNING))  # its debug lines come several a call


def configure_process(level: str, format: str) -> None:  # noqa: A002 - named as the setting is
    """`configure` by the settings' values, for a process that has no settings of its own: an engine core."""
    configure(LogSettings.model_validate({"level": level, "format": format}))
