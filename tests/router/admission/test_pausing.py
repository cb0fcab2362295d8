"""Streams of a tenant with more than its share pause for another tenant, and go on exactly where they were."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from router.api.live.state import stages_of
from router.request.request_log import RequestLog
from tests.fakes.behaviour import Behaviour
from tests.router.conftest import Run
from tests.router.failing import decodes
from tests.router.rig import PROMPT, Answer, Rig, request_of
from tests.waiting import until

TENANTS = {"tenant_key": "x-tenant", "yield_after_s": 0.0, "queue_timeout_s": 60.0}
NUM_TOKENS = 60
MORE = [9, *PROMPT]


def two_slots(token_s: float = 0.05) -> Behaviour:
    return Behaviour(slots=2, token_s=token_s)


def ask(
    rig: Rig, tenant: str, prompt: list[int] = PROMPT, *, n: int = 1, max_tokens: int = NUM_TOKENS
) -> grpc.aio.UnaryStreamCall[Any, Any]:
    request = request_of(prompt, n=n, max_tokens=max_tokens)
    return rig.stub.Generate(request, timeout=60, metadata=(("x-tenant", tenant),))


async def read(call: grpc.aio.UnaryStreamCall[Any, Any]) -> Answer:
    return Answer([response async for response in call])


async def until_all_stream(rig: Rig, num: int) -> None:
    await until(lambda: len({one.request_id for fake in rig.decode for one in fake.recorded("token")}) >= num)


@pytest.mark.parametrize("prefill", [0, 1], ids=["local", "split"])
async def test_a_stream_pauses_for_another_tenant_and_goes_on_exactly(run: Run, prefill: int) -> None:
    async with run(prefill=prefill, decode=decodes(two_slots()), admission=TENANTS) as rig:
        greedy = [asyncio.create_task(read(ask(rig, "greedy", prompt))) for prompt in (PROMPT, MORE)]
        await until_all_stream(rig, 2)
        modest = await read(ask(rig, "modest", max_tokens=5))
        assert modest.is_exactly(5)
        assert not any(task.done() for task in greedy), "it has waited for no end"
        assert rig.app.admission.num_paused == 1
        rig.decode[0].behaviour.token_s = 0.0
        for task, prompt in zip(greedy, (PROMPT, MORE), strict=True):
            assert (await task).is_exactly(NUM_TOKENS, prompt=prompt)
        assert rig.app.admission.num_rejected.total() == 0
        await rig.until_idle()
        metrics = rig.app.service.metrics
        assert (metrics.num_retried, metrics.num_resumed) == (0, 0), "a pause is no failure"


async def test_a_pause_is_a_wait_in_the_queue_on_the_live_page(run: Run) -> None:
    async with run(prefill=0, decode=decodes(two_slots()), admission=TENANTS) as rig:
        log = rig.app.service.metrics.log = RequestLog()
        greedy = [asyncio.create_task(read(ask(rig, "greedy", prompt))) for prompt in (PROMPT, MORE)]
        await until_all_stream(rig, 2)
        await read(ask(rig, "modest", max_tokens=5))
        rig.decode[0].behaviour.token_s = 0.0
        await asyncio.gather(*greedy)
        await until(lambda: len(log.ended) == 3)
    paused = ["queue", "pick", "prefill", "decode", "queue", "prefill", "decode"]
    assert paused in [[name for name, _ in stages_of(one)] for one in log.ended]


async def test_all_choices_of_a_request_pause_together(run: Run) -> None:
    async with run(prefill=0, decode=decodes(Behaviour(slots=4, token_s=0.05)), admission=TENANTS) as rig:
        greedy = [asyncio.create_task(read(ask(rig, "greedy", prompt, n=2))) for prompt in (PROMPT, MORE)]
        await until_all_stream(rig, 4)
        assert (await read(ask(rig, "modest", n=2, max_tokens=5))).is_exactly(5, choice=1)
        rig.decode[0].behaviour.token_s = 0.0
        for task, prompt in zip(greedy, (PROMPT, MORE), strict=True):
            answer = await task
            assert all(answer.is_exactly(NUM_TOKENS, prompt=prompt, choice=choice) for choice in (0, 1))


async def test_a_pause_counts_against_no_instance_and_is_no_resumption_that_is_limited(run: Run) -> None:
    async with run(prefill=0, decode=decodes(two_slots()), admission=TENANTS, failover={"max_resumptions": 0}) as rig:
        greedy = [asyncio.create_task(read(ask(rig, "greedy", prompt))) for prompt in (PROMPT, MORE)]
        await until_all_stream(rig, 2)
        for number in range(3):
            assert (await read(ask(rig, "modest", max_tokens=3))).is_exactly(3)
            await until(lambda number=number: rig.app.admission.num_queued == 0)  # type: ignore[misc]
        rig.decode[0].behaviour.token_s = 0.0
        assert [
            (await task).is_exactly(NUM_TOKENS, prompt=one) for task, one in zip(greedy, (PROMPT, MORE), strict=True)
        ]
        assert rig.app.admission.num_paused >= 2
        key = rig.app.pools.decode.views()[0].key
        assert rig.app.safeguards.decode.ejected_s(key) is None


async def test_a_paused_stream_goes_on_where_a_slot_is_free(run: Run) -> None:
    decode = decodes(*(Behaviour(slots=1, token_s=0.05) for _ in range(2)))
    async with run(prefill=0, decode=decode, admission=TENANTS) as rig:
        paused = asyncio.create_task(read(ask(rig, "greedy")))
        await until_all_stream(rig, 1)
        other = ask(rig, "greedy", MORE, max_tokens=1000)
        await until_all_stream(rig, 2)
        modest = asyncio.create_task(read(ask(rig, "modest", max_tokens=300)))
        await until_all_stream(rig, 3)
        other.cancel()
        assert (await paused).is_exactly(NUM_TOKENS)
        assert not modest.done(), "it has the slot of the other instance"
        modest.cancel()


async def test_a_paused_stream_ends_with_its_client_or_its_deadline(run: Run) -> None:
    async with run(prefill=0, decode=decodes(two_slots()), admission=TENANTS) as rig:
        short = rig.stub.Generate(request_of(max_tokens=400), timeout=3, metadata=(("x-tenant", "greedy"),))
        paused = asyncio.create_task(read(short))
        await until_all_stream(rig, 1)
        stays = ask(rig, "greedy", MORE, max_tokens=400)
        await until_all_stream(rig, 2)
        modest = ask(rig, "modest", max_tokens=400)
        await until(lambda: rig.app.admission.num_paused == 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await paused
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: rig.app.admission.num_queued == 0)
        stays.cancel()
        modest.cancel()


async def test_one_tenant_alone_never_pauses(run: Run) -> None:
    async with run(prefill=0, decode=decodes(two_slots(0.005)), admission={**TENANTS, "tenant_key": ""}) as rig:
        answers = await asyncio.gather(*(read(ask(rig, f"tenant-{i}", max_tokens=12)) for i in range(6)))
        assert all(answer.is_exactly(12) for answer in answers)
        assert rig.app.admission.num_paused == 0
