"""A channel notices a frozen peer, and its pings are welcome at our servers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2 as pb
from protos.tandem.v1.generation_pb2_grpc import GenerationServiceStub
from serving.channel import ChannelSettings, ip_target, is_ip, is_private, listens_privately, open_channel, resolve
from tests.grpc_calls import next_message
from tests.serving.conftest import Rigs
from tests.tcp import proxy
from tests.waiting import Stopwatch

ROOT = Path(__file__).resolve().parents[2]

PEER = """
import asyncio
import contextlib
from serving.server import Server
from serving.server import ServerSettings
from tests.serving.conftest import SERVICE, Scripted

async def main():
    server = Server(ServerSettings())
    await server.register(SERVICE, Scripted())
    await server.start()
    print(server.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def peer() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen([sys.executable, "-c", PEER], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


async def test_a_frozen_peer_is_noticed_within_seconds_and_an_idle_one_is_left_in_peace(
    peer: tuple[subprocess.Popen[str], str],
) -> None:
    process, address = peer
    # STEP 1: pings twice a second on a silent stream are no reason to hang up.
    async with open_channel(address, ChannelSettings(keepalive_ms=500, ping_timeout_ms=20_000)) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="wait"), wait_for_ready=True)
        assert (await next_message(call)).model == "started"
        await asyncio.sleep(2.5)
        assert not call.done()
        call.cancel()

    # STEP 2: the peer freezes; no FIN, no RST, only silence.
    async with open_channel(address, ChannelSettings(keepalive_ms=500, ping_timeout_ms=500)) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="wait"), wait_for_ready=True)
        assert (await next_message(call)).model == "started"
        process.send_signal(signal.SIGSTOP)
        watch = Stopwatch()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert watch.s < 4


# What counts as private: an allow list, in which nothing is by accident.


@pytest.mark.parametrize(
    "ip",
    ["127.0.0.1", "127.9.9.9", "::1", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.0.9", "100.64.0.1",
     "fd00::1", "::ffff:10.0.0.1"],
)  # fmt: skip
def test_private(ip: str) -> None:
    assert is_private(ip)
    assert listens_privately(ip)


@pytest.mark.parametrize(
    "ip",
    ["0.0.0.0", "::", "8.8.8.8", "172.32.0.1", "172.15.255.255", "169.254.169.254", "fe80::1%eth0", "100.128.0.1",
     "2001:db8::1", "::ffff:8.8.8.8", "::ffff:169.254.169.254", "255.255.255.255", "224.0.0.1"],
)  # fmt: skip
def test_not_private(ip: str) -> None:
    assert not is_private(ip)
    assert not listens_privately(ip)


async def test_a_name_is_as_private_as_what_it_stands_for() -> None:
    assert not is_ip("localhost")
    assert listens_privately("localhost")
    with pytest.raises(OSError, match=r"^no-such-host\.invalid cannot be resolved: \w"):
        listens_privately("no-such-host.invalid")
    with pytest.raises(OSError, match=r"^no-such-host\.invalid cannot be resolved: \w"):
        await resolve("no-such-host.invalid")


def test_a_target_of_both_families_is_one_of_ipv6() -> None:
    assert ip_target(["10.0.0.1", "10.0.0.2"], 7) == "ipv4:10.0.0.1:7,10.0.0.2:7"
    assert ip_target(["fd00::1", "10.0.0.1"], 7) == "ipv6:[fd00::1]:7,[::ffff:10.0.0.1]:7"


@pytest.mark.parametrize("host", ["prefill..svc", f"{'x' * 64}.svc"])
async def test_what_no_name_may_be_is_unknown(host: str) -> None:
    with pytest.raises(OSError, match="is not a DNS name"):
        listens_privately(host)
    with pytest.raises(OSError, match="is not a DNS name"):
        await resolve(host)


async def test_a_connection_that_takes_its_time_is_made(rigs: Rigs) -> None:
    """Over a slow network, with TLS, or from a machine that is busy. Attempts had at most half a second."""
    rig = await rigs.start()
    async with proxy(rig.server.address, delay_s=0.8) as network, open_channel(network.address) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="hello"), timeout=20)
        assert [response.model async for response in call] == ["token"] * 3
