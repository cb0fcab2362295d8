"""A channel notices a frozen peer, and its pings are welcome at our servers."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos.tandem.v1 import generation_pb2 as pb
from protos.tandem.v1.generation_pb2_grpc import GenerationServiceStub
from serving.channel import ChannelSettings, open_channel

ROOT = Path(__file__).resolve().parents[2]

PEER = """
import asyncio
from serving.server import Server
from serving.server_settings import ServerSettings
from tests.serving.conftest import SERVICE, Scripted

async def main():
    server = Server(ServerSettings())
    await server.register(SERVICE, Scripted())
    await server.start()
    print(server.address, flush=True)
    await server.wait_closed()

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
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="wait"))
        assert (await call.read()).model == "started"
        await asyncio.sleep(2.5)
        assert not call.done()
        call.cancel()

    # STEP 2: the peer freezes; no FIN, no RST, only silence.
    async with open_channel(address, ChannelSettings(keepalive_ms=500, ping_timeout_ms=500)) as channel:
        call = GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="wait"))
        assert (await call.read()).model == "started"
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started < 4
