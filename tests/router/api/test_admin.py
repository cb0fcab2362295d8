"""The operators' service: it shows what the router uses, resizes pools, and is not on the clients' port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from protos.tandem.v1 import common_pb2, instance_pb2, pools_pb2, pools_pb2_grpc
from router.pools.pool import Pool
from serving.settings import parse_address
from tests.fakes.instance import FakeInstance
from tests.router.conftest import Run
from tests.router.pools.owned import WIRE_ROLES, owned
from tests.router.pools.test_pools import beside
from tests.router.rig import PROMPT, SHORT, TIMEOUT_S, Rig, slow
from tests.waiting import until

ADMIN = {"admin_listen": "127.0.0.1:0"}


@asynccontextmanager
async def operator(run: Run, **rig_fields: Any) -> AsyncIterator[tuple[Rig, Any]]:
    """A rig and a stub of its admin listener."""
    async with run(router=ADMIN, **rig_fields) as rig:
        assert rig.app.admin_address is not None
        async with grpc.aio.insecure_channel(rig.app.admin_address) as channel:
            yield rig, pools_pb2_grpc.PoolsServiceStub(channel)


def asked(prompt: list[int], **fields: Any) -> pools_pb2.ExplainPickRequest:
    return pools_pb2.ExplainPickRequest(token_ids=common_pb2.TokenIds(ids=prompt), **fields)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_the_pools_are_listed_by_role_and_name_with_their_state_and_load(run: Run) -> None:
    decode = [FakeInstance("decode", name) for name in ("decode-b", "decode-a")]
    decode[0].behaviour.num_waiting, decode[0].behaviour.num_running = 2, 5
    decode[0].behaviour.num_prefilled_tokens, decode[0].behaviour.num_generated_tokens = 30, 7
    decode[0].behaviour.step_cost = cost = instance_pb2.StepCost(base_s=0.01, per_stream_s=0.001)
    async with operator(run, decode=decode) as (rig, stub):
        decode[1].behaviour.draining = True
        await until(lambda: rig.app.pools.decode.num_ready() == 1)
        listed = (await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)).instances
        assert [one.instance_id for one in listed] == ["prefill-0", "decode-a", "decode-b"]
        assert [one.out for one in listed] == ["", "draining", ""]
        assert (listed[2].load.num_waiting, listed[2].load.num_running) == (2, 5)
        assert (listed[2].load.num_prefilled_tokens, listed[2].load.num_generated_tokens) == (30, 7)
        assert listed[2].load.step_cost == cost
        assert listed[1].load.draining
        assert not listed[1].load.HasField("step_cost")
        assert listed[2].address == decode[0].address


async def test_an_instance_that_never_answered_is_listed_with_why(run: Run) -> None:
    dead = FakeInstance("decode", "dead")
    dead.freeze()
    async with operator(run, decode=[FakeInstance("decode"), dead], wait=False) as (rig, stub):
        await rig.until_ready(num_decode=1)
        listed = (await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)).instances
        (one,) = [one for one in listed if one.address == dead.address]
        assert (one.instance_id, one.HasField("load"), bool(one.out)) == ("", False, True)
        answer = await stub.ExplainPick(asked(SHORT), timeout=TIMEOUT_S)
        (candidate,) = [one for one in answer.decode if one.address == dead.address]
        assert candidate.rejected
        assert not candidate.picked
        dead.thaw()


async def test_requests_of_this_router_are_counted_where_they_run(run: Run) -> None:
    async with operator(run, prefill=0, decode=[FakeInstance("decode", behaviour=slow())]) as (rig, stub):
        call = rig.call(prompt=SHORT, max_tokens=200)
        await call.read()
        (one,) = (await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)).instances
        assert one.num_running_here == 1
        call.cancel()


async def test_an_explanation_predicts_the_next_request(run: Run) -> None:
    busy, idle = FakeInstance("decode", "busy"), FakeInstance("decode", "idle")
    busy.behaviour.num_waiting, busy.behaviour.num_running = 1, 3
    async with operator(run, decode=[busy, idle]) as (rig, stub):
        answer = await stub.ExplainPick(asked(PROMPT), timeout=TIMEOUT_S)
        assert [(one.instance_id, one.score, one.picked) for one in answer.decode] == [
            ("idle", 0, True),
            ("busy", 7, False),
        ]
        assert [(part.scorer, part.value, part.weight) for part in answer.decode[1].parts] == [("queue", 7, 1)]
        assert [(one.instance_id, one.picked) for one in answer.prefill] == [("prefill-0", True)]
        assert answer.disaggregated
        trailers = (await rig.generate()).trailers
        assert (trailers["tandem-decode"], trailers["tandem-reason"]) == ("idle", answer.reason)


async def test_an_explanation_is_of_an_answer_of_usual_length(run: Run) -> None:
    """One of a token or two would go where the prompt is computed first, however slow its decoding."""
    decode = [FakeInstance("decode", name) for name in ("quick-prompts", "quick-tokens")]
    decode[0].behaviour.step_cost = instance_pb2.StepCost(base_s=0.0195, per_token_s=1e-5)
    decode[1].behaviour.step_cost = instance_pb2.StepCost(base_s=0.001, per_token_s=0.005)
    for fake in decode:
        fake.behaviour.num_batched_tokens = 512
    async with operator(run, prefill=0, decode=decode, slo={"ttft_ms": 1000, "itl_ms": 20}) as (rig, stub):
        answer = await stub.ExplainPick(asked(PROMPT), timeout=TIMEOUT_S)
        picked = [one.instance_id for one in answer.decode if one.picked]
        trailers = (await rig.generate(prompt=PROMPT, max_tokens=200)).trailers
        assert picked == [trailers["tandem-decode"]] == ["quick-tokens"]


async def test_the_pick_for_an_adapter_is_explained(run: Run) -> None:
    plain, poet = FakeInstance("decode", "plain"), FakeInstance("decode", "poet")
    poet.behaviour.lora_adapters = ["poet"]
    async with operator(run, decode=[plain, poet]) as (_, stub):
        answer = await stub.ExplainPick(asked(PROMPT, lora="poet"), timeout=TIMEOUT_S)
        assert [(one.instance_id, one.rejected, one.picked) for one in answer.decode] == [
            ("poet", "", True),
            ("plain", "does not have the adapter poet", False),
        ]
        assert [one.rejected for one in answer.prefill] == ["does not have the adapter poet"]
        assert not answer.disaggregated
        error = await failure(stub.ExplainPick(asked(PROMPT, lora="clerk"), timeout=TIMEOUT_S))
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_an_ejected_instance_is_listed_and_explained_as_such(run: Run) -> None:
    decode = [FakeInstance("decode", name) for name in ("bad", "good")]
    async with operator(run, decode=decode, ejection={"failures": 1}) as (rig, stub):
        views = rig.app.pools.decode.views()
        (bad,) = [view.key for view in views if view.instance_id == "bad"]
        rig.app.safeguards.outliers["decode"].failed(bad, views)
        listed = (await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)).instances
        assert {one.instance_id: one.out.partition(" for")[0] for one in listed if one.load.sequence} == {
            "bad": "ejected",
            "good": "",
            "prefill-0": "",
        }
        answer = await stub.ExplainPick(asked(PROMPT), timeout=TIMEOUT_S)
        assert [(one.instance_id, one.rejected.partition(" for")[0], one.picked) for one in answer.decode] == [
            ("good", "", True),
            ("bad", "ejected", False),
        ]


async def test_an_ejected_instance_that_is_the_last_one_is_explained_as_it_is_used(run: Run) -> None:
    decode = [FakeInstance("decode", name) for name in ("bad", "good")]
    async with operator(run, decode=decode, ejection={"failures": 1, "ejection_s": 1000.0}) as (rig, stub):
        views = rig.app.pools.decode.views()
        (bad,) = [view.key for view in views if view.instance_id == "bad"]
        rig.app.safeguards.outliers["decode"].failed(bad, views)
        assert rig.app.safeguards.outliers["decode"].ejected_s(bad) is not None
        await decode[1].kill()
        await until(lambda: rig.app.pools.decode.num_ready() == 1)
        answer = await stub.ExplainPick(asked(PROMPT), timeout=TIMEOUT_S)
        assert [(one.instance_id, one.picked) for one in answer.decode] == [("bad", True), ("good", False)]
        trailers = (await rig.generate()).trailers
        assert (trailers["tandem-decode"], trailers["tandem-reason"]) == ("bad", answer.reason)


async def test_an_explanation_names_rejected_instances_and_why(run: Run) -> None:
    other = FakeInstance("prefill", "other", identity={"fingerprint": "f1"})
    leaving = FakeInstance("decode", "leaving")
    async with operator(run, prefill=[other], decode=[FakeInstance("decode"), leaving]) as (rig, stub):
        leaving.behaviour.draining = True
        await until(lambda: rig.app.pools.decode.num_ready() == 1)
        answer = await stub.ExplainPick(asked(PROMPT), timeout=TIMEOUT_S)
        assert {one.instance_id: one.rejected for one in [*answer.decode, *answer.prefill]} == {
            "decode": "",
            "leaving": "draining",
            "other": "fingerprint is f1, not f0",
        }
        assert not answer.disaggregated
        assert "no prefill instance" in answer.reason


async def test_an_explanation_names_the_pairs_and_what_has_no_partner(run: Run) -> None:
    decode = [FakeInstance("decode", "alone", identity={"fingerprint": "f1"}), FakeInstance("decode", "paired")]
    decode[1].behaviour.num_running = 3
    async with operator(run, prefill=2, decode=decode, disaggregation={"mode": "always"}) as (_, stub):
        answer = await stub.ExplainPick(asked(PROMPT), timeout=TIMEOUT_S)
        assert [(one.instance_id, one.picked, [*one.partners]) for one in answer.decode] == [
            ("paired", True, ["prefill-0", "prefill-1"]),
            ("alone", False, []),
        ]
        assert answer.decode[1].rejected.startswith("no prefill instance pairs with it (prefill-")
        assert answer.decode[1].rejected.endswith(": fingerprint is f0, not f1)")


async def test_a_request_that_cannot_be_served_is_explained_too(run: Run) -> None:
    async with operator(run, prefill=0, disaggregation={"mode": "always"}) as (_, stub):
        answer = await stub.ExplainPick(asked(PROMPT), timeout=TIMEOUT_S)
        assert not answer.HasField("disaggregated")
        assert "no prefill instance" in answer.reason
        assert [one.picked for one in answer.decode] == [True]


async def test_an_explanation_changes_nothing(run: Run) -> None:
    async with operator(run, decode=3, picking={"decode_scorers": "queue=1,session=9,prefix=9"}) as (rig, stub):
        for _ in range(5):
            await stub.ExplainPick(asked(PROMPT, session="s"), timeout=TIMEOUT_S)
        assert rig.app.affinity.sessions.instance("s", "decode") is None
        assert len(rig.app.affinity.index) == 0
        assert not any(fake.records for fake in [*rig.prefill, *rig.decode])


async def test_a_session_and_a_cached_prompt_are_seen_in_the_scores(run: Run) -> None:
    async with operator(run, decode=2, picking={"decode_scorers": "queue=1,session=2,prefix=3"}) as (rig, stub):
        ran = (await rig.generate(session="s")).trailers["tandem-decode"]
        await rig.until_idle()
        answer = await stub.ExplainPick(asked(PROMPT, session="s"), timeout=TIMEOUT_S)
        parts = {one.instance_id: {part.scorer: part.value for part in one.parts} for one in answer.decode}
        other = next(name for name in parts if name != ran)
        assert parts[ran]["session"] == 0
        assert parts[ran]["prefix"] < 0.1
        assert (parts[other]["session"], parts[other]["prefix"]) == (1, 1)


@pytest.mark.parametrize(
    ("request_", "code", "hint"),
    [
        (pools_pb2.ExplainPickRequest(text="a", token_ids=common_pb2.TokenIds(ids=[1])), "INVALID_ARGUMENT", "text"),
        (asked([10**9]), "INVALID_ARGUMENT", "token"),
        (asked([1] * 5000), "INVALID_ARGUMENT", "4096"),
    ],
)
async def test_an_invalid_prompt_is_rejected_as_by_generate(
    run: Run, request_: pools_pb2.ExplainPickRequest, code: str, hint: str
) -> None:
    async with operator(run) as (_, stub):
        error = await failure(stub.ExplainPick(request_, timeout=TIMEOUT_S))
        assert error.code().name == code
        assert hint in (error.details() or "")


async def test_a_drain_reaches_the_named_instance_alone(run: Run) -> None:
    async with operator(run, decode=2) as (rig, stub):
        request = pools_pb2.DrainInstanceRequest(instance="decode-1")
        answer = await stub.DrainInstance(request, timeout=TIMEOUT_S)
        assert (answer.instance_id, answer.num_unfinished) == ("decode-1", 0)
        assert [fake.behaviour.draining for fake in rig.decode] == [False, True]
        by_address = pools_pb2.DrainInstanceRequest(instance=rig.prefill[0].address, grace_s=1)
        assert (await stub.DrainInstance(by_address, timeout=TIMEOUT_S)).instance_id == "prefill-0"


@asynccontextmanager
async def at_two_addresses(run: Run) -> AsyncIterator[tuple[Pool, Any]]:
    """A decode pool of one instance that is ready at two addresses, and a stub of its router's PoolsService."""
    async with run(router=ADMIN, prefill=0) as rig:
        address = rig.decode[0].address
        async with (
            beside(rig, decode=f"{address},localhost:{parse_address(address)[1]}") as both,
            grpc.aio.insecure_channel(both.app.admin_address or "") as channel,
        ):
            pool = both.app.pools.decode
            await until(lambda: [one.state for one in pool.instances] == ["ready", "ready"])
            yield pool, pools_pb2_grpc.PoolsServiceStub(channel)


