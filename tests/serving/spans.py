"""What the tests of traces share: spans that are kept in memory, and looking at them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import context as trace_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serving import tracing
from tests.waiting import until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
METADATA = (("traceparent", TRACEPARENT),)


class Spans:
    """What was recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def all(self) -> tuple[ReadableSpan, ...]:
        """In the order in which they ended."""
        return self._exporter.get_finished_spans()

    def names(self) -> list[str]:
        return [span.name for span in self.all()]

    def one(self, name: str) -> ReadableSpan:
        (span,) = (span for span in self.all() if span.name == name)
        return span

    async def named(self, *names: str) -> list[ReadableSpan]:
        """These, once they have ended."""
        await until(lambda: set(names) <= set(self.names()))
        return [self.one(name) for name in names]


@pytest.fixture
def spans() -> Iterator[Spans]:
    spans = Spans()
    tracing.set_provider(spans.provider)
    yield spans
    tracing.set_provider(None)
    spans.provider.shutdown()


@pytest.fixture
def own_context() -> Iterator[None]:
    """What a test attaches goes with it."""
    token = trace_context.attach(Context())
    yield
    trace_context.detach(token)


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def id_of(span: ReadableSpan) -> int | None:
    return span.context.span_id if span.context is not None else None


def trace_ids(*spans: ReadableSpan) -> set[str]:
    return {trace.format_trace_id(span.context.trace_id) for span in spans if span.context is not None}
