"""The figures of a run, against those of a client that shares no code with the bench, on the same run.

That client is plain synchronous gRPC, a thread for each request, and numpy. Both send the same requests at the same
moments to the same server, whose own times (hundreds of milliseconds) are far above what either client adds.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tandem.bench.serve.endpoint import PlannedRequest
from tandem.bench.serve.grpc_endpoint import GrpcEndpoint
from tandem.bench.serve.load import run_load
from tandem.bench.serve.report import Objectives, Report, summarise
from tests.grpc_calls import blocking_stub
from tests.tandem.bench.serve.fake_servers import Behaviour, FakeTandem
from tests.waiting import Stopwatch

FIRST_S, GAP_S, NUM_TOKENS, NUM_REQUESTS, SPACING_S = 0.8, 0.3, 5, 10, 0.35
NUM_REFUSED = 2
WITHIN = 0.02
MAX_STALL_S = 0.05
"""A stall of the machine moves the two clients' times apart: such a run is repeated."""


@dataclass
class Seen:
    """What the independent client saw; times by time.monotonic."""

    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    first_after: list[float] = field(default_factory=list)
    last_after: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_ok: int = 0
    num_tokens: int = 0
    codes: list[str] = field(default_factory=list)


def ask(stub: Any, delay_s: float, seen: Seen, lock: threading.Lock) -> None:
    time.sleep(delay_s)
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[20, 21, 22]),
        sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    )
    began, arrivals, code = time.monotonic(), [], ""
    try:
        for response in stub.Generate(request):
            arrivals += [time.monotonic()] * len(response.tokens.token_ids)
    except grpc.RpcError as error:
        code = error.code().name
    ended = time.monotonic()
    with lock:
        seen.began.append(began)
        seen.ended.append(ended)
        if code:
            seen.codes.append(code)
            return
        seen.num_ok += 1
        seen.num_tokens += len(arrivals)
        seen.first_after.append(arrivals[0] - began)
        seen.last_after.append(arrivals[-1] - began)
        seen.gaps += list(np.diff(arrivals))


def independent(address: str) -> Seen:
    seen, lock = Seen(), threading.Lock()
    with grpc.insecure_channel(address) as channel:
        stub = blocking_stub(generation_pb2_grpc.GenerationServiceStub, channel)
        grpc.channel_ready_future(channel).result(20)
        threads = [
            threading.Thread(target=ask, args=(stub, number * SPACING_S, seen, lock)) for number in range(NUM_REQUESTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return seen


def behaviour(number: int) -> Behaviour:
    """The last ones of both clients are refused."""
    if number >= 2 * (NUM_REQUESTS - NUM_REFUSED):
        return Behaviour(refuse=True)
    return Behaviour(first_s=FIRST_S, gap_s=GAP_S)


async def run_both() -> tuple[Report, Seen]:
    """One run: the bench's summary, and what the independent client saw."""
    requests = [PlannedRequest(number * SPACING_S, (20, 21, 22), NUM_TOKENS) for number in range(NUM_REQUESTS)]
    async with FakeTandem(behaviour) as server:
        endpoint = GrpcEndpoint(server.address)
        await endpoint.served_model()
        theirs, records = await asyncio.gather(
            asyncio.to_thread(independent, server.address), run_load(endpoint, requests)
        )
        await endpoint.close()
        assert server.num_requests == 2 * NUM_REQUESTS
    return summarise(records, Objectives(e2e_ms=1e3 * (FIRST_S + GAP_S * (NUM_TOKENS - 1)) + 30_000)), theirs


async def run_undisturbed() -> tuple[Report, Seen]:
    """The first run without a stall."""
    while True:
        watch = Stopwatch()
        ours, theirs = await run_both()
        if watch.stalled_s < MAX_STALL_S:
            return ours, theirs


async def test_counts_rates_and_latencies_agree_within_two_percent() -> None:
    ours, theirs = await run_undisturbed()
    assert ours.num_succeeded == theirs.num_ok == NUM_REQUESTS - NUM_REFUSED
    assert ours.failures == {"RESOURCE_EXHAUSTED": NUM_REFUSED}
    assert theirs.codes == ["RESOURCE_EXHAUSTED"] * NUM_REFUSED
    assert ours.num_output_tokens == theirs.num_tokens == NUM_TOKENS * (NUM_REQUESTS - NUM_REFUSED)

    duration = max(theirs.ended) - min(theirs.began)
    assert ours.duration_s == pytest.approx(duration, rel=WITHIN)
    assert ours.requests_per_s == pytest.approx(theirs.num_ok / duration, rel=WITHIN)
    assert ours.output_tokens_per_s == pytest.approx(theirs.num_tokens / duration, rel=WITHIN)
    assert ours.goodput_per_s == pytest.approx(ours.requests_per_s, rel=WITHIN)

    for mine, other in ((ours.ttft, theirs.first_after), (ours.itl, theirs.gaps), (ours.e2e, theirs.last_after)):
        in_ms = np.array(other) * 1e3
        assert (mine.mean, mine.p50) == pytest.approx((in_ms.mean(), np.percentile(in_ms, 50)), rel=WITHIN)
    per_token = (np.array(theirs.last_after) - np.array(theirs.first_after)) / (NUM_TOKENS - 1) * 1e3
    assert (ours.tpot.mean, ours.tpot.p50) == pytest.approx(
        (per_token.mean(), np.percentile(per_token, 50)), rel=WITHIN
    )
