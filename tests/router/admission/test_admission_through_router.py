"""Admission as clients see it: a waiting call ends like a running one, and the gateway names the tenant."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import common_pb2, generation_pb2, instance_pb2
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.rig import Rig, request_of, slow
from tests.waiting import until

ONE: dict[str, Any] = {"max_requests": 1, "queue_timeout_s": 20.0, "tenant_key": "x-tenant"}
SHORT_QUEUE = {**ONE, "max_queued": 1}


async def until_queued(rig: Rig, num: int) -> None:
    await until(lambda: rig.app.admission.num_queued == num)


class OneStream:
    """A decode instance that emits the first token of one stream, and the others when `finish` is called."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(1)
        self.instance = FakeInstance("decode", behaviour=slow(permits=self._permits))

    def finish(self) -> None:
        self.instance.behaviour.permits = None
        self._permits.release()


async def test_a_waiting_request_is_served_when_its_turn_comes(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.01))], admission=ONE) as rig:
        answers = await asyncio.gather(*(rig.generate() for _ in range(4)))
        assert all(answer.is_exactly(12) for answer in answers)
        assert rig.app.admission.wait_s.count == 4


async def test_a_prompt_that_has_been_computed_is_no_work_ahead_of_others(run: Run) -> None:
    one = OneStream()
    async with run(decode=[one.instance], admission=ONE) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=50))
        await one.instance.until("token")
        await until(lambda: rig.app.admission.in_use.num_prefill_tokens == 0)
        assert rig.app.admission.in_use.num_requests == 1
        one.finish()
        assert (await running).is_exactly(50)


async def test_a_prompt_past_its_ttft_is_no_work_ahead_of_others(run: Run) -> None:
    cost = instance_pb2.StepCost(base_s=0.0035, per_stream_s=0.0006, per_token_s=1 / 4500)
    never = FakeInstance("decode", behaviour=slow(1000.0, num_batched_tokens=1, step_cost=cost))
    async with run(prefill=0, decode=[never], admission={"prefill_steps": 1}, slo={"ttft_ms": 200}) as rig:
        calls = [rig.call() for _ in range(2)]
        await until(lambda: rig.app.admission.in_use.num_requests == 2)
        for call in calls:
            call.cancel()


async def test_a_prompt_that_no_instance_begins_in_time_is_rejected(run: Run) -> None:
    """No second instance is asked, and no stream that has begun is too late."""
    permits = [asyncio.Semaphore(2), asyncio.Semaphore(2)]
    pool = [FakeInstance("decode", str(n), behaviour=slow(slots=1, permits=one)) for n, one in enumerate(permits)]
    admission = {"queue_timeout_s": 0.3, "sequence_fraction": 2.0}
    async with run(prefill=0, decode=pool, slo={"ttft_ms": 200}, admission=admission) as rig:
        running = [asyncio.create_task(rig.generate(max_tokens=9)) for _ in pool]
        for instance in pool:
            await instance.until("token", 2)
        with pytest.raises(grpc.aio.AioRpcError, match="full: no instance has begun the prompt in time") as raised:
            await rig.generate()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(raised.value.trailing_metadata()["grpc-retry-pushback-ms"]) > 0
        assert rig.app.admission.num_rejected == {"late": 1}
        assert sum(len(instance.recorded("decode")) for instance in pool) == 3
        for _ in range(7):
            permits[0].release()
            permits[1].release()
        assert all(answer.is_exactly(9) for answer in await asyncio.gather(*running))


async def test_a_wait_for_admission_is_part_of_the_time_in_which_a_prompt_must_begin(run: Run) -> None:
    permits, waiting_s = asyncio.Semaphore(1), 0.5
    one = FakeInstance("decode", behaviour=slow(0.0, permits=permits))
    async with run(prefill=0, decode=[one], slo={"ttft_ms": 200}, admission=ONE) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=2))
        await one.until("token")
        waiting = asyncio.create_task(rig.generate(max_tokens=2))
        await until_queued(rig, 1)
        await asyncio.sleep(waiting_s)
        for _ in range(3):
            permits.release()
        await asyncio.gather(running, waiting)
        begin_s = one.recorded("decode")[1].detail.request.begin_s
        assert 0 < begin_s <= ONE["queue_timeout_s"] + 0.2 - waiting_s


async def test_a_wait_for_a_reservation_is_part_of_the_time_to_the_first_token(run: Run) -> None:
    waiting_s = 0.5
    pool = [FakeInstance("decode", behaviour=Behaviour(reserve_s=waiting_s))]
    slo = {"ttft_ms": 1000, "itl_ms": 50}
    async with run(decode=pool, slo=slo, admission=ONE, disaggregation={"mode": "always"}) as rig:
        assert (await rig.generate(max_tokens=4)).is_exactly(4)
        [reserving], [computing] = pool[0].recorded("decode"), rig.prefill[0].recorded("prefill")
        before, after = reserving.detail.request, computing.detail.request
        assert 0 < after.ttft_s <= 1.0 - waiting_s
        assert after.begin_s <= ONE["queue_timeout_s"] + 1.0 - waiting_s
        assert (after.itl_s, after.stream_epoch) == (before.itl_s, before.stream_epoch)


async def test_further_choices_of_an_answer_that_has_begun_are_never_too_late(run: Run) -> None:
    one = FakeInstance("decode", behaviour=slow(slots=1))
    async with run(prefill=0, decode=[one], slo={"ttft_ms": 50}, admission={"queue_timeout_s": 0.05}) as rig:
        answer = await rig.generate(n=2, max_tokens=30)
        assert all(answer.is_exactly(30, choice=choice) for choice in range(2))
        first, second = (record.detail.request for record in one.recorded("decode"))
        assert min(first.ttft_s, first.begin_s) > 0
        assert (second.ttft_s, second.begin_s) == (0, 0)


