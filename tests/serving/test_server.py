"""Start, health, reflection and drain of a server."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import ValidationError

from protos.tandem.v1 import generation_pb2 as pb
from protos.tandem.v1.generation_pb2_grpc import GenerationServiceStub
from serving.channel import ChannelSettings, open_channel
from serving.errors import is_cut_off
from serving.interceptor import Context
from serving.limits import CONTROL
from serving.server import HealthSettings, Server, ServerSettings, server_options
from serving.settings import format_address
from tests.channels import PATIENT
from tests.floods import http2
from tests.floods.http2 import Connection, frame, message
from tests.grpc_calls import next_message
from tests.serving.conftest import SERVICE, Rigs, Scripted, trailers_of
from tests.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def checked(channel: grpc.aio.Channel, service: str) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_a_free_port_is_chosen_and_reported(rigs: Rigs) -> None:
    rig = await rigs.start()
    assert rig.server.port > 0
    assert rig.server.address == f"127.0.0.1:{rig.server.port}"
    assert await rig.generate("hello") == ["token"] * 3


async def test_the_advertised_address_is_a_setting_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server = Server(ServerSettings(advertise="pod-7.pods:7000"))
    await server.start()
    assert server.address == "pod-7.pods:7000"
    assert f"listening on 127.0.0.1:{server.port}, reported as pod-7.pods:7000, plaintext" in caplog.messages
    await server.stop()
    assert format_address("::1", 7) == "[::1]:7"


async def test_no_log_line_says_that_all_addresses_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server = Server(ServerSettings(host="0.0.0.0"))
    await server.start()
    assert f"listening on 0.0.0.0:{server.port}, plaintext" in caplog.messages
    await server.stop()


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
    server.health.set_serving(SERVICE.full_name, True)
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


async def test_a_drain_turns_unready_then_refuses_then_waits_then_stops(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = await rigs.start(drain_accept_s=0.3)
    noticed, accepted_s = asyncio.Event(), list[float]()

    async def accept_for(seconds: float) -> None:
        accepted_s.append(seconds)
        await noticed.wait()

    monkeypatch.setattr(rig.server, "_accept_for", accept_for)
    watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE.full_name))
    assert (await watch.read()).status == SERVING
    running = await rig.waiting_call()

    # STEP 1: readiness goes first, and requests are still accepted.
    draining = asyncio.create_task(rig.server.drain())
    assert (await watch.read()).status == NOT_SERVING
    assert not rig.server.calls.draining
    assert await rig.generate("hello") == ["token"] * 3
    assert await checked(rig.channel, "") == SERVING

    # STEP 2: requests are refused, control calls and what runs go on.
    assert accepted_s == [0.3]
    noticed.set()
    await until(lambda: rig.server.calls.draining)
    error = await rig.refusal("hello")
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert (error.details() or "").startswith("draining")
    assert trailers_of(error)["grpc-retry-pushback-ms"] == "250"
    assert (await rig.stub.Abort(pb.AbortRequest(request_ids=["a"]))).num_aborted == 1
    rig.server.health.set_serving(SERVICE.full_name, True)
    assert await checked(rig.channel, SERVICE.full_name) == NOT_SERVING  # it cannot be undone
    assert not draining.done()

    # STEP 3: the last request ends in peace, and with it the server, though the watch is still open.
    rig.servicer.go.set()
    assert (await next_message(running)).model == "went on"
    assert await draining is True
    assert await running.code() is grpc.StatusCode.OK
    await asyncio.wait_for(rig.server._server.wait_for_termination(), 20)


async def test_a_drain_cuts_off_what_outlives_the_grace(rigs: Rigs) -> None:
    rig = await rigs.start(drain_grace_s=0.2)
    call = await rig.waiting_call()
    assert await rig.server.drain() is False
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert rig.servicer.num_running == 0


@pytest.mark.parametrize("drain_accept_s", [0.0, 60.0])
async def test_a_drain_that_is_interrupted_ends_every_call(rigs: Rigs, drain_accept_s: float) -> None:
    """By a second signal, in each of its phases."""
    rig = await rigs.start(drain_accept_s=drain_accept_s, drain_grace_s=60.0)
    call = await rig.waiting_call()
    draining = asyncio.create_task(rig.server.drain())
    while await checked(rig.channel, SERVICE.full_name) != NOT_SERVING:
        await asyncio.sleep(0.01)
    assert rig.server.calls.draining == (drain_accept_s == 0)
    draining.cancel()
    await asyncio.wait({draining})
    assert await call.code() is grpc.StatusCode.UNAVAILABLE
    assert rig.servicer.num_running == 0
    assert await rig.server.stop() is False


async def test_calls_cut_off_get_a_retry_hint_and_say_so(rigs: Rigs) -> None:
    rig = await rigs.start()
    calls = [await rig.waiting_call() for _ in range(8)]
    assert await rig.server.stop() is False
    for call in calls:
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert ("grpc-retry-pushback-ms", "250") in tuple(await call.trailing_metadata())
        assert is_cut_off(await call.trailing_metadata())
    assert await rig.server.stop() is False  # its word stays


async def test_a_stop_ends_streams_without_an_end_by_a_status() -> None:
    """Those that a drain does not wait for, such as load reports."""
    server, servicer = Server(ServerSettings()), Scripted()
    await server.register(SERVICE, servicer, {"Generate": CONTROL})
    await server.start()
    async with open_channel(server.address, PATIENT) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="wait"))
        assert (await next_message(call)).model == "started"
        assert await server.stop() is True
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert is_cut_off(await call.trailing_metadata())
    assert servicer.num_running == 0


async def test_a_stop_reports_that_it_cut_off_no_call(rigs: Rigs) -> None:
    rig = await rigs.start()
    assert await rig.generate("hello") == ["token"] * 3
    assert await rig.server.stop() is True


async def test_a_drain_does_not_wait_for_a_client_that_does_not_read(rigs: Rigs) -> None:
    rig = await rigs.start(write_timeout_s=0.1, drain_grace_s=30.0)
    call = rig.stub.Generate(pb.GenerateRequest(text="flood"))
    await until(lambda: rig.servicer.num_sent > 0)
    assert await asyncio.wait_for(rig.server.drain(), 5) is True
    call.cancel()


async def test_pings_without_end_neither_grow_the_process_nor_end_the_connection(rigs: Rigs) -> None:
    rig = await rigs.start()
    process = psutil.Process()
    async with Connection(rig.server.address) as connection:
        before = process.memory_info().rss
        for _ in range(400):
            connection.send(frame(http2.PING, 0, 0, bytes(8)) * 500)
            await connection.sent()
        assert process.memory_info().rss - before < 64 << 20
        await until(lambda: connection.received[http2.PING] > 100)
        assert connection.goaway is None
    assert await rig.generate("hello", wait_for_ready=True) == ["token"] * 3


async def test_connections_over_the_cap_are_closed_and_the_others_serve_on(rigs: Rigs) -> None:
    rig = await rigs.start(max_connections=4)
    async with AsyncExitStack() as stack:
        assert await rig.generate("hello") == ["token"] * 3
        connections = [await stack.enter_async_context(Connection(rig.server.address)) for _ in range(8)]
        await until(lambda: sum(one.is_open for one in connections) <= 4)
        assert await rig.generate("hello") == ["token"] * 3


async def test_watchers_get_the_last_state_before_the_port_closes(rigs: Rigs) -> None:
    rig = await rigs.start()
    request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
    watches = [health_pb2_grpc.HealthStub(rig.channel).Watch(request) for _ in range(50)]
    assert {(await watch.read()).status for watch in watches} == {SERVING}
    last = [asyncio.ensure_future(watch.read()) for watch in watches]
    await rig.server.stop()
    assert {(await state).status for state in last} == {NOT_SERVING}


async def test_probes_have_quotas_that_clients_of_the_other_port_cannot_use_up(rigs: Rigs) -> None:
    """Or the kubelet would restart a router that is merely full, with all its streams."""
    rig = await rigs.start(
        max_connections=1, max_calls=2, max_calls_per_peer=2, probes=HealthSettings(listen="127.0.0.1:0")
    )
    watches = [health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
    assert [(await watch.read()).status for watch in watches] == [SERVING] * 2
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await checked(rig.channel, "")
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with Connection(rig.server.address) as another:
        await another.closed()
    async with open_channel(f"127.0.0.1:{rig.server.probe_port}", PATIENT) as kubelet:
        assert await checked(kubelet, "") == SERVING


async def test_a_connection_that_says_nothing_is_closed_and_so_is_an_idle_one(rigs: Rigs) -> None:
    rig = await rigs.start(max_idle_s=1.0)
    async with Connection(rig.server.address) as idle:
        silent, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        await idle.closed()
        async with asyncio.timeout(20):
            await silent.read()
        writer.close()
    assert await rig.generate("hello") == ["token"] * 3


async def test_an_upper_case_key_ends_one_call_and_nothing_else(rigs: Rigs) -> None:
    rig = await rigs.start()
    async with Connection(rig.server.address) as connection:
        connection.open_call("/tandem.v1.GenerationService/Generate", (b"X-Upper", b"1"))
        await until(lambda: connection.received[http2.RST_STREAM] or not connection.is_open)
    assert await rig.generate("hello") == ["token"] * 3
    assert rig.servicer.num_running == 0


@pytest.mark.parametrize("value", [b"\xff\xfe", b"!not base64!", b"A"])
async def test_garbage_in_binary_metadata_ends_one_call_at_the_most(rigs: Rigs, value: bytes) -> None:
    rig = await rigs.start()
    async with Connection(rig.server.address) as connection:
        stream = connection.open_call("/tandem.v1.GenerationService/Generate", (b"x-garbage-bin", value))
        data = pb.GenerateRequest(text="hello").SerializeToString()
        connection.send(frame(http2.DATA, http2.END_STREAM, stream, message(data)))
        await until(lambda: connection.received[http2.HEADERS] or connection.received[http2.RST_STREAM])
    assert await rig.generate("hello") == ["token"] * 3


async def test_what_comes_beyond_window_and_message_ends_the_call_or_the_connection(rigs: Rigs) -> None:
    rig = await rigs.start()
    async with Connection(rig.server.address) as connection:
        stream = connection.open_call("/tandem.v1.GenerationService/Generate")
        connection.send(frame(http2.DATA, 0, stream, message(b"", length=4 << 20)))
        connection.send(frame(http2.DATA, 0, stream, bytes(16_000)) * 2000)
        await until(lambda: connection.received[http2.HEADERS] or not connection.is_open)
    assert rig.servicer.limits_s == []
    assert await rig.generate("hello") == ["token"] * 3


# A connection that is old takes no new call, so that clients dial again; what runs on it is never cut off.

AGE_S = 0.3


class Named(Scripted):
    """Remembers by which connection each Abort came."""

    def __init__(self) -> None:
        super().__init__()
        self.peers: list[str] = []

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        self.peers.append(context.peer())
        return await super().Abort(request, context)


async def test_a_stream_survives_its_connections_age_and_new_calls_dial_again(rigs: Rigs) -> None:
    servicer = Named()
    rig = await rigs.start(servicer, max_connection_age_s=AGE_S)
    running = await rig.waiting_call()
    async with asyncio.timeout(20):
        while len(set(servicer.peers)) < 3:  # the stream's own connection, and two more
            try:
                await rig.stub.Abort(pb.AbortRequest())
            except grpc.aio.AioRpcError as error:
                # A call that is sent in the moment in which its connection ends is not processed; clients retry it.
                if "GOAWAY" not in str(error.details()):
                    raise
            await asyncio.sleep(0.01)
    assert servicer.num_running == 1
    servicer.go.set()
    assert (await next_message(running)).model == "went on"
    assert await running.read() is grpc.aio.EOF
    assert await running.code() is grpc.StatusCode.OK


async def test_a_grace_ends_what_runs_on(rigs: Rigs) -> None:
    rig = await rigs.start(max_connection_age_s=AGE_S, max_connection_age_grace_s=AGE_S)
    running = await rig.waiting_call()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(20):
            await running.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


_LONGEST_S = 2_147_483
LARGEST: dict[str, Any] = {
    "max_message_bytes": 2**31 - 1,
    "max_streams_per_connection": 2**31 - 1,
    "max_idle_s": _LONGEST_S,
    "max_connection_age_s": _LONGEST_S,
    "max_connection_age_grace_s": _LONGEST_S,
}


@pytest.mark.parametrize("name", LARGEST)
def test_what_exceeds_an_int_of_grpc_is_rejected_as_a_setting(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}\n  Input should be less than or equal to {LARGEST[name]}"):
        ServerSettings.model_validate({name: LARGEST[name] + 1})


async def test_a_server_and_a_channel_with_the_largest_values_serve(rigs: Rigs) -> None:
    largest = {"keepalive_ms", "ping_timeout_ms", "max_backoff_ms", "max_message_bytes"}
    for name in largest:
        with pytest.raises(ValidationError, match=f"{name}\n  Input should be less than or equal to {2**31 - 1}"):
            ChannelSettings.model_validate({name: 2**31})
    rig = await rigs.start(**LARGEST)
    settings = ChannelSettings.model_validate(dict.fromkeys(largest, 2**31 - 1))
    async with open_channel(rig.server.address, settings) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert (await call).status == health_pb2.HealthCheckResponse.SERVING


async def test_connections_do_not_age_unless_asked(rigs: Rigs) -> None:
    options = dict(server_options(ServerSettings()))
    assert not [name for name in options if "max_connection_age" in name]
    options = dict(server_options(ServerSettings(max_connection_age_s=1.5, max_connection_age_grace_s=0.0001)))
    assert options["grpc.max_connection_age_ms"] == 1500
    assert options["grpc.max_connection_age_grace_ms"] == 1
