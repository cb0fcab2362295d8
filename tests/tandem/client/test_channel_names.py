"""Clients of a name whose routers are replaced: the old one drains while the new one is ready, as in a rollout."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace

import grpc
import pytest

from serving.channel import ReloadingChannel
from tandem import AsyncClient, Client, Piece, TandemError
from tandem.client import channel
from tandem.client.channel import router_target
from tandem.client.errors import dns_parts
from tests.dns import DnsServer
from tests.tandem.client.test_channel import Router
from tests.waiting import until, wait_until


@dataclass
class Rollout:
    """Two routers on one port of two addresses, of which `name` has the first."""

    old: Router
    new: Router
    dns: DnsServer
    name: str

    def replace(self) -> None:
        self.dns.ips = ["127.0.0.2"]
        self.old.is_ready(False)

    def replace_for(self, client: Client) -> None:
        """Returns when `client` knows that the old router does not serve."""
        self.replace()
        current = client._channel._current.channel
        wait_until(lambda: channel._state(current) is grpc.ChannelConnectivity.TRANSIENT_FAILURE)

    async def replace_for_async(self, client: AsyncClient) -> None:
        self.replace()
        assert isinstance(client._channel, ReloadingChannel)
        current = client._channel._current.channel
        await until(lambda: current.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE)


@pytest.fixture
def rollout() -> Iterator[Rollout]:
    with ExitStack() as stack:
        dns = stack.enter_context(DnsServer("127.0.0.1").serving())
        old = stack.enter_context(Router("old").serving())
        port = old.address.rpartition(":")[2]
        new = stack.enter_context(Router("new").serving(f"127.0.0.2:{port}"))
        yield Rollout(old, new, dns, f"dns://{dns.address}/routers.test:{port}")


def test_a_call_after_the_routers_are_replaced_reaches_a_new_one(rollout: Rollout) -> None:
    with Client(rollout.name) as client:
        assert client.generate("go").model == "old"
        rollout.replace_for(client)
        assert [client.generate("go").model for _ in range(3)] == ["new"] * 3


async def test_a_call_on_an_event_loop_does_too(rollout: Rollout) -> None:
    async with AsyncClient(rollout.name) as client:
        assert (await client.generate("go")).model == "old"
        await rollout.replace_for_async(client)
        assert [(await client.generate("go")).model for _ in range(3)] == ["new"] * 3


async def test_calls_wait_for_a_new_router_that_is_not_ready_at_once(rollout: Rollout) -> None:
    """Rather than for the old one, which is gone."""
    async with AsyncClient(rollout.name) as client:
        assert (await client.generate("go")).model == "old"
        rollout.new.is_ready(False)
        await rollout.replace_for_async(client)
        channel = client._channel
        assert isinstance(channel, ReloadingChannel)
        await until(lambda: channel.connection() is channel._successor and channel._successor.has_failed)
        rollout.new.is_ready(True)
        assert (await client.generate("go")).model == "new"


def test_a_stream_of_the_old_router_ends_there(rollout: Rollout) -> None:
    rollout.old.may_end = threading.Event()
    with Client(rollout.name) as client:
        stream = client.stream("go")
        pieces = [next(stream)]
        rollout.replace_for(client)
        assert client.generate("go").model == "new"
        assert len(client._channel._retired) == 1
        rollout.old.may_end.set()
        pieces += stream
        assert "".join(piece.text for piece in pieces) == "ab"
        assert not client._channel._retired, "the old connection stays open"
    assert rollout.old.num_requests == 1


async def test_a_stream_of_the_old_router_ends_there_on_an_event_loop(rollout: Rollout) -> None:
    rollout.old.may_end = threading.Event()
    async with AsyncClient(rollout.name) as client:
        stream = client.stream("go")
        pieces: list[Piece] = [await anext(stream)]
        await rollout.replace_for_async(client)
        assert (await client.generate("go")).model == "new"
        rollout.old.may_end.set()
        pieces += [piece async for piece in stream]
        assert "".join(piece.text for piece in pieces) == "ab"
    assert rollout.old.num_requests == 1


def test_calls_of_a_name_without_routers_seldom_connect_anew(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MIN_REDIAL_S", 1e6)
    rollout.old.is_ready(False)
    with Client(rollout.name, retries=0) as client:
        before = client._channel._current
        used = []
        for _ in range(5):
            with pytest.raises(TandemError, match="no router answers"):
                client.generate("go")
            used.append(client._channel._current)
    assert used[0] is before
    assert used[1] is not before
    assert used[1:] == [used[1]] * 4


def test_the_longer_no_router_answers_the_less_often_calls_connect_anew(
    rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now_s))
    rollout.old.is_ready(False)
    changed_s, used = [], set[object]()
    with Client(rollout.name, retries=0) as client:
        for now_s in (100, 101, 102, 103, 104, 107, 108, 115, 116, 131, 132, 161, 162):
            with pytest.raises(TandemError, match="no router answers"):
                client.generate("go")
            if client._channel._current not in used:
                changed_s.append(now_s - 100)
                used.add(client._channel._current)
    assert changed_s == [0, 1, 2, 4, 8, 16, 32, 62]


def test_a_name_may_have_a_server_of_its_own() -> None:
    assert router_target("dns://10.0.0.53:53/router:1", None).target == "dns://10.0.0.53:53/router:1"
    assert router_target("dns://router:1", None).target == "dns:///router:1"
    assert dns_parts("dns://10.0.0.53:53/router:1") == ("10.0.0.53:53", "router:1")
    for name in ("dns:router:1", "dns:/router:1", "dns:///router:1", "dns://router:1"):
        assert dns_parts(name) == ("", "router:1")
