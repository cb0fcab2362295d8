"""One request's trace over a real stack: every stage is there, in its place, and together they are its TTFT."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.grpc_calls import blocking_stub
from tests.lively import random_prompt
from tests.system.rig import Rig
from tests.system.stacks import Stack, on_stack
from tests.waiting import wait_until

pytestmark = on_stack("tight")
TOLERANCE_MS = 2.0
NUM_REQUESTS = 24
MAX_ROUNDS = 8
TO_FIRST_TOKEN = ["router.validate", "router.queue", "router.pick", "router.reserve", "router.prefill"]
AFTER = ["router.hand_over", "router.decode"]
PREFILL = ["prefill.compute", "kv.hold"]
DECODE = ["decode.wait", "decode.generate", "kv.transfer", "kv.reserve", "kv.load", "kv.release"]
SERVICES = {
    **dict.fromkeys(["router.generate", *TO_FIRST_TOKEN, *AFTER], "tandem-router"),
    **dict.fromkeys(PREFILL, "tandem-prefill"),
    **dict.fromkeys(DECODE, "tandem-decode"),
}
"""Every span of a request, and the service that writes it."""


@dataclass(frozen=True)
class Span:
    """One line of the file, times in milliseconds since 1970 by the clock of this machine."""

    name: str
    service: str
    begin_ms: float
    end_ms: float
    span_id: str
    parent_id: str
    attributes: dict[str, Any]

    @staticmethod
    def of(line: str) -> tuple[str, Span]:
        """The id of its trace, and the span."""
        record = json.loads(line)
        span = Span(
            record["name"],
            record["resource"]["attributes"]["service.name"],
            _ms(record["start_time"]),
            _ms(record["end_time"]),
            record["context"]["span_id"],
            record["parent_id"],
            record["attributes"],
        )
        return record["context"]["trace_id"], span


def _ms(text: str) -> float:
    return datetime.fromisoformat(text).timestamp() * 1e3


@dataclass(frozen=True)
class Traced:
    """A request as its client saw it, as the router timed it, and as it was traced."""

    ttft_ms: float
    way_ms: float
    """What an empty call took just before: to the router and back."""
    routers_ttft_ms: float
    spans: dict[str, Span]

    @property
    def stages_ms(self) -> float:
        """The stages up to the first token, added up."""
        return sum(self.spans[name].end_ms - self.spans[name].begin_ms for name in TO_FIRST_TOKEN)


def ask(address: str, number_of_round: int) -> dict[str, tuple[float, float]]:
    """Trace ids, the TTFT that the client measured, and the time of an empty call just before; in milliseconds."""
    prompts, measured = random.Random(number_of_round), {}
    with grpc.insecure_channel(address) as channel:
        stub, health = (
            blocking_stub(generation_pb2_grpc.GenerationServiceStub, channel),
            health_pb2_grpc.HealthStub(channel),
        )
        for number in range(NUM_REQUESTS):
            trace_id = f"{number_of_round * NUM_REQUESTS + number + 1:032x}"
            request = generation_pb2.GenerateRequest(
                request_id=trace_id,
                token_ids=common_pb2.TokenIds(ids=random_prompt(prompts, 150)),
                sampling=common_pb2.SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True),
            )
            empty_s = time.monotonic()
            health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            began_s = time.monotonic()
            call = stub.Generate(request, timeout=60, metadata=(("traceparent", f"00-{trace_id}-{1:016x}-01"),))
            next(call)
            measured[trace_id] = (time.monotonic() - began_s) * 1e3, (began_s - empty_s) * 1e3
            assert len(list(call)) >= 1
    return measured


def log_lines(rig: Rig) -> dict[str, dict[str, Any]]:
    """The fields of the router's one line for each request, by the name that the client gave it."""
    log = rig.stack.processes["router"].spec.log_file.read_text().splitlines()
    lines = [json.loads(line) for line in log if '"first_token_ms"' in line]
    return {line["request_id"]: line["fields"] for line in lines}


def spans_of(rig: Rig, trace_ids: Collection[str]) -> dict[str, dict[str, Span]]:
    """Those in the file, by trace and name."""
    file = Path(rig.stack.processes["router"].spec.env["TANDEM_TRACING__FILE"])
    traces: dict[str, dict[str, Span]] = {trace_id: {} for trace_id in trace_ids}
    for line in file.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            continue  # the last one is not written in full yet
        trace_id, span = Span.of(line)
        if (spans := traces.get(trace_id[2:])) is not None:  # a request of this module
            assert span.name not in spans, "a second span of that name"
            spans[span.name] = span
    return traces


