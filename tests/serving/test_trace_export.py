"""Spans leave the process: into a file that several may share, to a collector, and never at a request's expense."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from pydantic import ValidationError

from serving import tracing
from serving.settings import SettingsError
from serving.trace_export import TracingSettings, exported
from tests.serving.spans import own_context

__all__ = ["own_context"]


def traced(*names: str) -> None:
    for name in names:
        tracing.end(tracing.begin(name), {"tandem.choice": 1})


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_by_default_nothing_is_recorded() -> None:
    with exported(TracingSettings(), "tandem-router"):
        assert not tracing.begin("anything").is_recording()


def test_a_file_gets_a_line_for_each_span(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    for service in ("tandem-router", "tandem-decode"):  # the second goes on where the first has ended
        with exported(TracingSettings(file=file), service):
            traced("one", "two")
    told = lines(file)
    assert [span["name"] for span in told] == ["one", "two"] * 2
    services = [span["resource"]["attributes"]["service.name"] for span in told]
    assert services == ["tandem-router"] * 2 + ["tandem-decode"] * 2
    assert told[0]["attributes"] == {"tandem.choice": 1}
    assert not tracing.begin("afterwards").is_recording()


def test_two_processes_share_a_file_without_tearing_lines(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    with exported(TracingSettings(file=file), "a"), file.open("a", buffering=1) as other:
        writing = threading.Thread(
            target=lambda: [other.write(json.dumps({"name": "x" * 900}) + "\n") for _ in range(400)]
        )
        writing.start()
        traced(*["span"] * 400)
        writing.join()
    assert len(lines(file)) == 800


@pytest.mark.usefixtures("own_context")
def test_a_part_of_the_requests_is_traced_unless_the_caller_has_decided(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    with exported(TracingSettings(file=file, sample=0.0), "a"):
        traced("own")
        tracing.join([("traceparent", f"00-{1:032x}-{1:016x}-01")])
        traced("asked for")
        tracing.join([("traceparent", f"00-{1:032x}-{1:016x}-00")])
        traced("declined")
    assert [span["name"] for span in lines(file)] == ["asked for"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    wanted = exported(TracingSettings(file=tmp_path), "a")
    with pytest.raises(SettingsError, match=r"tracing.file: .*cannot be written: Is a directory"), wanted:
        pass


@pytest.mark.parametrize("fields", [{"otlp": "collector"}, {"otlp": "http://c:4317"}, {"sample": 1.5}])
def test_settings_that_make_no_sense_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TracingSettings(**fields)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """OpenTelemetry's, as far as it takes spans."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            (service,) = (a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            self.names += [(service, span.name) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    server, collector = grpc.server(ThreadPoolExecutor(2)), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_a_collector_gets_them_by_otlp(collector: tuple[Collector, str]) -> None:
    received, address = collector
    with exported(TracingSettings(otlp=address), "tandem-router"):
        traced("one", "two")
    assert received.names == [("tandem-router", "one"), ("tandem-router", "two")]


@pytest.mark.timeout(60)
def test_a_collector_that_is_not_there_holds_up_neither_requests_nor_the_end() -> None:
    with exported(TracingSettings(otlp="127.0.0.1:1"), "tandem-router"):
        traced(*["span"] * 5000)  # more than the queue holds
