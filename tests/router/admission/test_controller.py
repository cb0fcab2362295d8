"""The admission controller: admits what fits, queues a bounded rest, rejects the excess at once, and leaks nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.capacity import Capacity
from router.admission.settings import TenantSettings
from router.admission.slots import Ticket
from router.api.live.state import stages_of
from router.request.request_log import RequestLog
from serving.errors import Unavailable
from tests.fakes.behaviour import Behaviour
from tests.router.admission.admission_rig import GUARD_S, AdmissionRig, request, settled
from tests.router.conftest import Run
from tests.router.failing import decodes
from tests.router.rig import PROMPT, Answer, Rig, request_of
from tests.waiting import until


async def test_what_fits_goes_in_at_once_and_the_rest_waits_its_turn() -> None:
    rig = AdmissionRig()
    for name in "abcd":
        await rig.arrive(name)
    assert rig.inside == ["a", "b"]
    assert (rig.admission.in_use.num_requests, rig.admission.num_queued) == (2, 2)
    await rig.finish("b")
    assert rig.inside == ["a", "b", "c"]
    await rig.finish("a")
    assert rig.inside == ["a", "b", "c", "d"]
    assert rig.admission.wait_s.count == 4
    await rig.close()


async def test_every_choice_counts() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=3, num_blocks=100, block_size=4))
    await rig.arrive("a", request(n=2))
    held = rig.admission.in_use
    assert (held.num_sequences, held.num_tokens, held.num_blocks, held.num_prefill_tokens) == (2, 20, 6, 6)
    await rig.arrive("b", request(n=2))
    assert rig.inside == ["a"]
    await rig.finish("a")
    assert rig.inside == ["a", "b"]
    await rig.close()


async def test_a_request_alone_is_never_too_big() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=1, num_blocks=1, num_batched_tokens=1), max_tokens=1)
    await rig.arrive("giant", request(1000, 1000, n=8))
    assert rig.inside == ["giant"]
    await rig.close()


async def test_a_prompt_is_work_until_its_first_token() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_batched_tokens=10), prefill_steps=1)
    tickets: list[Ticket] = []

    async def stay() -> None:
        async with rig.admission.admit(request(10)) as ticket:
            tickets.append(ticket)
            await asyncio.Event().wait()

    rig.tasks = {name: asyncio.create_task(stay()) for name in "ab"}
    await settled()
    assert len(tickets) == 1
    rig.admission.prefilled(tickets[0])
    prefill_s = tickets[0].prefill_s
    assert 0.0 < prefill_s < GUARD_S
    rig.admission.prefilled(tickets[0])
    assert tickets[0].prefill_s == prefill_s
    await settled()
    assert len(tickets) == 2
    await rig.close()


async def test_prompts_past_their_ttft_keep_no_other_from_being_admitted() -> None:
    """Where instances compute them last."""
    capacity = Capacity(num_instances=1, num_batched_tokens=10)
    rig = AdmissionRig(capacity, prefill_steps=1, ttft_s=0.2)
    for name in "ab":
        await rig.arrive(name, request(10))
    await asyncio.sleep(0.4)
    assert rig.inside == ["a"]
    rig.capacity = replace(capacity, puts_late_last=True)
    await until(lambda: rig.inside == ["a", "b"])
    await rig.finish("a")
    await rig.close()


async def test_room_that_an_instance_brings_is_used() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=1))
    for name in "abc":
        await rig.arrive(name)
    assert rig.inside == ["a"]
    rig.capacity = Capacity(num_instances=2, num_sequences=2)
    await until(lambda: rig.inside == ["a", "b"])
    await rig.close()


async def test_room_that_an_instance_takes_along_is_missed() -> None:
    rig = AdmissionRig(Capacity(num_instances=2, num_sequences=2))
    await rig.arrive("a")
    await rig.arrive("b")
    rig.capacity = Capacity(num_instances=1, num_sequences=1)
    await asyncio.sleep(0.05)
    await rig.arrive("c")
    await rig.finish("a")
    assert rig.inside == ["a", "b"]
    await rig.finish("b")
    assert rig.inside == ["a", "b", "c"]
    await rig.close()


@pytest.mark.parametrize("has_own", [False, True])
async def test_a_burst_at_a_quiet_router_leaves_the_others_what_they_use(has_own: bool) -> None:
    """The pool is full of another router's requests; this one is asked nothing for a minute."""
    now_s = 0.0
    capacity = Capacity(num_instances=1, num_sequences=8, used_sequences=8)
    rig = AdmissionRig(capacity, num_routers=2, clock=lambda: now_s)
    if has_own:
        await rig.arrive("long")
    for _ in range(240):
        now_s += 0.25
        rig.admission.refresh()
    for number in range(8):
        await rig.arrive(str(number))
    assert rig.admission.in_use.num_sequences == 4, "its part"
    await rig.close()


