"""Start, health, reflection and drain of a server."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.tandem.v1 import generation_pb2 as pb
from serving.server import Server, ServerSettings, address
from tests.serving.conftest import SERVICE, Rigs, Scripted, eventually, trailers_of

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def checked(channel: grpc.aio.Channel, service: str) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_a_free_port_is_taken_and_told(rigs: Rigs) -> None:
    rig = await rigs.start()
    assert rig.server.port > 0
    assert rig.server.address == f"127.0.0.1:{rig.server.port}"
    assert await rig.generate("hello") == ["token"] * 3


async def test_the_advertised_address_is_a_setting_of_its_own() -> None:
    server = Server(ServerSettings(advertise="pod-7.pods:7000"))
    await server.start()
    assert server.address == "pod-7.pods:7000"
    await server.stop()
    assert address("::1", 7) == "[::1]:7"


async def test_a_taken_port_is_an_error_that_names_it(rigs: Rigs) -> None:
    rig = await rigs.start()
    other = Server(ServerSettings(port=rig.server.port))
    with pytest.raises(OSError, match=f"127.0.0.1:{rig.server.port}: the port is taken"):
        await other.start()
    await other.stop()


async def test_readiness_is_per_service_and_liveness_is_not(rigs: Rigs) -> None:
    server = Server(ServerSettings())
    await server.register(SERVICE, Scripted(), ready=False)
    await server.start()
    channel = await rigs.channel(server)
    assert await checked(channel, "") == SERVING
    assert await checked(channel, SERVICE.full_name) == NOT_SERVING
    await server.health.set_serving(SERVICE.full_name, True)
    assert await checked(channel, SERVICE.full_name) == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await checked(channel, "tandem.v1.Nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop()


async def test_reflection_lists_the_services_and_describes_them(rigs: Rigs) -> None:
    rig = await rigs.start()
    stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {SERVICE.full_name, "grpc.health.v1.Health"} <= names
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE.full_name))
    assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()


async def test_a_drain_turns_unready_then_refuses_then_waits_then_stops(rigs: Rigs) -> None:
    rig = await rigs.start(drain_accept_s=0.3)
    watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE.full_name))
    assert (await watch.read()).status == SERVING
    running = await rig.waiting_call()

    # STEP 1: readiness goes first, and requests are still accepted.
    draining = asyncio.create_task(rig.server.drain())
    assert (await watch.read()).status == NOT_SERVING
    assert not rig.server.draining
    assert await rig.generate("hello") == ["token"] * 3
    assert await checked(rig.channel, "") == SERVING

    # STEP 2: requests are refused, control calls and what runs go on.
    await eventually(lambda: rig.server.draining)
    error = await rig.refusal("hello")
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert error.details().startswith("draining")
    assert trailers_of(error)["grpc-retry-pushback-ms"] == "250"
    assert (await rig.stub.Abort(pb.AbortRequest(request_ids=["a"]))).num_aborted == 1
    await rig.server.health.set_serving(SERVICE.full_name, True)
    assert await checked(rig.channel, SERVICE.full_name) == NOT_SERVING  # nobody can undo it
    assert not draining.done()

    # STEP 3: the last request ends in peace, and with it the server, though the watch is still open.
    rig.servicer.go.set()
    assert (await running.read()).model == "went on"
    assert await draining is True
    assert await running.code() is grpc.StatusCode.OK
    await asyncio.wait_for(rig.server.wait_closed(), 2)


async def test_a_drain_cuts_off_what_outlives_the_grace(rigs: Rigs) -> None:
    rig = await rigs.start(drain_grace_s=0.2)
    call = await rig.waiting_call()
    assert await rig.server.drain() is False
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert rig.servicer.num_running == 0


async def test_whoever_is_cut_off_is_told_when_to_try_again(rigs: Rigs) -> None:
    rig = await rigs.start()
    calls = [await rig.waiting_call() for _ in range(8)]
    assert await rig.server.stop() is False
    for call in calls:
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "250") in tuple(await call.trailing_metadata())
    assert await rig.server.stop() is False  # its word stays


async def test_a_stop_that_cuts_nobody_off_says_so(rigs: Rigs) -> None:
    rig = await rigs.start()
    assert await rig.generate("hello") == ["token"] * 3
    assert await rig.server.stop() is True


async def test_a_drain_does_not_wait_for_a_client_that_does_not_read(rigs: Rigs) -> None:
    rig = await rigs.start(write_timeout_s=0.1, drain_grace_s=30.0)
    call = rig.stub.Generate(pb.GenerateRequest(text="flood"))
    await eventually(lambda: rig.servicer.num_sent > 0)
    assert await asyncio.wait_for(rig.server.drain(), 5) is True
    call.cancel()