async def test_an_instance_at_two_addresses_is_listed_once_and_found_by_either(run: Run) -> None:
    """`tandem pools resize` compares the number of instances that are listed with that of those that are ready."""
    async with at_two_addresses(run) as (pool, stub):
        listed = await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        explained = await stub.ExplainPick(asked(SHORT), timeout=TIMEOUT_S)
        assert [one.instance_id for one in listed.instances] == ["decode-0"]
        assert [one.instance_id for one in explained.decode] == ["decode-0"]
        assert [one.num_ready for one in listed.pools] == [0, 1]
        for instance in pool.instances:
            request = pools_pb2.DrainInstanceRequest(instance=instance.address)
            assert (await stub.DrainInstance(request, timeout=TIMEOUT_S)).instance_id == "decode-0"


async def test_a_drain_by_name_calls_the_address_that_answers(run: Run) -> None:
    async with (
        at_two_addresses(run) as (pool, stub),
        grpc.aio.insecure_channel("127.0.0.1:1") as broken,  # nothing listens there
    ):
        lost = pool.instances[0]
        lost._lose("its connection has broken", "lost", is_silence=False)
        lost.channel = broken
        request = pools_pb2.DrainInstanceRequest(instance="decode-0")
        assert (await stub.DrainInstance(request, timeout=TIMEOUT_S)).instance_id == "decode-0"


