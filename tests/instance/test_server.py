"""The life of an instance: its info, its load, its drain, and a dead or silent core."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import prefill_service.service
from engine.config import EngineConfig, LoadFormat
from engine.core.async_engine import AsyncEngine
from engine.core.messages import AbortRequests, LeaseCommand, TokensEvent, TransferEvent
from engine.errors import EngineError
from instance import decoding
from instance.server import InstanceServer, _run, run_instance, serve
from instance.settings import EngineSection, InstanceSection
from protos.tandem.v1 import instance_pb2, kv_transfer_pb2, prefill_pb2
from serving.lifecycle import (
    EXIT_CANNOT_START,
    EXIT_CUT_OFF,
    EXIT_FAILED,
    EXIT_STOPPED,
    StopSignals,
    announce_ready,
)
from serving.limits import LARGE_BYTES
from tests.grpc_calls import next_message
from tests.instance.rig import Rig, instance_request, model_folder, read_all, refusal, running, settings_of
from tests.instance.scripted_core import INFO, ScriptedCore
from tests.tokenizer_builders import byte_level
from tests.waiting import Stopwatch, until

ROLE = prefill_service.service.ROLE
SERVICE, DECODE_SERVICE = prefill_service.service.SERVICE.full_name, decoding.SERVICE.full_name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
async def rig(folder: Path) -> AsyncIterator[Rig]:
    async with running(folder, ROLE, transfer={"lease_s": 2.0}, instance={"domain": "rack-1"}) as rig:
        yield rig


def request(request_id: str = "r1", transfer_id: str = "t1") -> prefill_pb2.PrefillRequest:
    hand_over = prefill_pb2.HandOver(transfer_id=transfer_id, lease_s=2.0)
    return prefill_pb2.PrefillRequest(request=instance_request(request_id), hand_over=hand_over)


async def is_serving(rig: Rig, service: str = SERVICE) -> bool:
    answer = await health_pb2_grpc.HealthStub(rig.channel).Check(health_pb2.HealthCheckRequest(service=service))
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def started(rig: Rig, **fields: Any) -> Any:
    """A prefill that the core has and that has been accepted."""
    call = rig.prefill.Prefill(request(**fields))
    assert (await next_message(call)).WhichOneof("event") == "accepted"
    return call


async def test_an_instance_says_who_it_is(rig: Rig) -> None:
    info = await rig.instance.GetInstanceInfo(instance_pb2.GetInstanceInfoRequest())
    assert info.role == instance_pb2.ROLE_PREFILL
    assert info.address == rig.server.address
    assert info.instance_id == f"prefill-{rig.server.grpc_server.port}"
    assert info.instance_epoch == rig.server.instance_epoch
    assert (info.model, info.domain) == ("demo", "rack-1")
    assert info.identity.fingerprint == INFO.model_identity.fingerprint
    assert info.block_size == INFO.model_identity.block_size
    for name in ("max_model_len", "vocab_size", "num_blocks", "bytes_per_block", "kv_connector"):
        assert getattr(info, name) == getattr(INFO, name)
    assert await is_serving(rig)


async def test_no_peer_is_given_the_address_of_all_interfaces(folder: Path) -> None:
    listen = {"listen": "0.0.0.0:0", "allow_plaintext": True}
    for advertise in (None, "10.0.0.7:7001"):
        async with running(folder, ROLE, server={**listen, "advertise": advertise}) as rig:
            assert rig.server.info().address == (advertise or "")


async def test_load_reports_follow_the_core(rig: Rig) -> None:
    watch = rig.instance.WatchLoad(instance_pb2.WatchLoadRequest())
    assert (await next_message(watch)).instance_epoch == rig.server.instance_epoch
    rig.core.emit(num_waiting=2, num_steps=7)
    async with asyncio.timeout(20):
        while (report := await next_message(watch)).num_waiting != 2:
            pass
    assert (report.num_steps, report.blocks.free, report.draining) == (7, 64, False)
    watch.cancel()


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(rig: Rig) -> None:
    ending = asyncio.create_task(serve(rig.server, rig.signals))
    call = await started(rig)
    watch = rig.instance.WatchLoad(instance_pb2.WatchLoadRequest())

    # STEP the drain begins: readiness goes first, the load says so, new requests are refused
    assert (await rig.instance.Drain(instance_pb2.DrainRequest(grace_s=5))).num_unfinished == 1
    await until(lambda: rig.server.grpc_server.calls.draining)
    assert not await is_serving(rig)
    assert await is_serving(rig, "")
    async with asyncio.timeout(20):
        while not (await next_message(watch)).draining:
            pass
    watch.cancel()
    error = await refusal(rig.prefill.Prefill(request("r2", "t2")))
    assert (error.code(), (error.details() or "").startswith("draining")) == (grpc.StatusCode.UNAVAILABLE, True)

    # STEP the stream ends by itself; its KV is held, so the port stays open for the reader
    rig.core.emit(TransferEvent("t1", 2, num_tokens=10), num_transfers=1)
    rig.core.emit(TokensEvent("r1", [72], finish_reason="hand_over"))
    assert len(await read_all(call)) == 1
    await asyncio.sleep(0.05)
    assert not ending.done()
    released = await rig.transfer.Release(kv_transfer_pb2.ReleaseRequest(transfer_id="t1"))
    assert released.was_held

    # STEP the last transfer has ended: the process does, too
    rig.core.emit(TransferEvent("t1", 2, ended="released"), num_transfers=0)
    assert await asyncio.wait_for(ending, 20) == EXIT_STOPPED
    assert rig.core.closed
    assert not rig.core.of(AbortRequests)


async def test_what_outlives_the_grace_is_answered_unavailable(folder: Path) -> None:
    async with running(folder, ROLE, server={"drain_grace_s": 0.05}) as rig:
        call = await started(rig)
        rig.signals.request_stop()
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(ending, 20) == EXIT_CUT_OFF


async def test_unread_kv_delays_the_end_for_the_grace_alone(folder: Path) -> None:
    async with running(folder, ROLE, server={"drain_grace_s": 0.2}) as rig:
        rig.core.emit(num_transfers=1)
        await until(lambda: rig.server.engine.load.num_transfers == 1)
        began, watch = asyncio.get_running_loop().time(), Stopwatch()
        assert not await rig.server.drain()
        assert watch.s < 1.5
        assert asyncio.get_running_loop().time() - began > 0.15


async def test_a_second_signal_stops_at_once(rig: Rig) -> None:
    call = await started(rig)
    ending = asyncio.create_task(serve(rig.server, rig.signals))
    rig.signals.request_stop()
    await until(lambda: rig.server.grpc_server.calls.draining)
    rig.signals.request_stop()
    assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.wait_for(ending, 20) == EXIT_CUT_OFF


async def test_a_dead_core_ends_the_process_and_its_streams(rig: Rig) -> None:
    ending = asyncio.create_task(serve(rig.server, rig.signals))
    call = await started(rig)
    health = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    last = asyncio.ensure_future(health.read())
    rig.core.die()
    assert (await refusal(call)).code() is grpc.StatusCode.UNAVAILABLE
    assert (await last).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await asyncio.wait_for(ending, 20) == EXIT_FAILED


async def test_a_core_that_dies_during_a_drain_does_not_wait_for_readers(rig: Rig) -> None:
    rig.core.emit(num_transfers=1)
    await until(lambda: rig.server.engine.load.num_transfers == 1)
    ending = asyncio.create_task(serve(rig.server, rig.signals))
    rig.signals.request_stop()
    await until(lambda: rig.server.grpc_server.calls.draining)
    rig.core.die()
    assert await asyncio.wait_for(ending, 20) in (EXIT_FAILED, EXIT_STOPPED)


async def test_a_silent_core_is_not_ready_then_not_alive_and_may_come_back(folder: Path) -> None:
    async with running(folder, ROLE, instance=InstanceSection(core_unready_s=0.6, core_dead_s=3.0)) as rig:

        async def reached(ready: bool, alive: bool) -> None:
            async with asyncio.timeout(20):
                while [await is_serving(rig, name) for name in (SERVICE, DECODE_SERVICE, "")] != [ready, ready, alive]:
                    if ready:
                        rig.core.emit()
                    await asyncio.sleep(0.02)

        await reached(ready=False, alive=True)
        await reached(ready=False, alive=False)
        await reached(ready=True, alive=True)


async def test_a_core_that_hangs_is_killed_which_ends_the_process_and_its_streams(folder: Path) -> None:
    async with running(folder, ROLE, instance=InstanceSection(core_unready_s=0.6, core_dead_s=1.0)) as rig:
        ending = asyncio.create_task(serve(rig.server, rig.signals))
        assert (await refusal(await started(rig))).code() is grpc.StatusCode.UNAVAILABLE
        assert rig.core.killed
        assert await asyncio.wait_for(ending, 20) == EXIT_FAILED


async def test_leases_that_an_attached_reader_lets_go_reach_the_core(rig: Rig) -> None:
    await rig.transfer.Release(kv_transfer_pb2.ReleaseRequest(transfer_id="unknown"))
    assert await rig.core.wait_for(LeaseCommand) == LeaseCommand("unknown", "release")


async def test_a_full_house_refuses_at_once_and_says_when_to_come_back(folder: Path) -> None:
    async with running(folder, ROLE, instance=InstanceSection(max_requests=1)) as rig:
        call = await started(rig)
        error = await refusal(rig.prefill.Prefill(request("r2", "t2")))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = {key: value for key, value in error.trailing_metadata() or ()}  # noqa: C416 - Metadata is no dict
        assert trailers["grpc-retry-pushback-ms"] == "500"
        call.cancel()


async def test_long_prompts_of_one_router_are_all_parsed_at_once(rig: Rig) -> None:
    prompt = [1] * LARGE_BYTES
    calls = []
    for number in range(20):
        long = instance_request(f"r{number}", prompt_token_ids=prompt)
        hand_over = prefill_pb2.HandOver(transfer_id=f"t{number}", lease_s=2.0)
        calls.append(rig.prefill.Prefill(prefill_pb2.PrefillRequest(request=long, hand_over=hand_over)))
    errors = await asyncio.gather(*map(refusal, calls))
    assert {error.code() for error in errors} == {grpc.StatusCode.INVALID_ARGUMENT}, "longer than the model's maximum"


async def test_the_reader_of_each_allowed_request_may_attach(folder: Path) -> None:
    async with running(folder, ROLE, instance=InstanceSection(max_requests=3000)) as rig:
        rig.server.transfer_server.num_attached = 3000  # of the requests before
        call = rig.transfer.Attach()
        await call.write(kv_transfer_pb2.AttachRequest())
        assert (await refusal(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_ready_line_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "ready address=127.0.0.1:1 instance=prefill-1\n"  # the local stack reads real ones
    announce_ready(line, tmp_path / "ready")
    assert capsys.readouterr().out == line
    assert (tmp_path / "ready").read_text() == line
    assert [path.name for path in tmp_path.iterdir() if "ready" in path.name] == ["ready"]


async def test_a_chat_ends_at_the_tokenizers_eos_beside_that_of_a_base_models_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    async with running(folder, ROLE) as rig:
        call = await started(rig)
        assert (await rig.core.request()).eos_token_ids == (3, byte_level().eos_token_id)
        call.cancel()


@pytest.mark.parametrize(("load_format", "num_warnings"), [("auto", 1), ("dummy", 0)])
async def test_a_start_without_a_tokenizer_warns_unless_the_weights_are_random(
    folder: Path, caplog: pytest.LogCaptureFixture, load_format: LoadFormat, num_warnings: int
) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    settings = settings_of(folder)
    model = settings.model.model_copy(update={"load_format": load_format})
    settings = settings.model_copy(update={"model": model})
    server = await InstanceServer.start(settings, ROLE, StopSignals(), engine=ScriptedCore().engine())
    await server.stop()
    warnings = [record.getMessage() for record in caplog.records if "token ids" in record.getMessage()]
    assert len(warnings) == num_warnings
    for warning in warnings:
        assert "no tokenizer.json, only tokenizer.model; transformers writes it: python -c" in warning


async def test_a_damaged_tokenizer_is_an_error_of_the_start(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(EngineError, match=r"^tokenizer\.json of the checkpoint"):
        await InstanceServer.start(settings_of(folder), ROLE, StopSignals(), engine=ScriptedCore().engine())


async def test_a_ready_file_that_cannot_be_written_ends_the_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore()

    async def start(config: EngineConfig) -> AsyncEngine:
        return core.engine()

    monkeypatch.setattr(AsyncEngine, "start", start)
    monkeypatch.setattr("instance.server.freeze_heap", lambda: None)
    (folder / "config.json").write_text("{}")
    settings = settings_of(folder, instance=InstanceSection(ready_file=folder / "none" / "ready"))
    with pytest.raises(FileNotFoundError):
        await _run(settings, ROLE)
    assert core.closed


@pytest.mark.parametrize(
    ("end", "status"), [("kill -9 $$", EXIT_FAILED), ("exit 1", EXIT_FAILED), ("exit 2", EXIT_CANNOT_START)]
)
def test_a_core_that_dies_while_it_loads_is_started_again_unless_its_settings_are_wrong(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, status: int
) -> None:
    (script := tmp_path / "python").write_text(f"#!/bin/sh\n{end}\n")
    script.chmod(0o755)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("instance.server.configure_logging", lambda settings: None)
    assert run_instance(settings_of(folder, engine=EngineSection(python=str(script))), ROLE) == status


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EAGAIN, EXIT_FAILED), (errno.EMFILE, EXIT_FAILED), (errno.ENOMEM, EXIT_FAILED),
     (errno.ENOSPC, EXIT_FAILED), (errno.EADDRINUSE, EXIT_CANNOT_START), (errno.ENOENT, EXIT_CANNOT_START)],
)  # fmt: skip
def test_a_start_for_which_the_machine_lacks_something_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("instance.server.configure_logging", lambda settings: None)
    monkeypatch.setattr(AsyncEngine, "start", AsyncMock(side_effect=OSError(number, os.strerror(number))))
    assert run_instance(settings_of(folder), ROLE) == status
