"""Prefill and decode instances that sleep instead of computing: pools larger than the cores of this machine allow.

A prefill instance does one prompt after the other, `tokens_per_s`. A decode instance takes steps: each gives one token
to every request that runs, and lasts `step_s` and `per_request_s` for each of them; requests join between two steps.
KV moves at `kv_tokens_per_s`, which only the moved request waits for. The router and the wire between them are real.

One process holds all instances: they sleep nearly always, and nothing in one of them delays another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from protos.tandem.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    instance_pb2,
    instance_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

_BEAT_S = 0.1
_TOKEN_ID = 20
_MAX_MODEL_LEN = 1 << 16
_TEXT = " a"
_SERVER_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 250))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Of one instance with its own hardware."""

    tokens_per_s: float = 24_000.0
    step_s: float = 0.025
    per_request_s: float = 0.0005
    max_num_seqs: int = 64
    kv_tokens_per_s: float = 400_000.0

    def step(self, num_running: float) -> float:
        """Seconds of a decode step."""
        return self.step_s + self.per_request_s * num_running

    def expected_step(self, token_rate: float) -> float:
        """Seconds of a decode step on an instance with a load of `token_rate` tokens per second, on average: by
        Little's law `token_rate * step(n)` = n streams run. inf: it cannot keep up."""
        share = token_rate * self.per_request_s
        return self.step_s / (1 - share) if share < 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Pools:
    """The stubs of one process."""

    num_prefill: int
    num_decode: int
    speeds: Speeds
    vocab_size: int


class _Stub(
    instance_pb2_grpc.InstanceServiceServicer,
    kv_transfer_pb2_grpc.KvTransferServiceServicer,
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
):
    """What the two roles share. `name` is its epoch too: a stub does not restart."""

    role: instance_pb2.Role.ValueType

    def __init__(self, name: str, pools: Pools) -> None:
        self.name = name
        self.speeds = pools.speeds
        self._pools = pools
        self._load = instance_pb2.WatchLoadResponse(instance_epoch=name)

    async def GetInstanceInfo(self, request: Any, context: Any) -> instance_pb2.GetInstanceInfoResponse:
        return instance_pb2.GetInstanceInfoResponse(
            instance_id=self.name,
            instance_epoch=self.name,
            role=self.role,
            identity=common_pb2.Identity(fingerprint="stub", block_size=16),
            model="stub",
            max_model_len=_MAX_MODEL_LEN,
            vocab_size=self._pools.vocab_size,
            block_size=16,
            kv_connector="stub",
            max_num_seqs=self.speeds.max_num_seqs,
        )

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[instance_pb2.WatchLoadResponse]:
        while True:
            self._load.sequence += 1
            yield self._load
            await asyncio.sleep(_BEAT_S)

    async def Release(self, request: Any, context: Any) -> kv_transfer_pb2.ReleaseResponse:
        return kv_transfer_pb2.ReleaseResponse(was_held=True)


class PrefillStub(_Stub):
    """One prompt at a time, in order of arrival."""

    role = instance_pb2.ROLE_PREFILL

    def __init__(self, name: str, pools: Pools) -> None:
        super().__init__(name, pools)
        self._turn = asyncio.Lock()

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield prefill_pb2.PrefillResponse(accepted=prefill_pb2.PrefillAccepted(instance_epoch=self.name))
        num_tokens = len(request.request.prompt_token_ids)
        self._load.num_waiting += 1
        self._load.num_waiting_tokens += num_tokens
        try:
            async with self._turn:
                await asyncio.sleep(num_tokens / self.speeds.tokens_per_s)
                self._load.num_prefilled_tokens += num_tokens
        finally:
            self._load.num_waiting -= 1
            self._load.num_waiting_tokens -= num_tokens
        chunk = _chunk(request.request, 0)
        if not chunk.HasField("finish"):
            chunk.finish.reason = common_pb2.FINISH_REASON_HAND_OVER
        yield prefill_pb2.PrefillResponse(tokens=chunk)


class DecodeStub(_Stub):
    """All requests that run get a token at the end of each step."""

    role = instance_pb2.ROLE_DECODE

    def __init__(self, name: str, pools: Pools) -> None:
        super().__init__(name, pools)
        self._places = asyncio.Semaphore(self.speeds.max_num_seqs)
        self._step_ended = asyncio.Event()
        self._steps: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        """Requests that have a part in the steps."""
        return self._load.num_running

    async def Decode(self, requests: Any, context: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        start = (await anext(requests)).start
        index = len(start.request.emitted_token_ids)
        if start.HasField("transfer"):
            yield decode_pb2.DecodeResponse(reserved=decode_pb2.DecodeReserved(instance_epoch=self.name))
            index += len((await anext(requests)).seed.token_ids)
            num_tokens = len(start.request.prompt_token_ids)
            await asyncio.sleep(num_tokens / self.speeds.kv_tokens_per_s)
            yield decode_pb2.DecodeResponse(loaded=decode_pb2.DecodeLoaded(num_external_tokens=num_tokens))
        async with self._place():
            while index < start.request.sampling.max_tokens:
                await self._step_ended.wait()
                yield decode_pb2.DecodeResponse(tokens=_chunk(start.request, index))
                index += 1

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A request's place in the steps, from the end of the one that runs now."""
        self._load.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._load.num_waiting -= 1
        try:
            if self._steps is not None and not self._steps.done():
                await self._step_ended.wait()
            self._load.num_running += 1
            try:
                if self._steps is None or self._steps.done():
                    self._steps = asyncio.create_task(self._step())
                yield
            finally:
                self._load.num_running -= 1
        finally:
            self._places.release()

    async def _step(self) -> None:
        """Steps, on their own clock, as long as requests run."""
        loop = asyncio.get_running_loop()
        end_s = loop.time()
        while self.num_running:
            end_s = max(end_s + self.speeds.step(self.num_running), loop.time())
            await asyncio.sleep(end_s - loop.time())
            ended, self._step_ended = self._step_ended, asyncio.Event()
            ended.set()


def _chunk(request: Any, index: int) -> common_pb2.TokenChunk:
    chunk = common_pb2.TokenChunk(
        stream_epoch=request.stream_epoch,
        choice=request.choice,
        token_index=index,
        token_ids=(_TOKEN_ID,),
        text_offset=index * len(_TEXT),
        text=_TEXT,
    )
    if index + 1 == request.sampling.max_tokens:
        chunk.finish.reason = common_pb2.FINISH_REASON_LENGTH
    return chunk


async def serve(ready: Connection, pools: Pools) -> None:
    """Sends (addresses of prefill, of decode) through `ready` and serves until its process is killed."""
    stubs: list[_Stub] = [PrefillStub(f"prefill-{index}", pools) for index in range(pools.num_prefill)]
    stubs += [DecodeStub(f"decode-{index}", pools) for index in range(pools.num_decode)]
    servers = [await _start(stub) for stub in stubs]
    addresses = [address for _, address in servers]
    ready.send((addresses[: pools.num_prefill], addresses[pools.num_prefill :]))
    await asyncio.gather(*(server.wait_for_termination() for server, _ in servers))


async def _start(stub: _Stub) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    instance_pb2_grpc.add_InstanceServiceServicer_to_server(stub, server)
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(stub, server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(stub, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(stub, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"
