"""Reading a transfer never delays its request, and the transfer is released on every path."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.core.messages import KVProgress, LeaseCommand, LoadedEvent, TransferEvent
from instance.convert import TransferSource
from instance.transfers import _MAX_IDLE, PeerChannels, TransferClients
from prefill_service.service import ROLE
from tests.channels import PATIENT
from tests.instance.rig import Rig, model_folder, running
from tests.instance.scripted_core import INFO
from tests.waiting import Stopwatch, until

RELEASE = LeaseCommand("t1", "release")


@pytest.fixture
async def prefill(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running(model_folder(tmp_path / "model"), ROLE) as rig:
        yield rig


class Reader:
    """TransferClients whose core is a list."""

    def __init__(self) -> None:
        self.progress: list[KVProgress] = []
        self.peers = PeerChannels(PATIENT)
        self.transfers = TransferClients(
            self.peers, INFO.model_identity, self.progress.append, lease_s=1.0, attach_timeout_s=5.0
        )


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    reader = Reader()
    yield reader
    await reader.transfers.close()
    assert reader.transfers.num_open == 0
    await reader.peers.close()


def source(prefill: Rig) -> TransferSource:
    return TransferSource("t1", prefill.server.address, prefill.server.instance_epoch)


async def test_what_was_never_reserved_is_released_all_the_same(prefill: Rig, reader: Reader) -> None:
    with reader.transfers.read_transfer(source(prefill), "r1"):
        pass
    await until(lambda: RELEASE in prefill.core.commands)
    assert not reader.progress


async def test_the_first_release_counts(prefill: Rig, reader: Reader) -> None:
    prefill.core.emit(TransferEvent("t1", 3, num_tokens=14))
    with reader.transfers.read_transfer(source(prefill), "r1") as client:
        client.blocks_reserved(1)
        await until(lambda: any(progress.num_tokens == 14 for progress in reader.progress))
        client.load_finished(LoadedEvent("r1", 14, 0))
        client.release()
        assert client.loaded.result()
    await until(lambda: RELEASE in prefill.core.commands)
    assert prefill.core.commands.count(RELEASE) == 1


async def test_the_lease_is_renewed_for_as_long_as_the_load_takes(prefill: Rig, reader: Reader) -> None:
    prefill.core.emit(TransferEvent("t1", 0))
    with reader.transfers.read_transfer(source(prefill), "r1") as client:
        client.blocks_reserved(0)
        await until(lambda: sum(command.action == "renew" for command in prefill.core.of(LeaseCommand)) >= 2)


async def test_releasing_at_an_unreachable_instance_takes_no_time(reader: Reader) -> None:
    watch = Stopwatch()
    with reader.transfers.read_transfer(TransferSource("t1", "127.0.0.1:1", "e"), "r1") as client:
        client.blocks_reserved(0)
        await until(lambda: reader.progress)
    assert watch.s < 1.0
    assert "UNAVAILABLE" in (reader.progress[-1].failed or "")


async def test_a_failure_before_the_request_has_blocks_is_reported_once_it_has(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instance.transfers.CONNECT_S", 60.0)  # however long this process may stand still
    with reader.transfers.read_transfer(TransferSource("t1", "prefill..svc:7000", "e"), "r1") as client:
        for _ in range(20):  # such a name fails without a resolver
            await asyncio.sleep(0.01)
        assert not reader.progress, "the core ignores progress of a request that has no blocks"
        client.blocks_reserved(0)
        await until(lambda: reader.progress)
    assert reader.progress == [KVProgress("r1", 0, failed="transfer.address: prefill..svc cannot be resolved")]


async def test_a_resolver_that_hangs_is_a_failure_in_the_time_of_a_connection(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    with reader.transfers.read_transfer(TransferSource("t1", "prefill.svc:7000", "e"), "r1") as client:
        client.blocks_reserved(0)
        await until(lambda: reader.progress)
    failed = "transfer.address: prefill.svc cannot be resolved within 0.7 s"
    assert reader.progress == [KVProgress("r1", 0, failed=failed)]


def _resolve_to(monkeypatch: pytest.MonkeyPatch, *ips: str) -> None:
    """Every name has these addresses."""

    async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        families = [socket.AF_INET6 if ":" in ip else socket.AF_INET for ip in ips]
        return [(family, socket.SOCK_STREAM, 6, "", (ip, 0)) for family, ip in zip(families, ips, strict=True)]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("others", [["::1"], ["127.0.0.2"], ["8.8.8.8"], ["2001:db8::1", "fe80::1%eth0", "::1"]])
async def test_an_instance_is_reached_at_any_private_address_of_its_name(
    prefill: Rig, reader: Reader, monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    """It listens on IPv4 alone, and the system names another address first."""
    monkeypatch.setattr("kv_transfer.transfer.client.CONNECT_S", 60.0)  # however long this process may stand still
    _resolve_to(monkeypatch, *others, "127.0.0.1")
    prefill.core.emit(TransferEvent("t1", 0))
    address = f"prefill.example:{prefill.server.grpc_server.port}"
    with reader.transfers.read_transfer(TransferSource("t1", address, prefill.server.instance_epoch), "r1") as client:
        client.blocks_reserved(0)
        await until(lambda: reader.progress)
        assert reader.progress == [KVProgress("r1", 0)]


async def test_a_name_without_a_private_address_is_refused(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    _resolve_to(monkeypatch, "169.254.169.254", "2001:db8::1")
    with reader.transfers.read_transfer(TransferSource("t1", "prefill.example:7000", "e"), "r1") as client:
        client.blocks_reserved(0)
        await until(lambda: reader.progress)
    refused = "169.254.169.254:7000, [2001:db8::1]:7000 is not in a private network, and TLS is off"
    assert reader.progress == [KVProgress("r1", 0, failed=f"transfer.address: {refused}")]


async def test_a_name_that_gets_no_thread_is_a_failure(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the limit on processes is reached for a while."""

    async def getaddrinfo(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    with reader.transfers.read_transfer(TransferSource("t1", "prefill.svc:7000", "e"), "r1") as client:
        client.blocks_reserved(0)
        await until(lambda: reader.progress)
    assert reader.progress == [KVProgress("r1", 0, failed="transfer.address: prefill.svc cannot be resolved")]


# Channels are shared, kept while in use, and closed when too many lie idle.


async def test_users_of_an_address_share_its_channel() -> None:
    peers = PeerChannels(PATIENT)
    async with peers.channel("127.0.0.1:1") as first, peers.channel("127.0.0.1:1") as second:
        assert first is second
    async with peers.channel("127.0.0.1:1") as third:
        assert third is first
    await peers.close()


async def test_the_longest_idle_are_closed_and_none_in_use() -> None:
    peers = PeerChannels(PATIENT)
    async with peers.channel("127.0.0.1:1") as used:
        kept = {}
        for port in range(2, 2 + _MAX_IDLE + 5):
            async with peers.channel(f"127.0.0.1:{port}") as channel:
                kept[port] = channel
        async with peers.channel("127.0.0.1:1") as again:
            assert again is used
        async with peers.channel(f"127.0.0.1:{1 + _MAX_IDLE + 5}") as latest:
            assert latest is kept[1 + _MAX_IDLE + 5]
        async with peers.channel("127.0.0.1:2") as oldest:
            assert oldest is not kept[2]
    await peers.close()
