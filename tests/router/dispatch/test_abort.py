"""Requests that are ended from outside: cancelled, aborted, drained."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.sampling.params import SamplingParams
from engine.text.detokenizer import IncrementalDetokenizer, OutputProcessor
from engine.text.tokenizer import Tokenizer
from protos.tandem.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from router.dispatch import handler
from router.request.validation import ServedModel
from tests.fakes.behaviour import Behaviour
from tests.fakes.instance import FakeInstance
from tests.fakes.tokens import expected_ids
from tests.router.conftest import Run
from tests.router.failing import deaf_client
from tests.router.rig import PROMPT, SEED, Answer, Rig, request_of, slow
from tests.tcp import proxy
from tests.waiting import until


async def test_a_clients_cancel_in_decode_ends_everything(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow())]) as rig:
        call = rig.call(max_tokens=1000)
        await anext(aiter(call))
        await rig.decode[0].until("token", 3)
        call.cancel()
        await rig.until_idle()
        assert rig.decode[0].recorded("decode cancelled")


async def test_a_clients_cancel_in_prefill_ends_both_calls_and_releases(run: Run) -> None:
    async with run(prefill=[FakeInstance("prefill", behaviour=Behaviour(prefill_s=60))]) as rig:
        call = rig.call()
        await rig.prefill[0].until("prefill")
        call.cancel()
        await rig.until_idle()
        assert rig.prefill[0].recorded("prefill cancelled")
        assert rig.decode[0].recorded("decode cancelled")
        assert await rig.prefill[0].until("released by router")


async def test_a_clients_cancel_before_the_reservation_never_reaches_prefill(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=Behaviour(reserve_s=60))]) as rig:
        call = rig.call()
        await rig.decode[0].until("decode")
        call.cancel()
        await rig.until_idle()
        assert not rig.prefill[0].recorded("prefill")


async def test_a_lost_connection_is_a_cancel(run: Run) -> None:
    decode = FakeInstance("decode", behaviour=slow())
    async with (
        run(decode=[decode]) as rig,
        proxy(rig.app.address) as wire,
        grpc.aio.insecure_channel(wire.address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await anext(aiter(stub.Generate(request_of(max_tokens=1000))))
        wire.cut()
        await rig.until_idle()
        assert decode.recorded("decode cancelled")


async def test_many_cancels_at_any_moment_leave_nothing(run: Run) -> None:
    fakes = [FakeInstance("decode", f"decode-{i}", behaviour=slow(0.002, reserve_s=0.01)) for i in range(2)]
    async with run(prefill=[FakeInstance("prefill", behaviour=Behaviour(prefill_s=0.02))], decode=fakes) as rig:
        calls = [rig.call(max_tokens=50) for _ in range(40)]
        for i, call in enumerate(calls):
            await asyncio.sleep(0.004)
            calls[i // 2].cancel()
            call.cancel() if i % 3 == 0 else None
        for call in calls:
            call.cancel()
        await rig.until_idle()


@pytest.mark.parametrize("num_rounds", [2, pytest.param(8, marks=pytest.mark.slow)])
async def test_ends_of_several_choices_at_random_moments_leave_no_error_in_the_log(
    run: Run, caplog: pytest.LogCaptureFixture, num_rounds: int
) -> None:
    rng = random.Random(1)
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.0005))]) as rig:

        async def ended_early(timeout_s: float) -> None:
            call = rig.call(n=4, max_tokens=500, timeout=timeout_s)
            reading = asyncio.create_task(_read(call))
            await asyncio.wait({reading}, timeout=rng.uniform(0, 0.25))
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        for _ in range(num_rounds):
            await asyncio.gather(*(ended_early(60) for _ in range(10)))
            await asyncio.gather(*(ended_early(rng.uniform(0.01, 0.1)) for _ in range(10)))
        await rig.until_idle()
    gc.collect()  # asyncio logs a lost exception when its task is freed
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert "UNAVAILABLE" not in caplog.text  # a deadline that has passed counts against no instance


async def test_an_abort_ends_every_request_with_its_label(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow())]) as rig:
        same = [asyncio.create_task(rig.generate(request_id="same", max_tokens=1000)) for _ in range(3)]
        other = asyncio.create_task(rig.generate(request_id="other", max_tokens=30))
        await rig.decode[0].until("token", 8)
        aborted = await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["same", "unknown"]))
        assert aborted.num_aborted == 3
        for answer in await asyncio.gather(*same):
            finish = answer.finish()
            assert finish.reason == common_pb2.FINISH_REASON_ABORT
            assert finish.usage.completion_tokens == len(answer.ids())
            assert answer.is_exactly(len(answer.ids()))
        assert (await other).is_exactly(30)
        await rig.until_idle()


async def test_an_abort_ends_every_choice(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow())]) as rig:
        pending = asyncio.create_task(rig.generate(request_id="mine", n=3, max_tokens=1000))
        await rig.decode[0].until("token", 12)
        await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        answer = await pending
        assert [answer.finish(choice).reason for choice in range(3)] == [common_pb2.FINISH_REASON_ABORT] * 3
        await rig.until_idle()


class HoldingInstance(FakeInstance):
    """Holds back what may become a stop string, as real instances do."""

    def __init__(self, tokenizer: Tokenizer, behaviour: Behaviour) -> None:
        super().__init__("decode", behaviour=behaviour)
        self._tokenizer = tokenizer

    async def tokens(
        self, request: common_pb2.InstanceRequest, emitted: list[int], *, hand_over: bool
    ) -> AsyncIterator[common_pb2.TokenChunk]:
        params = SamplingParams(stop=tuple(request.sampling.stop), max_tokens=None)
        processor = OutputProcessor(self._tokenizer, params, prompt=request.prompt_token_ids)
        async for chunk in super().tokens(request, emitted, hand_over=hand_over):
            delta = processor.push(chunk.token_ids)
            chunk.text, chunk.text_offset = delta.text, delta.text_offset
            yield chunk


async def test_an_aborted_answer_has_the_text_of_all_its_tokens(run: Run, model: ServedModel) -> None:
    tokenizer, ids, permits = model.tokenizer, expected_ids(PROMPT, SEED, 12), asyncio.Semaphore(12)
    assert tokenizer is not None
    text = IncrementalDetokenizer(tokenizer, prompt=PROMPT)
    whole = text.push(ids) + text.finish()
    async with run(prefill=0, decode=[HoldingInstance(tokenizer, Behaviour(permits=permits))]) as rig:
        request, answer = request_of(max_tokens=1000, request_id="mine"), Answer()
        request.sampling.stop.append(f"{whole[3:]} and more")
        async for response in rig.call(request):
            answer.responses.append(response)
            if len(answer.ids()) == len(ids) and not response.tokens.HasField("finish"):
                assert len(answer.text()) <= 3, "the rest is held"
                await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        assert answer.finish().reason == common_pb2.FINISH_REASON_ABORT
        assert (answer.ids(), answer.text()) == (ids, whole)
        await rig.until_idle()


async def test_aborts_at_any_moment_of_a_fast_stream_keep_what_was_delivered(run: Run) -> None:
    async with run(decode=[FakeInstance("decode", behaviour=slow(0.0005))]) as rig:
        for moment in range(12):
            label = f"fast-{moment}"
            pending = asyncio.create_task(rig.generate(request_id=label, n=1 + 2 * (moment % 2), max_tokens=2000))
            await rig.decode[0].until("decode", moment + 1)
            await asyncio.sleep(0.01 * moment)
            while not (await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=[label]))).num_aborted:
                await asyncio.sleep(0.001)
            answer = await pending
            for choice in range(1 + 2 * (moment % 2)):
                assert answer.finish(choice).reason == common_pb2.FINISH_REASON_ABORT
                assert answer.is_exactly(answer.finish(choice).usage.completion_tokens, choice=choice)
            await rig.until_idle()


async def test_an_abort_frees_the_instances_of_a_client_that_does_not_read(run: Run) -> None:
    async with run(server={"write_timeout_s": 30}) as rig, deaf_client(rig) as call:
        await _stuck(rig.decode[0])
        assert rig.app.service.abort_registry.num_requests == 1
        await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["deaf"]))
        await rig.until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_an_abort_while_a_request_is_validated_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenising a long text takes a while, more where others wait for the same threads."""
    validating = asyncio.Event()

    async def long(*_: Any, **__: Any) -> None:
        validating.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(handler, "validated", long)
    async with run() as rig:
        asked = asyncio.create_task(rig.generate(request_id="mine"))
        await validating.wait()
        aborted = await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["mine"]))
        assert aborted.num_aborted == 1
        with pytest.raises(grpc.aio.AioRpcError, match="aborted before it was validated"):
            await asked


