"""How the interceptor handles abusive and failing calls."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import logging
import random
import time
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.tandem.v1 import generation_pb2 as pb
from serving import interceptor
from serving.errors import from_rpc_error
from serving.interceptor import CallInterceptor, CallLimits, Context, StreamWriter
from serving.limits import AbuseLimits, OpenCalls
from tests.grpc_calls import of_bytes
from tests.process_logs import ProcessLogs
from tests.serving.conftest import SERVICE, Rigs, Scripted, trailers_of
from tests.waiting import Stopwatch, until

GENERATE = "/tandem.v1.GenerationService/Generate"


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff\xff", pb.GenerateRequest(text="hello").SerializeToString()[:-2], b"\x0a\x02\xc3\x28"],
    ids=["not protobuf", "truncated", "invalid UTF-8"],
)
async def test_malformed_bytes_are_an_invalid_argument(rigs: Rigs, data: bytes) -> None:
    rig = await rigs.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await of_bytes(rig.channel, GENERATE)(data).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("request is not a valid GenerateRequest")
    assert "0xc3" not in (caught.value.details() or "")
    [violation] = from_rpc_error(caught.value).violations
    problem = "is not a valid GenerateRequest; allowed: protobuf whose texts are UTF-8"
    assert (violation.field, violation.description) == ("request", problem)
    assert rig.servicer.limits_s == []


async def test_unknown_fields_are_ignored(rigs: Rigs) -> None:
    rig = await rigs.start()
    data = pb.GenerateRequest(text="hello").SerializeToString() + b"\xba\x3e\x01x"  # field 999
    call = of_bytes(rig.channel, GENERATE)(data)
    assert len([message async for message in call]) == 3


async def test_an_unknown_method_is_unimplemented(rigs: Rigs) -> None:
    rig = await rigs.start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await of_bytes(rig.channel, "/tandem.v1.GenerationService/Degenerate")(b"").read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_over_the_limit_is_refused(rigs: Rigs) -> None:
    rig = await rigs.start(max_message_bytes=1 << 16)
    error = await rig.refusal("x" * (1 << 17))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in (error.details() or "")


async def test_a_compressed_message_is_refused_before_it_is_inflated(rigs: Rigs) -> None:
    rig = await rigs.start(max_message_bytes=1 << 16)
    error = await rig.refusal("x" * (1 << 25), compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert len(gzip.compress(b"x" * (1 << 25))) < 1 << 16  # so its size alone would have let it through


async def test_twelve_kib_of_metadata_are_always_refused(rigs: Rigs) -> None:
    rig = await rigs.start()
    for _ in range(8):
        error = await rig.refusal("hello", metadata=(("filler", "x" * 12288),))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_thousand_metadata_keys_are_refused(rigs: Rigs) -> None:
    rig = await rigs.start()
    error = await rig.refusal("hello", metadata=tuple((f"key-{i}", "value") for i in range(1000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_deadline_of_zero_is_exceeded_every_time(rigs: Rigs) -> None:
    rig = await rigs.start()
    for _ in range(20):
        error = await rig.refusal("hello", timeout=0)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("timeout", [None, 1e9])
async def test_a_call_without_a_bound_gets_the_servers(rigs: Rigs, timeout: float | None) -> None:
    rig = await rigs.start(max_deadline_s=0.3)
    watch = Stopwatch()
    error = await rig.refusal("wait", timeout=timeout)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert watch.s < 2
    assert rig.servicer.limits_s[0] == pytest.approx(0.3, abs=0.1)
    assert rig.servicer.num_running == 0


async def test_a_timeout_named_in_plain_metadata_does_not_lift_the_servers_cap(rigs: Rigs) -> None:
    rig = await rigs.start(max_deadline_s=0.3)
    error = await rig.refusal("wait", metadata=(("tandem-timeout", "99999S"),))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_goes_away_ends_its_handler(rigs: Rigs) -> None:
    rig = await rigs.start()
    call = await rig.waiting_call()
    call.cancel()
    await until(lambda: rig.servicer.num_running == 0)
    assert rig.server.calls.num_open == 0


async def test_clients_that_go_away_at_random_moments_leave_no_error_in_the_log(
    rigs: Rigs, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await rigs.start()
    rng = random.Random(1)
    for _ in range(300):
        text = rng.choice(("hello", "flood", "full"))
        calls = [rig.stub.Generate(pb.GenerateRequest(text=text)) for _ in range(4)]
        await asyncio.sleep(rng.uniform(0, 0.004))
        for call in calls:
            call.cancel()
    await until(lambda: rig.server.calls.num_open == 0)
    gc.collect()  # asyncio logs a lost exception when its task is freed
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


async def test_a_slow_reader_is_cut_off_and_its_handler_closed(rigs: Rigs) -> None:
    rig = await rigs.start(write_timeout_s=0.3)
    call = rig.stub.Generate(pb.GenerateRequest(text="flood"))
    await until(lambda: rig.servicer.num_sent > 0)
    await until(lambda: rig.servicer.num_running == 0)
    # The status waits behind the unread messages, so the client keeps its place until it reads or goes.
    assert rig.server.calls.num_open == 1
    assert rig.server.calls.num_awaited == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "client too slow" in (caught.value.details() or "")
    await until(lambda: rig.server.calls.num_open == 0)


async def test_a_slow_reader_that_never_reads_leaves_nothing_behind_when_it_goes(rigs: Rigs) -> None:
    rig = await rigs.start(write_timeout_s=0.1)
    call = rig.stub.Generate(pb.GenerateRequest(text="flood"))
    await until(lambda: rig.servicer.num_sent > 0 and rig.servicer.num_running == 0)
    call.cancel()
    await until(lambda: rig.server.calls.num_open == 0)


async def test_calls_over_the_cap_of_one_peer_are_refused_with_a_hint(rigs: Rigs) -> None:
    rig = await rigs.start(max_calls_per_peer=8)
    calls = [await rig.waiting_call() for _ in range(8)]

    error = await rig.refusal("hello")

    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "8 open calls" in (error.details() or "")
    assert trailers_of(error)["grpc-retry-pushback-ms"] == "1000"
    assert (await rig.stub.Abort(pb.AbortRequest(request_ids=["a"]))).num_aborted == 1  # control calls pass
    calls[0].cancel()
    await until(lambda: rig.server.calls.num_open == 7)
    assert await rig.generate("hello") == ["token"] * 3
    # closing: no place is lost
    for call in calls:
        call.cancel()
    await until(lambda: rig.server.calls.num_open == 0)


async def test_the_129th_open_call_of_a_peer_is_refused_by_default(rigs: Rigs) -> None:
    rig = await rigs.start()
    calls = await asyncio.gather(*(rig.waiting_call() for _ in range(128)))
    assert (await rig.refusal("hello")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        call.cancel()
    await until(lambda: rig.server.calls.num_open == 0)


async def test_calls_over_the_cap_in_all_are_refused(rigs: Rigs) -> None:
    rig = await rigs.start(max_calls=1)
    call = await rig.waiting_call()
    assert "the server has 1 open calls" in ((await rig.refusal("hello")).details() or "")
    call.cancel()


class Writing(Scripted):
    """Answers through a writer instead of yielding."""

    async def Generate(  # type: ignore[override]
        self, request: pb.GenerateRequest, context: Context, writer: StreamWriter[pb.GenerateResponse]
    ) -> None:
        async with aclosing(super().Generate(request, context)) as responses:
            async for response in responses:
                await writer.write(response)
                if request.text == "pauses":
                    await asyncio.sleep(0.5)


async def test_a_coroutine_function_writes_its_answer(rigs: Rigs, process_logs: ProcessLogs) -> None:
    rig = await rigs.start(Writing())
    assert await rig.generate("hello") == ["token"] * 3
    assert (await rig.refusal("invalid")).code() is grpc.StatusCode.INVALID_ARGUMENT
    with process_logs.expected("Generate returned a AbortResponse"):
        assert (await rig.refusal("wrong answer")).code() is grpc.StatusCode.INTERNAL
    call = await rig.waiting_call()
    call.cancel()
    await until(lambda: rig.servicer.num_running == 0)


async def test_a_slow_reader_of_what_is_written_is_cut_off(rigs: Rigs) -> None:
    rig = await rigs.start(Writing(), write_timeout_s=0.3)
    call = rig.stub.Generate(pb.GenerateRequest(text="flood"))
    await until(lambda: rig.servicer.num_sent > 0)
    await until(lambda: rig.servicer.num_running == 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "client too slow: a message waited 0.3 s" in (caught.value.details() or "")


async def test_pauses_between_messages_do_not_make_a_reader_slow(rigs: Rigs) -> None:
    rig = await rigs.start(Writing(), write_timeout_s=0.2)
    assert await rig.generate("pauses") == ["token"] * 3


class HaltingContext:
    """Its process is halted in the middle of a write; some turns of the event loop later the message has left."""

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)
        for _ in range(8):
            await asyncio.sleep(0)


async def test_a_halt_of_the_process_makes_no_reader_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptor, "_LOOK_AGAIN_S", 60.0)
    context: Any = HaltingContext()
    writer = StreamWriter(context, bytes, timeout_s=0.05)
    async with writer.bounded():
        await writer.write(b"")
        await asyncio.sleep(0)


class Incomplete(Scripted):
    Abort = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("servicer", "policies", "problem"),
    [
        (Incomplete, {}, "Abort must be implemented as a coroutine function"),
        (Scripted, {"Abrot": None}, "has no Abrot"),
    ],
)
async def test_a_servicer_that_does_not_fit_its_service_is_refused(
    servicer: type[Scripted], policies: dict[str, Any], problem: str
) -> None:
    guard = CallInterceptor(CallLimits(1.0, 1.0, 1.0), OpenCalls(max_per_peer=1, max_in_all=1), AbuseLimits(per_s=1.0))
    with pytest.raises(TypeError, match=problem):
        guard.handlers(SERVICE, servicer(), policies)


async def test_control_calls_have_places_of_their_own_and_no_more(rigs: Rigs) -> None:
    rig = await rigs.start(max_calls_per_peer=4)
    requests = [await rig.waiting_call() for _ in range(4)]
    stub = health_pb2_grpc.HealthStub(rig.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(4)]
    for watch in watches:
        await watch.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in (*requests, *watches):
        call.cancel()


async def test_a_call_whose_message_does_not_come_is_ended(rigs: Rigs) -> None:
    rig = await rigs.start(read_timeout_s=0.3)
    call = rig.channel.stream_stream(GENERATE)(timeout=20)
    await call.wait_for_connection()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (caught.value.details() or "").startswith("no whole request within 0.3 s")
    assert rig.servicer.limits_s == []
    assert await rig.generate("hello") == ["token"] * 3


async def test_a_call_that_waits_for_its_message_takes_a_place(rigs: Rigs) -> None:
    rig = await rigs.start(max_calls_per_peer=1)
    call = rig.channel.stream_stream(GENERATE)()
    await call.wait_for_connection()
    await until(lambda: rig.server.calls.num_open == 1)
    assert (await rig.refusal("hello")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    call.cancel()
    await until(lambda: rig.server.calls.num_open == 0)


async def test_a_call_that_ends_without_a_message_is_an_invalid_argument(rigs: Rigs) -> None:
    rig = await rigs.start()
    call = rig.channel.stream_stream(GENERATE)()
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith("no GenerateRequest came")


async def test_a_call_that_reads_when_the_server_has_stopped_leaves_no_error_in_the_log(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entered, stopped, read = asyncio.Event(), asyncio.Event(), CallInterceptor._read

    async def read_late(self: CallInterceptor, context: Context, within_s: float) -> bytes | None:
        entered.set()
        while not stopped.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await stopped.wait()
        try:
            return await read(self, context, within_s)
        except BaseException as error:
            ended.append(error)
            raise

    ended: list[BaseException] = []
    monkeypatch.setattr(CallInterceptor, "_read", read_late)
    rig = await rigs.start(drain_grace_s=0.0)
    call = of_bytes(rig.channel, GENERATE)(pb.GenerateRequest(text="hello").SerializeToString())
    await entered.wait()
    await rig.server.stop()
    stopped.set()
    await until(lambda: ended)
    await asyncio.sleep(0.05)
    assert "stopped" in str(ended[0])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
    call.cancel()


async def test_calls_that_have_ended_are_gone_without_garbage_collection(rigs: Rigs) -> None:
    rig = await rigs.start()
    gc.collect()
    gc.disable()
    try:
        before = sum(type(one).__name__ == "_ServicerContext" for one in gc.get_objects())
        for _ in range(50):
            assert await rig.generate("hello") == ["token"] * 3
        after = sum(type(one).__name__ == "_ServicerContext" for one in gc.get_objects())
    finally:
        gc.enable()
    assert after - before < 10
