"""Spans of the stages of a request, the trace context between services (W3C Trace Context), and where spans go.

    caller's traceparent ─▶ CallInterceptor ─▶ the call's context ─┬▶ start_span … end_span
                                                                   └▶ outgoing_metadata() for the next service
    event loop ──span ends──▶ the SDK's queue ──its own thread, in batches──▶ file, OTLP collector

Without a tracer provider nothing is recorded, a span costs a few function calls, and a received context is still passed
on. A stage often ends in another task than it began in, so a span's parent is the context in which it is started, or a
remembered one. An attached context belongs to a call's task and ends with it. OpenTelemetry's SDK is imported only
where spans are exported; a full queue drops spans, and no call waits for a file or a collector.

OpenTelemetry's gRPC instrumentation makes one span per call, where a request's stages span calls of several services.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from opentelemetry import context as trace_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN as INVALID_SPAN
from opentelemetry.trace import Span as Span
from opentelemetry.trace import Status, StatusCode, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.settings import Address, Section, SettingsError, setting

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TRACEPARENT_KEY = "traceparent"
TRACESTATE_KEY = "tracestate"
_MAX_TRACESTATE_CHARS = 512  # what W3C requires to be passed on; more would use up the metadata limit
_MAX_REMEMBERED = 4096


Attributes = Mapping[str, str | int | float | bool]

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("tandem")
_remembered: OrderedDict[str, Context] = OrderedDict()


def set_provider(provider: TracerProvider | None) -> None:
    """Records with `provider` from now on; None: with the process's global one, if any."""
    global _tracer
    _tracer = trace.get_tracer("tandem", tracer_provider=provider)
    _remembered.clear()


# Context between services


