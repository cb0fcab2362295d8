"""A router whose process does not run for a while, as on a machine that is paused: its instances were never gone."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2_grpc
from router.pools.settings import PoolSettings
from serving.channel import ChannelSettings
from tests.fakes.behaviour import Behaviour
from tests.router.failing import decodes
from tests.router.process import router_process
from tests.router.rig import Answer, request_of

NUM_TOKENS = 100
STALL_S = 2.5


@pytest.mark.timeout(120)
async def test_a_stall_of_the_router_is_no_evidence_against_its_requests(model_folder: Path) -> None:
    """All have one content, and if their three instances had died, it would be rejected as poison."""
    assert max(PoolSettings().beat_timeout_s, ChannelSettings().ping_timeout_ms / 1000) < STALL_S
    answers = [Answer() for _ in range(9)]

    async def generate(stub: generation_pb2_grpc.GenerationServiceStub, answer: Answer) -> None:
        async for response in stub.Generate(request_of(max_tokens=NUM_TOKENS)):
            answer.responses.append(response)

    async with AsyncExitStack() as stack:
        permits = asyncio.Semaphore(len(answers) * NUM_TOKENS // 2)
        fakes = decodes(*[Behaviour(permits=permits) for _ in range(3)])
        for fake in fakes:
            await stack.enter_async_context(fake)
        addresses = ",".join(fake.address for fake in fakes)
        router = await stack.enter_async_context(
            router_process(model_folder, "--decode", addresses, "--disaggregation", "never")
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(router.address))
        await router.until_serving(channel)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        async with asyncio.TaskGroup() as requests:
            for answer in answers:
                requests.create_task(generate(stub, answer))
            while not permits.locked() or not all(answer.responses for answer in answers):
                if permits.locked():  # the first requests have taken all
                    permits.release()
                await asyncio.sleep(0.02)
            await router.stall(STALL_S)
            for _ in range(len(answers) * NUM_TOKENS):
                permits.release()
        await router.end()
    for answer in answers:
        assert answer.is_exactly(NUM_TOKENS)
    print(f"\n{sum(len(fake.recorded('decode')) for fake in fakes)} calls for {len(answers)} requests")
