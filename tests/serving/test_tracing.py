"""Each stage of a hand-over is a span in the caller's trace; without a tracing SDK nothing happens."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.trace import StatusCode
from pydantic import ValidationError

import decode_service.service
import prefill_service.service
from engine.core.messages import AbortRequests, LeaseCommand, LoadedEvent, ReservedEvent, TokensEvent, TransferEvent
from protos.tandem.v1 import decode_pb2, generation_pb2, prefill_pb2
from router.dispatch.instance_call import DecodeCall
from serving import tracing
from serving.settings import SettingsError
from serving.tracing import TracingSettings, exporting_spans
from tests.instance.rig import Rig, instance_request, model_folder, read_all, running
from tests.serving.conftest import Rigs, Scripted
from tests.serving.spans import (
    METADATA,
    SPAN_ID,
    TRACE_ID,
    TRACEPARENT,
    Spans,
    id_of,
    own_context,
    parent_of,
    spans,
    trace_ids,
)
from tests.waiting import until

__all__ = ["own_context", "spans"]


@pytest.fixture
async def decode(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(model_folder(tmp_path / "model"), decode_service.service.ROLE) as rig:
        yield rig


@pytest.fixture
async def prefill(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(model_folder(tmp_path / "model"), prefill_service.service.ROLE) as rig:
        yield rig


def prefilled(rig: Rig, metadata: Any = METADATA) -> Any:
    hand_over = prefill_pb2.HandOver(transfer_id="t1", lease_s=2.0)
    request = prefill_pb2.PrefillRequest(request=instance_request(), hand_over=hand_over)
    return rig.prefill.Prefill(request, metadata=metadata)


async def decoding(rig: Rig, holder: Rig, metadata: Any = METADATA) -> Any:
    call = rig.decode.Decode(metadata=metadata)
    source = decode_pb2.TransferSource(
        transfer_id="t1",
        address=holder.server.address,
        instance_epoch=holder.server.instance_epoch,
        reservation_s=5.0,
    )
    start = decode_pb2.DecodeStart(request=instance_request("r2"), transfer=source)
    await call.write(decode_pb2.DecodeRequest(start=start))
    await rig.core.request()
    return call


# The stages


async def test_a_hand_over_is_one_trace_from_both_instances(decode: Rig, prefill: Rig, spans: Spans) -> None:
    # STEP decode reserves
    call = await decoding(decode, prefill)
    decode.core.emit(ReservedEvent("r2", num_cached_tokens=4, num_local_blocks=1))
    await call.read()

    # STEP prefill computes and offers
    prefilling = prefilled(prefill)
    await prefill.core.request()
    prefill.core.emit(TransferEvent("t1", 0))
    prefill.core.emit(TokensEvent("r1", [72], finish_reason="hand_over", num_cached_tokens=4, queue_s=0.25))
    await read_all(prefilling)
    prefill.core.emit(TransferEvent("t1", 2, num_tokens=10))

    # STEP decode loads, lets go and goes on
    decode.core.emit(LoadedEvent("r2", num_external_tokens=4, num_recomputed_blocks=1, reason="page_digest"))
    await call.read()
    await prefill.core.wait_for(LeaseCommand)
    await until(lambda: LeaseCommand("t1", "release") in prefill.core.commands)
    prefill.core.emit(TransferEvent("t1", 2, ended="released"))
    call.cancel()

    compute, hold = await spans.named("prefill.compute", "kv.hold")
    transfer, reserve, load, release = await spans.named("kv.transfer", "kv.reserve", "kv.load", "kv.release")
    assert trace_ids(compute, hold, transfer, reserve, load, release) == {TRACE_ID}
    assert parent_of(compute) == parent_of(transfer) == int(SPAN_ID, 16)
    assert parent_of(hold) == id_of(compute)
    assert {parent_of(stage) for stage in (reserve, load, release)} == {id_of(transfer)}
    assert compute.attributes == {
        "gen_ai.request.id": "r1",
        "tandem.num_prompt_tokens": 10,
        "tandem.transfer_id": "t1",
        "tandem.num_cached_tokens": 4,
        "tandem.queue_ms": 250.0,
    }
    assert hold.attributes == {"tandem.lease": "released", "tandem.num_blocks": 2}
    assert transfer.attributes == {
        "gen_ai.request.id": "r2",
        "tandem.transfer_id": "t1",
        "tandem.connector": "scripted",
    }
    assert load.attributes == {
        "tandem.num_blocks": 1,
        "tandem.num_external_tokens": 4,
        "tandem.num_recomputed_blocks": 1,
        "tandem.reason": "page_digest",
    }
    assert (reserve.start_time, reserve.end_time) == (transfer.start_time, load.start_time)
    assert (release.start_time, release.end_time) == (load.end_time, transfer.end_time)
    assert all(span.status.status_code is StatusCode.UNSET for span in (compute, hold, reserve, load, release))
    (wait,) = await spans.named("decode.wait")
    assert (parent_of(wait), wait.status.description) == (int(SPAN_ID, 16), "ended before its last token")
    assert len(spans.names()) == 7


@pytest.mark.parametrize("ended", ["expired", "failed"])
async def test_a_hold_that_ends_badly_says_how(prefill: Rig, spans: Spans, ended: Any) -> None:
    prefill.core.emit(TransferEvent("t1", 1))
    prefill.core.emit(TransferEvent("t1", 1, ended=ended, reason="no sign of its reader"))
    (hold,) = await spans.named("kv.hold")
    assert hold.attributes == {"tandem.lease": ended, "tandem.num_blocks": 1}
    assert (hold.status.status_code, hold.status.description) == (StatusCode.ERROR, "no sign of its reader")
    assert hold.parent is None  # no call is known


async def test_what_was_released_before_its_offer_was_never_held(prefill: Rig, spans: Spans) -> None:
    prefill.core.emit(TransferEvent("t1", 0, ended="released", reason="released before it was offered"))
    prefill.core.emit(TransferEvent("t2", 0), TransferEvent("t2", 0, ended="released"))
    await spans.named("kv.hold")
    assert spans.names() == ["kv.hold"]


async def test_a_cancelled_prefill_and_a_cancelled_decode_end_their_spans(
    decode: Rig, prefill: Rig, spans: Spans
) -> None:
    prefilling = prefilled(prefill)
    await prefilling.read()
    prefilling.cancel()
    call = await decoding(decode, prefill)
    call.cancel()
    await decode.core.wait_for(AbortRequests)
    compute, transfer, reserve, release = await spans.named(
        "prefill.compute", "kv.transfer", "kv.reserve", "kv.release"
    )
    assert (compute.status.status_code, reserve.status.status_code) == (StatusCode.ERROR, StatusCode.ERROR)
    assert parent_of(release) == id_of(transfer)
    assert "kv.load" not in spans.names()


async def test_a_load_goes_on_after_its_holder_has_gone(decode: Rig, prefill: Rig, spans: Spans) -> None:
    """The holder has failed, its follower has ended; the request still waits for what was begun."""
    call = await decoding(decode, prefill)
    prefill.core.emit(TransferEvent("t1", 0), TransferEvent("t1", 0, ended="failed", reason="its request ended"))
    decode.core.emit(ReservedEvent("r2", num_cached_tokens=0, num_local_blocks=0))
    await call.read()
    await until(lambda: decode.server.transfers.num_open == 0)
    assert "kv.load" not in spans.names()
    decode.core.emit(LoadedEvent("r2", num_external_tokens=0, num_recomputed_blocks=3, reason="its request ended"))
    load, _ = await spans.named("kv.load", "kv.transfer")
    assert load.attributes is not None
    assert load.attributes["tandem.num_recomputed_blocks"] == 3
    call.cancel()


async def test_without_a_callers_trace_a_transfer_is_a_trace_of_its_own(
    decode: Rig, prefill: Rig, spans: Spans
) -> None:
    call = await decoding(decode, prefill, metadata=())
    call.cancel()
    transfer, reserve = await spans.named("kv.transfer", "kv.reserve")
    assert transfer.parent is None
    assert len(trace_ids(transfer, reserve)) == 1


async def test_without_an_sdk_nothing_is_recorded_and_all_is_as_ever(decode: Rig, prefill: Rig) -> None:
    assert not tracing.start_span("anything").is_recording()
    prefilling = prefilled(prefill)
    await prefill.core.request()
    prefill.core.emit(TransferEvent("t1", 2, num_tokens=10), TokensEvent("r1", [72], finish_reason="hand_over"))
    assert len(await read_all(prefilling)) == 2
    call = await decoding(decode, prefill)
    decode.core.emit(ReservedEvent("r2", num_cached_tokens=0, num_local_blocks=0))
    decode.core.emit(LoadedEvent("r2", num_external_tokens=8, num_recomputed_blocks=0))
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["reserved", "loaded"]
    call.cancel()


# The context between services


@pytest.mark.usefixtures("own_context")
def test_what_comes_goes_on_even_without_an_sdk() -> None:
    assert tracing.outgoing_metadata() == ()
    tracing.attach_caller_context([("other", "x"), ("traceparent", TRACEPARENT), ("tracestate", "vendor=1")])
    assert dict(tracing.outgoing_metadata()) == {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}


@pytest.mark.usefixtures("own_context")
def test_metadata_win_over_the_message() -> None:
    other = TRACEPARENT.replace("0af", "1bf")
    tracing.attach_caller_context([], other)
    assert dict(tracing.outgoing_metadata())["traceparent"] == other
    tracing.attach_caller_context(METADATA, other)
    assert dict(tracing.outgoing_metadata())["traceparent"] == TRACEPARENT


class Telling(Scripted):
    """Answers with the traceparent that its next service would get."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(model=dict(tracing.outgoing_metadata())["traceparent"])

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return generation_pb2.GetModelInfoResponse(model=dict(tracing.outgoing_metadata())["traceparent"])


