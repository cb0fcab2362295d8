"""Calls in vain: slow answers to those who wait for them, and no connection for those who do not."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2 as pb
from serving import bad_callers, calls
from serving.connections import connections_from, drop_what_comes, end
from tests.floods import http2
from tests.floods.http2 import Connection, frame, message
from tests.serving.conftest import Rig, Rigs
from tests.waiting import until

GENERATE = "/tandem.v1.GenerationService/Generate"
CANCELLED = http2.CANCEL.to_bytes(4, "big")


def begin_and_reset(connection: Connection) -> None:
    connection.send(frame(http2.RST_STREAM, 0, connection.open_call(GENERATE), CANCELLED))


def send_good_call(connection: Connection) -> None:
    data = message(pb.GenerateRequest(text="hello").SerializeToString())
    connection.send(frame(http2.DATA, http2.END_STREAM, connection.open_call(GENERATE), data))


async def reset_until_cut(rig: Rig, connection: Connection) -> int:
    """How many calls that took."""
    num_cut = rig.server.bad_callers.num_cut
    for number in range(10_000):
        begin_and_reset(connection)
        await connection.sent()
        await asyncio.sleep(0.002)
        if rig.server.bad_callers.num_cut > num_cut:
            return number + 1
    raise AssertionError("it was never cut")


async def test_who_resets_calls_before_their_message_is_dropped_and_nobody_else_is(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_callers, "_STARVED_S", 0.5)
    rig = await rigs.start(max_bad_calls_per_s=20.0)
    other = await rig.waiting_call()
    num_descriptors = len(os.listdir("/dev/fd"))
    async with Connection(rig.server.address, source="127.0.0.2") as connection:
        assert await reset_until_cut(rig, connection) > 40
        # STEP what comes on it now is dropped, and after a while it is ended
        send_good_call(connection)
        assert connection.is_open
        await connection.closed()
        assert connection.received[http2.DATA] == 0
    # STEP from the same address it takes few calls more, until the budget has come back
    async with Connection(rig.server.address, source="127.0.0.2") as connection:
        assert await reset_until_cut(rig, connection) <= 20
    assert await rig.generate("hello") == ["token"] * 3
    rig.servicer.go.set()
    assert (await other.read()).model == "went on"
    await until(lambda: len(os.listdir("/dev/fd")) <= num_descriptors)
    await until(lambda: rig.server.calls.num_open == 0)


async def test_a_server_that_stops_ends_what_it_has_starved(rigs: Rigs) -> None:
    rig = await rigs.start(max_bad_calls_per_s=1.0)
    async with Connection(rig.server.address) as connection:
        await reset_until_cut(rig, connection)
        await rig.server.stop()
        await connection.closed(2.0)


async def test_the_same_connection_serves_who_resets_calls_now_and_then(rigs: Rigs) -> None:
    rig = await rigs.start(max_bad_calls_per_s=20.0)
    async with Connection(rig.server.address) as connection:
        for _ in range(38):
            begin_and_reset(connection)
        send_good_call(connection)
        await until(lambda: connection.received[http2.DATA] >= 3)
        assert connection.is_open


async def test_requests_that_are_reset_are_no_calls_in_vain(rigs: Rigs) -> None:
    rig = await rigs.start(max_bad_calls_per_s=2.0)
    data = message(pb.GenerateRequest(text="wait").SerializeToString())
    async with Connection(rig.server.address) as connection:
        for number in range(1, 21):
            stream_id = connection.open_call(GENERATE)
            connection.send(frame(http2.DATA, http2.END_STREAM, stream_id, data))
            await until(lambda number=number: len(rig.servicer.limits_s) == number)
            connection.send(frame(http2.RST_STREAM, 0, stream_id, CANCELLED))
        await until(lambda: rig.servicer.num_running == 0)
        assert connection.is_open


async def ask_wrongly(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.channel.unary_stream(GENERATE)(b"\xff\xff").read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_who_asks_wrongly_all_the_time_waits_for_the_answers_and_others_do_not(rigs: Rigs) -> None:
    rig = await rigs.start(max_bad_calls_per_s=4.0, max_calls_per_peer=6)
    for _ in range(8):
        await ask_wrongly(rig)
    began_s = time.monotonic()
    asking = [asyncio.create_task(ask_wrongly(rig)) for _ in range(4)]
    await until(lambda: rig.server.calls.num_open == 4)
    assert await rig.generate("hello") == ["token"] * 3
    await asyncio.gather(*asking)
    assert time.monotonic() - began_s >= 0.5  # four at four per second, less what came back before
    assert rig.server.calls.num_open == 0


async def test_who_is_dropped_is_not_dropped_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_callers, "_CONDEMNED_S", 0.05)
    callers, peer = bad_callers.BadCallers(per_s=1.0), "ipv4:192.0.2.1:5000"
    for _ in range(3):
        callers.gone_early(peer)
    assert callers.is_condemned(peer)
    assert not callers.is_condemned("ipv4:192.0.2.1:5001")
    await until(lambda: not callers.is_condemned(peer))
    callers.gone_early(peer)
    assert callers.is_condemned(peer), "and may be dropped again"
    callers.close()


async def test_wrong_requests_drop_nobody() -> None:
    callers, peer = bad_callers.BadCallers(per_s=1.0), "ipv4:192.0.2.1:5000"
    waiting = [asyncio.create_task(callers.slow_down(peer)) for _ in range(50)]
    await asyncio.sleep(0)
    callers.gone_early(peer)
    assert not callers.is_condemned(peer)
    for task in waiting:
        task.cancel()
    callers.close()


@pytest.mark.parametrize(
    ("family", "host", "peer"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}")],
)
async def test_the_connection_of_a_peer_is_ended_and_no_other(family: int, host: str, peer: str) -> None:
    with socket.create_server((host, 0), family=family) as server:
        near = [socket.create_connection(server.getsockname()[:2]) for _ in range(3)]
        far = [server.accept()[0] for _ in near]
        [found] = await connections_from({peer.format(near[1].getsockname()[1])})
        end(found)
        assert near[1].recv(1) == b""
        for index in (0, 2):
            far[index].sendall(b"x")
            assert near[index].recv(1) == b"x"
        for each in (*near, *far):
            each.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="packets are dropped by Linux alone")
def test_what_comes_is_dropped_by_the_kernel() -> None:
    near, far = socket_pair()
    drop_what_comes(far)
    near.sendall(b"x")
    far.settimeout(0.2)
    with pytest.raises(TimeoutError):
        far.recv(1)
    for each in (near, far):
        each.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return socket.create_connection(server.getsockname()), server.accept()[0]


async def test_a_peer_that_is_no_tcp_connection_of_ours_is_no_error() -> None:
    assert await connections_from({"unix:", "ipv4:192.0.2.1:1", ""}) == []


async def test_who_begins_calls_without_end_and_sends_no_message_is_dropped(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_MAX_REFUSED", 3)
    rig = await rigs.start(max_calls_per_peer=1, max_bad_calls_per_s=1.0)
    async with Connection(rig.server.address, source="127.0.0.2") as connection:
        for _ in range(1 + 3 + 2):
            connection.open_call(GENERATE)
        await connection.sent()
        await asyncio.sleep(0.2)
        assert rig.server.bad_callers.num_cut == 0
        connection.open_call(GENERATE)
        await until(lambda: rig.server.bad_callers.num_cut == 1)
    assert await rig.generate("hello") == ["token"] * 3