def attach_caller_context(metadata: Iterable[tuple[str, str | bytes]], traceparent: str = "") -> None:
    """Makes the caller's trace context the current task's, until the task ends. Malformed headers are ignored.
    `traceparent` is the message's field, which metadata override."""
    carrier = {key: value for key, value in metadata if key in (TRACEPARENT_KEY, TRACESTATE_KEY)}
    if TRACEPARENT_KEY not in carrier and traceparent:
        carrier[TRACEPARENT_KEY] = traceparent
    if isinstance(carrier.get(TRACEPARENT_KEY), str):
        trace_context.attach(_propagator.extract(carrier, trace_context.get_current()))


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """The current trace context as metadata for a call; empty where there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    if len(carrier.get(TRACESTATE_KEY, "")) > _MAX_TRACESTATE_CHARS:
        del carrier[TRACESTATE_KEY]
    return tuple(carrier.items())


# Spans


def start_span(
    name: str, parent: Context | None = None, attributes: Attributes | None = None, *, at_ns: int | None = None
) -> Span:
    """A span that starts now, or at `at_ns` (`time.time_ns()`), in `parent` or the current context."""
    return _tracer.start_span(name, context=parent, attributes=attributes, start_time=at_ns)


def start_current_span(name: str, *, at_ns: int | None = None) -> Span:
    """A span that becomes the current one of this task, until the task ends, and of the tasks that it starts."""
    span = start_span(name, at_ns=at_ns)
    trace_context.attach(set_span_in_context(span))
    return span


def end_span(
    span: Span, attributes: Attributes | None = None, failure: str | None = None, *, at_ns: int | None = None
) -> None:
    """Ends the span now or at `at_ns`, as an error if there is a `failure`. Only the first call has an effect."""
    if not span.is_recording():
        return
    if attributes:
        span.set_attributes(attributes)
    if failure is not None:
        span.set_status(Status(StatusCode.ERROR, failure))
    span.end(end_time=at_ns)


def remember_span(key: str, span: Span) -> None:
    """Remembers `span` under `key`, as the parent of spans outside its call; the oldest are forgotten."""
    if span.get_span_context().is_valid:
        _remembered[key] = set_span_in_context(span)
        while len(_remembered) > _MAX_REMEMBERED:
            _remembered.popitem(last=False)


def recall_context(key: str) -> Context | None:
    """The context remembered under `key`, which is then forgotten."""
    return _remembered.pop(key, None)


class Stages:
    """Consecutive spans: each starts at the nanosecond at which the previous one ends, so that durations add up."""

    def __init__(
        self,
        first: str,
        parent: Context | None = None,
        attributes: Attributes | None = None,
        *,
        at_ns: int | None = None,
    ) -> None:
        """`parent` None: the current context. Every stage gets a copy of `attributes`. The first stage starts at
        `at_ns` (`time.time_ns()`), or now."""
        self._parent = trace_context.get_current() if parent is None else parent
        self._attributes = attributes
        self.name = first  # of the current stage
        self._span = start_span(first, self._parent, attributes, at_ns=at_ns)

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def next(self, stage: str, failure: str | None = None) -> None:
        """Ends the current stage, as an error if there is a `failure`, and starts another."""
        at_ns = time.time_ns()
        end_span(self._span, failure=failure, at_ns=at_ns)
        self.name = stage
        self._span = start_span(stage, self._parent, self._attributes, at_ns=at_ns)

    def end(self, failure: str | None = None, *, at_ns: int | None = None) -> None:
        end_span(self._span, failure=failure, at_ns=at_ns)


class StageSpans(Stages):
    """A span and its stages, which fill it completely."""

    def __init__(self, name: str, first_stage: str, attributes: Attributes | None = None) -> None:
        at_ns = time.time_ns()
        self._whole = start_span(name, attributes=attributes, at_ns=at_ns)
        super().__init__(first_stage, set_span_in_context(self._whole), at_ns=at_ns)

    def end(self, failure: str | None = None, *, at_ns: int | None = None) -> None:
        at_ns = time.time_ns() if at_ns is None else at_ns
        super().end(failure, at_ns=at_ns)
        end_span(self._whole, at_ns=at_ns)


# Export

_log = logging.getLogger(__name__)
_OTLP_TIMEOUT_S = 2  # per batch
_MAX_FILE_BYTES = 256 << 20
_INSTALL = "pip install -c constraints.txt -e '.[tracing]' in the checkout"


class TracingSettings(Section):
    """Spans of the stages of each request; docs/tracing.md lists them."""

    file: Path | None = setting(
        None,
        "File to which spans are appended, one JSON object a line; of 256 MiB it becomes FILE.1, in place of the one "
        "before; none: not written.",
    )
    otlp: Address | None = setting(
        None, "host:port of an OTLP collector (gRPC, plaintext: on this host or in a mesh); none: not sent."
    )
    sample: float = setting(1.0, "Fraction of requests, 0..1, traced unless the caller has decided.", ge=0, le=1)


@contextmanager
def exporting_spans(settings: TracingSettings, service: str) -> Iterator[None]:
    """Exports spans of `service` while inside. Raises SettingsError where that is impossible."""
    if settings.file is None and settings.otlp is None:
        yield
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ModuleNotFoundError:
        raise SettingsError(f"tracing: needs OpenTelemetry's SDK: {_INSTALL}") from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}),
        sampler=ParentBasedTraceIdRatio(settings.sample),
        shutdown_on_exit=False,
    )
    with ExitStack() as stack:
        if settings.file is not None:
            provider.add_span_processor(BatchSpanProcessor(_file_exporter(settings.file, stack)))
        if settings.otlp is not None:
            provider.add_span_processor(BatchSpanProcessor(_otlp_exporter(settings.otlp)))
        set_provider(provider)
        try:
            yield
        finally:
            set_provider(None)
            provider.shutdown()  # writes the queued spans


def _file_exporter(path: Path, stack: ExitStack) -> SpanExporter:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    try:
        file = _SpanFile(path)
    except OSError as error:
        raise SettingsError(f"tracing.file: {path} cannot be written: {error.strerror}") from None
    stack.callback(file.close)
    _log.info("spans go to %s", path)
    return ConsoleSpanExporter(out=cast(IO[str], file), formatter=lambda span: f"{span.to_json(indent=None)}\n")


class _SpanFile:
    """Written line by line, so that several processes may share it. The process that finds it full renames it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", buffering=1)

    def write(self, line: str) -> None:
        if os.fstat(self._file.fileno()).st_size >= _MAX_FILE_BYTES:
            self._rotate()
        self._file.write(line)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        with self._file as full:
            fcntl.flock(full, fcntl.LOCK_EX)  # until it is closed
            with suppress(FileNotFoundError):
                if os.path.samestat(self._path.stat(), os.fstat(full.fileno())):  # else another process has renamed it
                    self._path.replace(f"{self._path}.1")
            self._file = self._path.open("a", buffering=1)


def _otlp_exporter(address: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError:
        raise SettingsError(f"tracing.otlp needs OpenTelemetry's exporter: {_INSTALL}") from None
    _log.info("spans go to %s", address)
    return OTLPSpanExporter(endpoint=f"http://{address}", insecure=True, timeout=_OTLP_TIMEOUT_S)
