"""The last instances of a pool: one left, none left, all draining. Each state has an answer, and the answer a hint.

Fakes behind a real router: what is tested is what the router says and how soon (docs/operations.md has the table).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.request.validation import ServedModel
from tandem.client.errors import from_rpc
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.model_folder import write_model_folder
from tests.router.rig import PROMPT, SHORT, Answer, Rig, running
from tests.waiting import Stopwatch
from tests.waiting import until as wait_until

Run = Callable[..., AbstractAsyncContextManager[Rig]]
SERVICE = "tandem.v1.GenerationService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WITHIN_S = 2.0
"""The promise: so soon the router reports that no instance is available."""
TOKEN_S = 0.02
HANG_S = 30.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    return partial(running, ServedModel.from_folder(folder, "fake"), folder)


def fakes(role: Any, count: int, **behaviour: Any) -> list[FakeInstance]:
    return [FakeInstance(role, f"{role}-{i}", behaviour=Behaviour(**behaviour)) for i in range(count)]


@asynccontextmanager
async def health_of(rig: Rig) -> AsyncIterator[Callable[[int], Any]]:
    """Follows the router's health: a function that waits for a status and returns how long that took, in seconds."""
    call = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))

    async def until(status: int) -> float:
        watch = Stopwatch()
        async with asyncio.timeout(HANG_S):
            while (await call.read()).status != status:
                pass
        return watch.s

    try:
        yield until
    finally:
        call.cancel()


async def rejected(rig: Rig, within_s: float = WITHIN_S, **fields: Any) -> grpc.aio.AioRpcError:
    """A new request: answered UNAVAILABLE in time, with a hint in both forms when to try again."""
    watch = Stopwatch()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await rig.generate(**fields)
    assert watch.s < within_s
    assert_unavailable_with_hint(raised.value)
    return raised.value


def assert_unavailable_with_hint(error: grpc.aio.AioRpcError) -> None:
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error.details()
    pushbacks = [value for key, value in error.trailing_metadata() or () if key == "grpc-retry-pushback-ms"]
    assert len(pushbacks) == 1
    assert int(pushbacks[0]) > 0
    assert from_rpc(error, "").retry_after_s == int(pushbacks[0]) / 1000


async def begun(rig: Rig, count: int, **fields: Any) -> list[asyncio.Task[Answer]]:
    """Streams of which each has sent a token."""
    first_tokens: list[asyncio.Event] = []

    async def one(first_token: asyncio.Event) -> Answer:
        call, answer = rig.call(timeout=HANG_S, **fields), Answer()
        async for response in call:
            first_token.set()
            answer.responses.append(response)
        answer.trailers = {str(key): str(value) for key, value in await call.trailing_metadata() or ()}
        return answer

    tasks = []
    for _ in range(count):
        first_tokens.append(asyncio.Event())
        tasks.append(asyncio.create_task(one(first_tokens[-1])))
    async with asyncio.timeout(HANG_S):
        for first_token in first_tokens:
            await first_token.wait()
    return tasks


# One decode instance left


async def test_the_one_that_is_left_takes_over_every_stream(run: Run) -> None:
    async with run(prefill=1, decode=fakes("decode", 2, token_s=TOKEN_S)) as rig, health_of(rig) as until:
        await until(SERVING)
        streams = await begun(rig, 10, max_tokens=40)
        num_lost = rig.decode[0].num_open_calls
        assert num_lost > 0, "nothing ran where the fault is to be"
        await rig.decode[0].kill()
        assert all(answer.is_exactly(40) for answer in await asyncio.gather(*streams))
        moved = [record.detail.request for record in rig.decode[1].recorded("decode")]
        assert sum(bool(request.emitted_token_ids) for request in moved) >= num_lost
        assert (await rig.generate()).is_exactly(12)
        await rig.until_router_is_idle()


# No decode instance left