class TellingByWriter(Telling):
    async def Generate(self, request: Any, context: Any, writer: Any) -> None:  # type: ignore[override]
        await writer.write(generation_pb2.GenerateResponse(model=dict(tracing.outgoing_metadata())["traceparent"]))


@pytest.mark.parametrize("kind", [Telling, TellingByWriter])
async def test_every_call_runs_in_its_callers_trace(rigs: Rigs, kind: type[Telling]) -> None:
    rig, other = await rigs.start(kind()), TRACEPARENT.replace("0af", "1bf")
    request = generation_pb2.GenerateRequest(traceparent=other)
    assert [one.model async for one in rig.stub.Generate(request)] == [other]
    assert [one.model async for one in rig.stub.Generate(request, metadata=METADATA)] == [TRACEPARENT]
    info = await rig.stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), metadata=METADATA)
    assert info.model == TRACEPARENT


@pytest.mark.usefixtures("own_context")
@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", TRACEPARENT.upper(), f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{'0' * 32}-{SPAN_ID}-01"]
)
def test_what_is_not_well_formed_is_ignored(traceparent: str) -> None:
    tracing.attach_caller_context([("traceparent", traceparent)])
    assert tracing.outgoing_metadata() == ()
    tracing.attach_caller_context([("traceparent", traceparent.encode())])
    assert tracing.outgoing_metadata() == ()


