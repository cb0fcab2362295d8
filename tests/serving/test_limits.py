"""Large messages are parsed one at a time for each client, and calls that fail beyond a budget have consequences."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2 as pb
from serving import interceptor, limits
from serving.errors import InvalidArgument, Overloaded
from serving.limits import (
    LARGE_BYTES,
    AbuseLimits,
    LargeMessages,
    connections_from,
    discard_incoming,
    reset_connection,
    start_in_thread,
)
from tests.floods import http2
from tests.floods.http2 import Connection, frame, message
from tests.grpc_calls import next_message, of_bytes
from tests.serving.conftest import Rig, Rigs
from tests.waiting import until

LARGE = bytes(LARGE_BYTES)


def slowly(data: bytes) -> int:
    end_s = time.thread_time() + 0.01
    while time.thread_time() < end_s:
        pass
    return len(data)


async def test_small_messages_are_parsed_at_once_during_a_pause() -> None:
    messages = LargeMessages()
    assert await messages.parsed("a", LARGE, slowly) == LARGE_BYTES
    following = asyncio.create_task(messages.parsed("a", LARGE, slowly))
    assert await messages.parsed("a", LARGE[1:], len) == LARGE_BYTES - 1
    assert await messages.parsed("b", LARGE, len) == LARGE_BYTES
    assert not following.done()
    assert await following == LARGE_BYTES


async def test_a_pause_is_much_longer_than_parsing() -> None:
    messages, began_s = LargeMessages(), time.monotonic()
    await messages.parsed("a", LARGE, slowly)
    await messages.parsed("a", LARGE, slowly)
    assert time.monotonic() - began_s >= 0.2


async def test_too_many_waiting_messages_are_rejected() -> None:
    messages = LargeMessages()
    await messages.parsed("a", LARGE, slowly)
    waiting = [asyncio.create_task(messages.parsed("a", LARGE, len)) for _ in range(limits._MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="large messages of this client wait already"):
        await messages.parsed("a", LARGE, len)
    assert await messages.parsed("b", LARGE, len) == LARGE_BYTES
    assert await asyncio.gather(*waiting) == [LARGE_BYTES] * len(waiting)


async def test_tenants_behind_one_address_do_not_wait_for_each_other() -> None:
    messages = LargeMessages(tenant_of=lambda metadata: str(dict(metadata).get("x-tenant", "")))
    alice, bob = [("x-tenant", "alice")], [("x-tenant", "bob")]
    await messages.parsed("gateway", LARGE, slowly, alice)
    waiting = [asyncio.create_task(messages.parsed("gateway", LARGE, len, alice)) for _ in range(limits._MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await messages.parsed("gateway", LARGE, len, alice)
    assert await messages.parsed("gateway", LARGE, len, bob) == LARGE_BYTES
    assert await messages.parsed("elsewhere", LARGE, len, alice) == LARGE_BYTES, "a host of its own"
    assert await messages.parsed("gateway", LARGE, len) == LARGE_BYTES, "without a tenant"
    await asyncio.gather(*waiting)


async def test_a_tenant_that_cannot_be_read_is_none() -> None:
    def tenant_of(metadata: object) -> str:
        raise InvalidArgument("two names", [])

    assert await LargeMessages(tenant_of=tenant_of).parsed("a", LARGE, len, [("x-tenant", "?")]) == LARGE_BYTES


async def test_as_many_as_the_setting_says_are_parsed_at_a_time() -> None:
    messages, together = LargeMessages(2), threading.Barrier(2)

    def both(data: bytes) -> int:
        together.wait(60)  # breaks if one is parsed after the other
        return len(data)

    assert await asyncio.gather(*[messages.parsed("a", LARGE, both) for _ in range(2)]) == [LARGE_BYTES] * 2
    for _ in range(2):
        await messages._acquire("b")
    waiting = [asyncio.create_task(messages.parsed("b", LARGE, len)) for _ in range(2 * limits._MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="16 large messages of this client wait already"):
        await messages.parsed("b", LARGE, len)
    for _ in range(2):
        messages._release("b")
    assert await asyncio.gather(*waiting) == [LARGE_BYTES] * len(waiting)
    await until(lambda: not messages._locks and not messages._num_waiting)


async def test_no_state_remains_after_the_messages() -> None:
    def broken(data: bytes) -> None:
        raise ValueError

    messages = LargeMessages()
    with pytest.raises(ValueError):  # noqa: PT011 - ours
        await messages.parsed("a", LARGE, broken)
    leaving = asyncio.create_task(messages.parsed("a", LARGE, len))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert await messages.parsed("a", LARGE, len) == LARGE_BYTES
    await until(lambda: not messages._locks and not messages._num_waiting)


async def test_a_message_of_a_cancelled_call_is_parsed_before_the_next() -> None:
    began, may_end, running, most = threading.Event(), threading.Event(), 0, 0

    def counted(data: bytes) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        began.set()
        assert may_end.wait(60)
        running -= 1
        raise ValueError

    messages = LargeMessages()
    cancelled = asyncio.create_task(messages.parsed("a", LARGE, counted))
    await until(began.is_set)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    following = asyncio.create_task(messages.parsed("a", LARGE, counted))
    await asyncio.sleep(0.05)
    may_end.set()
    with pytest.raises(ValueError):  # noqa: PT011 - ours
        await following
    assert most == 1
    await until(lambda: not messages._locks and not messages._num_waiting)


async def test_a_message_cancelled_at_its_turn_leaves_no_state() -> None:
    messages = LargeMessages()
    await messages._acquire("a")
    waiting = asyncio.create_task(messages._acquire("a"))
    await asyncio.sleep(0)
    messages._release("a")  # it is woken and has not run yet
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not messages._locks
    assert not messages._num_waiting


async def test_a_message_that_gets_no_thread_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the limit on processes is reached for a while. Python has queued the work before it starts a thread."""
    queued: list[Callable[[], object]] = []

    def fails(_: object, work: Callable[[], object]) -> None:
        queued.append(work)
        raise RuntimeError("can't start new thread")

    messages = LargeMessages()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "run_in_executor", fails)
        with pytest.raises(Overloaded, match="no thread can be started"):
            await messages.parsed("a", LARGE, len)
    (work,) = queued
    with pytest.raises(Overloaded, match="no thread can be started"):
        work()
    assert not messages._locks
    assert not messages._num_held
    assert await messages.parsed("a", LARGE, len) == LARGE_BYTES


