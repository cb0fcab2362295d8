"""Requests that come whether or not the last ones have been answered, from a process of their own.

    python -m tests.router.open_load '{"address": …, "seconds": 10, "streams": [{"tenant": "calm", "per_s": 5}], …}'

writes what became of each of them as one JSON list.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc

TENANT_KEY = "x-test-tenant"
_NUM_CHANNELS = 4


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds; `came_s` and `ended_s` count from the start of the load."""

    tenant: str
    came_s: float
    ended_s: float = 0.0
    first_token_s: float | None = None
    """From its coming."""
    num_tokens: int = 0
    code: str = "OK"
    message: str = ""
    pushback_ms: int | None = None
    retry_info_s: float | None = None


async def offer(address: str, seconds: float, streams: list[dict[str, Any]], num_tokens: int) -> list[Outcome]:
    """Offers each stream's `per_s` requests a second for `seconds`, even but for a jitter, and waits for every end.

    A stream may begin later, at `from_s`, and have a `num_tokens` of its own.
    """
    rng = random.Random(0)
    arrivals = sorted(
        (from_s + (i + rng.random()) / stream["per_s"], stream["tenant"], stream.get("num_tokens", num_tokens))
        for stream in streams
        for from_s in [stream.get("from_s", 0.0)]
        for i in range(int((seconds - from_s) * stream["per_s"]))
    )
    # Separate connections: one would hold back what exceeds its number of streams.
    channels = [
        grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)])
        for _ in range(_NUM_CHANNELS)
    ]
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    for channel in channels:
        await channel.channel_ready()
    prompt = common_pb2.TokenIds(ids=range(20, 52))
    started_s = time.monotonic()
    tasks = []
    for number, (at_s, tenant, max_tokens) in enumerate(arrivals):
        await asyncio.sleep(max(started_s + at_s - time.monotonic(), 0))
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens, seed=number)
        request = generation_pb2.GenerateRequest(token_ids=prompt, sampling=sampling)
        tasks.append(asyncio.create_task(_ask(stubs[number % _NUM_CHANNELS], request, tenant, started_s)))
    outcomes = await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()
    return outcomes


async def _ask(stub: Any, request: generation_pb2.GenerateRequest, tenant: str, started_s: float) -> Outcome:
    came_s = time.monotonic()
    outcome = Outcome(tenant, came_s - started_s)
    try:
        async for response in stub.Generate(request, timeout=120, metadata=((TENANT_KEY, tenant),)):
            if outcome.first_token_s is None:
                outcome.first_token_s = time.monotonic() - came_s
            outcome.num_tokens += len(response.tokens.token_ids)
    except grpc.aio.AioRpcError as error:
        outcome.code, outcome.message = error.code().name, error.details() or ""
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-retry-pushback-ms":
                outcome.pushback_ms = int(value)
            elif key == "grpc-status-details-bin":
                outcome.retry_info_s = _retry_info_s(value)
    outcome.ended_s = time.monotonic() - started_s
    return outcome


def _retry_info_s(value: str | bytes) -> float | None:
    info = error_details_pb2.RetryInfo()
    for detail in status_pb2.Status.FromString(value).details:
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None


if __name__ == "__main__":
    print(json.dumps([asdict(outcome) for outcome in asyncio.run(offer(**json.loads(sys.argv[1])))]))