async def test_an_address_that_is_given_for_both_pools_is_listed_in_each_and_drains(run: Run) -> None:
    async with operator(run, prefill=0) as (rig, stub):
        address = rig.decode[0].address
        rig.app.pools.prefill._reconcile(frozenset({address}))
        await until(lambda: [one.state for one in rig.app.pools.prefill.instances] == ["foreign"])
        listed = await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        assert [(one.address, bool(one.out)) for one in listed.instances] == [(address, True), (address, False)]
        request = pools_pb2.DrainInstanceRequest(instance=address)
        assert (await stub.DrainInstance(request, timeout=TIMEOUT_S)).instance_id == "decode-0"


async def test_an_impossible_drain_is_rejected_with_a_reason(run: Run) -> None:
    twins = [FakeInstance("decode", "twin"), FakeInstance("decode", "twin")]
    twins[1]._num_starts = 1  # another epoch: two processes, not one at two addresses
    async with operator(run, decode=twins) as (rig, stub):

        async def rejected(name: str, grace_s: float = 0) -> tuple[str, str]:
            request = pools_pb2.DrainInstanceRequest(instance=name, grace_s=grace_s)
            error = await failure(stub.DrainInstance(request, timeout=TIMEOUT_S))
            return error.code().name, error.details() or ""

        code, text = await rejected("prefil-0")
        assert (code, "did you mean prefill-0?" in text) == ("NOT_FOUND", True)
        code, text = await rejected("twin")
        assert (code, twins[0].address in text) == ("FAILED_PRECONDITION", True)
        assert (await rejected(""))[0] == "INVALID_ARGUMENT"
        for grace_s in (-1.0, 3601.0, float("nan"), float("inf")):
            assert (await rejected("prefill-0", grace_s))[0] == "INVALID_ARGUMENT"
        await rig.prefill[0].kill()
        code, text = await rejected("prefill-0")
        assert (code, "prefill-0 does not answer" in text) == ("UNAVAILABLE", True)