def traced_round(stack: Stack, number_of_round: int) -> list[Traced]:
    with stack.leaves_nothing():
        ttfts_ms = ask(stack.rig.address, number_of_round)
    fields = log_lines(stack.rig)
    wait_until(
        lambda: all(len(spans) == len(SERVICES) for spans in spans_of(stack.rig, ttfts_ms).values()),
        lambda: f"spans are missing: {spans_of(stack.rig, ttfts_ms)}",
    )
    return [
        Traced(*ttfts_ms[name], fields[name]["first_token_ms"] - fields[name]["received_ms"], spans)
        for name, spans in spans_of(stack.rig, ttfts_ms).items()
    ]


@pytest.fixture(scope="module")
def traced(shared_stack: Stack) -> list[Traced]:
    return traced_round(shared_stack, 0)


def test_every_stage_is_there_and_comes_from_where_it_happens(traced: list[Traced]) -> None:
    for one in traced:
        assert {name: span.service for name, span in one.spans.items()} == SERVICES


def test_each_stage_of_the_router_begins_where_the_last_one_ended(traced: list[Traced]) -> None:
    for one in traced:
        whole = one.spans["router.generate"]
        path = [one.spans[name] for name in (*TO_FIRST_TOKEN, *AFTER)]
        assert path[0].begin_ms == whole.begin_ms
        assert all(earlier.end_ms == later.begin_ms for earlier, later in itertools.pairwise(path))
        assert path[-1].end_ms <= whole.end_ms
        assert {span.parent_id for span in path} == {whole.span_id}


def test_what_happens_at_the_instances_lies_within_what_the_router_waits_for(traced: list[Traced]) -> None:
    for one in traced:
        spans = one.spans
        whole = spans["router.generate"]
        assert {spans[name].parent_id for name in ("prefill.compute", "decode.wait", "kv.transfer")} == {whole.span_id}
        # A reservation is asked for, made, and only then anything is computed.
        assert whole.begin_ms <= spans["router.reserve"].begin_ms <= spans["decode.wait"].begin_ms
        assert spans["kv.reserve"].begin_ms <= spans["router.reserve"].end_ms <= spans["prefill.compute"].begin_ms
        # The prompt is computed, and its first token goes to the client.
        assert spans["prefill.compute"].end_ms <= spans["router.prefill"].end_ms
        # KV goes over while the router waits for the decode instance's first token.
        assert spans["kv.reserve"].end_ms == spans["kv.load"].begin_ms
        assert spans["kv.load"].end_ms == spans["kv.release"].begin_ms
        assert spans["kv.load"].end_ms <= spans["decode.wait"].end_ms <= spans["router.hand_over"].end_ms
        assert spans["decode.wait"].end_ms == spans["decode.generate"].begin_ms
        assert spans["kv.hold"].parent_id == spans["prefill.compute"].span_id
        assert spans["kv.load"].attributes["tandem.num_recomputed_blocks"] == 0


def test_the_stages_that_wait_for_an_instance_name_it(traced: list[Traced]) -> None:
    for one in traced:
        reserve, prefill = (one.spans[name].attributes for name in ("router.reserve", "router.prefill"))
        assert (reserve["tandem.prefill"], reserve["tandem.decode"]) == ("prefill-0", "decode-0")
        assert prefill["tandem.prefill"] == "prefill-0"


def test_the_stages_add_up_to_the_ttft_of_each_request(traced: list[Traced]) -> None:
    """As the router timed it for its log line, by another clock; on a busy machine time passes between the two."""
    assert min(abs(one.stages_ms - one.routers_ttft_ms) for one in traced) <= TOLERANCE_MS


def test_the_client_measures_what_the_stages_add_up_to(shared_stack: Stack, traced: list[Traced]) -> None:
    """And the way between client and router, which is no stage; a busy machine lengthens that as it likes, for all
    requests of a round too."""
    for number_of_round in range(1, MAX_ROUNDS):
        assert min(one.ttft_ms - one.stages_ms for one in traced) >= 0
        differences_ms = sorted(one.ttft_ms - one.stages_ms - one.way_ms for one in traced)
        print("\nclient's TTFT less the way and the stages, ms:", *(f"{one:.2f}" for one in differences_ms))
        if min(map(abs, differences_ms)) <= TOLERANCE_MS:
            return
        traced = traced_round(shared_stack, number_of_round)
    pytest.fail(f"the stages add up to the client's TTFT within {TOLERANCE_MS} ms in no round")
