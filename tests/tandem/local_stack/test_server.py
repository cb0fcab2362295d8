"""The stack service over its socket, called by the router's own clients of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import instance_pb2, stack_pb2, stack_pb2_grpc
from router.autoscaler.resizer import ActuatorError, StackLink
from tandem.demo import MODEL_DIR
from tandem.local_stack.desired_state import DesiredState
from tandem.local_stack.server import LeaderLease, StackServer
from tandem.local_stack.settings import StackSettings
from tandem.local_stack.supervisor import StackFailed
from tandem.local_stack.topology import Topology
from tests.grpc_calls import blocking_stub
from tests.tandem.local_stack.test_desired_state import make_state, names
from tests.tcp import TcpServer
from tests.waiting import wait_until

TIMEOUT_S = 20.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def address(short_folder: Path) -> str:
    return f"unix:{short_folder / 'stack.sock'}"


@pytest.fixture
def owned() -> DesiredState:
    return make_state(num_decode=2)


@pytest.fixture
def server(address: str, owned: DesiredState) -> Iterator[StackServer]:
    before = threading.active_count()
    server = StackServer(address, owned, owned.resize)
    yield server
    server.stop()
    assert threading.active_count() <= before + 1, "threads are left"


@pytest.fixture
async def link(address: str) -> AsyncIterator[StackLink]:
    link = StackLink(address)
    yield link
    await link.close()


async def test_a_link_that_is_closed_ends_its_calls_with_an_error_and_cancels_no_task(short_folder: Path) -> None:
    """As a router does that stops while its pools are watched."""
    connected, silence = asyncio.Event(), asyncio.Event()

    async def never_answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await silence.wait()

    async with asyncio.timeout(TIMEOUT_S):
        async with TcpServer(never_answer, short_folder / "stack.sock") as server:
            link = StackLink(server.address)
            sizes = asyncio.ensure_future(link.sizes())
            await connected.wait()
            await link.close()
            with pytest.raises(ActuatorError, match="about to end"):
                await sizes
            link = StackLink(server.address)
            cancelled = asyncio.ensure_future(link.sizes())
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await link.close()
            silence.set()


def addresses(owned: DesiredState) -> frozenset[str]:
    return frozenset(instance.address for instance in owned.snapshot.pool("decode"))


async def test_a_router_receives_every_change_and_removals_at_once(
    server: StackServer, owned: DesiredState, link: StackLink
) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        updates = link.discovery("decode").addresses()
        assert await anext(updates) == addresses(owned)
        owned.resize("decode", 3)
        assert await anext(updates) == addresses(owned)
        await link.resize("decode", 1, [owned.snapshot.pool("decode")[0].address], previous_size=3)
        assert await anext(updates) == addresses(owned)
        assert names(owned) == ["decode-1"]
        owned.resize("prefill", 0)
        prefill = link.discovery("prefill").addresses()
        assert await anext(prefill) == frozenset(), "an empty pool is reported, too"


async def test_what_was_known_last_holds_while_the_owner_is_away(
    address: str, owned: DesiredState, link: StackLink
) -> None:
    first = StackServer(address, owned, owned.resize)
    updates = link.discovery("decode").addresses()
    async with asyncio.timeout(TIMEOUT_S):
        assert await anext(updates) == addresses(owned)
        await asyncio.to_thread(first.stop)
        update = asyncio.ensure_future(anext(updates))
        with pytest.raises(ActuatorError, match="does not answer"):
            await link.sizes()
        assert not update.done()
        second = StackServer(address, owned, owned.resize)
        try:
            again = link.discovery("decode").addresses()
            assert await anext(again) == addresses(owned), "the owner is back"
            await asyncio.sleep(0.5)
            assert not update.done(), "and nothing has changed"
            owned.resize("decode", 3)
            assert await update == addresses(owned)
        finally:
            await asyncio.to_thread(second.stop)


async def test_a_router_that_starts_before_its_owner_finds_it(
    address: str, owned: DesiredState, link: StackLink
) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        update = asyncio.ensure_future(anext(link.discovery("decode").addresses()))
        await asyncio.sleep(0.1)
        server = StackServer(address, owned, owned.resize)
        try:
            assert await update == addresses(owned)
        finally:
            await asyncio.to_thread(server.stop)


@pytest.mark.parametrize("name", ["a%20b", "a b", "a#b?c", "ä"])
async def test_the_socket_may_lie_in_a_folder_of_any_name(short_folder: Path, owned: DesiredState, name: str) -> None:
    (short_folder / name).mkdir()
    address = Topology(StackSettings(model=MODEL_DIR, model_name="demo"), short_folder / name).stack_address
    server = StackServer(address, owned, owned.resize)
    assert (short_folder / name / "stack.sock").is_socket()
    link = StackLink(address)
    async with asyncio.timeout(TIMEOUT_S):
        assert (await link.sizes())["decode"] == 2
    await link.close()
    server.stop()


def test_a_socket_that_cannot_be_bound_fails_the_stack(owned: DesiredState) -> None:
    with pytest.raises(StackFailed, match=r"cannot listen at unix:/nowhere/stack\.sock.*set TMPDIR"):
        StackServer("unix:/nowhere/stack.sock", owned, owned.resize)


def cannot_start(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_calls_are_answered_where_no_thread_can_start(
    server: StackServer, owned: DesiredState, link: StackLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that needs one would end the loop in which gRPC takes calls."""
    await link.sizes()  # the client's own threads run
    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    async with asyncio.timeout(TIMEOUT_S):
        watches = [link.discovery("decode").addresses() for _ in range(3)]
        for watch in watches:
            assert await anext(watch) == addresses(owned)
        await link.resize("decode", 3, [], previous_size=2)
        assert [await anext(watch) for watch in watches] == [addresses(owned)] * 3


