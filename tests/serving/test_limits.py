"""Large messages of one client are parsed one at a time with pauses; small ones and other clients' do not wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from serving import limits
from serving.errors import InvalidArgument, Overloaded
from serving.limits import LARGE_BYTES, LargeMessages
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