async def test_the_operators_calls_are_not_on_the_clients_port(run: Run) -> None:
    async with operator(run) as (rig, _):
        stub = pools_pb2_grpc.PoolsServiceStub(rig.channel)
        error = await failure(stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_without_an_admin_address_the_service_is_absent(run: Run) -> None:
    async with run() as rig:
        assert rig.app.admin_address is None


# Resizing and watching


async def test_sizes_and_their_last_change_are_reported(run: Run) -> None:
    async with owned(run) as stack:
        prefill, decode = (await stack.listed()).pools
        assert [pool.role for pool in (prefill, decode)] == [WIRE_ROLES["prefill"], WIRE_ROLES["decode"]]
        assert (prefill.num_ready, prefill.size, decode.num_ready, decode.size) == (1, 1, 2, 2)
        assert not decode.HasField("last_change")
        assert not decode.HasField("autoscaler")
        # STEP: an operator resizes both
        changes = (await stack.resize(decode=4, prefill=0)).changes
        assert [(change.previous_size, change.size) for change in changes] == [(2, 4), (1, 0)], "in the order asked for"
        await stack.until_ready(prefill=0, decode=4)
        prefill, decode = (await stack.listed()).pools
        assert (prefill.num_ready, prefill.size, decode.num_ready, decode.size) == (0, 0, 4, 4)
        assert (decode.last_change.previous_size, decode.last_change.cause) == (2, "operator")
        assert 0 <= decode.last_change.age_s < TIMEOUT_S


async def test_the_autoscaler_reports_its_status(run: Run) -> None:
    autoscaler = {
        "enabled": True,
        "interval_s": 0.05,
        "prefill": {"min_size": 1, "max_size": 1},
        "decode": {"min_size": 2, "max_size": 3},
    }
    async with owned(run, autoscaler=autoscaler) as stack, asyncio.timeout(TIMEOUT_S):
        while not (status := (await stack.listed()).pools[1].autoscaler).leads:
            await asyncio.sleep(0.01)
        assert (status.min_size, status.max_size) == (2, 3)
        assert status.reason


@pytest.mark.parametrize(
    ("sizes", "hint"),
    [
        ([], "is empty"),
        ([("decode", 0)], "between 1 and 64"),
        ([("decode", 65)], "between 1 and 64"),
        ([("prefill", -1)], "between 0 and 64"),
        ([("decode", 3), ("decode", 3)], "names the decode pool twice"),
        ([("nobody", 3)], "ROLE_PREFILL, ROLE_DECODE"),
    ],
)
async def test_invalid_sizes_are_rejected(run: Run, sizes: list[tuple[str, int]], hint: str) -> None:
    async with owned(run) as stack:
        wanted = [
            pools_pb2.PoolSize(role=WIRE_ROLES.get(pool, instance_pb2.ROLE_UNSPECIFIED), size=size)
            for pool, size in sizes
        ]
        error = await failure(stack.stub.ResizePools(pools_pb2.ResizePoolsRequest(sizes=wanted), timeout=TIMEOUT_S))
        assert error.code().name == "INVALID_ARGUMENT"
        assert hint in (error.details() or "")
        assert stack.decode_names() == ["decode-0", "decode-1"]


async def test_a_router_without_an_owner_explains_who_can_resize(run: Run) -> None:
    async with operator(run) as (_, stub):
        wanted = [pools_pb2.PoolSize(role=WIRE_ROLES["decode"], size=2)]
        error = await failure(stub.ResizePools(pools_pb2.ResizePoolsRequest(sizes=wanted), timeout=TIMEOUT_S))
        assert error.code().name == "FAILED_PRECONDITION"
        assert "this router cannot resize its pools" in (error.details() or "")
        assert "--stack" in (error.details() or "")
        listed = await stub.ListPools(pools_pb2.ListPoolsRequest(), timeout=TIMEOUT_S)
        assert [pool.num_ready for pool in listed.pools] == [1, 1]
        assert not any(pool.HasField("size") for pool in listed.pools)


async def test_a_watch_reports_instances_that_come_and_go(run: Run) -> None:
    async with owned(run, num_decode=1) as stack, asyncio.timeout(TIMEOUT_S):
        watch = stack.stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=0.1))

        async def seen(count: int) -> None:
            async for answer in watch:
                if sum(not one.out for one in answer.pools.instances if one.role == WIRE_ROLES["decode"]) == count:
                    return

        await seen(1)
        await stack.resize(decode=3)
        await seen(3)
        await stack.resize(decode=1)
        await seen(1)
        watch.cancel()


@pytest.mark.parametrize("interval_s", [-1.0, 0.05, 61.0, float("nan"), float("inf")])
async def test_an_invalid_interval_is_rejected(run: Run, interval_s: float) -> None:
    async with operator(run) as (_, stub):
        error = await failure(stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=interval_s)).read())
        assert error.code().name == "INVALID_ARGUMENT"
        assert "0.1..60 seconds" in (error.details() or "")


async def test_a_watch_ends_with_the_router_and_not_as_a_failure(run: Run) -> None:
    async with operator(run) as (rig, stub), asyncio.timeout(TIMEOUT_S):
        watch = stub.WatchPools(pools_pb2.WatchPoolsRequest(interval_s=60))
        await watch.read()
        draining = asyncio.ensure_future(rig.app.drain())
        assert await watch.read() is grpc.aio.EOF
        assert (await watch.code()) is grpc.StatusCode.OK
        await draining
