"""Where a process's spans go: into a file as lines of JSON, to a collector by OTLP over gRPC, or, by default, nowhere.

    event loop ──span ends──▶ the SDK's queue ──its own thread, in batches──▶ file, collector

OpenTelemetry's SDK does the work and is imported only by who asks for it. A queue that is full drops spans, and nobody
waits for a file or a collector; what is left is written when the process ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import field_validator

from serving import tracing
from serving.settings import Section, SettingsError, host_and_port, setting

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_log = logging.getLogger(__name__)
_PATIENCE_S = 2
"""With a collector that does not answer, for each batch."""


class TracingSettings(Section):
    """Spans of what each request waits for; docs/tracing.md says which there are."""

    file: Path | None = setting(None, "File to which spans are appended, one JSON object a line; none: no file.")
    otlp: str | None = setting(
        None, "host:port of an OTLP collector (gRPC, plaintext: on this host or in a mesh); none: nowhere."
    )
    sample: float = setting(
        1.0, "Part of the requests, 0..1, that are traced if their caller has not decided it already.", ge=0, le=1
    )

    @field_validator("otlp")
    @classmethod
    def _is_host_and_port(cls, otlp: str | None) -> str | None:
        if otlp is not None and "/" in host_and_port(otlp)[0]:
            raise ValueError("is not host:port, such as 127.0.0.1:4317")
        return otlp


@contextmanager
def exported(settings: TracingSettings, service: str) -> Iterator[None]:
    """While inside, spans go where the settings say, as those of `service`. Raises SettingsError where that is
    impossible."""
    if settings.file is None and settings.otlp is None:
        yield
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ModuleNotFoundError:
        raise SettingsError("tracing: needs OpenTelemetry's SDK: pip install '.[tracing]'") from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}),
        sampler=ParentBasedTraceIdRatio(settings.sample),
        shutdown_on_exit=False,
    )
    with ExitStack() as stack:
        for exporter in _exporters(settings, stack):
            provider.add_span_processor(BatchSpanProcessor(exporter))
        tracing.configure(provider)
        try:
            yield
        finally:
            tracing.configure(None)
            provider.shutdown()  # writes what is left


def _exporters(settings: TracingSettings, stack: ExitStack) -> Iterator[SpanExporter]:
    if settings.file is not None:
        yield _to_file(settings.file, stack)
    if settings.otlp is not None:
        yield _to_collector(settings.otlp)


def _to_file(path: Path, stack: ExitStack) -> SpanExporter:
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    try:
        # Line by line, so that several processes may share a file.
        file = stack.enter_context(path.open("a", buffering=1))
    except OSError as error:
        raise SettingsError(f"tracing.file: {path} cannot be written: {error.strerror}") from None
    _log.info("spans go to %s", path)
    return ConsoleSpanExporter(out=file, formatter=lambda span: f"{span.to_json(indent=None)}\n")


def _to_collector(address: str) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError:
        raise SettingsError("tracing.otlp needs OpenTelemetry's exporter: pip install '.[tracing]'") from None
    _log.info("spans go to %s", address)
    return OTLPSpanExporter(endpoint=f"http://{address}", insecure=True, timeout=_PATIENCE_S)