async def test_with_the_last_decode_instance_dead_streams_wait_a_while_and_new_requests_do_not(run: Run) -> None:
    wait_s = 5.0
    decode = fakes("decode", 1, token_s=TOKEN_S)
    async with (
        run(prefill=1, decode=decode, failover={"resume_wait_s": wait_s}) as rig,
        health_of(rig) as until,
    ):
        await until(SERVING)
        streams = await begun(rig, 3, max_tokens=200)
        await decode[0].kill()
        killed_s, watch = time.monotonic(), Stopwatch()
        # STEP it says so at once, and new requests do not wait
        assert await until(NOT_SERVING) < WITHIN_S
        for prompt in (PROMPT, SHORT):
            await rejected(rig, prompt=prompt)
        assert not any(stream.done() for stream in streams)
        # STEP streams that have begun wait for a successor, but not for ever
        ended = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - killed_s >= wait_s
        assert watch.s < wait_s + WITHIN_S
        for error in ended:
            assert isinstance(error, grpc.aio.AioRpcError)
            assert_unavailable_with_hint(error)
        # STEP one comes back
        await decode[0].restart()
        assert await until(SERVING) < WITHIN_S
        assert (await rig.generate()).is_exactly(12)


async def test_a_successor_that_comes_in_time_goes_on_with_the_streams(run: Run) -> None:
    decode = fakes("decode", 1, token_s=TOKEN_S)
    async with (
        run(prefill=1, decode=decode, failover={"resume_wait_s": 15.0}) as rig,
        health_of(rig) as until,
    ):
        await until(SERVING)
        streams = await begun(rig, 3, max_tokens=40)
        await decode[0].kill()
        await until(NOT_SERVING)
        await decode[0].restart()
        assert await until(SERVING) < WITHIN_S
        assert all(answer.is_exactly(40) for answer in await asyncio.gather(*streams))


async def test_a_frozen_last_decode_instance_is_noticed_within_its_beat_timeout(run: Run) -> None:
    """Its machine may be held up: new requests wait for it, until it has been silent for `resume_wait_s`."""
    decode = fakes("decode", 1, token_s=TOKEN_S)
    pools, failover = {"beat_timeout_s": 0.5}, {"resume_wait_s": 3.0}
    async with run(prefill=1, decode=decode, pools=pools, failover=failover) as rig, health_of(rig) as until:
        await until(SERVING)
        decode[0].freeze()
        assert await until(NOT_SERVING) < WITHIN_S
        await rejected(rig, HANG_S)
        await rejected(rig)  # at once
        decode[0].thaw()
        await until(SERVING)
        assert (await rig.generate()).is_exactly(12)


@pytest.mark.parametrize("frozen", ["decode", "prefill"])
async def test_a_new_request_is_served_when_the_frozen_last_instance_goes_on(run: Run, frozen: str) -> None:
    settings: dict[str, Any] = {
        "disaggregation": {"mode": "always"},
        "pools": {"beat_timeout_s": 0.5},
        "failover": {"resume_wait_s": 20.0},
    }
    async with run(prefill=1, decode=1, **settings) as rig, health_of(rig) as until:
        await until(SERVING)
        [fake] = rig.decode if frozen == "decode" else rig.prefill
        fake.freeze()
        await until(NOT_SERVING)
        asking = asyncio.create_task(rig.generate())
        while not rig.app.admission.in_use.num_requests:
            assert not asking.done()
            await asyncio.sleep(0.01)
        fake.thaw()
        assert (await asking).is_exactly(12)


# No prefill instance left


async def test_in_auto_decode_serves_alone_and_says_why(run: Run) -> None:
    async with run(prefill=1, decode=1) as rig, health_of(rig) as until:
        await until(SERVING)
        assert (await rig.generate()).trailers["tandem-disaggregated"] == "yes"
        await rig.prefill[0].kill()
        await rig.until_ready(num_prefill=0)
        answer = await rig.generate()
        assert answer.is_exactly(12)
        assert answer.trailers["tandem-disaggregated"] == "no"
        assert answer.trailers["tandem-reason"] == "no prefill instance is available"
        check = health_pb2.HealthCheckRequest(service=SERVICE)
        assert (await health_pb2_grpc.HealthStub(rig.channel).Check(check)).status == SERVING


async def test_in_auto_a_prompt_in_the_works_is_computed_by_decode(run: Run) -> None:
    prefill = fakes("prefill", 1, prefill_s=60.0)
    async with run(prefill=prefill, decode=1) as rig:
        asking = asyncio.create_task(rig.generate())
        await prefill[0].until("prefill")
        await prefill[0].kill()
        watch = Stopwatch()
        assert (await asking).is_exactly(12)
        assert watch.s < WITHIN_S