async def test_a_deadline_in_the_queue_counts_as_such(run: Run) -> None:
    async with run(
        prefill=0, decode=[FakeInstance("decode", behaviour=slow(60.0))], admission={"max_requests": 1}
    ) as rig:
        running = rig.call()
        await rig.decode[0].until("decode")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(timeout=0.5)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: rig.app.service.metrics.ended.total() == 1)
        assert rig.app.service.metrics.ended == {"deadline_exceeded": 1}
        running.cancel()


async def test_what_does_not_come_in_the_shared_stream_is_read_however_slow_the_client_is(run: Run) -> None:
    """Or the instance would take the router for a client that does not read, and end the call."""
    async with run(prefill=0) as rig:
        request = request_of(max_tokens=3500)
        request.sampling.prompt_logprobs = 0
        call = rig.call(request)
        await anext(aiter(call))
        await rig.decode[0].until("token", 3500)
        call.cancel()
        await rig.until_idle()


async def test_an_abort_of_nothing_is_no_error(run: Run) -> None:
    async with run() as rig:
        assert (await rig.stub.Abort(generation_pb2.AbortRequest(request_ids=["a", "b"]))).num_aborted == 0


async def test_a_drain_lets_running_requests_finish(run: Run) -> None:
    server = {"drain_accept_s": 0.0, "drain_grace_s": 20.0}
    async with run(decode=[FakeInstance("decode", behaviour=slow())], server=server) as rig:
        pending = asyncio.create_task(rig.generate(max_tokens=20))
        await rig.decode[0].until("token", 2)
        draining = asyncio.create_task(rig.app.drain())
        await asyncio.sleep(0.05)
        assert await _code(rig) is grpc.StatusCode.UNAVAILABLE
        assert (await pending).is_exactly(20)
        assert await draining


