"""A router in a process of its own, in front of fake instances that a test runs in this one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.process_logs import LOGS


@dataclass
class RouterProcess:
    """A router that has printed its ready line."""

    process: Process
    ready_line: str

    @property
    def address(self) -> str:
        return self.ready_line.removeprefix("ready address=").strip()

    async def until_serving(self, channel: grpc.aio.Channel) -> None:
        """Waits until it is ready to answer requests."""
        request = health_pb2.HealthCheckRequest(service="tandem.v1.GenerationService")
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=60):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return

    async def stall(self, seconds: float) -> None:
        """Does not let it run for so long."""
        self.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    async def end(self) -> str:
        """Lets it drain; returns what it has written to stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(self.process.communicate(), 20)
        assert self.process.returncode == 0
        LOGS.search("router", errors.decode())
        return errors.decode()


@asynccontextmanager
async def router_process(model_folder: Path, *arguments: str) -> AsyncIterator[RouterProcess]:
    """A running router with the fakes' model; killed at the end if the test has not ended it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--listen", "127.0.0.1:0", "--model", str(model_folder)),
        *("--server-drain-accept-s", "0", *arguments),
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "TANDEM_ROUTER__MODEL_NAME": "fake"},
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield RouterProcess(process, line.decode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