# Fairness


async def test_a_tenant_below_its_share_does_not_wait_behind_a_flood() -> None:
    rig = AdmissionRig()
    for number in range(50):
        await rig.arrive(f"flood-{number}", request(tenant="flood"))
    await rig.arrive("calm", request(tenant="calm"))
    await rig.finish("flood-0")
    await rig.finish("flood-1")
    assert "calm" in rig.inside
    await rig.close()


async def test_a_tenant_at_its_bound_waits_while_others_go_in() -> None:
    rig = AdmissionRig(Capacity(num_instances=1, num_sequences=10), tenants={"one": TenantSettings(max_requests=1)})
    for name in ("one-a", "one-b"):
        await rig.arrive(name, request(tenant="one"))
    await rig.arrive("two", request(tenant="two"))
    assert rig.inside == ["one-a", "two"]
    await rig.finish("one-a")
    assert rig.inside == ["one-a", "two", "one-b"]
    await rig.close()


# Leaving


async def test_a_waiter_that_is_cancelled_leaves_the_queue_at_once() -> None:
    rig = AdmissionRig()
    for name in "abcd":
        await rig.arrive(name)
    await rig.cancel("c")
    assert (rig.admission.num_queued, rig.admission.num_rejected.total()) == (1, 0)
    await rig.finish("a")
    assert rig.inside == ["a", "b", "d"]
    await rig.close()


async def test_a_waiter_cancelled_in_the_moment_of_its_turn_gives_its_place_back() -> None:
    rig = AdmissionRig()
    for name in "abcd":
        await rig.arrive(name)
    rig._ends["a"].set()
    await asyncio.sleep(0)
    while rig.admission.queue.num_in_service != 2 or rig.admission.num_queued != 1:
        await asyncio.sleep(0)  # until c has been given a's ticket and has not run yet
    assert "c" not in rig.inside
    await rig.cancel("c")
    assert rig.inside == ["a", "b", "d"]
    await rig.close()


async def test_a_failure_inside_gives_everything_back() -> None:
    rig = AdmissionRig()
    with pytest.raises(RuntimeError):
        async with rig.admission.admit(request()):
            raise RuntimeError
    await rig.close()


async def test_without_an_instance_newcomers_are_admitted_and_waiting_requests_end_as_unavailable() -> None:
    rig = AdmissionRig(queue_timeout_s=0.3)
    for name in "abc":
        await rig.arrive(name)
    rig.capacity = Capacity()
    await asyncio.sleep(0.05)
    await rig.arrive("new")
    assert rig.inside == ["a", "b", "new"], "the error is decided where an instance is picked"
    with pytest.raises(Unavailable):
        async with asyncio.timeout(GUARD_S):
            await rig.tasks["c"]
    await rig.close()


async def test_real_lengths_decide_how_many_fit() -> None:
    capacity = Capacity(num_instances=1, num_blocks=100, block_size=10)
    rig = AdmissionRig(capacity, expected_tokens=990)
    for number in range(300):
        await rig.arrive(f"first-{number}", request(10, 4000), num_output_tokens=90)
        await rig.finish(f"first-{number}")
    for number in range(12):
        await rig.arrive(f"then-{number}", request(10, 4000))
    assert len(rig.inside) - 300 in (9, 10), "1000 tokens of room, about 100 a request, whatever it may generate"
    await rig.close()


