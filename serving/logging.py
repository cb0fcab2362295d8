"""Structured logs over the standard library, and the events of a request that logs, metrics and spans share.

One line a record, as JSON or for a terminal. The task that handles a call sets the request's id in a context variable,
so every record of that task carries it. A record may contain client input, so control characters are escaped (a newline
must not fake a line, an ESC must not reach a terminal), credentials are blanked and lines are cut.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import time
import uuid
from collections.abc import Hashable
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal, TextIO

from serving.settings import Section, setting


class RequestEvent(StrEnum):
    """Events of a request, in the order of a fault-free one; the last five may come at any point."""

    RECEIVED = "received"  # the router has parsed the request
    ADMITTED = "admitted"  # it is valid and within its budget
    PICKED = "picked"  # its instances are chosen; repeated after every failover
    KV_RESERVED = "kv_reserved"  # the decode instance holds blocks for it
    PREFILL_STARTED = "prefill_started"  # the prefill instance has queued it
    FIRST_TOKEN = "first_token"  # its first token is sent to the client
    HAND_OVER_STARTED = "hand_over_started"  # the prefill instance has computed it, in this attempt
    KV_LOADED = "kv_loaded"  # each block has arrived and is verified, or will be recomputed
    DECODE_STARTED = "decode_started"  # the decode instance has scheduled it
    FINISHED = "finished"  # it ended at a stop condition or its length
    PAUSED = "paused"  # another tenant has its slot
    INTERRUPTED = "interrupted"  # an attempt has failed after the first token; until RESUMED it has no instances
    RESUMED = "resumed"  # it continues at another instance from the tokens already emitted
    ABORTED = "aborted"  # it was cancelled or disconnected
    FAILED = "failed"  # it was answered with an error


class Timeline:
    """Times of one request's events on the monotonic clock. Owned by the request's handler."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        self.marks: list[tuple[RequestEvent, float]] = []
        """Every event with its time, in the order of recording."""

    def mark(self, event: RequestEvent, at_s: float | None = None) -> float:
        """Records `event` now or at `at_s` (`time.monotonic()`); returns its time."""
        at_s = time.monotonic() if at_s is None else at_s
        self.marks.append((event, at_s))
        return at_s

    def at(self, event: RequestEvent) -> float | None:
        """The time of the first `event`, None if it has not happened."""
        return next((at_s for name, at_s in self.marks if name is event), None)

    def count(self, event: RequestEvent) -> int:
        return sum(name is event for name, _ in self.marks)

    def between(self, start: RequestEvent, end: RequestEvent, reset: RequestEvent | None = None) -> float | None:
        """Seconds from the last `start` before the first `end` to that. None: they have not happened in this order, or
        with a `reset` in between."""
        start_s: float | None = None
        for event, at_s in self.marks:
            if event is end:
                return None if start_s is None else at_s - start_s
            if event is start:
                start_s = at_s
            elif event is reset:
                start_s = None
        return None

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds from the first mark to the first of each event, for one log line."""
        if not self.marks:
            return {}
        start_s = self.marks[0][1]
        offsets: dict[str, float] = {}
        for event, at_s in self.marks:
            offsets.setdefault(f"{event}_ms", round((at_s - start_s) * 1e3, 3))
        return offsets


_MAX_VALUE_CHARS = 8192
_MAX_WARNINGS = 1000  # remembered by one Repeats
_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_VALUES = re.compile(r"'[^']*'|[0-9]+")
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
    return _request_id.get()


def valid_request_id(given: object) -> str:
    """`given`, a caller's id for a request, if it is well-formed, else a new id."""
    return given if isinstance(given, str) and _VALID_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def set_request_id(value: str | None) -> None:
    """Sets the request of the current context (task), for its log records and error messages."""
    _request_id.set(value)


def log_event(logger: logging.Logger, event: RequestEvent, message: str = "", /, **fields: object) -> None:
    """One INFO record for a request's event; `fields` are numbers and short strings, never prompts."""
    logger.info(message or event.value, extra={"event": event.value, "fields": fields})


class Repeats:
    """Of equal warnings in a row one is enough: says which repeat an earlier one. Belongs to one thread."""

    def __init__(self, within_s: float = 60.0) -> None:
        self._within_s = within_s
        self._seen_at_s: dict[Hashable, float] = {}  # least recently seen first

    def is_repeat(self, warning: Hashable) -> bool:
        """Whether `warning` came before, and since then at least every `within_s`."""
        now_s = time.monotonic()
        seen_at_s = self._seen_at_s.pop(warning, -math.inf)
        if len(self._seen_at_s) >= _MAX_WARNINGS:
            del self._seen_at_s[next(iter(self._seen_at_s))]
        self._seen_at_s[warning] = now_s
        return now_s - seen_at_s <= self._within_s


def without_values(text: str) -> str:
    """`text` without its numbers and quoted parts, so that texts that differ in those alone are equal."""
    return _VALUES.sub("", text)


def escaped(text: str, *, keep_newlines: bool = False) -> str:
    """`text` with every control and other non-printable character as an escape. Of more than 8192 characters the end is
    cut off; of a traceback, which keeps its newlines, the middle is: the exception comes last."""
    if len(text) > _MAX_VALUE_CHARS:
        num_last = _MAX_VALUE_CHARS // 2 if keep_newlines else 0
        text = text[: _MAX_VALUE_CHARS - num_last] + "...[cut]" + text[len(text) - num_last :]
    return "".join(
        char if char.isprintable() or (keep_newlines and char == "\n") else char.encode("unicode_escape").decode()
        for char in text
    )


def redacted(text: str) -> str:
    """`text` with likely credentials blanked."""
    for pattern, replacement in _CREDENTIALS:
        text = pattern.sub(replacement, text)
    return text


def _clean(name: str, value: object) -> object:
    """A field's value for a record: finite numbers unchanged, everything else as safe text."""
    if name.lower() in _SECRET_NAMES:
        return "[redacted]"
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return escaped(redacted(str(value)))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return {name: _clean(name, value) for name, value in fields.items()}


class _Formatter(logging.Formatter):
    def _message(self, record: logging.LogRecord) -> str:
        return escaped(redacted(record.getMessage()))

    def _traceback(self, record: logging.LogRecord) -> str | None:
        if not record.exc_info:
            return None
        return escaped(redacted(self.formatException(record.exc_info)), keep_newlines=True)


class JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        request_id = _request_id.get()
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
            "pid": record.process,
        }
        optional = {
            "request_id": None if request_id is None else escaped(request_id),
            "event": getattr(record, "event", None),
            "fields": _fields(record),
            "traceback": self._traceback(record),
        }
        return json.dumps(line | {name: value for name, value in optional.items() if value}, allow_nan=False)


class HumanFormatter(_Formatter):
    """`12:34:56.789 INFO router.dispatch [request] message name=value`; a traceback is indented below its line."""

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
    # It warns of invalid `tracestate` headers with their text, which any caller can send.
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
    logging.getLogger("grpc").setLevel(max(root.level, logging.WARNING))  # its debug lines come several a call


def configure_process(level: str, format: str) -> None:  # noqa: A002 - named as the setting is
    """`configure` by values, for a process without a settings tree: an engine core."""
    configure(LogSettings.model_validate({"level": level, "format": format}))