async def test_a_stop_releases_what_it_cuts_off(run: Run) -> None:
    async with run(prefill=[FakeInstance("prefill", behaviour=Behaviour(prefill_s=60))]) as rig:
        pending = asyncio.create_task(_code(rig))
        await rig.prefill[0].until("prefill")
        await rig.app.stop()
        assert await pending in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert rig.prefill[0].recorded("released by router")
        await rig.until_idle()
        assert rig.app.service.metrics.ended == {"unavailable": 1}


async def test_a_full_router_rejects_at_once_with_a_hint(run: Run) -> None:
    permits = asyncio.Semaphore(2)
    decode = FakeInstance("decode", behaviour=slow(permits=permits))
    async with run(decode=[decode], admission={"max_requests": 2, "max_queued": 0, "retry_after_s": 3}) as rig:
        running = [asyncio.create_task(rig.generate(max_tokens=20)) for _ in range(2)]
        await decode.until("decode", 2)
        await decode.until("token", 2)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate(timeout=10)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(tuple(raised.value.trailing_metadata() or ()))
        assert 3000 <= int(trailers["grpc-retry-pushback-ms"]) <= 4500
        for _ in range(2 * 20 + 12):
            permits.release()
        assert all(answer.is_exactly(20) for answer in await asyncio.gather(*running))
        assert (await rig.generate()).is_exactly(12)


async def test_the_tokens_in_flight_are_bounded_but_no_request_is_too_big_alone(run: Run) -> None:
    permits = asyncio.Semaphore(1)
    decode = FakeInstance("decode", behaviour=slow(permits=permits))
    async with run(decode=[decode], admission={"max_tokens": 50, "max_queued": 0}) as rig:
        running = asyncio.create_task(rig.generate(max_tokens=20))
        await decode.until("token", 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.generate()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in range(20):
            permits.release()
        assert (await running).is_exactly(20)


async def test_a_client_that_does_not_read_is_ended(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with run(server={"write_timeout_s": 0.3}) as rig, deaf_client(rig) as call:
        await rig.prefill[0].until("prefill")
        await until(lambda: not rig.app.admission.in_use.num_requests)
        await rig.until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in call:
                pass
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "client too slow" in str(raised.value.details())
        assert rig.app.service.metrics.ended == {"resource_exhausted": 1}
        (ended,) = (record for record in caplog.records if record.__dict__.get("event") == "failed")
        assert ended.__dict__["fields"]["error"] == "RESOURCE_EXHAUSTED: client too slow: a message waited 0.3 s"


async def _stuck(fake: FakeInstance) -> None:
    """Returns when the instance gets rid of no more tokens; one sample or two may be equal after a stall."""
    latest = [-1]
    async with asyncio.timeout(20):
        while latest != [len(fake.records)] * 3:
            latest = [*latest[-2:], len(fake.records)]
            await asyncio.sleep(0.5)


async def _read(call: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    async for _ in call:
        pass


async def _code(rig: Rig) -> grpc.StatusCode:
    try:
        await rig.generate()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
