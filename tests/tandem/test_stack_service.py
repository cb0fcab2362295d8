"""What the owner of a stack's processes answers its routers over the socket, asked by the router's own ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import stack_pb2, stack_pb2_grpc
from router.autoscaler.actuator import ActuatorError
from router.stack_link import StackLink
from tandem.roster import Roster
from tandem.stack_service import Lead, StackServer
from tests.tandem.test_roster import names, roster

TIMEOUT_S = 20.0


@pytest.fixture
def address(short_folder: Path) -> str:
    return f"unix:{short_folder / 'stack.sock'}"


@pytest.fixture
def owned() -> Roster:
    return roster(num_decode=2)


@pytest.fixture
def server(address: str, owned: Roster) -> Iterator[StackServer]:
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


def addresses(owned: Roster) -> frozenset[str]:
    return frozenset(seat.address for seat in owned.seating.pool("decode"))


async def test_a_router_hears_of_every_change_and_of_those_that_go_at_once(
    server: StackServer, owned: Roster, link: StackLink
) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        told = link.membership("decode").addresses()
        assert await anext(told) == addresses(owned)
        owned.resize("decode", 3)
        assert await anext(told) == addresses(owned)
        await link.actuator.resize("decode", 1, [owned.seating.pool("decode")[0].address])
        assert await anext(told) == addresses(owned)
        assert names(owned) == ["decode-1"]
        owned.resize("prefill", 0)
        prefill = link.membership("prefill").addresses()
        assert await anext(prefill) == frozenset(), "an empty pool is told of, or nobody would know that it is empty"


async def test_what_was_known_last_holds_while_the_owner_is_away(address: str, owned: Roster, link: StackLink) -> None:
    first = StackServer(address, owned, owned.resize)
    told = link.membership("decode").addresses()
    async with asyncio.timeout(TIMEOUT_S):
        assert await anext(told) == addresses(owned)
        await asyncio.to_thread(first.stop)
        news = asyncio.ensure_future(anext(told))
        with pytest.raises(ActuatorError, match="does not answer"):
            await link.actuator.sizes()
        assert not news.done()
        second = StackServer(address, owned, owned.resize)
        try:
            again = link.membership("decode").addresses()
            assert await anext(again) == addresses(owned), "the owner is back"
            await asyncio.sleep(0.5)
            assert not news.done(), "and nothing has changed"
            owned.resize("decode", 3)
            assert await news == addresses(owned)
        finally:
            await asyncio.to_thread(second.stop)


async def test_a_router_that_comes_before_its_owner_finds_it(address: str, owned: Roster, link: StackLink) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        news = asyncio.ensure_future(anext(link.membership("decode").addresses()))
        await asyncio.sleep(0.1)
        server = StackServer(address, owned, owned.resize)
        try:
            assert await news == addresses(owned)
        finally:
            await asyncio.to_thread(server.stop)


async def test_sizes_are_told_and_changed(server: StackServer, owned: Roster, link: StackLink) -> None:
    assert await link.actuator.sizes() == {"prefill": 1, "decode": 2}
    await link.actuator.resize("decode", 4, [])
    await link.actuator.resize("prefill", 0, [])
    assert await link.actuator.sizes() == {"prefill": 0, "decode": 4}


async def test_a_hundred_questions_leave_no_watch_behind(server: StackServer, link: StackLink) -> None:
    for _ in range(100):
        await link.actuator.sizes()


async def test_what_the_owner_refuses_is_told_in_its_words(server: StackServer, link: StackLink) -> None:
    with pytest.raises(ActuatorError, match=r"the decode pool of this stack has 1\.\.64 instances; not 0"):
        await link.actuator.resize("decode", 0, [])


async def test_one_router_leads_and_nobody_else_before_its_time_is_over(server: StackServer, link: StackLink) -> None:
    assert await link.actuator.take_lead("one", 600.0)
    assert await link.actuator.take_lead("one", 600.0)
    assert not await link.actuator.take_lead("two", 600.0)


def test_the_lead_is_free_when_its_time_is_over() -> None:
    now_s = 10.0
    lead = Lead(clock=lambda: now_s)
    assert lead.take("one", 5.0) == "one"
    now_s = 14.0
    assert lead.take("two", 5.0) == "one"
    assert lead.take("one", 5.0) == "one", "renewed: until 19"
    now_s = 18.9
    assert lead.take("two", 5.0) == "one"
    now_s = 19.0
    assert lead.take("two", 5.0) == "two"
    assert lead.take("one", 5.0) == "two"


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
def test_nonsense_is_answered_with_what_is_allowed(
    server: StackServer, address: str, owned: Roster, method: str, request_: object, hint: str
) -> None:
    before = owned.seating
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        getattr(stack_pb2_grpc.StackServiceStub(channel), method)(request_, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert hint in caught.value.details()
    assert owned.seating is before


def test_more_watches_than_there_are_routers_are_refused_and_the_rest_goes_on(
    server: StackServer, address: str
) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = stack_pb2_grpc.StackServiceStub(channel)
        watches = [stub.WatchStack(stack_pb2.WatchStackRequest(), timeout=TIMEOUT_S) for _ in range(24)]
        for watch in watches:
            next(watch)
        with pytest.raises(grpc.RpcError, match="24 watches"):
            next(stub.WatchStack(stack_pb2.WatchStackRequest(), timeout=TIMEOUT_S))
        assert stub.TakeLead(stack_pb2.TakeLeadRequest(holder="x", ttl_s=1), timeout=TIMEOUT_S).granted
        for watch in watches:
            watch.cancel()