@pytest.mark.usefixtures("own_context")
def test_a_large_tracestate_goes_no_further() -> None:
    state = ",".join(f"vendor{index}={'x' * 60}" for index in range(20))
    tracing.attach_caller_context([*METADATA, ("tracestate", state)])
    assert tracing.outgoing_metadata() == METADATA


@pytest.mark.usefixtures("own_context")
def test_both_calls_of_the_router_carry_an_active_span(spans: Spans) -> None:
    choice: Any = SimpleNamespace(request=SimpleNamespace(remaining_s=None, label="mine"))
    unused: Any = None
    span = spans.provider.get_tracer("test").start_span("generate")
    with trace.use_span(span, end_on_exit=True):
        metadata = dict(DecodeCall(unused, unused, choice, unused)._options()["metadata"])
    ids = span.get_span_context()
    assert metadata == {
        "tandem-request-id": "mine",
        "traceparent": f"00-{trace.format_trace_id(ids.trace_id)}-{trace.format_span_id(ids.span_id)}-01",
    }


def test_remembered_contexts_are_bounded_and_recalled_once(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MAX_REMEMBERED", 2)
    for key in ("a", "b", "c"):
        tracing.remember_span(key, tracing.start_span(key))
    assert tracing.recall_context("a") is None
    assert tracing.recall_context("c") is not None
    assert tracing.recall_context("c") is None
    tracing.remember_span("d", tracing.INVALID_SPAN)
    assert tracing.recall_context("d") is None


def test_the_first_end_of_a_span_counts(spans: Spans) -> None:
    span = tracing.start_span("once")
    tracing.end_span(span, {"a": 1})
    tracing.end_span(span, failure="too late")
    assert spans.one("once").status.status_code is StatusCode.UNSET


# Spans leave the process: into a file that several may share, to a collector, and never at a request's expense.


def traced(*names: str) -> None:
    for name in names:
        tracing.end_span(tracing.start_span(name), {"tandem.choice": 1})


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_by_default_nothing_is_recorded() -> None:
    with exporting_spans(TracingSettings(), "tandem-router"):
        assert not tracing.start_span("anything").is_recording()


def test_a_file_gets_a_line_for_each_span(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    for service in ("tandem-router", "tandem-decode"):  # the second goes on where the first has ended
        with exporting_spans(TracingSettings(file=file), service):
            traced("one", "two")
    spans_written = lines(file)
    assert [span["name"] for span in spans_written] == ["one", "two"] * 2
    services = [span["resource"]["attributes"]["service.name"] for span in spans_written]
    assert services == ["tandem-router"] * 2 + ["tandem-decode"] * 2
    assert spans_written[0]["attributes"] == {"tandem.choice": 1}
    assert not tracing.start_span("afterwards").is_recording()


def test_two_processes_share_a_file_without_tearing_lines(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    with exporting_spans(TracingSettings(file=file), "a"), file.open("a", buffering=1) as other:
        writing = threading.Thread(
            target=lambda: [other.write(json.dumps({"name": "x" * 900}) + "\n") for _ in range(400)]
        )
        writing.start()
        traced(*["span"] * 400)
        writing.join()
    assert len(lines(file)) == 800


def test_a_full_file_is_renamed_once_by_those_who_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spans.jsonl"
    monkeypatch.setattr(tracing, "_MAX_FILE_BYTES", 40)
    files = [tracing._SpanFile(path) for _ in range(2)]
    for number in range(6):  # each of the two in turns
        files[number % 2].write(f"{number} {'x' * 18}\n")
    for file in files:
        file.close()
    kept = [(tmp_path / name).read_text()[::21] for name in ("spans.jsonl.1", "spans.jsonl")]
    assert kept == ["23", "45"], "the earlier ones are gone"
    with exporting_spans(TracingSettings(file=path), "a"):
        traced("one", "two")
    assert [span["name"] for span in lines(path)] == ["two"]


@pytest.mark.usefixtures("own_context")
def test_a_part_of_the_requests_is_traced_unless_the_caller_has_decided(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    with exporting_spans(TracingSettings(file=file, sample=0.0), "a"):
        traced("own")
        tracing.attach_caller_context([("traceparent", f"00-{1:032x}-{1:016x}-01")])
        traced("asked for")
        tracing.attach_caller_context([("traceparent", f"00-{1:032x}-{1:016x}-00")])
        traced("declined")
    assert [span["name"] for span in lines(file)] == ["asked for"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    wanted = exporting_spans(TracingSettings(file=tmp_path), "a")
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
    with exporting_spans(TracingSettings(otlp=address), "tandem-router"):
        traced("one", "two")
    assert received.names == [("tandem-router", "one"), ("tandem-router", "two")]


@pytest.mark.timeout(60)
def test_a_collector_that_is_not_there_holds_up_neither_requests_nor_the_end() -> None:
    with exporting_spans(TracingSettings(otlp="127.0.0.1:1"), "tandem-router"):
        traced(*["span"] * 5000)  # more than the queue holds