async def test_an_error_of_the_work_itself_is_no_lack_of_threads() -> None:
    def fails() -> None:
        raise RuntimeError("of the work")

    with pytest.raises(RuntimeError, match="of the work"):
        await start_in_thread(fails, "test")


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
    monkeypatch.setattr(limits, "_MUTED_S", 0.5)
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
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now_s))
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
    monkeypatch.setattr(limits, "_BLOCKED_S", 0.05)
    abuse, peer = AbuseLimits(per_s=1.0), "ipv4:192.0.2.1:5000"
    for _ in range(3):
        abuse.count_cancelled(peer)
    assert abuse.is_blocked(peer)
    assert not abuse.is_blocked("ipv4:192.0.2.1:5001")
    await until(lambda: not abuse.is_blocked(peer))
    abuse.count_cancelled(peer)
    assert abuse.is_blocked(peer), "and may be dropped again"
    abuse.close()


async def test_invalid_requests_drop_no_connection() -> None:
    abuse, peer = AbuseLimits(per_s=1.0), "ipv4:192.0.2.1:5000"
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


async def test_calls_that_the_end_of_the_server_cancels_drop_no_connection() -> None:
    found = limits.AbuseLimits(per_s=1.0)
    found.close()
    for _ in range(10):
        found.count_cancelled("ipv4:127.0.0.2:1")
    assert not found.is_blocked("ipv4:127.0.0.2:1")


async def test_a_connection_that_only_begins_calls_is_dropped(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: now_s))
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
