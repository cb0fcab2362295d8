"""Spans of the stages of a request, and the trace context on its way between the services (W3C Trace Context).

    caller's traceparent ─▶ Traced servicer ─▶ the call's context ─┬▶ begin … end: a span
                                                                   └▶ outgoing(): metadata for the next service

Only OpenTelemetry's API is used: until somebody sets a tracer provider up nothing is recorded, a span costs a few
function calls, and a context that came is passed on all the same. A stage often ends in another task than the one it
began in, so a span's parent is the context in which it is begun, or one that was kept. What is attached belongs to a
call's task and goes with it.
"""

from __future__ import annotations

import inspect
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from opentelemetry import context as trace_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT_KEY = "traceparent"
TRACESTATE_KEY = "tracestate"
_MAX_TRACESTATE_CHARS = 512
"""What W3C asks everybody to pass on; more would eat into the metadata's limit."""
_MAX_KEPT = 4096

__all__ = [
    "INVALID_SPAN",
    "Attributes",
    "Span",
    "StageSpans",
    "Stages",
    "Traced",
    "begin",
    "configure",
    "end",
    "enter",
    "join",
    "keep",
    "kept",
    "outgoing",
]

Attributes = Mapping[str, str | int | float | bool]

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("tandem")
_kept: OrderedDict[str, Context] = OrderedDict()


def configure(provider: TracerProvider | None) -> None:
    """Records with `provider` from now on; None: with the process's global one, if there ever is one."""
    global _tracer
    _tracer = trace.get_tracer("tandem", tracer_provider=provider)
    _kept.clear()


# Context between services


def join(metadata: Iterable[tuple[str, str | bytes]], traceparent: str = "") -> None:
    """Makes the caller's trace context the current task's, for as long as the task lives. What is not well-formed is
    ignored. `traceparent` is what the message said: metadata win."""
    carrier = {key: value for key, value in metadata if key in (TRACEPARENT_KEY, TRACESTATE_KEY)}
    if TRACEPARENT_KEY not in carrier and traceparent:
        carrier[TRACEPARENT_KEY] = traceparent
    if isinstance(carrier.get(TRACEPARENT_KEY), str):
        trace_context.attach(_propagator.extract(carrier, trace_context.get_current()))


def outgoing() -> tuple[tuple[str, str], ...]:
    """The current trace context as metadata for a call; empty where there is none."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    if len(carrier.get(TRACESTATE_KEY, "")) > _MAX_TRACESTATE_CHARS:
        del carrier[TRACESTATE_KEY]
    return tuple(carrier.items())


class Traced:
    """A servicer whose calls run in the trace context of their caller; registered in its place."""

    def __init__(self, servicer: object) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Any:
        behaviour = getattr(self._servicer, name)

        async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
            _join_call(request, context)
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

        async def awaited(request: Any, context: Any, *writer: Any) -> Any:
            _join_call(request, context)
            return await behaviour(request, context, *writer)

        return streaming if inspect.isasyncgenfunction(behaviour) else awaited


def _join_call(request: Any, context: Any) -> None:
    join(context.invocation_metadata() or (), getattr(request, TRACEPARENT_KEY, ""))


# Spans


def begin(
    name: str, parent: Context | None = None, attributes: Attributes | None = None, *, at_ns: int | None = None
) -> Span:
    """A span from now on, or from `at_ns` (`time.time_ns()`), in `parent` or the current context. It is not made the
    current one."""
    return _tracer.start_span(name, context=parent, attributes=attributes, start_time=at_ns)


def enter(name: str, *, at_ns: int | None = None) -> Span:
    """The same, made the current one for as long as the current task lives, and for the tasks that it starts."""
    span = begin(name, at_ns=at_ns)
    trace_context.attach(set_span_in_context(span))
    return span


def end(
    span: Span, attributes: Attributes | None = None, failure: str | None = None, *, at_ns: int | None = None
) -> None:
    """The span is over, now or at `at_ns`, for a bad reason if there is a `failure`. The first word counts."""
    if not span.is_recording():
        return
    if attributes:
        span.set_attributes(attributes)
    if failure is not None:
        span.set_status(Status(StatusCode.ERROR, failure))
    span.end(end_time=at_ns)


def keep(key: str, span: Span) -> None:
    """Remembers `span` under `key`, as the parent of what will happen outside of the call; the oldest are forgotten."""
    if span.get_span_context().is_valid:
        _kept[key] = set_span_in_context(span)
        while len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)


def kept(key: str) -> Context | None:
    """What was remembered, once."""
    return _kept.pop(key, None)


class Stages:
    """Spans that follow one upon the other: each begins at the very nanosecond at which the one before has ended, so
    that together they last as long as what they are stages of."""

    def __init__(
        self,
        first: str,
        parent: Context | None = None,
        attributes: Attributes | None = None,
        *,
        at_ns: int | None = None,
    ) -> None:
        """`parent` None: the current context. Of `attributes` every stage has a copy. The first stage began at `at_ns`
        (`time.time_ns()`), or now."""
        self._parent = trace_context.get_current() if parent is None else parent
        self._attributes = attributes
        self.name = first
        """Of the stage that goes on."""
        self._span = begin(first, self._parent, attributes, at_ns=at_ns)

    def note(self, attributes: Attributes) -> None:
        """What is known of the stage that goes on."""
        self._span.set_attributes(attributes)

    def next(self, stage: str, failure: str | None = None) -> None:
        """The stage has ended, for a bad reason if there is a `failure`; another one begins."""
        at_ns = time.time_ns()
        end(self._span, failure=failure, at_ns=at_ns)
        self.name = stage
        self._span = begin(stage, self._parent, self._attributes, at_ns=at_ns)

    def end(self, failure: str | None = None, *, at_ns: int | None = None) -> None:
        """The last stage has ended."""
        end(self._span, failure=failure, at_ns=at_ns)


class StageSpans(Stages):
    """A span and its stages, which fill it from its beginning to its end."""

    def __init__(self, name: str, first_stage: str, attributes: Attributes | None = None) -> None:
        at_ns = time.time_ns()
        self._whole = begin(name, attributes=attributes, at_ns=at_ns)
        super().__init__(first_stage, set_span_in_context(self._whole), at_ns=at_ns)

    def end(self, failure: str | None = None, *, at_ns: int | None = None) -> None:
        """The last stage has ended, and all with it."""
        at_ns = time.time_ns() if at_ns is None else at_ns
        super().end(failure, at_ns=at_ns)
        end(self._whole, at_ns=at_ns)