async def test_an_abort_ends_a_request_that_waits(run: Run) -> None:
    one = OneStream()
    async with run(decode=[one.instance], admission=ONE) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=50))
        await one.instance.until("token")
        waiting = asyncio.create_task(rig.generate(request_id="mine", n=2))
        await until_queued(rig, 1)
        answer = await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        assert answer.num_aborted == 1
        assert (await waiting).finish(1).reason == common_pb2.FINISH_REASON_ABORT
        assert rig.app.admission.num_queued == 0
        one.finish()
        assert (await running).is_exactly(50)


async def test_a_waiting_client_that_goes_leaves_the_queue_at_once(run: Run) -> None:
    one = OneStream()
    async with run(decode=[one.instance], admission=ONE) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=50))
        await one.instance.until("token")
        call = rig.call()
        await until_queued(rig, 1)
        call.cancel()
        await until_queued(rig, 0)
        assert not running.done()
        assert rig.app.admission.num_rejected.total() == 0
        one.finish()
        assert (await running).is_exactly(50)


async def test_a_waiting_requests_deadline_ends_it(run: Run) -> None:
    async with run(admission=ONE, disaggregation={"reserve_timeout_s": 20.0}) as rig:
        rig.decode[0].freeze()  # without a token nothing says how long the first one takes
        running = asyncio.create_task(rig.generate(max_tokens=60))
        await until(lambda: rig.app.admission.in_use.num_requests == 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(timeout=0.3)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_queued(rig, 0)
        rig.decode[0].thaw()
        assert (await running).is_exactly(60)


async def test_a_request_behind_a_long_stream_is_rejected_at_once(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.1))], admission=ONE) as rig:
        running = rig.call(max_tokens=1000)
        await rig.decode[0].until("token", 10)
        with pytest.raises(grpc.aio.AioRpcError, match="the wait would be") as raised:
            await rig.generate()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()


async def ask_as(rig: Rig, tenant: str, **fields: Any) -> None:
    async for _ in rig.stub.Generate(request_of(**fields), timeout=20, metadata=(("x-tenant", tenant),)):
        pass


async def test_tenants_have_queues_of_their_own(run: Run) -> None:
    one = OneStream()
    async with run(decode=[one.instance], admission=SHORT_QUEUE) as rig:
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(rig.generate(max_tokens=50))]
        await one.instance.until("token")
        for num, tenant in enumerate(("alice", "bob"), start=1):
            tasks.append(asyncio.create_task(ask_as(rig, tenant)))
            await until_queued(rig, num)
        with pytest.raises(grpc.aio.AioRpcError, match="full"):
            await ask_as(rig, "alice")
        one.finish()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(("key", "received"), [("x-tenant", 0), ("", 3)])
async def test_a_priority_orders_no_other_tenants_requests_at_the_instances(run: Run, key: str, received: int) -> None:
    async with run(admission={"tenant_key": key}) as rig:
        await ask_as(rig, "alice", priority=3)
        records = [*rig.prefill[0].recorded("prefill"), *rig.decode[0].recorded("decode")]
        assert [record.detail.request.priority for record in records] == [received] * 2


async def test_without_a_key_a_clients_own_header_makes_it_no_tenant(run: Run) -> None:
    one = OneStream()
    async with run(decode=[one.instance], admission={**SHORT_QUEUE, "tenant_key": ""}) as rig:
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(rig.generate(max_tokens=50))]
        await one.instance.until("token")
        tasks.append(asyncio.create_task(ask_as(rig, "alice")))
        await until_queued(rig, 1)
        with pytest.raises(grpc.aio.AioRpcError, match="full"):
            await ask_as(rig, "bob")
        one.finish()
        await asyncio.gather(*tasks)


async def test_what_is_no_tenants_name_is_a_wrong_argument(run: Run) -> None:
    async with run(admission=ONE) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await ask_as(rig, "not a name")
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "x-tenant" in (raised.value.details() or "")


async def test_the_limits_follow_the_load_of_other_routers_while_no_request_comes(run: Run) -> None:
    behaviour = Behaviour(slots=10)
    admission = {"num_routers": 2, "sequence_fraction": 1.0}
    async with run(decode=[FakeInstance("decode", behaviour=behaviour)], admission=admission) as rig:
        await until(lambda: rig.app.admission.limits.num_sequences == 10)
        behaviour.num_running = 3
        await until(lambda: rig.app.admission.limits.num_sequences == 7)
        behaviour.num_running = 10
        await until(lambda: rig.app.admission.limits.num_sequences == 5)


async def test_a_wait_that_ends_before_an_instance_is_back_counts_as_no_rejection_of_a_request_that_is_served(
    run: Run,
) -> None:
    async with run(prefill=0, admission={"instance_wait_s": 0.1}, failover={"resume_wait_s": 60.0}) as rig:
        rig.decode[0].behaviour.core_silence_s = 30.0
        await rig.until_ready(num_decode=0)
        asking = asyncio.create_task(rig.generate(max_tokens=6))
        await until(lambda: rig.app.admission.in_use.num_requests)
        rig.decode[0].behaviour.core_silence_s = 0.0
        assert (await asking).is_exactly(6)
        assert rig.app.admission.num_rejected.total() == 0


async def test_a_wait_for_an_instance_that_is_not_back_in_time_counts_as_one_rejection(run: Run) -> None:
    async with run(prefill=0, admission={"instance_wait_s": 0.1}, failover={"resume_wait_s": 0.1}) as rig:
        rig.decode[0].behaviour.core_silence_s = 30.0
        await rig.until_ready(num_decode=0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rig.generate(max_tokens=6)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert rig.app.admission.num_rejected == {"no_instance": 1}
