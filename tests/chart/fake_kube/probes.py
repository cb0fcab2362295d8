"""A container's probes as the kubelet asks them: over the network, to the pod's address, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.chart.fake_kube.kinds import Object
from tests.chart.fake_kube.services import container_port

Run = Callable[[list[str]], Awaitable[int]]
"""Runs a command in the container; its exit status."""


class Probe:
    """One of a container's probes. Times are in seconds; defaults are Kubernetes'."""

    def __init__(self, spec: Object, pod: Object, run: Run) -> None:
        self._spec = spec
        self._pod = pod
        self._run = run
        self._delay_s = spec.get("initialDelaySeconds", 0)
        self._period_s = spec.get("periodSeconds", 10)
        self._timeout_s = spec.get("timeoutSeconds", 1)
        self._num_failures = spec.get("failureThreshold", 3)
        self._num_successes = spec.get("successThreshold", 1)

    async def starts(self) -> bool:
        """Asks until it passes; False once it has failed too often."""
        await asyncio.sleep(self._delay_s)
        for _ in range(self._num_failures):
            if await self._passes():
                return True
            await asyncio.sleep(self._period_s)
        return False

    async def until(self, wanted: bool) -> None:
        """Asks until it has passed, or failed, as often in a row as its threshold says."""
        await asyncio.sleep(self._delay_s)
        threshold, in_a_row = (self._num_successes if wanted else self._num_failures), 0
        while True:
            in_a_row = in_a_row + 1 if await self._passes() is wanted else 0
            if in_a_row == threshold:
                return
            await asyncio.sleep(self._period_s)

    async def _passes(self) -> bool:
        """Whatever is no answer in time is a failure."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask()
        except (TimeoutError, OSError, aiohttp.ClientError, grpc.RpcError):
            return False

    async def _ask(self) -> bool:
        address = self._pod["status"]["podIP"]
        if "exec" in self._spec:
            return await self._run(self._spec["exec"]["command"]) == 0
        if "grpc" in self._spec:
            return await _serves(f"{address}:{self._spec['grpc']['port']}", self._spec["grpc"].get("service") or "")
        if "tcpSocket" in self._spec:
            _, writer = await asyncio.open_connection(address, self._port(self._spec["tcpSocket"]))
            writer.close()
            return True
        get = self._spec["httpGet"]
        url = f"{get.get('scheme', 'HTTP').lower()}://{address}:{self._port(get)}{get.get('path', '/')}"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=False, allow_redirects=False) as answer:
            return 200 <= answer.status < 400

    def _port(self, handler: Object) -> int:
        return container_port(self._pod, handler["port"])


async def _serves(address: str, service: str) -> bool:
    """Plaintext, without a login: the kubelet knows no other way."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
