"""The phases of a drain: what each reports, accepts and waits for, and the exit status."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import decode_service.service
import prefill_service.service
from engine.core.messages import AbortRequests, TokensEvent, TransferEvent
from instance.decoding import SERVICE as DECODE_SERVICE
from instance.server import serve
from instance.settings import InstanceSection
from protos.tandem.v1 import decode_pb2, instance_pb2, kv_transfer_pb2, prefill_pb2
from serving.lifecycle import EXIT_CUT_OFF, EXIT_STOPPED
from tests.grpc_calls import next_message
from tests.instance.rig import Rig, instance_request, model_folder, read_all, refusal, running
from tests.waiting import until

PREFILL, DECODE = prefill_service.service.ROLE, decode_service.service.ROLE
LONG_BEAT = InstanceSection(load_interval_s=10)
HANG_S = 20.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


async def decoding(rig: Rig, request_id: str = "r1") -> Any:
    """A stream whose first token has been sent."""
    num_before = len(rig.core.commands)

    async def start() -> AsyncIterator[decode_pb2.DecodeRequest]:
        yield decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=instance_request(request_id)))

    call = rig.decode.Decode(start())
    await until(lambda: len(rig.core.commands) > num_before)
    rig.core.emit(TokensEvent(request_id, [72]), num_running=1)
    assert (await next_message(call)).tokens.token_index == 0
    return call


async def prefilling(rig: Rig) -> Any:
    """A stream that waits for its first token."""
    hand_over = prefill_pb2.HandOver(transfer_id="t1", lease_s=5.0)
    call = rig.prefill.Prefill(prefill_pb2.PrefillRequest(request=instance_request(), hand_over=hand_over))
    assert (await next_message(call)).WhichOneof("event") == "accepted"
    return call


async def reports(rig: Rig) -> AsyncGenerator[instance_pb2.WatchLoadResponse]:
    async for report in rig.instance.WatchLoad(instance_pb2.WatchLoadRequest()):
        yield report


async def within(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, HANG_S)


async def test_a_drain_is_reported_at_once_and_requests_are_accepted_for_a_while(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"drain_accept_s": 3.0, "drain_grace_s": 10.0}
    is_over = asyncio.Event()
    accepted_s: list[float] = []

    async def accept_for(seconds: float) -> None:
        accepted_s.append(seconds)
        await is_over.wait()

    async with running(folder, DECODE, server=server, instance=LONG_BEAT) as rig:
        monkeypatch.setattr(rig.server._drain, "_accept_for", accept_for)
        reported: list[str] = []
        health = health_pb2_grpc.HealthStub(rig.channel).Watch(
            health_pb2.HealthCheckRequest(service=DECODE_SERVICE.full_name)
        )
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING

        async def watch_health() -> None:
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            reported.append("health")

        async def watch_load() -> None:
            async with aclosing(reports(rig)) as watch:
                async for report in watch:
                    if report.draining:
                        assert not rig.server.grpc_server.health.is_serving(DECODE_SERVICE.full_name)
                        assert not rig.server.grpc_server.calls.draining, (
                            "reported only when requests are refused already"
                        )
                        reported.append("load")
                        return

        watching = asyncio.gather(watch_health(), watch_load())
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        first = await decoding(rig, "r1")
        await rig.instance.Drain(instance_pb2.DrainRequest())
        await within(watching)
        assert sorted(reported) == ["health", "load"]
        second = await decoding(rig, "r2")  # a router without the report is served
        assert accepted_s == [3.0]
        is_over.set()
        await until(lambda: rig.server.grpc_server.calls.draining)
        error = await refusal(rig.decode.Decode(only_start("r3")))
        assert (error.code(), (error.details() or "").startswith("draining")) == (grpc.StatusCode.UNAVAILABLE, True)
        rig.core.emit(TokensEvent("r1", [73], finish_reason="stop"), TokensEvent("r2", [73], finish_reason="stop"))
        assert [len(await read_all(call)) for call in (first, second)] == [1, 1]
        assert await within(ending) == EXIT_STOPPED
        assert not rig.core.of(AbortRequests)


async def only_start(request_id: str) -> AsyncIterator[decode_pb2.DecodeRequest]:
    yield decode_pb2.DecodeRequest(start=decode_pb2.DecodeStart(request=instance_request(request_id)))


async def test_streams_are_asked_to_move_before_the_grace_is_over_and_may_stay(folder: Path) -> None:
    server = {"drain_grace_s": 10.0, "drain_move_s": 9.7}
    async with running(folder, DECODE, server=server, instance=LONG_BEAT) as rig:
        staying, moving = await decoding(rig, "r1"), await decoding(rig, "r2")
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        asked: list[tuple[bool, bool]] = []

        async def watch_load() -> None:
            async with aclosing(reports(rig)) as watch:
                async for report in watch:
                    asked.append((report.draining, report.moving_out))
                    if report.moving_out:
                        return

        watching = asyncio.create_task(watch_load())
        await until(lambda: asked)
        rig.signals.request_stop()
        await within(watching)
        # STEP first it only says that it drains; both calls run on
        assert asked[0] == (False, False)
        assert (True, False) in asked
        assert not ending.done()
        # STEP a router takes one of them elsewhere, and no instance takes the other: it ends here
        moving.cancel()
        await rig.core.wait_for(AbortRequests)
        rig.core.emit(TokensEvent("r1", [73], finish_reason="stop"))
        assert len(await read_all(staying)) == 1
        assert await within(ending) == EXIT_STOPPED


async def test_a_reader_that_comes_during_the_drain_gets_its_kv(folder: Path) -> None:
    server = {"drain_grace_s": 10.0, "drain_move_s": 10.0}
    async with running(folder, PREFILL, server=server, transfer={"lease_s": 5.0}) as rig:
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        call = await prefilling(rig)
        rig.core.emit(TransferEvent("t1", 2, num_tokens=10), num_transfers=1)
        rig.core.emit(TokensEvent("r1", [72], finish_reason="hand_over"))
        await read_all(call)
        rig.signals.request_stop()
        await until(lambda: rig.server.grpc_server.calls.draining)

        # STEP the reader has not come yet, and is let in although requests are refused
        attach = rig.transfer.Attach()
        opening = kv_transfer_pb2.AttachOpen(
            transfer_id="t1",
            instance_epoch=rig.server.instance_epoch,
            min_protocol_version=1,
            max_protocol_version=1,
            identity=rig.server.info().identity,
        )
        await attach.write(kv_transfer_pb2.AttachRequest(open=opening))
        events = [(await next_message(attach)).WhichOneof("event") for _ in range(3)]
        assert events == ["attached", "ready", "complete"]
        await asyncio.sleep(0.1)
        assert not ending.done(), "it does not end under its reader"

        # STEP the reader has everything, and the instance goes
        await attach.write(kv_transfer_pb2.AttachRequest(release=kv_transfer_pb2.AttachRelease(loaded=True)))
        rig.core.emit(TransferEvent("t1", 2, ended="released"), num_transfers=0)
        assert await within(ending) == EXIT_STOPPED


async def test_kv_without_a_reader_is_a_loss_when_the_grace_is_over(folder: Path) -> None:
    server = {"drain_grace_s": 0.2, "drain_move_s": 60.0}  # a move that is longer takes all of the grace
    async with running(folder, PREFILL, server=server) as rig:
        rig.core.emit(num_transfers=1)
        await until(lambda: rig.server.engine.load.num_transfers == 1)
        rig.signals.request_stop()
        assert await within(serve(rig.server, rig.signals)) == EXIT_CUT_OFF


async def test_a_lease_that_runs_out_ends_the_wait(folder: Path) -> None:
    async with running(folder, PREFILL, server={"drain_grace_s": 60.0}) as rig:
        rig.core.emit(num_transfers=1)
        await until(lambda: rig.server.engine.load.num_transfers == 1)
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        rig.signals.request_stop()
        await until(lambda: rig.server.grpc_server.calls.draining)
        assert not ending.done()
        rig.core.emit(TransferEvent("t1", 2, ended="expired"), num_transfers=0)
        assert await within(ending) == EXIT_STOPPED


async def test_a_second_signal_to_an_idle_instance_is_no_loss(folder: Path) -> None:
    async with running(folder, DECODE, server={"drain_accept_s": 60.0}) as rig:
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        rig.signals.request_stop()
        await asyncio.sleep(0.05)
        assert not ending.done()
        rig.signals.request_stop()
        assert await within(ending) == EXIT_STOPPED


async def test_a_signal_limits_a_drain_that_a_call_has_begun_to_the_instance_s_own_grace(folder: Path) -> None:
    """Who sends it kills the process after that."""
    server = {"drain_grace_s": 0.5, "drain_move_s": 0.1}
    async with running(folder, DECODE, server=server, instance=LONG_BEAT) as rig:
        call = await decoding(rig)
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        await rig.instance.Drain(instance_pb2.DrainRequest(grace_s=3600.0))
        await until(lambda: rig.server.grpc_server.calls.draining)
        assert not rig.server.reporter.latest.moving_out
        rig.signals.request_stop()
        await until(lambda: rig.server.reporter.latest.moving_out)
        assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert await within(ending) == EXIT_CUT_OFF


async def test_a_signal_that_comes_while_requests_are_still_accepted_limits_such_a_drain_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"drain_accept_s": 0.1, "drain_grace_s": 0.4, "drain_move_s": 0.1}
    is_over = asyncio.Event()

    async def accept_for(seconds: float) -> None:
        await is_over.wait()

    async with running(folder, DECODE, server=server, instance=LONG_BEAT) as rig:
        drain = rig.server._drain
        monkeypatch.setattr(drain, "_accept_for", accept_for)
        call = await decoding(rig)
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        await rig.instance.Drain(instance_pb2.DrainRequest(grace_s=3600.0))
        await until(lambda: drain.draining)
        rig.signals.request_stop()
        await until(lambda: drain._end_s < math.inf)
        is_over.set()
        assert (await within(refusal(call))).code() is grpc.StatusCode.UNAVAILABLE
        assert await within(ending) == EXIT_CUT_OFF


async def test_requests_that_the_drain_cuts_off_count_as_failed_and_not_as_cancelled(folder: Path) -> None:
    for role in (DECODE, PREFILL):
        async with running(folder, role, server={"drain_grace_s": 0.2}) as rig:
            call = await (decoding if role is DECODE else prefilling)(rig)
            ending = asyncio.create_task(serve(rig.server, rig.signals))
            rig.signals.request_stop()
            assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
            assert await within(ending) == EXIT_CUT_OFF
            metrics = rig.server.metrics
            assert (metrics.num_failed, metrics.num_cancelled, metrics.vllm.num_rejected) == (1, 0, 0)


async def test_a_drain_asked_for_by_a_call_takes_the_grace_of_the_call(folder: Path) -> None:
    async with running(folder, DECODE, server={"drain_grace_s": 60.0}) as rig:
        call = await decoding(rig)
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        assert (await rig.instance.Drain(instance_pb2.DrainRequest(grace_s=0.2))).num_unfinished == 1
        assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert await within(ending) == EXIT_CUT_OFF