@pytest.mark.parametrize(
    ("num_started", "what"), [(0, "its 34 threads"), (5, "its 34 threads"), (35, "its last thread")]
)
def test_threads_that_cannot_start_fail_the_stack(
    address: str, owned: DesiredState, monkeypatch: pytest.MonkeyPatch, num_started: int, what: str
) -> None:
    start, before, started = threading.Thread.start, threading.active_count(), list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        if len(started) == num_started:
            cannot_start(thread)
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(StackFailed, match=f"cannot start {what}: can't start new thread; raise the limit"):
        StackServer(address, owned, owned.resize, num_router_workers=1)
    assert threading.active_count() <= before, "threads are left"


def test_ctrl_c_while_the_threads_start_leaves_none(
    address: str, owned: DesiredState, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, before, started = threading.Thread.start, threading.active_count(), list[threading.Thread]()

    def start_some(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)
        if len(started) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(KeyboardInterrupt):
        StackServer(address, owned, owned.resize)
    wait_until(lambda: threading.active_count() <= before, "threads are left, and the exit would wait for them")


def test_a_server_that_does_not_stop_holds_up_nothing(
    address: str, owned: DesiredState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.local_stack.server._STOP_S", 0.01)
    server, released, ended = StackServer(address, owned, owned.resize), threading.Event(), list[bool]()
    grpc_server = server._server
    monkeypatch.setattr(server, "_server", SimpleNamespace(stop=lambda grace: ended.append(released.wait(60))))
    server.stop()
    assert not ended, "it waited for gRPC"
    released.set()
    grpc_server.stop(None)


STOPS_WITHOUT_GRPCS_LOOP = """
import sys, threading, time
import grpc
from tandem.local_stack import server as module
from tests.tandem.local_stack.test_desired_state import make_state

def fail(*_, **__):
    raise RuntimeError("can't start new thread")

module._STOP_S = 0.1
owned = make_state()
server = module.StackServer(sys.argv[1], owned, owned.resize)
submit, server._threads.submit = server._threads.submit, fail
with grpc.insecure_channel(sys.argv[1]) as channel:
    call = channel.unary_unary("/tandem.v1.StackService/TakeLead").future(b"")
    while any("_serve" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    call.cancel()
server._threads.submit = submit
server.stop()
print("stopped")
"""


def test_a_process_ends_whose_server_does_not_stop(address: str) -> None:
    command = [sys.executable, "-c", STOPS_WITHOUT_GRPCS_LOOP, address]
    done = subprocess.run(command, timeout=TIMEOUT_S, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "stopped\n", done.stderr
    assert "can't start new thread" in done.stderr, "gRPC's loop has not ended"


async def test_sizes_are_read_and_changed(server: StackServer, owned: DesiredState, link: StackLink) -> None:
    assert await link.sizes() == {"prefill": 1, "decode": 2}
    await link.resize("decode", 4, [], previous_size=2)
    await link.resize("prefill", 0, [], previous_size=1)
    assert await link.sizes() == {"prefill": 0, "decode": 4}


async def test_a_hundred_calls_leave_no_watch_behind(server: StackServer, link: StackLink) -> None:
    for _ in range(100):
        await link.sizes()


async def test_an_invalid_size_is_reported_with_the_owners_message(server: StackServer, link: StackLink) -> None:
    with pytest.raises(ActuatorError, match=r"decode must be between 1 and 64, not 0"):
        await link.resize("decode", 0, [], previous_size=2)


async def test_a_resize_by_another_client_is_not_overwritten(
    server: StackServer, owned: DesiredState, link: StackLink
) -> None:
    owned.resize("decode", 5)
    with pytest.raises(ActuatorError, match="the decode pool was resized from 2 to 5 meanwhile, and keeps that size"):
        await link.resize("decode", 1, [], previous_size=2)
    assert await link.sizes() == {"prefill": 1, "decode": 5}
    await link.resize("decode", 5, [], previous_size=2)
    await link.resize("decode", 3, [], previous_size=5)
    assert await link.sizes() == {"prefill": 1, "decode": 3}


async def test_a_pool_that_was_stopped_meanwhile_stays_so(
    server: StackServer, owned: DesiredState, link: StackLink
) -> None:
    owned.resize("prefill", 0)
    with pytest.raises(ActuatorError, match="the prefill pool was resized from 1 to 0 meanwhile"):
        await link.resize("prefill", 2, [], previous_size=1)
    await link.resize("prefill", 1, [], previous_size=0)
    with pytest.raises(ActuatorError, match="the prefill pool was resized from 0 to 1 meanwhile"):
        await link.resize("prefill", 2, [], previous_size=0)


def test_a_client_that_names_no_previous_size_resizes_from_any(
    server: StackServer, address: str, owned: DesiredState
) -> None:
    request = stack_pb2.ResizePoolRequest(role=instance_pb2.ROLE_DECODE, size=3)
    with grpc.insecure_channel(address) as channel:
        answer = blocking_stub(stack_pb2_grpc.StackServiceStub, channel).ResizePool(request, timeout=TIMEOUT_S)
    assert (answer.previous_size, len(owned.snapshot.pool("decode"))) == (2, 3)


async def test_one_router_leads_until_its_lease_expires(server: StackServer, link: StackLink) -> None:
    assert await link.take_lead("one", 600.0)
    assert await link.take_lead("one", 600.0)
    assert not await link.take_lead("two", 600.0)


def test_an_expired_lease_is_free() -> None:
    now_s = 10.0
    lease = LeaderLease(clock=lambda: now_s)
    assert lease.acquire("one", 5.0) == "one"
    now_s = 14.0
    assert lease.acquire("two", 5.0) == "one"
    assert lease.acquire("one", 5.0) == "one", "renewed: until 19"
    now_s = 18.9
    assert lease.acquire("two", 5.0) == "one"
    now_s = 19.0
    assert lease.acquire("two", 5.0) == "two"
    assert lease.acquire("one", 5.0) == "two"


@pytest.mark.parametrize(
    ("method", "request_", "hint"),
    [
        ("ResizePool", stack_pb2.ResizePoolRequest(size=2), "ROLE_DECODE"),
        ("TakeLead", stack_pb2.TakeLeadRequest(ttl_s=1), "holder"),
        ("TakeLead", stack_pb2.TakeLeadRequest(holder="x" * 129, ttl_s=1), "128"),
        ("TakeLead", stack_pb2.TakeLeadRequest(holder="x"), "ttl_s is 0"),
        ("TakeLead", stack_pb2.TakeLeadRequest(holder="x", ttl_s=float("nan")), "ttl_s is nan"),
        ("TakeLead", stack_pb2.TakeLeadRequest(holder="x", ttl_s=float("inf")), "3600"),
    ],
)
def test_invalid_requests_are_answered_with_what_is_allowed(
    server: StackServer, address: str, owned: DesiredState, method: str, request_: object, hint: str
) -> None:
    before = owned.snapshot
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        getattr(blocking_stub(stack_pb2_grpc.StackServiceStub, channel), method)(request_, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert hint in (caught.value.details() or "")
    assert owned.snapshot is before


def test_64_workers_watch_both_pools_and_too_many_watches_are_rejected(server: StackServer, address: str) -> None:
    num_watches = 2 * 64 + 24
    with grpc.insecure_channel(address) as channel:
        stub = blocking_stub(stack_pb2_grpc.StackServiceStub, channel)
        watches = [stub.WatchStack(stack_pb2.WatchStackRequest(), timeout=TIMEOUT_S) for _ in range(num_watches)]
        for watch in watches:
            next(watch)
        with pytest.raises(grpc.RpcError, match=f"has {num_watches} watches"):
            next(stub.WatchStack(stack_pb2.WatchStackRequest(), timeout=TIMEOUT_S))
        assert stub.TakeLead(stack_pb2.TakeLeadRequest(holder="x", ttl_s=1), timeout=TIMEOUT_S).granted
        for watch in watches:
            watch.cancel()