async def test_in_always_it_is_unavailable_at_once_and_streams_that_run_finish(run: Run) -> None:
    decode = fakes("decode", 1, token_s=TOKEN_S)
    always = {"mode": "always"}
    async with run(prefill=1, decode=decode, disaggregation=always) as rig, health_of(rig) as until:
        await until(SERVING)
        streams = await begun(rig, 2, max_tokens=60)
        await decode[0].until("token", 6)  # both have been handed over
        await rig.prefill[0].kill()
        assert await until(NOT_SERVING) < WITHIN_S
        assert "prefill" in ((await rejected(rig)).details() or "")
        assert all(answer.is_exactly(60) for answer in await asyncio.gather(*streams))
        await rig.prefill[0].restart()
        assert await until(SERVING) < WITHIN_S
        assert (await rig.generate()).is_exactly(12)


async def test_in_always_a_prompt_in_the_works_is_unavailable_at_once(run: Run) -> None:
    prefill = fakes("prefill", 1, prefill_s=60.0)
    async with run(prefill=prefill, decode=1, disaggregation={"mode": "always"}) as rig:
        asking = asyncio.create_task(rejected(rig, HANG_S))
        await prefill[0].until("prefill")
        await prefill[0].kill()
        watch = Stopwatch()
        await asking
        assert watch.s < WITHIN_S


async def test_in_always_a_stream_whose_decode_dies_too_goes_on_without_prefill(run: Run) -> None:
    decode = fakes("decode", 2, token_s=TOKEN_S)
    decode[1].behaviour.num_running = 50
    async with run(prefill=1, decode=decode, disaggregation={"mode": "always"}) as rig:
        [stream] = await begun(rig, 1, max_tokens=40)
        await decode[0].until("token", 3)
        await rig.prefill[0].kill()
        await decode[0].kill()
        assert (await stream).is_exactly(40)


# All draining


@pytest.mark.parametrize("roles", [("decode",), ("prefill", "decode")])
async def test_with_all_draining_what_runs_finishes_and_nothing_is_begun(run: Run, roles: tuple[str, ...]) -> None:
    decode = fakes("decode", 2, token_s=TOKEN_S)
    async with run(prefill=1, decode=decode) as rig, health_of(rig) as until:
        await until(SERVING)
        streams = await begun(rig, 4, max_tokens=60)
        leaving = [fake for fake in (*rig.prefill, *rig.decode) if fake.role in roles]
        for fake in leaving:
            fake.behaviour.draining = True
        assert await until(NOT_SERVING) < WITHIN_S
        await rejected(rig)
        # STEP the instances request that their streams move, but no other instance is left
        for fake in leaving:
            fake.behaviour.moving_out = True
        assert all(answer.is_exactly(60) for answer in await asyncio.gather(*streams))
        assert not any(fake.recorded("decode cancelled") for fake in decode)
        # STEP the successors come
        for fake in leaving:
            fake.behaviour.draining = fake.behaviour.moving_out = False
        await until(SERVING)
        assert (await rig.generate()).is_exactly(12)


async def test_a_draining_router_reports_it_first_then_rejects_with_a_hint_and_finishes_what_runs(run: Run) -> None:
    decode = fakes("decode", 1, token_s=TOKEN_S)
    server = {"drain_accept_s": 4.0, "drain_grace_s": 20.0}
    async with run(prefill=1, decode=decode, server=server) as rig, health_of(rig) as until:
        await until(SERVING)
        streams = await begun(rig, 2, max_tokens=300)
        draining = asyncio.create_task(rig.app.drain())
        assert await until(NOT_SERVING) < WITHIN_S
        assert (await rig.generate(max_tokens=2)).is_exactly(2), "a client that does not know yet is served"
        await wait_until(lambda: rig.app._server.calls.draining)
        await rejected(rig)
        assert all(answer.is_exactly(300) for answer in await asyncio.gather(*streams))
        assert await draining is True


async def test_a_router_whose_grace_is_over_cuts_off_with_a_hint_and_frees_everything(run: Run) -> None:
    decode = fakes("decode", 1, token_s=TOKEN_S)
    async with run(prefill=1, decode=decode, server={"drain_grace_s": 0.2}) as rig:
        streams = await begun(rig, 2, max_tokens=2000)
        assert await rig.app.drain() is False
        for error in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(error, grpc.aio.AioRpcError)
            assert_unavailable_with_hint(error)
        await rig.until_idle(5.0)