@given(st.lists(st.tuples(st.sampled_from("cgxw"), st.integers(0, 30), st.integers(1, 3)), max_size=40))
@settings(max_examples=60)
def test_nothing_leaks_whatever_happens(happenings: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        rig = AdmissionRig(Capacity(num_instances=1, num_sequences=4), max_queued=6, queue_timeout_s=0.02)
        for number, (what, which, n) in enumerate(happenings):
            names = [name for name, task in rig.tasks.items() if not task.done()]
            inside = [name for name in names if name in rig.inside]
            if what == "c":
                wanted = request(n=n, tenant=f"tenant-{which % 3}", priority=which % 2)
                await rig.arrive(str(number), wanted, num_output_tokens=which)
            elif what == "g" and inside:
                await rig.finish(inside[which % len(inside)])
            elif what == "x" and names:
                await rig.cancel(names[which % len(names)])
            elif what == "w" and not which % 4:
                await asyncio.sleep(0.03)
            held = rig.admission.in_use
            assert held.num_sequences <= 4
            assert held.num_requests == len([name for name in rig.inside if not rig.tasks[name].done()])
        await rig.close()

    asyncio.run(run())


# Streams of a tenant with more than its share pause for another tenant


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
        assert rig.app.safeguards.outliers["decode"].ejected_s(key) is None


async def test_a_paused_stream_goes_on_where_a_slot_is_free(run: Run) -> None:
    decode = decodes(*(Behaviour(slots=1, token_s=0.05) for _ in range(2)))
    async with run(prefill=0, decode=decode, admission=TENANTS) as rig:
        paused = asyncio.create_task(read(ask(rig, "greedy")))
        await until_all_stream(rig, 1)
        other = ask(rig, "greedy", MORE, max_tokens=1000)
        await until_all_stream(rig, 2)
        modest = asyncio.create_task(read(ask(rig, "modest", max_tokens=1000)))
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


async def begun(call: grpc.aio.UnaryStreamCall[Any, Any]) -> asyncio.Task[Answer]:
    """The whole answer of a stream whose first token has come."""
    responses = aiter(call)
    first = await anext(responses)

    async def whole() -> Answer:
        return Answer([first, *[response async for response in responses]])

    return asyncio.create_task(whole())


async def one_paused(rig: Rig, num_tokens: int) -> list[asyncio.Task[Answer]]:
    """Three streams on two slots."""
    tenants = ("greedy", "greedy", "modest")
    streams = [await begun(ask(rig, tenant, max_tokens=num_tokens)) for tenant in tenants]
    assert rig.app.admission.num_paused
    return streams


async def test_a_paused_stream_ends_as_others_do_where_no_instance_is_left(run: Run) -> None:
    async with run(prefill=0, decode=decodes(two_slots()), admission=TENANTS, failover={"resume_wait_s": 0.2}) as rig:
        streams = await one_paused(rig, 1000)
        await rig.decode[0].kill()
        errors = await asyncio.gather(*streams, return_exceptions=True)
        assert [error.code().name for error in errors if isinstance(error, grpc.aio.AioRpcError)] == ["UNAVAILABLE"] * 3


async def test_a_paused_stream_goes_on_at_the_successor_of_the_last_instance(run: Run) -> None:
    async with run(prefill=0, decode=decodes(two_slots()), admission=TENANTS, failover={"resume_wait_s": 60.0}) as rig:
        streams = await one_paused(rig, 400)
        await rig.decode[0].kill()
        await until(lambda: rig.app.admission.num_queued == 0)
        rig.decode[0].behaviour.token_s = 0.0
        await rig.decode[0].restart()
        assert all([(await stream).is_exactly(400) for stream in streams])


async def test_one_tenant_alone_never_pauses(run: Run) -> None:
    async with run(prefill=0, decode=decodes(two_slots(0.005)), admission={**TENANTS, "tenant_key": ""}) as rig:
        answers = await asyncio.gather(*(read(ask(rig, f"tenant-{i}", max_tokens=12)) for i in range(6)))
        assert all(answer.is_exactly(12) for answer in answers)
        assert rig.app.admission.num_paused == 0
