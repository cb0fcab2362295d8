"""Abuse limits: slow answers to invalid requests, and dropped connections of cancelled calls."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2 as pb
from serving import abuse_limits, interceptor
from serving.abuse_limits import connections_from, discard_incoming, reset_connection
from tests.floods import http2
from tests.floods.http2 import Connection, frame, message
from tests.grpc_calls import next_message, of_bytes
from tests.serving.conftest import Rig, Rigs
from tests.waiting import until

GENERATE = "/tandem.v1.GenerationService/Generate"
CANCELLED = http2.CANCEL.to_bytes(4, "big")


def begin_and_cancel(connection: Connection) -> None:
    connection.send(frame(http2.RST_STREAM, 0, connection.open_call(GENERATE), CANCELLED))


def send_good_call(connection: Connection) -> None:
    data = message(pb.GenerateRequest(text="hello").SerializeToString())
    connection.send(frame(http2.DATA, http2.END_STREAM, connection.open_call(GENERATE), data))


async def cancel_until_dropped(rig: Rig, connection: Connection) -> int:
    """How many calls that took."""
    num_dropped = rig.server.abuse_limits.num_dropped
    for number in range(10_000):
        begin_and_cancel(connection)
        await connection.sent()
        await asyncio.sleep(0.002)
        if rig.server.abuse_limits.num_dropped > num_dropped:
            return number + 1
    raise AssertionError("it was never dropped")


async def test_only_the_connection_that_cancels_calls_before_their_message_is_dropped(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abuse_limits, "_MUTED_S", 0.5)
    rig = await rigs.start(max_bad_calls_per_s=20.0)
    other = await rig.waiting_call()
    num_descriptors = len(os.listdir("/dev/fd"))
    async with Connection(rig.server.address, source="127.0.0.2") as connection:
        assert await cancel_until_dropped(rig, connection) > 40
        dropped_s = time.monotonic()
        # STEP what comes on it now is dropped, and after a while it is ended
        send_good_call(connection)
        assert connection.is_open
        await connection.closed()
        assert connection.received[http2.DATA] == 0
    # STEP from the same address it takes few calls more, until the budget has come back
    async with Connection(rig.server.address, source="127.0.0.2") as connection:
        num_calls = await cancel_until_dropped(rig, connection)
    assert num_calls <= 20 * (1 + time.monotonic() - dropped_s)
    assert await rig.generate("hello") == ["token"] * 3
    rig.servicer.go.set()
    assert (await next_message(other)).model == "went on"
    await until(lambda: len(os.listdir("/dev/fd")) <= num_descriptors)
    await until(lambda: rig.server.calls.num_open == 0)


async def test_a_server_that_stops_resets_muted_connections(rigs: Rigs) -> None:
    rig = await rigs.start(max_bad_calls_per_s=1.0)
    async with Connection(rig.server.address) as connection:
        await cancel_until_dropped(rig, connection)
        await rig.server.stop()
        await connection.closed(2.0)


async def test_a_few_cancelled_calls_do_not_drop_a_connection(rigs: Rigs) -> None:
    rig = await rigs.start(max_bad_calls_per_s=20.0)
    async with Connection(rig.server.address) as connection:
        for _ in range(38):
            begin_and_cancel(connection)
        send_good_call(connection)
        await until(lambda: connection.received[http2.DATA] >= 3)
        assert connection.is_open


async def test_cancelled_requests_do_not_count(rigs: Rigs) -> None:
    rig = await rigs.start(max_bad_calls_per_s=2.0)
    data = message(pb.GenerateRequest(text="wait").SerializeToString())
    async with Connection(rig.server.address) as connection:
        for number in range(1, 21):
            stream_id = connection.open_call(GENERATE)
            connection.send(frame(http2.DATA, http2.END_STREAM, stream_id, data))
            await until(lambda number=number: len(rig.servicer.limits_s) == number)  # type: ignore[misc]
            connection.send(frame(http2.RST_STREAM, 0, stream_id, CANCELLED))
        await until(lambda: rig.servicer.num_running == 0)
        assert connection.is_open


async def send_invalid(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await of_bytes(rig.channel, GENERATE)(b"\xff\xff").read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_answers_to_many_invalid_requests_are_delayed_and_others_are_not(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(abuse_limits, "time", SimpleNamespace(monotonic=lambda: now_s))
    rig = await rigs.start(max_bad_calls_per_s=4.0, max_calls_per_peer=6)
    for _ in range(8):
        await send_invalid(rig)
    began_s = time.monotonic()
    await send_invalid(rig)
    assert time.monotonic() - began_s >= 0.25
    # STEP one that owes three seconds more
    now_s -= 3.0
    asking = [asyncio.create_task(send_invalid(rig)) for _ in range(4)]
    await until(lambda: rig.server.calls.num_open == 4)
    assert await rig.generate("hello") == ["token"] * 3
    assert not any(task.done() for task in asking)
    for task in asking:
        task.cancel()
    await until(lambda: rig.server.calls.num_open == 0)


async def test_a_block_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abuse_limits, "_BLOCKED_S", 0.05)
    abuse, peer = abuse_limits.AbuseLimits(per_s=1.0), "ipv4:192.0.2.1:5000"
    for _ in range(3):
        abuse.count_cancelled(peer)
    assert abuse.is_blocked(peer)
    assert not abuse.is_blocked("ipv4:192.0.2.1:5001")
    await until(lambda: not abuse.is_blocked(peer))
    abuse.count_cancelled(peer)
    assert abuse.is_blocked(peer), "and may be dropped again"
    abuse.close()


async def test_invalid_requests_drop_no_connection() -> None:
    abuse, peer = abuse_limits.AbuseLimits(per_s=1.0), "ipv4:192.0.2.1:5000"
    waiting = [asyncio.create_task(abuse.delay_invalid(peer)) for _ in range(50)]
    await asyncio.sleep(0)
    abuse.count_cancelled(peer)
    assert not abuse.is_blocked(peer)
    for task in waiting:
        task.cancel()
    abuse.close()


@pytest.mark.parametrize(
    ("family", "host", "peer"),
    [(socket.AF_INET, "127.0.0.1", "ipv4:127.0.0.1:{}"), (socket.AF_INET6, "::1", "ipv6:%5B::1%5D:{}")],
)
async def test_the_connection_of_a_peer_is_ended_and_no_other(family: int, host: str, peer: str) -> None:
    with socket.create_server((host, 0), family=family) as server:
        near = [socket.create_connection(server.getsockname()[:2]) for _ in range(3)]
        far = [server.accept()[0] for _ in near]
        [found] = await connections_from({peer.format(near[1].getsockname()[1])})
        reset_connection(found)
        assert near[1].recv(1) == b""
        for index in (0, 2):
            far[index].sendall(b"x")
            assert near[index].recv(1) == b"x"
        for each in (*near, *far):
            each.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="packets are dropped by Linux alone")
def test_the_kernel_discards_incoming_packets() -> None:
    near, far = socket_pair()
    discard_incoming(far)
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


async def test_an_unknown_peer_has_no_connections() -> None:
    assert await connections_from({"unix:", "ipv4:192.0.2.1:1", ""}) == []


async def test_a_connection_that_only_begins_calls_is_dropped(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(abuse_limits, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(interceptor, "_MAX_REJECTED", 3)
    monkeypatch.setattr(interceptor, "_REJECTED_READ_S", 600.0)
    rig = await rigs.start(max_calls_per_peer=1, max_bad_calls_per_s=1.0, read_timeout_s=600.0)
    peer, budgets = "ipv4:127.0.0.2", rig.server.abuse_limits._cancelled._left
    async with Connection(rig.server.address, source="127.0.0.2") as connection:
        for _ in range(1 + 3 + 2):
            connection.open_call(GENERATE)
        await until(lambda: budgets.get(peer) == (0.0, now_s))
        await until(lambda: rig.server._interceptor._num_rejected[peer] == 3)
        assert rig.server.calls.num_open == 1
        assert rig.server.abuse_limits.num_dropped == 0
        connection.open_call(GENERATE)
        await until(lambda: rig.server.abuse_limits.num_dropped == 1)
    assert await rig.generate("hello") == ["token"] * 3
